"""A cache in memory under a budget of bytes, for one or several tenants.

The least useful entry is evicted first, ranked by `usefulness` in `priority.py` as on disks. If
making an entry again costs almost nothing, the least recently used is evicted first.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from keepsight.errors import PinsFull
from keepsight.store.priority import EvictionQueue, Order, usefulness
from keepsight.system.accounts import account_of
from keepsight.system.lock import Mutex

T = TypeVar("T")
Place = tuple[str, str]  # tenant and key


@dataclass
class _CacheEntry(Generic[T]):
    """One value, and its rank for eviction."""

    item: T
    nbytes: int
    cost: float
    made: float
    uses: int = 0
    order: Order = (0.0, 0)
    pinned: bool = False


class MemoryCache(Generic[T]):
    """Values under a tenant and a key. `quota` limits the bytes of one tenant with all its salts;
    `ttl` is in seconds; `by_usefulness` evicts the least useful first, otherwise the least recently
    used.

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
        by_usefulness: bool = True,
    ) -> None:
        self.budget, self.quota, self.ttl, self._by_usefulness = budget, quota, ttl, by_usefulness
        self._size, self._clock = size, clock
        self._held: dict[Place, _CacheEntry[T]] = {}
        self._queue = EvictionQueue(self._order)
        self._own: dict[str, EvictionQueue[Place]] = {}  # by account
        self._uses = itertools.count(1)
        self._floor = 0.0
        self._swept = clock()
        self._of: Counter[str] = Counter()
        self._owned: Counter[str] = Counter()  # by account
        self._pinned: Counter[str] = Counter()  # the same for pinned values
        self.nbytes = 0
        self.evictions = 0

    # -- reading ---------------------------------------------------------------------------------

    def get(self, tenant: str, key: str) -> T | None:
        """The value, which becomes more useful."""
        held = self._held.get((tenant, key))
        if held is None:
            return None
        if self._expired(held):
            self._drop((tenant, key))
            return None
        self._use(held)
        return held.item

    def has(self, tenant: str, key: str) -> bool:
        """Whether `get` would find it; this does not change its rank."""
        held = self._held.get((tenant, key))
        return held is not None and not self._expired(held)

    def items(self, tenant: str) -> Iterator[tuple[str, T]]:
        """Keys and values of one tenant."""
        for (owner, key), held in list(self._held.items()):
            if owner == tenant and not self._expired(held):
                yield key, held.item

    def bytes_of(self, tenant: str) -> int:
        """Bytes of one tenant here."""
        return self._of[tenant]

    def __len__(self) -> int:
        return len(self._held)

    @property
    def room(self) -> int:
        """The most bytes that one value may take."""
        return self.budget if self.quota is None else min(self.budget, self.quota)

    # -- writing ---------------------------------------------------------------------------------

    def put(self, tenant: str, key: str, item: T, cost: float = 0.0, pinned: bool = False) -> None:
        """Store a value if it can fit; evict others as needed."""
        self._sweep()
        place, pinned = (tenant, key), pinned or self.pinned(tenant, key)
        self._drop(place)
        size = self._size(item)
        if size > self.room:
            return
        if pinned and self._too_many_pins(account_of(tenant), size):  # it has grown
            pinned = False
        held = _CacheEntry(item, size, cost, self._clock(), pinned=pinned)
        self._held[place] = held
        self._count(tenant, held, 1)
        self._use(held)
        self._offer(place)
        self._fit(account_of(tenant))

    def pop(self, tenant: str, key: str) -> int:
        """Remove it if present; return its bytes."""
        return self._drop((tenant, key))

    def forget(self, tenant: str | None, only: Callable[[T], bool]) -> None:
        """Remove entries selected by `only`, of all tenants or of one."""
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
        if size > self.room:
            raise PinsFull.over("features", size, self.room, "the room for one picture")
        if error := self._too_many_pins(account_of(tenant), size):
            raise error
        self.put(tenant, key, item, pinned=True)

    def pin(self, tenant: str, key: str, pinned: bool = True) -> bool:
        """Pin or unpin it; False if it is absent."""
        held = self._held.get((tenant, key))
        if held is None:
            return False
        account = account_of(tenant)
        if pinned != held.pinned:
            if pinned and (error := self._too_many_pins(account, held.nbytes)):
                raise error
            _add(self._pinned, account, held.nbytes if pinned else -held.nbytes)
        held.pinned = pinned
        self._offer((tenant, key))
        self._fit(account)
        return True

    def pinned(self, tenant: str, key: str) -> bool:
        """Whether it is pinned."""
        held = self._held.get((tenant, key))
        return held is not None and held.pinned

    def pinning(self) -> set[str]:
        """The tenants that have pins."""
        if not self._pinned:
            return set()
        return {tenant for (tenant, _), held in self._held.items() if held.pinned}

    def _too_many_pins(self, account: str, more: int) -> PinsFull | None:
        """Why this many more bytes cannot be pinned."""
        own, everything = self._pinned[account] + more, self._pinned.total() + more
        if self.quota is not None and own > self.quota:
            return PinsFull.over("features", own, self.quota, "half of tenant_quota")
        if everything > self.budget:
            return PinsFull.no_room("features", "half of vision_budget", self.budget)
        return None

    # -- eviction --------------------------------------------------------------------------------

    def _use(self, held: _CacheEntry[T]) -> None:
        held.uses += 1
        value = (
            usefulness(self._floor, held.uses, held.cost, held.nbytes)
            if self._by_usefulness
            else 0.0
        )
        held.order = value, next(self._uses)

    def _order(self, place: Place) -> Order:
        return self._held[place].order

    def _offer(self, place: Place) -> None:
        account = account_of(place[0])
        if account not in self._own:
            self._own[account] = EvictionQueue(self._order)
        self._own[account].add(place)
        self._queue.add(place)

    def _fit(self, account: str) -> None:
        while self.quota is not None and self._owned[account] > self.quota:
            if not self._evict(self._own[account]):
                break
        while self.nbytes > self.budget:
            if not self._evict(self._queue):
                break

    def _evict(self, queue: EvictionQueue[Place]) -> bool:
        """Evict the first value in rank; False if all are pinned."""
        least = queue.pop(lambda place: not self._held[place].pinned)
        if least is None:
            return False
        self._floor = max(self._floor, self._order(least)[0])
        self._drop(least)
        self.evictions += 1
        return True

    def _drop(self, place: Place) -> int:
        held = self._held.pop(place, None)
        if held is None:
            return 0
        self._count(place[0], held, -1)
        account = account_of(place[0])
        self._queue.discard(place)
        own = self._own.get(account)
        if own is not None:
            own.discard(place)
            if not len(own) and not self._owned[account]:  # the number of tenants is unbounded
                del self._own[account]
        return held.nbytes

    def _count(self, tenant: str, held: _CacheEntry[T], sign: int) -> None:
        nbytes, account = sign * held.nbytes, account_of(tenant)
        self.nbytes += nbytes
        _add(self._of, tenant, nbytes)
        _add(self._owned, account, nbytes)
        if held.pinned:
            _add(self._pinned, account, nbytes)

    def _expired(self, held: _CacheEntry[T]) -> bool:
        return self.ttl is not None and self._clock() - held.made >= self.ttl

    def _sweep(self) -> None:
        """Drop expired values from time to time: nobody may ask for them again."""
        if self.ttl is not None and self._clock() - self._swept >= self.ttl / 8:
            self._swept = self._clock()
            for place in [place for place, held in self._held.items() if self._expired(held)]:
                self._drop(place)

    def check(self) -> None:
        """Raise AssertionError if a count is wrong, or a budget or quota is exceeded."""
        of: Counter[str] = Counter()
        owned: Counter[str] = Counter()
        pinned: Counter[str] = Counter()
        for place, held in self._held.items():
            if held.nbytes != self._size(held.item):
                raise AssertionError("a thing changed its size in memory")
            account = account_of(place[0])
            _add(of, place[0], held.nbytes)
            _add(owned, account, held.nbytes)
            _add(pinned, account, held.nbytes * held.pinned)
            if not held.pinned and not (place in self._queue and place in self._own[account]):
                raise AssertionError(
                    "an entry that is not pinned is missing from the queue of evictions"
                )
        counted = (self._of, self._owned, self._pinned)
        if counted != (of, owned, pinned) or self.nbytes != of.total():
            raise AssertionError(f"counted {self.nbytes} {counted}, kept {of}, {owned}, {pinned}")
        over = [name for name in owned if self.quota is not None and owned[name] > self.quota]
        if over or self.nbytes > self.budget:
            raise AssertionError(f"{self.nbytes} bytes over {self.budget}, or {over} over quota")


class SharedMemoryCache(MemoryCache[T]):
    """A thread-safe `MemoryCache` for small values: the least recently used is evicted first, and
    nothing is pinned."""

    def __init__(
        self,
        budget: int,
        size: Callable[[T], int],
        quota: int | None = None,
        ttl: float | None = None,
    ) -> None:
        super().__init__(budget, size, quota, ttl, by_usefulness=False)
        self._lock = Mutex()

    def get(self, tenant: str, key: str) -> T | None:
        """The value, which is now evicted last."""
        with self._lock:
            return super().get(tenant, key)

    def put(self, tenant: str, key: str, item: T, cost: float = 0.0, pinned: bool = False) -> None:
        """Store a value if it can fit."""
        with self._lock:
            super().put(tenant, key, item, cost, pinned)

    def pop(self, tenant: str, key: str) -> int:
        """Remove it if present; return its bytes."""
        with self._lock:
            return super().pop(tenant, key)

    def forget(self, tenant: str | None, only: Callable[[T], bool]) -> None:
        """Remove entries selected by `only`, of all tenants or of one."""
        with self._lock:
            super().forget(tenant, only)

    def check(self) -> None:
        """The check of the base class, under the lock."""
        with self._lock:
            super().check()


def _add(counts: Counter[str], name: str, more: int) -> None:
    """Add to a count; drop counts of zero."""
    counts[name] += more
    if not counts[name]:
        del counts[name]
