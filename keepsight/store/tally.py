"""What is counted in memory: for statistics, which wait for no disk, and for the catalogue, later.

Safe in several threads. What the catalogue is yet to learn is bounded, for a disk may refuse for
days: of uses some may be forgotten, and what else is left over is found again from the files.
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
_GATHERED = 100_000  # uses and the like that wait for a disk that refuses


@dataclass(frozen=True)
class Counted:
    """What a tenant had when it was counted last."""

    kinds: dict[str, dict[str, int]]
    ever: dict[str, int]
    at: float | None  # seconds since the epoch
    is_complete: bool  # else there are files that no catalogue knows yet


@dataclass(frozen=True)
class Due:
    """What the catalogue is to learn."""

    uses: dict[EntryName, int]
    events: dict[str, int]
    ended: list[EntryName]
    refused: set[EntryName]


class StoreCounters:
    """Counts of one store."""

    def __init__(self) -> None:
        # By tenant, since the store was opened; of those that were heard of last.
        self.counts: OrderedDict[str, Counter[str]] = OrderedDict()
        self.ended: set[EntryName] = (
            set()
        )  # read and found to be over or damaged; still in the catalogue
        self.known: dict[str, Counted] = {}
        self.start_anew()

    def start_anew(self) -> None:
        """With nothing that the catalogue does not know, as at first and after a fork."""
        self._lock = threading.Lock()
        self._uses: Counter[EntryName] = Counter()
        self._events: Counter[str] = Counter()
        self._refused: set[EntryName] = set()

    def count(self, tenant: str, what: str, number: int = 1) -> None:
        """Something happened."""
        with self._lock:
            self.counts.setdefault(tenant, Counter())[what] += number
            self.counts.move_to_end(tenant)
            self._events[f"{what} {tenant}"] += number
            trim(self.counts)
            trim(self._events, _GATHERED)

    def know(self, tenant: str, counted: Counted) -> None:
        """This is what a tenant has now."""
        with self._lock:
            self.known.pop(tenant, None)
            self.known[tenant] = counted
            trim(self.known)

    def evicted(self, places: Iterable[EntryName]) -> None:
        """These had to go."""
        for place in places:
            self.count(place.tenant, "evictions")

    def use(self, place: EntryName) -> bool:
        """An entry was read; whether it is the first that the catalogue does not know of."""
        self.count(place.tenant, "hits")
        with self._lock:
            if len(self._uses) < _GATHERED:
                self._uses[place] += 1
            return len(self._uses) == 1

    def end(self, place: EntryName) -> None:
        """An entry was read and cannot be used."""
        with self._lock:
            if len(self.ended) < _GATHERED:
                self.ended.add(place)

    def refuse(self, place: EntryName) -> None:
        """Its base is absent."""
        self.count(place.tenant, "refused")
        self._add_refused([place])

    def _add_refused(self, places: Iterable[EntryName]) -> None:
        with self._lock:
            room = _GATHERED - len(self._refused)
            self._refused.update(itertools.islice(places, max(0, room)))

    @property
    def is_due(self) -> bool:
        """Whether there is anything that the catalogue should learn soon."""
        return bool(self._uses or self.ended or self._refused)

    @property
    def has_events(self) -> bool:
        """Whether anything was counted that the catalogue does not know."""
        return bool(self._events)

    def take(self) -> Due:
        """Take out all that the catalogue has to learn."""
        with self._lock:
            uses, self._uses = dict(self._uses), Counter()
            events, self._events = dict(self._events), Counter()
            refused, self._refused = self._refused, set()
            return Due(uses, events, list(self.ended), refused)

    def put_back(self, due: Due) -> None:
        """These could not be entered in the catalogue."""
        with self._lock:
            self._events.update(due.events)
        self._add_refused(due.refused)

    def settle(self, due: Due) -> None:
        """What was over is gone."""
        with self._lock:
            self.ended.difference_update(due.ended)
