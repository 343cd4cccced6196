"""A thread-safe cache in memory under a budget of bytes, for one or several tenants: the least
recently used goes first."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from keepsight.errors import PinsFull
from keepsight.system.accounts import account_of
from keepsight.system.lock import Mutex

T = TypeVar("T")
Place = tuple[str, str]  # tenant and key


@dataclass
class _CacheEntry(Generic[T]):
    item: T
    nbytes: int
    made: float


class MemoryCache(Generic[T]):
    """Values under a tenant and a key. `quota` limits the bytes of one tenant with all its salts;
    `ttl` is in seconds.

    Pinned values stay until they are unpinned, removed or expired. They count: only as many can be
    pinned as fit quota and budget.
    """

    def __init__(
        self,
        budget: int,
        size: Callable[[T], int],
        quota: int | None = None,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget, self.quota, self.ttl = budget, quota, ttl
        self._room = budget if quota is None else min(budget, quota)  # of one value
        self._size, self._clock, self._lock = size, clock, Mutex()
        self._held: OrderedDict[Place, _CacheEntry[T]] = OrderedDict()  # in order of last use
        self._swept = clock()
        self._of, self._owned = Counter[str](), Counter[str]()  # bytes by tenant, by account
        self._pins: set[Place] = set()
        self.nbytes = 0
        self.evictions = 0

    # -- reading ---------------------------------------------------------------------------------

    def get(self, tenant: str, key: str) -> T | None:
        """The value, which now goes last."""
        with self._lock:
            held = self._held.get((tenant, key))
            if held is None:
                return None
            if self._expired(held):
                self._drop((tenant, key))
                return None
            self._held.move_to_end((tenant, key))
            return held.item

    def has(self, tenant: str, key: str) -> bool:
        """Whether `get` would find it; this is no use of it."""
        held = self._held.get((tenant, key))
        return held is not None and not self._expired(held)

    def items(self, tenant: str) -> Iterator[tuple[str, T]]:
        """Keys and values of one tenant, the least recently used first."""
        with self._lock:
            everything = list(self._held.items())
        for (owner, key), held in everything:
            if owner == tenant and not self._expired(held):
                yield key, held.item

    def bytes_of(self, tenant: str) -> int:
        """Bytes of one tenant here."""
        return self._of[tenant]

    def __len__(self) -> int:
        return len(self._held)

    # -- writing ---------------------------------------------------------------------------------

    def put(self, tenant: str, key: str, item: T) -> None:
        """Store a value if it can fit; evict others as needed."""
        with self._lock:
            self._put(tenant, key, item, self.pinned(tenant, key))

    def _put(self, tenant: str, key: str, item: T, pinned: bool) -> None:
        self._sweep()
        self._drop((tenant, key))
        size, account = self._size(item), account_of(tenant)
        if size > self._room:
            return
        self._held[tenant, key] = _CacheEntry(item, size, self._clock())
        self._count(tenant, size)
        if pinned and not self._too_many_pins(account, size):  # otherwise it has grown
            self._pins.add((tenant, key))
        self._fit(account)

    def pop(self, tenant: str, key: str) -> int:
        """Remove it if present; return its bytes."""
        with self._lock:
            return self._drop((tenant, key))

    def forget(self, tenant: str | None, only: Callable[[T], bool]) -> None:
        """Remove entries selected by `only`, of all tenants or of one."""
        with self._lock:
            for place, held in list(self._held.items()):
                if tenant in (None, place[0]) and only(held.item):
                    self._drop(place)

    def clear(self, tenant: str | None = None) -> None:
        """Remove everything, or everything of one tenant."""
        self.forget(tenant, lambda item: True)

    # -- pins ------------------------------------------------------------------------------------

    def put_pinned(self, tenant: str, key: str, item: T) -> None:
        """Store a value pinned and evict unpinned ones; refused by name if that is not enough."""
        size = self._size(item)
        if size > self._room:
            raise PinsFull.over("features", size, self._room, "the room for one picture")
        with self._lock:
            if error := self._too_many_pins(account_of(tenant), size):
                raise error
            self._put(tenant, key, item, True)

    def pin(self, tenant: str, key: str, pinned: bool = True) -> bool:
        """Pin or unpin it; False if it is absent."""
        place, account = (tenant, key), account_of(tenant)
        with self._lock:
            held = self._held.get(place)
            if held is None:
                return False
            if not pinned:
                self._pins.discard(place)
            elif place not in self._pins:
                if error := self._too_many_pins(account, held.nbytes):
                    raise error
                self._pins.add(place)
            self._fit(account)
            return True

    def pinned(self, tenant: str, key: str) -> bool:
        """Whether it is pinned."""
        return (tenant, key) in self._pins

    def pinning(self) -> set[str]:
        """The tenants that have pins."""
        with self._lock:
            return {tenant for tenant, _ in self._pins}

    def _too_many_pins(self, account: str, more: int) -> PinsFull | None:
        """Why this many more bytes cannot be pinned."""
        sizes = Counter[str]()
        for place in self._pins:
            sizes[account_of(place[0])] += self._held[place].nbytes
        own, everything = sizes[account] + more, sizes.total() + more
        if self.quota is not None and own > self.quota:
            return PinsFull.over("features", own, self.quota, "half of tenant_quota")
        if everything > self.budget:
            return PinsFull.no_room("features", "half of vision_budget", self.budget)
        return None

    # -- eviction --------------------------------------------------------------------------------

    def _fit(self, account: str) -> None:
        if self.quota is not None and self._owned[account] > self.quota:
            for place in [place for place in self._held if account_of(place[0]) == account]:
                if self._owned[account] > self.quota:
                    self._evict(place)
        for _ in range(len(self._held)):
            if self.nbytes <= self.budget:
                break
            place = next(iter(self._held))
            if place in self._pins:  # it goes behind, so that the next look need not pass it
                self._held.move_to_end(place)
            self._evict(place)

    def _evict(self, place: Place) -> None:
        if place not in self._pins:
            self._drop(place)
            self.evictions += 1

    def _drop(self, place: Place) -> int:
        held = self._held.pop(place, None)
        if held is None:
            return 0
        self._pins.discard(place)
        self._count(place[0], -held.nbytes)
        return held.nbytes

    def _count(self, tenant: str, nbytes: int) -> None:
        self.nbytes += nbytes
        for counts, name in ((self._of, tenant), (self._owned, account_of(tenant))):
            counts[name] += nbytes
            if not counts[name]:
                del counts[name]

    def _expired(self, held: _CacheEntry[T]) -> bool:
        return self.ttl is not None and self._clock() - held.made >= self.ttl

    def _sweep(self) -> None:
        """Drop expired values from time to time: nobody may ask for them again."""
        if self.ttl is not None and self._clock() - self._swept >= self.ttl / 8:
            self._swept = self._clock()
            for place in [place for place, held in self._held.items() if self._expired(held)]:
                self._drop(place)
