"""What several tenants keep in memory under one budget of bytes: the least useful goes first.

What that is says `worth` in store/sizes.py, for memory as for disks.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from keepsight.errors import PinsFull
from keepsight.store import worth
from keepsight.system.accounts import account_of
from keepsight.system.lock import Mutex

T = TypeVar("T")
Place = tuple[str, str]  # tenant and key


@dataclass
class _Kept(Generic[T]):
    """One thing on the shelf."""

    item: T
    nbytes: int
    cost: float
    made: float
    uses: int = 1
    worth: float = 0.0
    pinned: bool = False
    mark: int = field(default=0)  # which entry of the heap speaks of it


class Shelf(Generic[T]):
    """Things under a tenant and a key. `quota` bounds the bytes of one tenant with all that it has
    under salts, `ttl` a thing's seconds.

    What is pinned stays until it is unpinned, removed or expired. It counts: no more can be pinned
    than quota and budget have room for.
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
        self._size, self._clock = size, clock
        self._kept: dict[Place, _Kept[T]] = {}
        self._heaps: dict[str, list[tuple[float, int, Place]]] = {}  # by account
        self._marks = itertools.count(1)
        self._floor = 0.0
        self._swept = clock()
        self._of: dict[str, int] = {}
        self._owned: dict[str, int] = {}  # by account
        self._pinned: dict[str, int] = {}  # likewise, of what is pinned
        self.nbytes = 0
        self.evictions = 0

    def get(self, tenant: str, key: str) -> T | None:
        """The thing, which is worth more from now on."""
        kept = self._kept.get((tenant, key))
        if kept is None:
            return None
        if self._expired(kept):
            self.pop(tenant, key)
            return None
        kept.uses += 1
        self._weigh(tenant, key, kept)
        return kept.item

    def has(self, tenant: str, key: str) -> bool:
        """Whether `get` would find it; asking makes nothing more useful."""
        kept = self._kept.get((tenant, key))
        return kept is not None and not self._expired(kept)

    def put_pinned(self, tenant: str, key: str, item: T) -> None:
        """Keep it pinned, letting go of what is not; refused by name where that is not enough."""
        size = self._size(item)
        if size > self.room:
            raise PinsFull.over("features", size, self.room, "the room for one picture")
        if error := self._too_many_pins(account_of(tenant), size):
            raise error
        self.put(tenant, key, item, pinned=True)

    def put(self, tenant: str, key: str, item: T, cost: float = 0.0, pinned: bool = False) -> None:
        """Keep it if it can fit, letting go of the least useful."""
        self._sweep()
        before = self._kept.get((tenant, key))
        pinned = pinned or (before is not None and before.pinned)
        self.pop(tenant, key)
        size = self._size(item)
        if size > self.room:
            return
        if pinned and self._too_many_pins(account_of(tenant), size):  # it has grown
            pinned = False
        kept = _Kept(item, size, cost, self._clock(), pinned=pinned)
        self._kept[tenant, key] = kept
        self._count(tenant, kept, 1)
        self._weigh(tenant, key, kept)
        self._fit(tenant)

    def pop(self, tenant: str, key: str) -> int:
        """Let it go, if it is there; its bytes."""
        kept = self._kept.pop((tenant, key), None)
        if kept is None:
            return 0
        self._count(tenant, kept, -1)
        return kept.nbytes

    def _count(self, tenant: str, kept: _Kept[T], sign: int) -> None:
        nbytes, account = sign * kept.nbytes, account_of(tenant)
        self.nbytes += nbytes
        _add(self._of, tenant, nbytes)
        _add(self._owned, account, nbytes)
        if kept.pinned:
            _add(self._pinned, account, nbytes)

    def pin(self, tenant: str, key: str, pinned: bool = True) -> bool:
        """Keep it whatever comes, or no longer; False when it is not there."""
        kept = self._kept.get((tenant, key))
        if kept is None:
            return False
        if pinned != kept.pinned:
            if pinned and (error := self._too_many_pins(account_of(tenant), kept.nbytes)):
                raise error
            _add(self._pinned, account_of(tenant), kept.nbytes if pinned else -kept.nbytes)
        kept.pinned = pinned
        self._weigh(tenant, key, kept)
        self._fit(tenant)
        return True

    def _too_many_pins(self, account: str, more: int) -> PinsFull | None:
        """Why so many bytes more cannot be pinned."""
        own, everything = self._pinned.get(account, 0), sum(self._pinned.values())
        if self.quota is not None and own + more > self.quota:
            return PinsFull.over("features", own + more, self.quota, "half of tenant_quota")
        if everything + more > self.budget:
            return PinsFull.no_room("features", "half of vision_budget", self.budget)
        return None

    @property
    def room(self) -> int:
        """Bytes that one thing may have."""
        return min(self.budget, self.budget if self.quota is None else self.quota)

    def pinning(self) -> set[str]:
        """The tenants of whom anything is pinned."""
        if not self._pinned:
            return set()
        return {owner for (owner, _), kept in self._kept.items() if kept.pinned}

    def pinned(self, tenant: str, key: str) -> bool:
        """Whether it is kept whatever comes."""
        kept = self._kept.get((tenant, key))
        return kept is not None and kept.pinned

    def clear(self, tenant: str | None = None) -> None:
        """Let go of everything, or of everything of one tenant."""
        for owner, key in list(self._kept):
            if tenant is None or owner == tenant:
                self.pop(owner, key)

    def bytes_of(self, tenant: str) -> int:
        """What one tenant keeps here."""
        return self._of.get(tenant, 0)

    def items(self, tenant: str) -> Iterator[tuple[str, T]]:
        """Keys and things of one tenant."""
        for (owner, key), kept in list(self._kept.items()):
            if owner == tenant and not self._expired(kept):
                yield key, kept.item

    def __len__(self) -> int:
        return len(self._kept)

    def _expired(self, kept: _Kept[T]) -> bool:
        return self.ttl is not None and self._clock() - kept.made >= self.ttl

    def _sweep(self) -> None:
        """Drop what has expired, now and then: nobody may ever ask for it again."""
        if self.ttl is not None and self._clock() - self._swept >= self.ttl / 8:
            self._swept = self._clock()
            for place, kept in list(self._kept.items()):
                if self._expired(kept):
                    self.pop(*place)

    def _weigh(self, tenant: str, key: str, kept: _Kept[T]) -> None:
        kept.worth = worth(self._floor, kept.uses, kept.cost, kept.nbytes)
        kept.mark = next(self._marks)
        account = account_of(tenant)
        heap = self._heaps.setdefault(account, [])
        heapq.heappush(heap, (kept.worth, kept.mark, (tenant, key)))
        if len(heap) > 64 + 4 * len(self._kept):  # mostly of worths that hold no longer
            self._heaps[account] = [
                (k.worth, k.mark, place)
                for place, k in self._kept.items()
                if account_of(place[0]) == account
            ]
            heapq.heapify(self._heaps[account])

    def _fit(self, tenant: str) -> None:
        account = account_of(tenant)
        while self.quota is not None and self._owned.get(account, 0) > self.quota:
            if not self._let_go([account]):
                break
        while self.nbytes > self.budget:
            if not self._let_go(list(self._heaps)):
                break

    def _let_go(self, accounts: list[str]) -> bool:
        """Drop the least useful thing of some accounts; False where all is pinned."""
        least = [found for account in accounts if (found := self._least(account))]
        if not least:
            return False
        worth, _, place = min(least)
        self.pop(*place)
        self._floor = max(self._floor, worth)
        self.evictions += 1
        return True

    def _least(self, account: str) -> tuple[float, int, Place] | None:
        heap = self._heaps.get(account, [])
        while heap:
            _, mark, place = heap[0]
            kept = self._kept.get(place)
            if kept is not None and kept.mark == mark and not kept.pinned:
                return heap[0]
            heapq.heappop(heap)  # unpinning weighs a thing anew
        self._heaps.pop(account, None)
        return None

    def check(self) -> None:
        """The books must agree with the shelves."""
        sizes: dict[str, int] = {}
        for (tenant, _), kept in self._kept.items():
            if kept.nbytes != self._size(kept.item):
                raise AssertionError("a thing changed its size on the shelf")
            sizes[tenant] = sizes.get(tenant, 0) + kept.nbytes
        sizes = {tenant: size for tenant, size in sizes.items() if size}
        if sizes != self._of or sum(sizes.values()) != self.nbytes:
            raise AssertionError(f"counted {self._of} ({self.nbytes}), kept {sizes}")
        owned: dict[str, int] = {}
        pinned: dict[str, int] = {}
        for (tenant, _), kept in self._kept.items():
            _add(owned, account_of(tenant), kept.nbytes)
            _add(pinned, account_of(tenant), kept.nbytes * kept.pinned)
        if owned != self._owned or pinned != self._pinned:
            raise AssertionError(f"counted {self._owned} and {self._pinned} of accounts")
        if self.nbytes > self.budget:
            raise AssertionError(f"{self.nbytes} bytes over a budget of {self.budget}")
        for account, nbytes in owned.items():
            if self.quota is not None and nbytes > self.quota:
                raise AssertionError(f"account {account!r} keeps {nbytes} over {self.quota}")


class SharedShelf(Generic[T]):
    """Small things under a tenant and a key, looked up in many threads at once. Of all, and of one
    tenant over its quota, those go first that were asked for longest ago."""

    def __init__(
        self,
        budget: int,
        size: Callable[[T], int],
        quota: int | None = None,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget, self.quota, self.ttl = budget, quota, ttl
        self._size, self._clock = size, clock
        self._lock = Mutex()
        self._all: OrderedDict[Place, tuple[T, int, float]] = OrderedDict()  # with bytes and age
        self._own: dict[str, OrderedDict[Place, None]] = {}  # by account, in the same order
        self._of: dict[str, int] = {}
        self._owned: dict[str, int] = {}  # by account
        self._swept = clock()
        self.nbytes = 0

    def get(self, tenant: str, key: str) -> T | None:
        """The thing, which is the last to go now."""
        with self._lock:
            found = self._all.get((tenant, key))
            if found is None:
                return None
            if self._is_over(found[2]):
                self._drop(tenant, key)
                return None
            self._all.move_to_end((tenant, key))
            self._own[account_of(tenant)].move_to_end((tenant, key))
            return found[0]

    def put(self, tenant: str, key: str, item: T) -> None:
        """Keep it if it can fit."""
        size = self._size(item)
        with self._lock:
            self._sweep()
            self._drop(tenant, key)
            if size > min(self.budget, self.budget if self.quota is None else self.quota):
                return
            self._all[tenant, key] = item, size, self._clock()
            account = account_of(tenant)
            self._own.setdefault(account, OrderedDict())[tenant, key] = None
            self._count(tenant, size)
            while self.quota is not None and self._owned.get(account, 0) > self.quota:
                self._drop(*next(iter(self._own[account])))
            while self.nbytes > self.budget:
                self._drop(*next(iter(self._all)))

    def pop(self, tenant: str, key: str) -> None:
        """Let it go, if it is there."""
        with self._lock:
            self._drop(tenant, key)

    def forget(self, tenant: str, only: Callable[[T], bool]) -> None:
        """Let go of what `only` says of one tenant's."""
        with self._lock:
            for place in list(self._own.get(account_of(tenant), ())):
                if place[0] == tenant and only(self._all[place][0]):
                    self._drop(*place)

    def clear(self, tenant: str) -> None:
        """Let go of everything of one tenant."""
        self.forget(tenant, lambda item: True)

    def bytes_of(self, tenant: str) -> int:
        """What one tenant keeps here."""
        return self._of.get(tenant, 0)

    def _drop(self, tenant: str, key: str) -> None:
        found = self._all.pop((tenant, key), None)
        if found is None:
            return
        account = account_of(tenant)
        self._count(tenant, -found[1])
        del self._own[account][tenant, key]
        if not self._own[account]:
            del self._own[account]

    def _count(self, tenant: str, nbytes: int) -> None:
        self.nbytes += nbytes
        _add(self._of, tenant, nbytes)
        _add(self._owned, account_of(tenant), nbytes)

    def _is_over(self, made: float) -> bool:
        return self.ttl is not None and self._clock() - made >= self.ttl

    def _sweep(self) -> None:
        """Drop what has expired, now and then: nobody may ever ask for it again."""
        if self.ttl is not None and self._clock() - self._swept >= self.ttl / 8:
            self._swept = self._clock()
            for place in [place for place, found in self._all.items() if self._is_over(found[2])]:
                self._drop(*place)

    def check(self) -> None:
        """The books must agree with the shelves."""
        with self._lock:
            sizes: dict[str, int] = {}
            for (tenant, _), (item, nbytes, _) in self._all.items():
                if nbytes != self._size(item):
                    raise AssertionError("a thing changed its size on the shelf")
                sizes[tenant] = sizes.get(tenant, 0) + nbytes
            sizes = {tenant: size for tenant, size in sizes.items() if size}
            owned: dict[str, int] = {}
            for tenant, size in sizes.items():
                _add(owned, account_of(tenant), size)
            keys = {place for own in self._own.values() for place in own}
            agree = sizes == self._of and owned == self._owned and keys == set(self._all)
            if not agree or sum(sizes.values()) != self.nbytes:
                raise AssertionError(f"counted {self._of} ({self.nbytes}), kept {sizes}")
            over = [t for t, n in owned.items() if self.quota is not None and n > self.quota]
            if over or self.nbytes > self.budget:
                raise AssertionError(
                    f"{self.nbytes} bytes over {self.budget}, or {over} over quota"
                )


def _add(counts: dict[str, int], name: str, more: int) -> None:
    """Count on; what is nothing has no place."""
    counts[name] = counts.get(name, 0) + more
    if not counts[name]:
        del counts[name]
