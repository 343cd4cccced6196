"""Bytes under a key, in memory, folders and remote addresses. May import formats and below.

`contract` defines the interface, `layout` the place and form of entries. `disk` keeps entries in a
folder, `remote` at an address, `tiers` in several stores in a row. `disk` uses `folder` (files that
stay inside the store), `entryfile` (one entry as one file), `catalogue` (their index), `writer`
(the writing thread) and `check` (check and repair). `priority` ranks entries for eviction;
`memory_cache` applies it in memory. Nothing here knows about images, models or prompts.
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
