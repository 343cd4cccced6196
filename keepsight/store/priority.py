"""The eviction order: the formula for usefulness, and a queue with the least useful entry on top.

Finding it must not walk through everything. Each evictable entry is in the heap once, with its
usefulness at insertion. Use only raises it, so the top is recomputed, and sinks again if it was
used meanwhile.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_PLACE = 4096  # least size of an entry: a disk block, a row of the index
MOST_TENANTS = 10_000  # tenants whose counts are in memory
K = TypeVar("K")
V = TypeVar("V")


def usefulness(floor: float, uses: int, cost: float, nbytes: int) -> float:
    """How useful an entry is; the least useful is evicted first (GreedyDual-Size-Frequency).

    Usefulness is the milliseconds saved per byte: the number of uses times the cost of making the
    entry again, over its size; plus the floor. The floor is the usefulness of the last evicted
    entry. It only rises, so old entries sink relative to new uses without any clock. Usefulness is
    recomputed at each use.
    """
    return floor + uses * (cost or likely_cost(nbytes)) / (nbytes + _PLACE)


def likely_cost(nbytes: int) -> float:
    """The estimated milliseconds to make an entry again, if not measured."""
    return 1.0 + nbytes / (64 << 10)


def trim(table: dict[K, V], most: int = MOST_TENANTS) -> None:
    """Drop the oldest rows of a table that any caller may extend."""
    while len(table) > most:
        table.pop(next(iter(table)), None)


T = TypeVar("T", bound=Hashable)
Order = tuple[float, int]  # usefulness, then last use: among equals the least recently used first


class EvictionQueue(Generic[T]):
    """Entries by usefulness, the least first. A discarded entry may stay referenced for a while, so
    it must be small."""

    def __init__(self, order: Callable[[T], Order]) -> None:
        self._order = order
        self._heap: list[tuple[float, int, int, T]] = []
        self._entry: dict[T, tuple[float, int, int]] = {}  # the valid heap item of each entry
        self._number = itertools.count()

    def add(self, item: T) -> None:
        """Add an entry; no effect if it is queued already with equal or less usefulness."""
        order = self._order(item)
        waiting = self._entry.get(item)
        if waiting is None or order < waiting[:2]:
            self._push(item, order)

    def discard(self, item: T) -> None:
        """Remove an entry. Its heap item is freed when many are stale."""
        self._entry.pop(item, None)
        if len(self._heap) > 64 + 2 * len(self._entry):
            self._heap = [(*entry, item) for item, entry in self._entry.items()]
            heapq.heapify(self._heap)

    def pop(self, may_go: Callable[[T], bool]) -> T | None:
        """The least useful evictable entry. One that cannot be evicted leaves the queue until it is
        added again."""
        while self._heap:
            *entry, item = heapq.heappop(self._heap)
            if self._entry.get(item) != tuple(entry):
                continue
            if not may_go(item):
                del self._entry[item]
                continue
            order = self._order(item)
            if order > (entry[0], entry[1]):
                self._push(item, order)
                continue
            del self._entry[item]
            return item
        return None

    def _push(self, item: T, order: Order) -> None:
        entry = (*order, next(self._number))
        self._entry[item] = entry
        heapq.heappush(self._heap, (*entry, item))

    def __contains__(self, item: T) -> bool:
        return item in self._entry

    def __len__(self) -> int:
        return len(self._entry)
