"""Counts in memory: for statistics, which never wait for a disk, and for the catalogue, later.

Thread-safe. Counts waiting for the catalogue are bounded, because a disk may refuse for days. Some
uses may then be lost; everything else is found again from the files.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from keepsight.store.layout import EntryName
from keepsight.store.priority import trim

COUNTED = ("hits", "misses", "evictions", "written", "refused")
_GATHERED = 100_000  # uses and other counts that wait for a refusing disk


@dataclass(frozen=True)
class StoredCounts:
    """A tenant's entries and bytes at the last count."""

    kinds: dict[str, dict[str, int]]
    ever: dict[str, int]
    at: float | None  # seconds since the epoch
    is_complete: bool  # False if some files are not in the catalogue yet


@dataclass(frozen=True)
class PendingCounts:
    """Changes that the catalogue does not have yet."""

    uses: dict[EntryName, int]
    events: dict[str, int]
    ended: list[EntryName]
    refused: set[EntryName]


class TenantCounts:
    """Counts of events since a store was opened: of all, and of each of the most recent tenants."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: Counter[str] = Counter()
        self._of: OrderedDict[str, Counter[str]] = OrderedDict()

    def count(self, tenant: str, what: str, more: int = 1) -> None:
        """Count events."""
        with self._lock:
            self._all[what] += more
            self._of.setdefault(tenant, Counter())[what] += more
            self._of.move_to_end(tenant)
            trim(self._of)

    def of(self, tenant: str | None) -> dict[str, int]:
        """The counts of one tenant, or of all."""
        with self._lock:
            found = self._all if tenant is None else self._of.get(tenant, Counter())
            return {name: found[name] for name in COUNTED}


class StoreCounters:
    """Counts of one store."""

    def __init__(self) -> None:
        self.counts = TenantCounts()
        # unusable when read; still in the catalogue
        self.ended: set[EntryName] = set()
        self.known: dict[str, StoredCounts] = {}
        self.start_anew()

    def start_anew(self) -> None:
        """Drop changes waiting for the catalogue: at first, and after a fork."""
        self._lock = threading.Lock()
        self._uses: Counter[EntryName] = Counter()
        self._events: Counter[str] = Counter()
        self._refused: set[EntryName] = set()

    def count(self, tenant: str, what: str) -> None:
        """Count an event."""
        self.counts.count(tenant, what)
        with self._lock:
            self._events[f"{what} {tenant}"] += 1
            trim(self._events, _GATHERED)

    def know(self, tenant: str, counted: StoredCounts) -> None:
        """Record a tenant's current count."""
        with self._lock:
            self.known.pop(tenant, None)
            self.known[tenant] = counted
            trim(self.known)

    def evicted(self, places: Iterable[EntryName]) -> None:
        """Count evictions."""
        for place in places:
            self.count(place.tenant, "evictions")

    def use(self, place: EntryName) -> bool:
        """Record a read; return whether it is the first that the catalogue does not have."""
        self.count(place.tenant, "hits")
        with self._lock:
            if len(self._uses) < _GATHERED:
                self._uses[place] += 1
            return len(self._uses) == 1

    def end(self, place: EntryName) -> None:
        """Record an entry that was read and is unusable."""
        with self._lock:
            if len(self.ended) < _GATHERED:
                self.ended.add(place)

    def refuse(self, place: EntryName) -> None:
        """Record an entry whose base is absent."""
        self.count(place.tenant, "refused")
        self._add_refused([place])

    def _add_refused(self, places: Iterable[EntryName]) -> None:
        with self._lock:
            room = _GATHERED - len(self._refused)
            self._refused.update(itertools.islice(places, max(0, room)))

    @property
    def is_due(self) -> bool:
        """Whether the catalogue should be updated soon."""
        return bool(self._uses or self.ended or self._refused)

    @property
    def has_events(self) -> bool:
        """Whether any event waits for the catalogue."""
        return bool(self._events)

    def take(self) -> PendingCounts:
        """Take out all changes for the catalogue."""
        with self._lock:
            uses, self._uses = dict(self._uses), Counter()
            events, self._events = dict(self._events), Counter()
            refused, self._refused = self._refused, set()
            return PendingCounts(uses, events, list(self.ended), refused)

    def put_back(self, due: PendingCounts) -> None:
        """Put changes back that the catalogue refused."""
        with self._lock:
            self._events.update(due.events)
        self._add_refused(due.refused)

    def settle(self, due: PendingCounts) -> None:
        """Record that unusable entries were removed."""
        with self._lock:
            self.ended.difference_update(due.ended)
