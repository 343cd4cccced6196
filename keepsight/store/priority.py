"""What is evicted first: the formula for usefulness, and a queue with the least useful on top.

Finding it must not walk through everything. A thing that can be evicted is in the heap once, with
the usefulness it had when it came in. Use only raises that, so what is on top is computed again and
goes back down if it was used meanwhile.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_PLACE = 4096  # what even the smallest entry takes: a block of a disk, a row of a catalogue
MOST_TENANTS = 10_000  # of which counts are kept in memory
K = TypeVar("K")
V = TypeVar("V")


def usefulness(floor: float, uses: int, cost: float, nbytes: int) -> float:
    """How useful an entry is; the least useful goes first (GreedyDual-Size-Frequency).

    An entry is worth the milliseconds that it has saved for each byte that it takes: how often it
    was used, times what making it again would cost, over its size. To that comes the floor, which
    is the usefulness of the last entry that was evicted: it only rises, so what was useful long ago
    sinks, against what is used now, without any clock. It is computed again at each use.
    """
    return floor + uses * (cost or likely_cost(nbytes)) / (nbytes + _PLACE)


def likely_cost(nbytes: int) -> float:
    """Milliseconds that making an entry again may take, where it was not measured."""
    return 1.0 + nbytes / (64 << 10)


def trim(table: dict[K, V], most: int = MOST_TENANTS) -> None:
    """Drop the oldest of a table of small things that any caller may add to."""
    while len(table) > most:
        table.pop(next(iter(table)), None)


T = TypeVar("T", bound=Hashable)
Order = tuple[float, int]  # usefulness; of equals the one used longest ago goes first


class EvictionQueue(Generic[T]):
    """Things by their usefulness, the least first. One that was discarded may be referenced for a
    while yet: nothing large should hang on it."""

    def __init__(self, order: Callable[[T], Order]) -> None:
        self._order = order
        self._heap: list[tuple[float, int, int, T]] = []
        self._entry: dict[T, tuple[float, int, int]] = {}  # the one that counts
        self._number = itertools.count()

    def add(self, item: T) -> None:
        """Let it wait for its turn; nothing happens if it does already, as useful or less."""
        order = self._order(item)
        waiting = self._entry.get(item)
        if waiting is None or order < waiting[:2]:
            self._push(item, order)

    def discard(self, item: T) -> None:
        """Remove it. Its place in the heap is freed when many are empty."""
        self._entry.pop(item, None)
        if len(self._heap) > 64 + 2 * len(self._entry):
            self._heap = [(*entry, item) for item, entry in self._entry.items()]
            heapq.heapify(self._heap)

    def pop(self, may_go: Callable[[T], bool]) -> T | None:
        """The least useful that may go. One that may not leaves the queue until it is added."""
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
