"""Several stores as one, the nearest first: for example a folder before a bucket.

Writes go to all of them. Reads search from near to far, and hand over what a far store has to the
writers of nearer ones. An entry that a near store evicts is still in a far one, so eviction is the
only demotion. Deletion removes an entry from all stores, including copies in progress.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from keepsight.errors import InputError, NotStored, StoreError
from keepsight.kinds import Record
from keepsight.store import layout
from keepsight.store.contract import About, Below, Content, Entry, EntryName, Found, Keeper, Name
from keepsight.store.health import OK
from keepsight.store.view import Store
from keepsight.store.writer import Counts
from keepsight.system.lock import Mutex

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TieredStore(Store):
    """Several stores in order, the nearest first."""

    def __init__(self, *stores: Store) -> None:
        if not stores:
            raise InputError("a tiered store needs stores, the nearest first; none was given")
        self._stores = stores  # who drops a store ends its threads
        super().__init__(Tiers([store.keeper for store in stores]))


class Tiers:
    """The entries of all tenants in several stores. `Store` says what its methods promise."""

    def __init__(self, tiers: list[Keeper]) -> None:
        self.tiers, self.label = tiers, " + ".join(tier.label for tier in tiers)
        self.root, self.budget, self.quota = tiers[0].root, tiers[0].budget, tiers[0].quota
        self._counts, self._lock = Counts(), Mutex()
        self._deletions = self._deleting = 0
        self._copied: set[EntryName] = set()  # since the last flush

    def retire(self) -> None:
        """Each store ends its own threads."""

    # -- one entry -------------------------------------------------------------------------------

    def tier(self, name: EntryName) -> str | None:
        return next((found for tier in self.tiers if (found := tier.tier(name))), None)

    def entry(self, name: EntryName) -> Entry | None:
        return next((found for tier in self.tiers if (found := tier.entry(name))), None)

    def below(self, tenant: str, kind: str, base: str | None, count: int) -> Below:
        """The dependents of an entry in the nearest store with any."""
        found = (tier.below(tenant, kind, base, count) for tier in self.tiers)
        return next((below for below in found if any(below.values())), {})

    def read(self, names: Iterable[EntryName]) -> dict[EntryName, Found]:
        """Those entries that any store has; what is only far is copied to nearer ones."""
        wanted = left = list(names)
        found: dict[EntryName, Found] = {}
        for place, tier in enumerate(self.tiers):
            deletions, here = self._deletions, tier.read(left) if left else {}
            left = [name for name in left if name not in here]
            found |= here
            for name, read in here.items() if place else ():
                self._copy(name, read, place, deletions)
        for name in wanted:
            self._counts.count(name.tenant, "hits" if name in found else "misses")
        return found

    def _copy(self, name: EntryName, read: Found, place: int, deletions: int) -> None:
        """Hand over to nearer stores what a far one has, unless it may have been deleted since it
        was read; the next read finds what still exists."""
        content, metadata = read
        about, times = layout.about_of(metadata), layout.lifetime(metadata)
        if times is not None:
            about = replace(about, ttl=max(0.0, sum(times) - time.time()))
        with self._lock:
            if not self._deleting and deletions == self._deletions:
                self._copied.add(name)
                for tier in self.tiers[:place]:
                    tier.put(name, content, about, layout.account_in(metadata, name.tenant))

    @contextlib.contextmanager
    def _deletion(self) -> Iterator[None]:
        """During a deletion, copy nothing, and nothing that was read before it ended."""
        with self._lock:
            self._deleting += 1
        try:
            yield
        finally:
            with self._lock:
                self._deleting -= 1
                self._deletions += 1

    def put(self, name: EntryName, content: Content, about: About, account: str) -> None:
        """Hand over an entry to every store; each writes in its own background."""
        for tier in self.tiers:
            tier.put(name, content, about, account)

    def reject(self, name: EntryName, why: str) -> None:
        with self._deletion():
            for tier in self.tiers:
                if tier.tier(name):
                    tier.reject(name, why)

    def pin(self, name: EntryName, pinned: bool) -> bool:
        """Pin an entry and what it depends on, wherever it is; False if absent everywhere."""
        return any(self._every("pinned in", lambda tier: tier.pin(name, pinned)))

    # -- all of them -----------------------------------------------------------------------------

    def flush(self, tenant: str | None) -> None:
        """Return when every store has everything handed over; raise with what is missing."""
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
        copied, self._copied = self._copied, set()
        gone = {name: why for name, why in refused.items() if not self.tier(name)}
        lost: dict[Name, str] = {n[:2]: why for n, why in gone.items() if n not in copied}
        if lost:
            raise NotStored.of(self.label, lost, len(lost))

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()

    def entries(self, tenant: str | None) -> Iterator[Entry]:
        """All entries, once each, as the nearest store has them."""
        table: dict[EntryName, Entry] = {}
        for tier in self.tiers:
            try:
                for entry in tier.entries(tenant):
                    table.setdefault(entry.name, entry)
            except (StoreError, OSError) as error:
                logger.warning("%s is left out: %s", tier.label, error)
        yield from table.values()

    def stats(self, tenant: str | None, whose: str | None, wait: float) -> Record:
        """The statistics of each store, nearest first, under "tiers"; above them each entry counts
        once, assuming that nearer stores hold part of the farthest that was counted."""
        tiers = [tier.stats(tenant, whose, wait) for tier in self.tiers]
        most = max(tiers, key=lambda stats: (stats["entries"], stats["bytes"]))
        worst = next((stats for stats in tiers if stats["state"] != OK), tiers[0])
        broken = [f"{stats['root']}: {stats['broken']}" for stats in tiers if stats["broken"]]
        same = ("written", "refused", "waiting")  # tiers wait for the same bytes
        return {
            **tiers[0],
            **{what: most[what] for what in ("entries", "bytes", "kinds", "tenants", "counted")},
            **{what: max(stats[what] for stats in tiers) for what in same},
            **self._counts.of(whose, ("hits", "misses")),
            "evictions": sum(stats["evictions"] for stats in tiers),
            "root": self.label,
            "state": worst["state"],
            "since": worst["since"],
            "broken": "; ".join(broken) or None,
            "tiers": tiers,
        }

    def remove(
        self, tenant: str | None, names: Iterable[EntryName] | None = None, image: str | None = None
    ) -> int:
        """Remove entries with all their dependents from every store; return the bytes freed, each
        entry counted once."""
        doomed = None if names is None else list(names)
        with self._deletion():
            return max(self._every("removed from", lambda t: t.remove(tenant, doomed, image)))

    def gc(self, tenant: str | None, budget: int) -> int:
        """Make room in the nearest store; the others keep what they are given."""
        return self.tiers[0].gc(tenant, budget)

    def check(self, tenant: str | None, repair: bool) -> list[str]:
        """Read everything in every store; return one line per problem."""
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
