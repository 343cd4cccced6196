"""Catalogue rows from what the files of a folder say about themselves.

Nothing here needs a catalogue, and no tensor is read.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Iterator

from keepsight.errors import FileError
from keepsight.store import entryfile, layout
from keepsight.store.contract import About, Entry
from keepsight.store.folders.folder import Folder, PartFile
from keepsight.store.layout import EntryName


def name_of(place: EntryName) -> str:
    """The file of an entry."""
    return layout.place(place.kind, place.key, place.tenant)


def pin_name(place: EntryName) -> str:
    """The note that keeps a pin if the catalogue is lost."""
    return f"{layout.tenant_prefix(place.tenant)}pins/{place.kind}/{place.key}.json"


def everything(folder: Folder) -> Iterator[list[Entry]]:
    """All entries from their files, one folder at a time, without reading them in full."""
    for tenant in ["", *folder.names("tenants")]:
        for kind in layout.KINDS:
            above = f"{layout.tenant_prefix(tenant)}{kind}"
            for shard in folder.names(above):
                found = []
                for name in folder.names(f"{above}/{shard}"):
                    place = layout.parse(f"{above}/{shard}/{name}")
                    entry = None if place is None else as_found(folder, place)
                    found += [] if entry is None else [entry]
                yield found


def as_found(folder: Folder, place: EntryName) -> Entry | None:
    """An entry from its file; None if the file is invalid or unreadable."""
    status = folder.status(name_of(place))
    if status is None or not stat.S_ISREG(status.st_mode):
        return None
    try:
        metadata = entryfile.read_metadata(folder.path(name_of(place)), place.kind, place.key)
    except (FileError, OSError):
        metadata = {}  # `check` will report it; its bytes count until then
    about = entryfile.about(metadata)
    created = status.st_mtime if about.ttl is None else float(metadata["created"]) / 1000
    if not math.isfinite(created):  # a file may claim anything, but its row must be valid
        created = status.st_mtime
    return row_of(place, about, status.st_size, created, max(status.st_atime, created))


def row_of(place: EntryName, about: About, nbytes: int, created: float, used: float) -> Entry:
    """The row of a new entry."""
    expires = None if about.ttl is None else created + about.ttl
    return Entry(
        kind=place.kind,
        key=place.key,
        nbytes=nbytes,
        used=used,
        created=created,
        uses=1,
        cost=about.cost,
        depends_on=about.depends_on,
        media=tuple(about.media),
        expires=expires,
        tenant=place.tenant,
    )


def accounts(folder: Folder) -> Iterator[tuple[str, str]]:
    """Every tenant that counts against another's quota, with that tenant."""
    for above in folder.names(layout.ACCOUNTS):
        for last in folder.names(f"{layout.ACCOUNTS}/{above}"):
            found = layout.parse_account(f"{layout.ACCOUNTS}/{above}/{last}")
            if found is not None:
                yield found


def begin_accounts(folder: Folder, accounts: dict[str, str]) -> list[PartFile]:
    """Write the missing account notes, to be renamed before the entries of such a tenant."""
    begun: list[PartFile] = []
    for tenant, account in accounts.items():
        name = layout.account_name(tenant, account)
        if tenant != account and folder.status(name) is None:
            with contextlib.suppress(OSError):  # the catalogue has it; the next write tries again
                begun.append(folder.begin(name, [b"{}"], None))
    return begun


def pins(folder: Folder) -> Iterator[EntryName]:
    """Every pin."""
    for tenant in ["", *folder.names("tenants")]:
        for kind in layout.KINDS:
            for name in folder.names(f"{layout.tenant_prefix(tenant)}pins/{kind}"):
                key = os.path.splitext(name)[0]
                if layout.is_name(kind, key):
                    yield EntryName(tenant, kind, key)
