"""Bytes under a key, in memory, folders and remote addresses. May import formats and below.

`contract` defines the interface, `layout` the place and form of entries. `folders` keeps entries on
a disk, `addresses` in a bucket or any place that fsspec reaches, `memory_cache` in memory, `tiers`
in several stores in a row; `opening` chooses. `priority` ranks entries for eviction.
Nothing here knows about images, models or prompts.
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
from keepsight.store.folders.disk import FORMAT, DiskStore
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
