"""What follows each batch of writes: uses are counted, what is over goes, budgets are kept.

All of it goes by the book and none by a walk through the folder. Rows that a locked book did not
take are owed to it and entered with the next ones.
"""

from __future__ import annotations

import contextlib
import time

from keepsight.store import entryfile, layout
from keepsight.store.book import Book, as_found, name_of
from keepsight.store.catalogue import WRITING, Catalogue
from keepsight.store.contract import Entry
from keepsight.store.folder import Folder
from keepsight.store.layout import Place

SWEEP = 1.0  # seconds between two looks for what has ended
_OWED = 10_000  # rows kept for a book that is locked; `check` finds the files of any others


class Keeper:
    """The book's side of writing."""

    def __init__(self, folder: Folder, book: Book, budget: int | None, quota: int | None) -> None:
        self.folder, self.book = folder, book
        self.budget, self.quota = budget, quota
        self.sweep_at = 0.0
        self._owed: list[Entry] = []
        self._adopting = False

    # -- around a write --------------------------------------------------------------------------

    def announce(self, rows: list[Entry]) -> None:
        """What will be written now, so that a process that dies in between leaves a trace."""
        self.book.try_to(lambda catalogue: _put(catalogue, rows, WRITING), None)

    def enter(self, written: list[Entry], failed: list[Place]) -> None:
        """What was written, and what was announced and was not."""
        self._owed += written

        def settle(catalogue: Catalogue) -> bool:
            with catalogue:
                # Another process may have let a file go between its writing and this.
                catalogue.put([e for e in self._owed if self.folder.status(_name(e)) is not None])
                catalogue.drop([p for p in failed if catalogue.state(p) == WRITING])
            return True

        if self.book.try_to(settle, False) or len(self._owed) > _OWED:
            self._owed = []

    def enter_file(self, place: Place) -> None:
        """A file that is there, if the book does not know it."""
        unknown = self.book.try_to(lambda catalogue: catalogue.state(place) is None, False)
        if unknown:
            entry = as_found(self.folder, place)
            self.book.try_to(lambda catalogue: _put(catalogue, [entry] if entry else []), None)

    # -- afterwards ------------------------------------------------------------------------------

    def count(self, uses: dict[Place, int], events: dict[str, int]) -> None:
        """Enter how often entries were read, and what else is counted."""

        def enter(catalogue: Catalogue) -> None:
            with catalogue:
                catalogue.add_facts(events)
                for place in catalogue.use(uses, time.time()):
                    entry = as_found(self.folder, place)  # a file that the book does not know
                    catalogue.put([entry] if entry else [])

        if uses or events:
            self.book.try_to(enter, None)

    def sweep(self, ended: list[Place]) -> None:
        """Remove what readers found to be over, and what the book says is over."""
        now = time.time()
        absent = [place for place in ended if self.folder.status(name_of(place)) is None]
        if absent:  # set aside: what stands on it waits for it to be made again
            self.book.change(lambda catalogue: catalogue.drop(absent))
        places = [place for place in ended if self._is_over(place, now)]
        if time.monotonic() >= self.sweep_at:
            self.sweep_at = time.monotonic() + SWEEP
            slack = layout.CLOCK_SLACK
            places += self.book.try_to(lambda catalogue: catalogue.ended(now, slack), [])
        if places:
            self.book.remove(self.book.act(lambda catalogue: catalogue.tower(places)))

    def let_fall(self, refused: list[Place]) -> None:
        """Remove what stands on entries that were refused; they came before them."""
        refused = [p for p in refused if self.folder.status(name_of(p)) is None]
        if refused:
            tower = self.book.act(lambda catalogue: catalogue.tower(refused))
            self.book.remove([place for place in tower if place not in refused])

    def _is_over(self, place: Place, now: float) -> bool:
        """By the file once more: somebody may have written it anew."""
        path = self.folder.path(name_of(place))
        with contextlib.suppress(OSError, ValueError):
            return layout.expired(entryfile.keeping(path, place.kind, place.key), now)
        return False

    def fit(self, tenants: set[str]) -> list[Place]:
        """Let the least useful go where a budget or a quota is exceeded."""
        gone: list[Place] = []
        if self.quota is not None:
            for tenant in tenants:
                gone += self.book.fit(tenant, self.quota)[0]
        if self.budget is not None:
            gone += self.book.fit(None, self.budget)[0]
        return gone

    # -- in idle time ----------------------------------------------------------------------------

    def adopt_some(self) -> tuple[bool, list[Place]]:
        """Enter files that the book does not know: whether there are more, and once there are
        none, what had to go because all of them were over the budget."""
        before, self._adopting = self._adopting, self.book.adopt_some()
        if before and not self._adopting:
            return False, self.fit(set(self.book.act(lambda catalogue: catalogue.tenants())))
        return self._adopting, []

    def pause(self) -> float | None:
        """Seconds until something may be over, as far as it is worth waking for."""
        first = self.book.try_to(lambda catalogue: catalogue.next_end(), None)
        return None if first is None else min(60.0, max(SWEEP, first - time.time()))


def _name(entry: Entry) -> str:
    return name_of(Place(entry.tenant, entry.kind, entry.key))


def _put(catalogue: Catalogue, rows: list[Entry], state: int = 0) -> None:
    with catalogue:
        catalogue.put(rows, state)
