"""Several stores as one, the nearest first: for example a folder before a bucket.

Writes go to all of them. Reads search from near to far, and copy what a far store has to nearer
ones in the background. An entry that a near store evicts is still in a far one, so eviction is the
only demotion. Deletion removes an entry from all stores, including copies in progress.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar

from keepsight.errors import InputError, NotStored, StoreError
from keepsight.kinds import Record
from keepsight.store.contract import About, Below, Content, Entry, EntryName, Keeper, Name
from keepsight.store.health import OK
from keepsight.store.tenants import Store
from keepsight.store.writer import Counts
from keepsight.system import forks
from keepsight.system.exits import STORES, begin, finish_before_exit
from keepsight.system.lock import Mutex

logger = logging.getLogger(__name__)

_MOST = 256  # copies that may wait; frequently read entries get another chance
T = TypeVar("T")


class TieredStore(Store):
    """Several stores in order, the nearest first."""

    def __init__(self, *stores: Store) -> None:
        if not stores:
            raise InputError("a tiered store needs stores, the nearest first; none was given")
        self._stores = stores  # who drops a store ends its threads
        super().__init__(Tiers(tuple(store.keeper for store in stores)))


class _Copy(NamedTuple):
    """An entry from a far store, on its way to nearer ones."""

    name: EntryName
    content: Content
    source: Keeper
    nearer: tuple[Keeper, ...]
    epoch: int


class _Carrier:
    """The thread that copies entries from far stores to nearer ones.

    Each deletion starts a new epoch. What was read in an earlier one may be deleted by now, so it
    is dropped; the next read finds what still exists.
    """

    def __init__(self) -> None:
        self._lock = Mutex()
        self._start_anew()
        forks.renew(self._start_anew)  # a forked child has none of its parent's threads
        finish_before_exit(self, STORES)

    def _start_anew(self) -> None:
        self.epoch = self._deleting = 0
        self.carried: set[EntryName] = set()  # since the last flush
        self._queue: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._waiting, self._settled = 0, threading.Condition()
        self._thread: threading.Thread | None = None

    def take(self, copy: _Copy) -> None:
        """Queue a copy; drop it if too many wait."""
        with self._settled:
            if self._thread is None:
                self._thread = begin(self._work, "keepsight-carrier")
            if self._thread is None or self._waiting >= _MOST:
                return
            self._waiting += 1
        self._queue.put(copy)

    def _work(self) -> None:
        while (copy := self._queue.get()) is not None:
            try:
                self._carry(copy)
            except Exception:
                logger.exception("%s/%s stays where it is", *copy.name[:2])
            copy = None  # it references stores, so do not keep it while waiting
            with self._settled:
                self._waiting -= 1
                self._settled.notify_all()

    def _carry(self, copy: _Copy) -> None:
        entry = copy.source.entry(copy.name)
        if entry is None:
            return
        left = None if entry.expires is None else entry.expires - time.time()
        if left is not None and left <= 0:
            return
        about = About(entry.cost, entry.depends_on, entry.media, left)
        with self._lock:
            if self._deleting or copy.epoch != self.epoch:
                return
            self.carried.add(copy.name)
            for keeper in copy.nearer:
                keeper.put(copy.name, copy.content, about, entry.account)

    @contextlib.contextmanager
    def deletion(self) -> Iterator[None]:
        """During a deletion, copy nothing, and drop everything read before."""
        with self._lock:
            self._deleting += 1
        try:
            yield
        finally:
            with self._lock:
                self._deleting -= 1
                self.epoch += 1

    def settle(self, seconds: float | None = None) -> None:
        """Return when all copies are handed to the nearer stores, or at the deadline."""
        with self._settled:
            self._settled.wait_for(lambda: not self._waiting, seconds)

    before_exit = settle

    def retire(self) -> None:
        """Let the thread end after the queued copies, without waiting."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)


class Tiers:
    """The entries of all tenants in several stores."""

    def __init__(self, tiers: tuple[Keeper, ...]) -> None:
        self.tiers, self.label = tiers, " + ".join(tier.label for tier in tiers)
        self.root, self.budget, self.quota = tiers[0].root, tiers[0].budget, tiers[0].quota
        self._carrier, self._counts = _Carrier(), Counts()
        self.retire = self._carrier.retire

    # -- reading ---------------------------------------------------------------------------------

    def has(self, name: EntryName) -> bool:
        """Whether reading this entry should work."""
        return any(tier.has(name) for tier in self.tiers)

    def tier(self, name: EntryName) -> str | None:
        """Where a read would find it, or None."""
        return next((found for tier in self.tiers if (found := tier.tier(name))), None)

    def read(self, names: Iterable[EntryName]) -> dict[EntryName, Content]:
        """Those entries that any store has; what is only far is copied to nearer ones."""
        left = list(names)
        found: dict[EntryName, Content] = {}
        for place, tier in enumerate(self.tiers):
            epoch = self._carrier.epoch
            here = tier.read(left) if left else {}
            left = [name for name in left if name not in here]
            found |= here
            for name, content in here.items():
                self._counts.count(name.tenant, "hits")
                if place:
                    nearer = self.tiers[:place]
                    self._carrier.take(_Copy(name, content, tier, nearer, epoch))
        for name in left:
            self._counts.count(name.tenant, "misses")
        return found

    def below(self, tenant: str, kind: str, base: str | None, count: int) -> Below:
        """The dependents of an entry in the nearest store with any."""
        found = (tier.below(tenant, kind, base, count) for tier in self.tiers)
        return next((below for below in found if any(below.values())), {})

    def entry(self, name: EntryName) -> Entry | None:
        """One entry from the nearest store that has it."""
        return next((found for tier in self.tiers if (found := tier.entry(name))), None)

    def reject(self, name: EntryName, why: str) -> None:
        """Set aside an entry whose content does not match its key."""
        with self._carrier.deletion():
            for tier in self.tiers:
                if tier.has(name):
                    tier.reject(name, why)

    # -- writing ---------------------------------------------------------------------------------

    def put(self, name: EntryName, content: Content, about: About, account: str) -> None:
        """Hand over an entry to every store; each writes in its own background."""
        for tier in self.tiers:
            tier.put(name, content, about, account)

    def drain(self) -> None:
        """Return when everything handed over before is written or lost."""
        self._carrier.settle()
        for tier in self.tiers:
            tier.drain()

    def flush(self, tenant: str | None) -> None:
        """Return when every store has everything handed over; raise with what is missing."""
        self._carrier.settle()
        refused: dict[EntryName, str] = {}

        def flush(tier: Keeper) -> None:
            try:
                tier.flush(tenant)
            except NotStored as error:
                if error.broken or len(error.reasons) < error.count:
                    raise
                refused.update({EntryName(*n, tenant or ""): w for n, w in error.reasons.items()})

        self._every("written to", flush)
        # A small folder before a bucket keeps what fits. An entry in the other store is no loss;
        # nor is one that was copied and then deleted.
        carried, self._carrier.carried = self._carrier.carried, set()
        gone = {name: why for name, why in refused.items() if not self.has(name)}
        lost: dict[Name, str] = {n[:2]: why for n, why in gone.items() if n not in carried}
        if lost:
            raise NotStored.of(self.label, lost, len(lost))

    def close(self) -> None:
        """Finish writing and release everything."""
        self._carrier.settle()
        self._carrier.retire()
        for tier in self.tiers:
            tier.close()

    # -- many entries ----------------------------------------------------------------------------

    def entries(self, tenant: str | None) -> Iterator[Entry]:
        """All entries, once each, with their uses in all stores combined."""
        table: dict[EntryName, Entry] = {}
        for tier in self.tiers:
            try:
                for far in tier.entries(tenant):
                    near = table.get(far.name)
                    table[far.name] = far if near is None else _merged(near, far)
            except (StoreError, OSError) as error:
                logger.warning("%s is left out: %s", tier.label, error)
        yield from table.values()

    def tenants(self) -> list[str]:
        """The digests of all tenants that may have entries here."""
        return sorted({digest for tier in self.tiers for digest in tier.tenants()})

    def stats(self, tenant: str, whose: str | None, wait: float) -> Record:
        """The statistics of each store, nearest first, under "tiers"; above them each entry counts
        once, assuming that nearer stores hold part of the farthest."""
        until = time.monotonic() + wait
        tiers = [
            {"name": t.label, **t.stats(tenant, whose, max(0.0, until - time.monotonic()))}
            for t in self.tiers
        ]
        kinds: dict[str, dict[str, int]] = {}
        for stats in tiers:
            for kind, counted in stats["kinds"].items():
                largest = kinds.setdefault(kind, dict.fromkeys(counted, 0))
                for what in largest:
                    largest[what] = max(largest[what], counted[what])
        broken = [f"{stats['name']}: {stats['broken']}" for stats in tiers if stats["broken"]]
        most = ("written", "refused", "waiting", "waiting_budget")  # tiers wait for the same bytes
        counts = self._counts.of(whose)
        counts |= {what: max(stats[what] for stats in tiers) for what in most}
        worst = next((stats for stats in tiers if stats["state"] != OK), tiers[0])
        return {
            "root": self.label,
            "entries": sum(counted["entries"] for counted in kinds.values()),
            "bytes": sum(counted["bytes"] for counted in kinds.values()),
            "kinds": kinds,
            **counts,
            "evictions": sum(stats["evictions"] for stats in tiers),
            "ever": tiers[0]["ever"],
            "budget": self.budget,
            "quota": self.quota,
            "counted": min((s["counted"] for s in tiers if s["counted"]), default=None),
            "state": worst["state"],
            "since": worst["since"],
            "broken": "; ".join(broken) or None,
            "tiers": tiers,
        }

    def pin(self, name: EntryName, pinned: bool) -> bool:
        """Pin an entry and what it depends on, wherever it is; False if absent everywhere."""
        return any(self._every("pinned in", lambda tier: tier.pin(name, pinned)))

    def remove(
        self, tenant: str | None, names: Iterable[EntryName] | None = None, image: str | None = None
    ) -> int:
        """Remove entries with all their dependents from every store; return the bytes freed, each
        entry counted once."""
        doomed = None if names is None else list(names)
        with self._carrier.deletion():
            return max(self._every("removed from", lambda t: t.remove(tenant, doomed, image)))

    def gc(self, tenant: str | None, budget: int) -> int:
        """Make room in the nearest store; the others keep what they are given."""
        return self.tiers[0].gc(tenant, budget)

    def check(self, tenant: str | None, repair: bool) -> list[str]:
        """Read everything in every store; return one line per problem."""
        self._carrier.settle()
        return [f"{t.label}: {line}" for t in self.tiers for line in t.check(tenant, repair)]

    def _every(self, done: str, work: Callable[[Keeper], T]) -> list[T]:
        """Call each store, even after one fails; the error names those that failed."""
        results, failed = [], []
        for tier in self.tiers:
            try:
                results.append(work(tier))
            except (StoreError, OSError) as error:
                failed.append(f"{tier.label}: {error}")
        if failed:
            raise StoreError(f"not {done} every tier: {'; '.join(failed)}")
        return results


def _merged(near: Entry, far: Entry) -> Entry:
    """The combined entry, for one in two stores."""
    return replace(
        near,
        used=max(near.used, far.used),
        uses=near.uses + far.uses,
        cost=near.cost or far.cost,
        created=min(near.created, far.created),
        pinned=near.pinned or far.pinned,
    )
