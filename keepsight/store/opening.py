"""Opens a store from an address: a folder, a remote address, or a folder before an address.

Only the form of an address is examined here; the stores do the rest.
"""

from __future__ import annotations

import os
from pathlib import Path

from keepsight.errors import InputError
from keepsight.store.addresses.write_queue import ROOM
from keepsight.store.contract import Store
from keepsight.store.folders.disk import DiskStore


def open_store(
    address: str | Path | None,
    budget: int | None = None,
    remote: str | None = None,
    quota: int | None = None,
    waiting: int = ROOM,
) -> Store:
    """The store at a folder or an fsspec address; with `remote`, a folder before that address.

    `budget` is the byte limit of the nearest of them, `quota` that of one tenant in it, and
    `waiting` that of data waiting in memory to be written, per store.
    """
    if address is None and remote is None:
        raise InputError("which store? give a folder, or an address such as s3://bucket/name")
    near = None if address is None else _open_one(os.fspath(address), budget, quota, waiting)
    if remote is None:
        if near is None:
            raise InputError("which store? give a folder, or an address")
        return near
    if "://" not in remote:
        raise InputError(f"{remote!r} is no remote address; expected one such as s3://bucket/name")
    if near is None:
        return _open_one(remote, budget, quota, waiting)
    from keepsight.store.tiers import TieredStore

    return TieredStore(near, _open_one(remote, None, None, waiting))


def _open_one(address: str, budget: int | None, quota: int | None, waiting: int) -> Store:
    if "://" not in address:
        return DiskStore(address, budget, quota=quota, waiting=waiting)
    from keepsight.store.addresses.remote import RemoteStore

    return RemoteStore(address, budget, quota=quota, waiting=waiting)
