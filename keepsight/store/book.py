"""The catalogue as the store leans on it: it may be missing, damaged, locked or deleted under us.

None of that may disturb reading or writing, so everything that can go wrong with the book ends
here: it is made anew from the files, or one is kept in memory, with one warning. What a dead
process left half done is settled when the book is opened, by the rows that say so and no others.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from keepsight.errors import FileError, StoreError
from keepsight.store import entryfile, layout
from keepsight.store.catalogue import GOING, NAME, THERE, WRITING, Catalogue
from keepsight.store.contract import About, Entry
from keepsight.store.folder import Folder
from keepsight.store.layout import Place
from keepsight.store.patience import is_busy, opened

logger = logging.getLogger(__name__)
T = TypeVar("T")
_AT_ONCE = 256  # removed in one transaction
_KNOTS = 64  # entries looked at for such a circle
_DAMAGE = sqlite3.Error, UnicodeDecodeError  # the latter where a message of SQLite is damaged
_UNDER_WAY = 600.0  # seconds that a write may take at most
_AGAIN = 60.0  # seconds until a book that could not be opened is tried again


def name_of(place: Place) -> str:
    """The file of an entry."""
    return layout.place(place.kind, place.key, place.tenant)


def pin_name(place: Place) -> str:
    """The note that keeps a pin where the book is lost."""
    return f"{layout.tenant_prefix(place.tenant)}pins/{place.kind}/{place.key}.json"


class Book:
    """The catalogue beside the files of one folder, opened when it is first needed."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.in_memory = False  # there is no book on the disk, for now
        self._lock = threading.RLock()
        self._catalogue: Catalogue | None = None
        self._inode: int | None = None
        self._try_again = 0.0
        self._warned = False
        self._adopting: Iterator[list[Entry]] | None = None

    def act(self, work: Callable[[Catalogue], T]) -> T:
        """Do something with the catalogue, on a new one where the old one is damaged."""
        with self._lock:
            for final in (False, True):
                try:
                    return work(self._open())
                except _DAMAGE as error:
                    if final or is_busy(error):
                        raise StoreError(f"{self._path}: {error}") from error
                    self._replace(error)
        raise StoreError(f"{self._path}: not usable")

    def try_to(self, work: Callable[[Catalogue], T], otherwise: T) -> T:
        """The same for those who can go on without."""
        try:
            return self.act(work)
        except StoreError as error:
            self._warn(error)
            return otherwise

    def change(self, work: Callable[[Catalogue], T]) -> T:
        """Do something in one transaction."""

        def whole(catalogue: Catalogue) -> T:
            with catalogue:
                return work(catalogue)

        return self.act(whole)

    def pages(self, tenant: str) -> Iterator[Entry]:
        """All rows of a tenant, whatever happens to them in the meantime."""
        after = 0
        while True:
            page, after = self.act(lambda catalogue, a=after: catalogue.page(tenant, a))  # type: ignore[misc]
            if not page:
                return
            yield from page

    def close(self) -> None:
        """Let go of the catalogue; it opens again when needed."""
        with self._lock:
            if self._catalogue is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._catalogue.close()
            self._catalogue, self._adopting, self.in_memory = None, None, False

    def abandon(self) -> None:
        """After a fork: forget the parent's connection without touching it."""
        self._lock = threading.RLock()
        self._catalogue = self._adopting = None

    # -- opening ---------------------------------------------------------------------------------

    @property
    def _path(self) -> str:
        return str(self.folder.path(NAME))

    def _open(self) -> Catalogue:
        if self._catalogue is not None and self._is_current():
            return self._catalogue
        self.close()
        if not self._is_store():
            return self._open_in_memory(0.0)
        for suffix in ("", "-wal", "-shm"):
            status = self.folder.status(NAME + suffix)
            if status is not None and not stat.S_ISREG(status.st_mode):
                self.folder.set_aside(NAME + suffix)  # a link would lead out of the store
        try:
            made = opened(self.folder.path(NAME))
            status = self.folder.status(NAME)
            _settle(made, self.folder)
        except (sqlite3.OperationalError, OSError) as error:
            if is_busy(error):
                raise
            self._warn(error)
            return self._open_in_memory(_AGAIN)
        self._catalogue, self._inode = made, None if status is None else status.st_ino
        if not made.fact("complete") and not self._has_entries():
            made.set_fact("complete", 1)
        return made

    def _is_current(self) -> bool:
        """Not when somebody deleted or replaced the file, or it may now be there after all."""
        if self.in_memory:
            return time.monotonic() < self._try_again
        status = self.folder.status(NAME)
        return status is not None and status.st_ino == self._inode

    def _open_in_memory(self, seconds: float) -> Catalogue:
        self._catalogue, self._inode, self.in_memory = Catalogue(None), None, True
        self._try_again = time.monotonic() + seconds
        if not self._has_entries():
            self._catalogue.set_fact("complete", 1)
        return self._catalogue

    def _is_store(self) -> bool:
        """Looking at a folder must not make a store of it; writing puts a marker there first."""
        marks = (layout.MARKER, NAME)
        return any(self.folder.status(name) for name in marks) or self._has_entries()

    def _has_entries(self) -> bool:
        return any(name in layout.KINDS or name == "tenants" for name in self.folder.names(""))

    def _replace(self, error: Exception) -> None:
        """Put a damaged catalogue aside; the next one is filled from the files."""
        self._warn(error)
        self.close()
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                self.folder.set_aside(NAME + suffix)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("the catalogue of %s: %s; going on without it", self.folder.root, error)

    # -- adopting what no book knows -------------------------------------------------------------

    def is_sound(self) -> bool:
        """Whether the book can be believed."""
        try:
            with self._lock:
                return self._open().is_sound()
        except _DAMAGE as error:
            if is_busy(error):
                raise StoreError(f"{self._path}: {error}") from error
            return False

    def make_anew(self) -> None:
        """Another book, from the files."""
        with self._lock:
            self._replace(sqlite3.DatabaseError("it is damaged"))
            self.complete()

    def complete(self) -> None:
        """Enter every file that is not in the book yet."""
        while self.adopt_some():
            pass

    def adopt_some(self) -> bool:
        """Enter the files of one more folder; False when all are in the book."""
        with self._lock:
            if self.act(lambda catalogue: catalogue.fact("complete")):
                return False
            if self._adopting is None:
                self._adopting = everything(self.folder)
            found = next(self._adopting, None)
            if found is None:
                self._adopting = None
                self.change(self._finish)
                return False
            self.change(lambda catalogue: self._enter(catalogue, found))
            return True

    def _enter(self, catalogue: Catalogue, found: list[Entry]) -> None:
        new = [e for e in found if catalogue.state(Place(e.tenant, e.kind, e.key)) is None]
        catalogue.put(new)

    def _finish(self, catalogue: Catalogue) -> None:
        for place in pins(self.folder):
            catalogue.pin(place, True)
        catalogue.set_fact("complete", 1)

    # -- letting go ------------------------------------------------------------------------------

    def remove(self, places: list[Place]) -> int:
        """Remove entries in this order, files and rows; the bytes freed."""
        freed = 0
        for start in range(0, len(places), _AT_ONCE):
            some = places[start : start + _AT_ONCE]
            freed += self.act(lambda catalogue, some=some: self._remove(catalogue, some))  # type: ignore[misc]
        return freed

    def _remove(self, catalogue: Catalogue, places: list[Place]) -> int:
        with catalogue:
            catalogue.mark(places, GOING)
        freed, gone, stay = 0, [], []
        failed: OSError | None = None
        with catalogue:
            for place in places:
                if catalogue.state(place) not in (GOING, None):
                    continue  # somebody writes it again at this moment
                status = self.folder.status(name_of(place))
                try:
                    freed += status.st_size if self.folder.remove(name_of(place)) and status else 0
                    gone.append(place)
                except OSError as error:
                    failed = error
                    stay.append(place)
            catalogue.drop(gone)
            catalogue.mark(stay, THERE)
            left = _left_alone(catalogue, gone)
        if failed is not None and not freed:
            raise StoreError(f"{self.folder.root}: entries cannot be removed: {failed}")
        return freed + (self.remove(left) if left else 0)

    def fit(self, tenant: str | None, budget: int) -> tuple[list[Place], int]:
        """Let the least useful go until the rest fits; which went, and the bytes freed."""
        went: list[Place] = []
        freed = 0
        while True:
            excess = self.act(lambda catalogue: catalogue.nbytes(tenant)) - budget
            if excess <= 0:
                return went, freed
            worst, places = self.act(lambda catalogue, e=excess: choose(catalogue, tenant, e))  # type: ignore[misc]
            places = places or self.act(lambda catalogue: knot(catalogue, tenant))
            gone = self.remove(places) if places else 0
            if not gone:
                return went, freed
            self.change(lambda catalogue, w=worst: _raise_floor(catalogue, w))  # type: ignore[misc]
            went, freed = went + places, freed + gone


def choose(catalogue: Catalogue, tenant: str | None, excess: int) -> tuple[float, list[Place]]:
    """The least useful entries that make up so many bytes, and the worth of the best of them.

    What something stands on comes after all that stands on it.
    """
    leaves = catalogue.leaves(tenant, _AT_ONCE)
    limit = leaves[-1][0] if len(leaves) == _AT_ONCE else float("inf")
    heap = [(value, e.used, Place(e.tenant, e.kind, e.key), e) for value, e in leaves]
    heapq.heapify(heap)
    chosen: dict[Place, None] = {}
    worst = total = 0.0
    while heap and total < excess and heap[0][0] <= limit:
        value, _, place, entry = heapq.heappop(heap)
        chosen[place] = None
        worst, total = max(worst, value), total + entry.nbytes
        if entry.stands_on is None:
            continue
        base = Place(entry.tenant, *entry.stands_on)
        found = catalogue.worth_of(base)
        if found is not None and all(other in chosen for other in catalogue.upon(base)):
            heapq.heappush(heap, (found[0], found[1].used, base, found[1]))
    return worst, list(chosen)


def knot(catalogue: Catalogue, tenant: str | None) -> list[Place]:
    """Entries that stand on each other in a circle, so that none is the last: no store writes that,
    but files may say it. They go together, unless one of them is pinned."""
    for place in catalogue.worst(tenant, _KNOTS):
        tower = catalogue.tower([place])
        if all(catalogue.worth_of(other) is not None for other in tower):
            return tower
    return []


def everything(folder: Folder) -> Iterator[list[Entry]]:
    """All entries by their files, a shelf at a time, without reading them in full."""
    for tenant in ["", *folder.names("tenants")]:
        for kind in layout.KINDS:
            above = f"{layout.tenant_prefix(tenant)}{kind}"
            for shelf in folder.names(above):
                found = []
                for name in folder.names(f"{above}/{shelf}"):
                    place = layout.parse(f"{above}/{shelf}/{name}")
                    entry = None if place is None else as_found(folder, place)
                    found += [] if entry is None else [entry]
                yield found


def as_found(folder: Folder, place: Place) -> Entry | None:
    """An entry as its file tells it; None where the file is none or cannot be read."""
    status = folder.status(name_of(place))
    if status is None or not stat.S_ISREG(status.st_mode):
        return None
    try:
        told = entryfile.keeping(folder.path(name_of(place)), place.kind, place.key)
    except (FileError, OSError):
        told = {}  # `check` will name it; its bytes count until then
    about = entryfile.about(told)
    created = status.st_mtime if about.ttl is None else float(told["created"]) / 1000
    return row_of(place, about, status.st_size, created, max(status.st_atime, created))


def row_of(place: Place, about: About, nbytes: int, created: float, used: float) -> Entry:
    """A row for something new."""
    expires = None if about.ttl is None else created + about.ttl
    return Entry(
        kind=place.kind,
        key=place.key,
        nbytes=nbytes,
        used=used,
        created=created,
        uses=1,
        cost=about.cost,
        stands_on=about.stands_on,
        media=tuple(about.media),
        expires=expires,
        tenant=place.tenant,
    )


def pins(folder: Folder) -> Iterator[Place]:
    """Every pin that was set."""
    for tenant in ["", *folder.names("tenants")]:
        for kind in layout.KINDS:
            for name in folder.names(f"{layout.tenant_prefix(tenant)}pins/{kind}"):
                key = os.path.splitext(name)[0]
                if layout.is_name(kind, key):
                    yield Place(tenant, kind, key)


def _settle(catalogue: Catalogue, folder: Folder) -> None:
    """Finish what was being written or removed when its process ended.

    A file that is not there yet may still come, from a process that lives: its row stays a while,
    or nobody would know the file if that process were killed before it enters it.
    """
    if not catalogue.unsettled():
        return
    with catalogue:
        now = time.time()
        for place, state, since in catalogue.unsettled():
            status = folder.status(name_of(place))
            if state == GOING:
                folder.remove(name_of(place))
            if state == WRITING and status is not None:
                catalogue.resize(place, status.st_size)
                catalogue.mark([place], THERE)
            elif state != WRITING or abs(now - since) > _UNDER_WAY:
                catalogue.drop([place])


def _left_alone(catalogue: Catalogue, gone: list[Place]) -> list[Place]:
    """What was written, while these were removed, to stand on them. What has the key of its base
    waits for it to be written too."""
    left = [up for place in gone for up in catalogue.upon(place) if up.key != place.key]
    return [place for place in catalogue.tower(left) if place not in gone] if left else []


def _raise_floor(catalogue: Catalogue, worst: float) -> None:
    catalogue.set_fact("floor", max(worst, catalogue.fact("floor")))
