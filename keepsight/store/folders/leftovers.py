"""Cleans up a folder: unfinished rows of dead processes, and empty folders.

Each salt makes a tenant of its own, so there may be any number of tenants. A tenant without entries
keeps no folder, and no record of its account.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from keepsight.store import layout
from keepsight.store.folders.catalogue import GOING, THERE, WRITING, Catalogue
from keepsight.store.folders.folder import Folder
from keepsight.store.folders.rows import name_of
from keepsight.store.layout import EntryName

_UNDER_WAY = 600.0  # longest seconds of a write


def settle(catalogue: Catalogue, folder: Folder) -> None:
    """Finish what was being written or removed when its process ended.

    A missing file may still be written by a living process. So its row stays for a while; otherwise
    the file would stay unknown if that process were killed before it adds the row.
    """
    if not catalogue.unsettled():
        return
    with catalogue:
        now = time.time()
        for place, state, since in catalogue.unsettled():
            status = folder.status(name_of(place))
            if state == GOING:
                folder.remove(name_of(place))
            if state == WRITING and status is not None:
                catalogue.resize(place, status.st_size)
                catalogue.mark([place], THERE)
            elif state != WRITING or abs(now - since) > _UNDER_WAY:
                catalogue.drop([place])


def forget_empty(catalogue: Catalogue, folder: Folder, gone: list[EntryName]) -> None:
    """Forget the accounts of these tenants if nothing of them is left. Runs in the transaction that
    drops their last rows: a writer for such a tenant first records it in the catalogue."""
    if not catalogue.fact("complete"):
        return  # unknown files may remain
    for tenant in {place.tenant for place in gone if place.tenant}:
        if not catalogue.has_rows(tenant):
            account = catalogue.account(tenant)
            catalogue.forget(tenant)
            if account != tenant:
                with contextlib.suppress(OSError):
                    folder.remove(layout.account_name(tenant, account))


def remove_empty(folder: Folder, names: Iterable[str]) -> None:
    """Remove the folders of tenants that are now empty."""
    for above in {name.rpartition("/")[0] for name in names if name.startswith("tenants/")}:
        folder.remove_empty(above, below="tenants")
