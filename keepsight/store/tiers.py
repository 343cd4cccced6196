"""Several stores as one, the nearest first: for example a folder before a bucket.

Writes go to all of them. Reads search from near to far, and copy what a far store has to nearer
ones in the background. An entry that a near store evicts is still in a far one, so eviction is the
only demotion. Deletion removes an entry from all stores, including copies in progress.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from keepsight.errors import InputError, NotStored, StoreError
from keepsight.kinds import Record
from keepsight.store import layout, ranking
from keepsight.store.contract import (
    NOTHING,
    About,
    Below,
    Entry,
    Listing,
    Name,
    Store,
    Tensors,
    delete_all,
    read_all,
)
from keepsight.store.health import OK
from keepsight.store.tally import TenantCounts
from keepsight.system import forks
from keepsight.system.exits import STORES, begin, finish_before_exit, when_dropped
from keepsight.system.lock import Mutex

logger = logging.getLogger(__name__)

_MOST = 256  # promotions that may wait; frequently read entries get another chance
T = TypeVar("T")


@dataclass
class _Promotion:
    """An entry from a far store, to be copied to nearer ones."""

    kind: str
    key: str
    content: tuple[Tensors, Record] | Record
    source: Store
    nearer: tuple[Store, ...]
    epoch: int


class _Carrier:
    """The thread that copies entries from far stores to nearer ones.

    Each deletion starts a new epoch. A promotion read in an earlier epoch may hold deleted data, so
    it is dropped; the next read finds what still exists.
    """

    def __init__(self) -> None:
        self._lock = Mutex()
        self._start()
        forks.renew(self._start)  # a forked child has none of its parent's threads
        finish_before_exit(self, STORES)

    def _start(self) -> None:
        self.epoch = self._deleting = 0
        self.carried: set[Name] = set()  # since the last flush
        self._queue: queue.SimpleQueue[_Promotion | None] = queue.SimpleQueue()
        self._waiting, self._settled = 0, threading.Condition()
        self._thread: threading.Thread | None = None

    def take(self, promotion: _Promotion) -> None:
        """Queue a promotion; drop it if too many wait."""
        with self._settled:
            if self._thread is None:
                self._thread = begin(self._work, "keepsight-carrier")
            if self._thread is None or self._waiting >= _MOST:
                return
            self._waiting += 1
        self._queue.put(promotion)

    def _work(self) -> None:
        while (promotion := self._queue.get()) is not None:
            try:
                self._carry(promotion)
            except Exception:
                logger.exception("%s/%s stays where it is", promotion.kind, promotion.key)
            promotion = None  # it references stores, so do not keep it while waiting
            with self._settled:
                self._waiting -= 1
                self._settled.notify_all()

    def _carry(self, promotion: _Promotion) -> None:
        kind, key, content = promotion.kind, promotion.key, promotion.content
        entry = promotion.source.entry(kind, key)
        if entry is None:
            return
        left = None if entry.expires is None else entry.expires - time.time()
        if left is not None and left <= 0:
            return
        about = About(entry.cost, entry.depends_on, entry.media, left)
        with self._lock:
            if self._deleting or promotion.epoch != self.epoch:
                return
            self.carried.add((kind, key))
            for store in promotion.nearer:
                if isinstance(content, tuple):
                    store.put(kind, key, *content, about)
                else:
                    store.put_note(kind, key, content, about)

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
        """Return when all queued promotions are handed to the nearer stores, or at the deadline."""
        with self._settled:
            self._settled.wait_for(lambda: not self._waiting, seconds)

    before_exit = settle

    def close(self) -> None:
        """Finish the queued promotions and stop."""
        self.settle()
        thread = self._thread
        self.retire()
        if thread is not None:
            thread.join()

    def retire(self) -> None:
        """Let the thread end after the queued promotions. This does not wait: the garbage collector
        calls it for a dropped store."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)


class TieredStore:
    """Several stores in order, for one tenant; the same tenant in each."""

    def __init__(self, *stores: Store) -> None:
        if not stores:
            raise InputError("a tiered store needs stores, the nearest first; none was given")
        self.tiers = stores
        self._carrier = _Carrier()
        self._counts, self._tenant = TenantCounts(), ""
        self._is_view = False
        when_dropped(self, self._carrier.retire)

    def tenant(self, name: str | None) -> TieredStore:
        """The same stores as another tenant sees them."""
        return self._view((s.tenant(name) for s in self.tiers), layout.tenant_digest(name))

    def of_digest(self, digest: str) -> TieredStore:
        """Like `tenant`, by a digest from `tenants`."""
        return self._view((s.of_digest(digest) for s in self.tiers), digest)

    def _view(self, tiers: Iterable[Store], tenant: str) -> TieredStore:
        view = copy.copy(self)
        view.tiers, view._tenant, view._is_view = tuple(tiers), tenant, True
        return view

    def tenants(self) -> list[str]:
        """The digests of all tenants that may have entries here; empty for the default tenant."""
        return sorted({digest for store in self.tiers for digest in store.tenants()})

    # -- reading ---------------------------------------------------------------------------------

    def has(self, kind: str, key: str) -> bool:
        """Whether reading this entry should work."""
        return any(store.has(kind, key) for store in self.tiers)

    def get(self, kind: str, key: str) -> tuple[Tensors, Record] | None:
        """Tensors and record from the nearest store that has them."""
        return self._find(kind, key, lambda store: store.get(kind, key))

    def get_all(self, kind: str, keys: Iterable[str]) -> dict[str, tuple[Tensors, Record]]:
        """Those entries that any store has."""
        keys = list(keys)
        near = read_all(self.tiers[0], kind, keys)
        self._counts.count(self._tenant, "hits", len(near))
        far = {key: self.get(kind, key) for key in keys if key not in near}
        return near | {key: found for key, found in far.items() if found is not None}

    def below(self, kind: str, base: str | None, count: int) -> Below:
        """The dependents of an entry, or entries without a base, in the nearest store with any."""
        able = (store for store in self.tiers if isinstance(store, Listing))
        found = (store.below(kind, base, count) for store in able)
        return next((below for below in found if any(below.values())), {})

    def note(self, kind: str, key: str) -> Record | None:
        """A small JSON record from the nearest store that has it."""
        return self._find(kind, key, lambda store: store.note(kind, key))

    def _find(self, kind: str, key: str, read: Callable[[Store], T | None]) -> T | None:
        for place, store in enumerate(self.tiers):
            epoch = self._carrier.epoch
            found = read(store)
            if found is None:
                continue
            if place:
                nearer = self.tiers[:place]
                content: Any = found
                self._carrier.take(_Promotion(kind, key, content, store, nearer, epoch))
            self._counts.count(self._tenant, "hits")
            return found
        self._counts.count(self._tenant, "misses")
        return None

    def entry(self, kind: str, key: str) -> Entry | None:
        """One entry from the nearest store that has it."""
        return next((e for s in self.tiers if (e := s.entry(kind, key)) is not None), None)

    def tier(self, kind: str, key: str) -> str | None:
        """Where a read would find it, or None."""
        return next((t for s in self.tiers if (t := s.tier(kind, key)) is not None), None)

    def reject(self, kind: str, key: str, why: str) -> None:
        """Set aside an entry whose content does not match its key."""
        with self._carrier.deletion():
            for store in self.tiers:
                if store.has(kind, key):
                    store.reject(kind, key, why)

    # -- writing ---------------------------------------------------------------------------------

    def put(
        self,
        kind: str,
        key: str,
        tensors: Tensors,
        record: Record,
        about: About = NOTHING,
    ) -> None:
        """Hand over an entry to every store; each writes in its own background."""
        for store in self.tiers:
            store.put(kind, key, tensors, record, about)

    def put_note(self, kind: str, key: str, body: Record, about: About = NOTHING) -> None:
        """Hand over a small JSON record to every store."""
        for store in self.tiers:
            store.put_note(kind, key, body, about)

    def flush(self) -> None:
        """Return when every store has everything handed over; raise with what is missing."""
        self._carrier.settle()
        refused: dict[Name, str] = {}

        def flush(store: Store) -> None:
            try:
                store.flush()
            except NotStored as error:
                if error.broken or len(error.reasons) < error.count:
                    raise
                refused.update(error.reasons)

        self._every("written to", flush)
        # A small folder before a bucket keeps what fits. An entry in the other store is no loss;
        # nor is one that was promoted and then deleted.
        carried, self._carrier.carried = self._carrier.carried, set()
        gone = {name: why for name, why in refused.items() if not self.has(*name)}
        lost = {name: why for name, why in gone.items() if name not in carried}
        if lost:
            raise NotStored.of(" + ".join(map(label, self.tiers)), lost, len(lost))

    def close(self) -> None:
        """Finish writing and release everything; a tenant's view only finishes writing."""
        if not self._is_view:
            self._carrier.close()
        for store in self.tiers:
            store.close()

    # -- housekeeping ----------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        """All entries of this tenant, once each, with their uses in all stores combined."""
        yield from self._table().values()

    def _table(self) -> dict[Name, Entry]:
        table: dict[Name, Entry] = {}
        for store in self.tiers:
            with self._warned(store):
                for entry in store.entries():
                    name = (entry.kind, entry.key)
                    table[name] = table[name].merged(entry) if name in table else entry
        return table

    def stats(self, wait: float = 10.0) -> Record:
        """The statistics of each store, nearest first, under "tiers"; above them each entry counts
        once, assuming that nearer stores hold part of the farthest."""
        until = time.monotonic() + wait
        tiers = [
            {"name": label(store), **store.stats(max(0.0, until - time.monotonic()))}
            for store in self.tiers
        ]
        kinds: dict[str, dict[str, int]] = {}
        for stats in tiers:
            for kind, counted in stats["kinds"].items():
                largest = kinds.setdefault(kind, {"entries": 0, "bytes": 0})
                for what in largest:
                    largest[what] = max(largest[what], counted[what])
        broken = [f"{stats['name']}: {stats['broken']}" for stats in tiers if stats.get("broken")]
        most = ("written", "refused", "waiting", "waiting_budget")  # tiers wait for the same bytes
        most_of = {what: max(t.get(what, 0) for t in tiers) for what in most}
        return {
            "root": " + ".join(stats["name"] for stats in tiers),
            "entries": sum(counted["entries"] for counted in kinds.values()),
            "bytes": sum(counted["bytes"] for counted in kinds.values()),
            "kinds": kinds,
            **self._counts.of(self._tenant if self._is_view else None),
            **most_of,
            "evictions": sum(stats.get("evictions", 0) for stats in tiers),
            "budget": tiers[0].get("budget"),
            "quota": tiers[0].get("quota"),
            "counted": min((at for t in tiers if (at := t.get("counted"))), default=None),
            **_first_trouble(tiers),
            "broken": "; ".join(broken) or None,
            "tiers": tiers,
        }

    def pin(self, kind: str, key: str, pinned: bool = True) -> bool:
        """Pin an entry and what it depends on, wherever it is; False if absent everywhere."""
        return any(self._every("pinned in", lambda store: store.pin(kind, key, pinned)))

    def delete(self, kind: str, key: str) -> int:
        """Remove an entry and all its dependents from every store; return the bytes freed, each
        entry counted once."""
        return self._remove(lambda store: store.delete(kind, key))

    def delete_media(self, image_key: str) -> int:
        """Remove everything that depends on this image from every store."""
        return self._remove(lambda store: store.delete_media(image_key))

    def clear(self, everybody: bool = False) -> int:
        """Remove every entry of this tenant, or of all tenants, from every store."""
        return self._remove(lambda store: store.clear(everybody))

    def gc(self, budget: int) -> int:
        """Remove the least useful entries from every store until the rest fits in each."""
        table = self._table()
        names = ranking.least_useful(table, budget, time.time())
        self._remove(lambda store: delete_all(store, names))
        return sum(table[name].nbytes for name in names)

    def check(self, repair: bool = False) -> list[str]:
        """Read everything in every store; return one line per problem."""
        self._carrier.settle()
        return [f"{label(s)}: {line}" for s in self.tiers for line in s.check(repair)]

    def _remove(self, remove: Callable[[Store], int]) -> int:
        with self._carrier.deletion():
            return max(self._every("removed from", remove))

    def _every(self, done: str, work: Callable[[Store], T]) -> list[T]:
        """Call each store, even after one fails; the error names those that failed."""
        results, failed = [], []
        for store in self.tiers:
            try:
                results.append(work(store))
            except (StoreError, OSError) as error:
                failed.append(f"{label(store)}: {error}")
        if failed:
            raise StoreError(f"not {done} every tier: {'; '.join(failed)}")
        return results

    @contextlib.contextmanager
    def _warned(self, store: Store) -> Iterator[None]:
        try:
            yield
        except (StoreError, OSError) as error:
            logger.warning("%s is left out: %s", label(store), error)


def _first_trouble(tiers: list[Record]) -> Record:
    """The state of the nearest store with a problem."""
    wrong = (stats for stats in tiers if stats.get("state", OK) != OK)
    found = next(wrong, {"state": OK, "since": None})
    return {"state": found["state"], "since": found["since"]}


def label(store: Store) -> str:
    """How people name a store: its address or its folder."""
    named = getattr(store, "address", None) or getattr(store, "root", None)
    return str(named or type(store).__name__)
