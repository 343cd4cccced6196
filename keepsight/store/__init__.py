"""Bytes under a key, in memory, folders and remote addresses. May import formats and below.

`contract` says what a store promises, `layout` where an entry lies and how it is spelled; `disk`
keeps entries in a folder, `remote` at an address, `tiers` in several stores in a row. Behind `disk`
are `folder` (files that stay inside the store), `entryfile` (one entry as one file), `catalogue`
(the catalogue about them), `writer` (the thread that writes) and `audit` (check and repair).
`priority` says how useful an entry is and what is evicted first; `memory_cache` keeps things in
memory that way. Nothing in here knows of images, models or prompts.
"""

from keepsight.store.contract import (
    NOTHING,
    About,
    Below,
    BulkRead,
    Entry,
    Listing,
    Store,
    read_all,
)
from keepsight.store.disk import FORMAT, DiskStore
from keepsight.store.memory_cache import MemoryCache, SharedMemoryCache
from keepsight.store.opening import open_store
from keepsight.store.priority import EvictionQueue, Order, likely_cost, usefulness

__all__ = [
    "FORMAT",
    "NOTHING",
    "About",
    "Below",
    "BulkRead",
    "DiskStore",
    "Entry",
    "Listing",
    "EvictionQueue",
    "MemoryCache",
    "Order",
    "SharedMemoryCache",
    "Store",
    "likely_cost",
    "open_store",
    "read_all",
    "usefulness",
]
