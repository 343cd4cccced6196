"""The latest texts or conversations of all tenants; the next one may continue one of them.

A tenant only finds its own, so timing reveals nothing about other tenants.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

MOST = 32  # kept for all tenants together


class Remembered(Protocol):
    """An entry of one tenant."""

    @property
    def tenant(self) -> str:
        """The tenant it belongs to."""


T = TypeVar("T", bound=Remembered)


class RecentEntries(Generic[T]):
    """A bounded, thread-safe list of entries."""

    def __init__(self) -> None:
        self._latest: list[T] = []
        self._lock = threading.Lock()

    def longest(
        self, whole: Sequence[object], parts: Callable[[T], Sequence[object] | None]
    ) -> tuple[T | None, int]:
        """The entry that shares the most leading parts with `whole`, and how many; entries whose
        `parts` are None are skipped."""
        with self._lock:
            latest = list(self._latest)
        best, most = None, 0
        for one in reversed(latest):
            own = parts(one)
            if own is not None and own[most : most + 1] == whole[most : most + 1]:
                shared = shared_length(own, whole)
                best, most = (one, shared) if shared > most else (best, most)
        return best, most

    def put(self, made: T, instead: T | None) -> None:
        """Add an entry, in place of the one that it continues."""
        with self._lock:
            self._latest = [one for one in self._latest if one is not instead][1 - MOST :]
            self._latest.append(made)

    def clear(self, tenant: str | None = None) -> None:
        """Forget the entries of one tenant, or of all."""
        with self._lock:
            self._latest = [one for one in self._latest if tenant not in (None, one.tenant)]

    def __len__(self) -> int:
        return len(self._latest)


def shared_length(one: Sequence[object], other: Sequence[object]) -> int:
    """The number of leading characters or items that two texts or lists share."""
    low, high, step = 0, min(len(one), len(other)), 4096
    while low < high and one[low : low + step] == other[low : low + step]:
        low, step = low + step, 2 * step
    low, high = min(low, high), min(low + step, high)
    while low < high:  # everything before `low` is equal
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
