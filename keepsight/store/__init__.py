"""Bytes under a key, in memory, folders and remote addresses. May import formats and below.

`view` is a store as callers see it, `contract` its nouns, `layout` the place and form of entries.
`disk` keeps them in `files` with an `index`, `remote` in a bucket or any place that fsspec reaches;
both are a `writer` with one thread, and `health` says what a store refuses. `tiers` are several
stores in a row, `memory_cache` a cache in memory. Nothing here knows about images, models or
prompts.
"""

from __future__ import annotations

import os
from pathlib import Path

from keepsight.errors import InputError
from keepsight.store.contract import NOTHING, About, Below, Entry
from keepsight.store.disk import DiskStore
from keepsight.store.layout import FORMAT
from keepsight.store.memory_cache import MemoryCache
from keepsight.store.view import Store
from keepsight.store.writer import ROOM

__all__ = [
    "FORMAT",
    "NOTHING",
    "About",
    "Below",
    "DiskStore",
    "Entry",
    "MemoryCache",
    "Store",
    "open_store",
]


def open_store(
    address: str | Path | None,
    budget: int | None = None,
    remote: str | None = None,
    quota: int | None = None,
    waiting: int = ROOM,
) -> Store:
    """The store at a folder or an fsspec address; with `remote`, a folder before that address.

    `budget` limits the bytes of the folder, `quota` those of one tenant in it, and `waiting` those
    of data waiting in memory to be written, per store.
    """
    places = [os.fspath(place) for place in (address, remote) if place]
    if not places:
        raise InputError("which store? give a folder, or an address such as s3://bucket/name")
    if remote is not None and "://" not in remote:
        raise InputError(f"{remote!r} is no remote address; expected one such as s3://bucket/name")
    if "://" in places[0] and address is not None and (budget, quota) != (None, None):
        raise InputError(
            f"{places[0]}: a budget or a quota is for folders; a bucket keeps what it is given, "
            "and its own lifecycle rules remove what is old"
        )
    stores: list[Store] = []
    for place in places:
        if "://" in place:
            from keepsight.store.remote import RemoteStore

            stores.append(RemoteStore(place, waiting=waiting))
        else:
            stores.append(DiskStore(place, budget, quota=quota, waiting=waiting))
    if len(stores) == 1:
        return stores[0]
    from keepsight.store.tiers import TieredStore

    return TieredStore(*stores)
