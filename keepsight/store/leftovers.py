"""What is left over in a folder: rows half done by the dead, and places with nothing in them.

A salt makes a tenant of its own, so there may be any number of tenants. Of one that has nothing any
more no folder stays, and no row that says whose quota it counted against.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from keepsight.store import layout
from keepsight.store.catalogue import GOING, THERE, WRITING, Catalogue
from keepsight.store.folder import Folder
from keepsight.store.layout import EntryName
from keepsight.store.rows import name_of

_UNDER_WAY = 600.0  # seconds that a write may take at most


def settle(catalogue: Catalogue, folder: Folder) -> None:
    """Finish what was being written or removed when its process ended.

    A file that is not there yet may still come, from a process that lives: its row stays a while,
    or the file would stay unknown if that process were killed before it enters it.
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
    """Forget whose the tenants of these were, where nothing is left of them. In the transaction
    that drops their last rows: whoever writes for such a tenant says so in the catalogue first."""
    if not catalogue.fact("complete"):
        return  # files that no catalogue knows may be left
    for tenant in {place.tenant for place in gone if place.tenant}:
        if not catalogue.has_rows(tenant):
            account = catalogue.account(tenant)
            catalogue.forget(tenant)
            if account != tenant:
                with contextlib.suppress(OSError):
                    folder.remove(layout.account_name(tenant, account))


def remove_empty(folder: Folder, names: Iterable[str]) -> None:
    """Remove the folders of tenants that are empty now that these files are gone."""
    for above in {name.rpartition("/")[0] for name in names if name.startswith("tenants/")}:
        folder.remove_empty(above, below="tenants")
