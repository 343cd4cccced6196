"""The latest texts or conversations of all tenants, of which the next one may be one more turn.

What a tenant has is of use to that tenant alone, so that no timing tells of another's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

MOST = 32  # that are remembered, of all tenants together


class Remembered(Protocol):
    """A thing of one tenant."""

    @property
    def tenant(self) -> str:
        """Whose it is."""


T = TypeVar("T", bound=Remembered)


class Latest(Generic[T]):
    """A bounded list of things, safe in several threads."""

    def __init__(self) -> None:
        self._latest: list[T] = []
        self._lock = threading.Lock()

    def longest(
        self, whole: Sequence[object], parts: Callable[[T], Sequence[object] | None]
    ) -> tuple[T | None, int]:
        """The one that shares most leading parts with `whole`, and how many; one whose `parts` are
        None is passed over."""
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
        """Remember one, in place of one that it goes on from."""
        with self._lock:
            self._latest = [one for one in self._latest if one is not instead][1 - MOST :]
            self._latest.append(made)

    def clear(self, tenant: str | None = None) -> None:
        """Forget those of one tenant, or of all."""
        with self._lock:
            self._latest = [one for one in self._latest if tenant not in (None, one.tenant)]

    def __len__(self) -> int:
        return len(self._latest)


def shared_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How many leading characters two texts share, or items two lists."""
    low, high, step = 0, min(len(one), len(other)), 4096
    while low < high and one[low : low + step] == other[low : low + step]:
        low, step = low + step, 2 * step
    low, high = min(low, high), min(low + step, high)
    while low < high:  # all before `low` is the same
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
