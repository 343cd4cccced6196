"""What is to go first: a queue in which the least useful thing comes out on top.

Finding it must not walk through everything. A thing that can go is in the heap once, at the
usefulness it had when it came in; that only rises by use, so what comes out on top is looked at
again and goes back down if it was used meanwhile.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

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
        """Forget it. Its place in the heap goes when many are empty."""
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
