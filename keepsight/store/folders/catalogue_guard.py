"""Access to a catalogue that may be missing, damaged, locked or deleted at any time.

None of that may disturb reading or writing, so every catalogue error is handled here. Only a
damaged catalogue is rebuilt from the files, and not repeatedly. An unreachable one (locked, or on a
disk that is full, read-only or gone) is intact and tried again later. When the catalogue is opened,
rows that a dead process left unfinished are settled, and no others.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from keepsight.errors import StoreError
from keepsight.store import health, layout
from keepsight.store.contract import Entry
from keepsight.store.folders.catalogue import GOING, NAME, THERE, Catalogue, Scope
from keepsight.store.folders.folder import Folder
from keepsight.store.folders.leftovers import forget_empty, remove_empty, settle
from keepsight.store.folders.retry import opened, opened_to_read
from keepsight.store.folders.rows import accounts, everything, name_of, pins
from keepsight.store.health import Health
from keepsight.store.layout import EntryName
from keepsight.store.ranking import AT_ONCE, choose, cycle, orphaned_meanwhile, raise_floor
from keepsight.system import forks

logger = logging.getLogger(__name__)
T = TypeVar("T")
_TROUBLE = sqlite3.Error, UnicodeDecodeError  # the latter if SQLite's message is damaged
_AGAIN = 60.0  # seconds until a catalogue that could not be opened is tried again
_FIRST_REBUILD, _LONGEST_REBUILD = 60.0, 3600.0  # seconds between two rebuilds
_LEFT: list[Catalogue | None] = []  # connections of a parent that were in use when it forked


class CatalogueGuard:
    """Access to the catalogue of one folder: opened when needed, rebuilt when damaged."""

    def __init__(self, folder: Folder, disk: Health) -> None:
        self.folder, self.disk = folder, disk
        self.health = Health(f"the catalogue of {folder.root} cannot be used")
        self.in_memory = False  # there is currently no catalogue on the disk
        self._lock = threading.RLock()
        self._catalogue: Catalogue | None = None
        self._file: tuple[int, int] | None = None  # device and inode
        self._is_makeshift = False  # read-only or unsettled, for a while
        self._try_again = 0.0
        self._rebuild_at, self._rebuild_pause = 0.0, _FIRST_REBUILD
        self._adopting: Iterator[list[Entry]] | None = None
        self._owed: list[EntryName] = []  # files are removed but rows remain: the disk was full
        forks.hold(self)

    def act(self, work: Callable[[Catalogue], T]) -> T:
        """Call `work` with the catalogue; if it is damaged, again with a new one."""
        with self._lock:
            for final in (False, True):
                try:
                    return work(self._open())
                except _TROUBLE as error:
                    state = health.named(error)
                    if state in (health.GONE, health.FAILING):
                        self.close()  # this connection may stay broken
                    if final or state not in (health.DAMAGED, health.GONE):
                        raise StoreError(f"{self._path}: {error}") from error
                    if state == health.DAMAGED:
                        self._replace(error)
                except StoreError:
                    raise
                except OSError as error:
                    raise StoreError(f"{self._path}: {error}") from error
        raise StoreError(f"{self._path}: not usable")

    def change(self, work: Callable[[Catalogue], T]) -> T:
        """Call `work` in one transaction."""

        def whole(catalogue: Catalogue) -> T:
            with catalogue:
                return work(catalogue)

        return self.act(whole)

    def try_to(self, work: Callable[[Catalogue], T], otherwise: T) -> T:
        """`act` for callers that can do without; None on failure."""
        try:
            return self.act(work)
        except StoreError as error:
            self.note(error)
            return otherwise

    def try_to_change(self, work: Callable[[Catalogue], T], otherwise: T) -> T:
        """`change` for callers that can do without; a locked catalogue is not retried at once."""
        if self.health.state == health.LOCKED and self.health.is_aside:
            return otherwise
        try:
            result = self.change(work)
        except StoreError as error:
            self.note(error)
            return otherwise
        if not self.in_memory:
            self.health.worked()
        return result

    def note(self, error: Exception) -> None:
        """Record an error: locks and damage concern the catalogue, all else the whole disk."""
        state = health.named(error)
        of_catalogue = state in (health.LOCKED, health.DAMAGED)
        (self.health if of_catalogue else self.disk).failed(error, state)

    def pages(self, tenant: str) -> Iterator[Entry]:
        """All rows of a tenant, even if they change meanwhile."""
        after = 0
        while True:
            page, after = self.act(lambda catalogue, a=after: catalogue.page(tenant, a))  # type: ignore[misc]
            if not page:
                return
            yield from page

    def close(self) -> None:
        """Close the catalogue; it opens again when needed."""
        with self._lock:
            if self._catalogue is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._catalogue.close()
            self._catalogue, self._adopting = None, None
            self.in_memory = self._is_makeshift = False

    def try_to_close(self) -> None:
        """Close the catalogue if it is not in use; never waits."""
        if self._lock.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._lock.release()

    def try_now(self) -> None:
        """Reopen a catalogue that is read-only or in memory at its next use."""
        if self._try_again != float("inf"):
            self._try_again = 0.0

    # -- forks -----------------------------------------------------------------------------------

    def before_fork(self, seconds: float) -> bool:
        """Close it until `after_fork`: SQLite records its locks in the process, and a child would
        trust the copied records."""
        if not self._lock.acquire(timeout=seconds):
            return False
        self.close()
        return True

    def after_fork(self) -> None:
        """Allow it to be opened again."""
        self._lock.release()

    def in_child(self, taken: bool) -> None:
        """Abandon a connection that could not be closed; use a catalogue in memory instead."""
        self._lock = threading.RLock()
        if not taken:
            _LEFT.append(self._catalogue)
            self._catalogue = self._adopting = None
            self._open_in_memory(float("inf"))

    # -- opening ---------------------------------------------------------------------------------

    @property
    def _path(self) -> str:
        return str(self.folder.path(NAME))

    def _open(self) -> Catalogue:
        if self._catalogue is not None and self._is_current():
            return self._catalogue
        before = self._file
        self.close()
        if not self._is_store():
            return self._open_in_memory(0.0)
        for suffix in ("", "-wal", "-shm"):
            status = self.folder.status(NAME + suffix)
            if status is not None and not stat.S_ISREG(status.st_mode):
                self.folder.set_aside(NAME + suffix)  # a link would lead outside the store
        try:
            made = opened(self.folder.path(NAME))
        except (sqlite3.OperationalError, OSError) as error:
            if health.named(error) in (health.LOCKED, health.DAMAGED):
                raise
            return self._open_without_writing(error)
        self._file = self._identity()
        try:
            self._begin(made, before not in (None, self._file))
        except (sqlite3.Error, OSError) as error:
            if health.named(error) in (health.LOCKED, health.DAMAGED):
                made.close()
                raise
            self.note(error)  # complete enough to read; opened again later
            self._is_makeshift, self._try_again = True, time.monotonic() + _AGAIN
        self._catalogue = made
        return made

    def _begin(self, made: Catalogue, replaced: bool) -> None:
        """Settle what dead processes left. If another file replaced ours, it may lack rows."""
        settle(made, self.folder)
        if replaced:
            made.set_fact("complete", 0)
        if replaced or not made.fact("accounts"):
            with made:
                made.set_accounts(dict(accounts(self.folder)))
                made.set_fact("accounts", 1)
        if not made.fact("complete") and not self._has_entries():
            made.set_fact("complete", 1)

    def _open_without_writing(self, error: Exception) -> Catalogue:
        """Open an unwritable catalogue for reading if possible, otherwise one in memory."""
        self._catalogue = opened_to_read(self.folder.path(NAME))
        if self._catalogue is None:
            self.note(error)
            return self._open_in_memory(_AGAIN)
        self._file, self._is_makeshift = self._identity(), True
        self._try_again = time.monotonic() + _AGAIN
        return self._catalogue

    def _identity(self) -> tuple[int, int] | None:
        status = self.folder.status(NAME)
        return None if status is None else (status.st_dev, status.st_ino)

    def _is_current(self) -> bool:
        """Whether the open catalogue is still the right one: its file may be deleted, replaced or
        available again."""
        if self.in_memory:
            return time.monotonic() < self._try_again
        if self._is_makeshift and time.monotonic() >= self._try_again:
            return False
        return self._file is not None and self._identity() == self._file

    def _open_in_memory(self, seconds: float) -> Catalogue:
        self._catalogue, self.in_memory = Catalogue(None), True
        self._try_again = time.monotonic() + seconds
        if not self._has_entries():
            self._catalogue.set_fact("complete", 1)
        return self._catalogue

    def _is_store(self) -> bool:
        """Whether the folder is a store. Reading must not make one; writing adds a marker."""
        marks = (layout.MARKER, NAME)
        return any(self.folder.status(name) for name in marks) or self._has_entries()

    def _has_entries(self) -> bool:
        return any(name in layout.KINDS or name == "tenants" for name in self.folder.names(""))

    def _replace(self, error: Exception) -> None:
        """Move a damaged catalogue aside; the next one is filled from the files. After repeated
        damage a catalogue in memory replaces it for a while."""
        self.health.failed(error, health.DAMAGED)
        self.close()
        now = time.monotonic()
        if now < self._rebuild_at:
            self._open_in_memory(self._rebuild_at - now)
            return
        self._rebuild_at = now + self._rebuild_pause
        self._rebuild_pause = min(2 * self._rebuild_pause, _LONGEST_REBUILD)
        self._file = None
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                self.folder.set_aside(NAME + suffix)

    # -- adopting unknown files ----------------------------------------------------------

    def is_sound(self) -> bool:
        """Whether the catalogue is intact."""
        try:
            with self._lock:
                return self._open().is_sound()
        except _TROUBLE as error:
            if health.named(error) != health.DAMAGED:
                raise StoreError(f"{self._path}: {error}") from error
            return False

    def make_anew(self) -> None:
        """Rebuild the catalogue from the files."""
        with self._lock:
            self._rebuild_at = 0.0  # somebody asked for it
            self._replace(sqlite3.DatabaseError("it is damaged"))
            self.complete()

    def complete(self) -> None:
        """Add every file that the catalogue lacks, and drop rows whose file is gone."""
        if self._owed:
            self.try_to(lambda catalogue: self._remove(catalogue, []), 0)
        while self.adopt_some():
            pass

    def adopt_some(self) -> bool:
        """Add the files of one more folder; False when all are in the catalogue."""
        with self._lock:
            if self.act(lambda catalogue: catalogue.fact("complete")):
                return False
            if self._adopting is None:
                self._adopting = everything(self.folder)
            try:
                found = next(self._adopting, None)
            except OSError as error:  # an incomplete walk does not count
                self._adopting = None
                raise StoreError(f"{self.folder.root} cannot be read: {error}") from error
            if found is None:
                self._adopting = None
                self.change(self._finish)
                return False
            self.change(lambda catalogue: self._enter(catalogue, found))
            return True

    def _enter(self, catalogue: Catalogue, found: list[Entry]) -> None:
        # Another process may have removed a file since it was found.
        new = [e for e in found if catalogue.state(EntryName.of(e)) is None]
        catalogue.put([e for e in new if self.folder.status(name_of(EntryName.of(e))) is not None])

    def _finish(self, catalogue: Catalogue) -> None:
        for place in pins(self.folder):
            catalogue.pin(place, True)
        catalogue.set_fact("complete", 1)

    # -- eviction --------------------------------------------------------------------------------

    def remove(self, places: list[EntryName]) -> int:
        """Remove entries, files and rows, in this order; return the bytes freed."""
        freed = 0
        for start in range(0, len(places), AT_ONCE):
            some = places[start : start + AT_ONCE]
            freed += self.act(lambda catalogue, some=some: self._remove(catalogue, some))  # type: ignore[misc]
        return freed

    def _remove(self, catalogue: Catalogue, places: list[EntryName]) -> int:
        self._drop_owed(catalogue)
        is_marked = not self._owed and self._mark_going(catalogue, places)
        freed, gone, stay, failed = 0, list[EntryName](), list[EntryName](), None
        with catalogue:
            for place in places:
                if is_marked and catalogue.state(place) not in (GOING, None):
                    continue  # somebody is writing it again now
                status = self.folder.status(name_of(place))
                try:
                    freed += status.st_size if self.folder.remove(name_of(place)) and status else 0
                    gone.append(place)
                except OSError as error:
                    failed = error
                    stay.append(place)
            if is_marked:
                catalogue.mark(stay, THERE)
            left = orphaned_meanwhile(catalogue, gone)
        self._owed += gone
        self._drop_owed(catalogue, is_full=not is_marked)
        remove_empty(self.folder, map(name_of, gone))
        if failed is not None and not freed:
            raise StoreError(f"{self.folder.root}: entries cannot be removed: {failed}") from failed
        return freed + (self.remove(left) if left else 0)

    def _drop_owed(self, catalogue: Catalogue, is_full: bool = True) -> None:
        """Drop rows whose files are gone. On a full disk the journal would use the freed room, so
        it is emptied first; until that works nothing is written to it."""
        if not self._owed or (is_full and not catalogue.checkpoint()):
            return
        try:
            with catalogue:
                owed = [p for p in self._owed if catalogue.state(p) in (THERE, GOING)]
                rows = [p for p in owed if self.folder.status(name_of(p)) is None]
                catalogue.drop(rows)
                forget_empty(catalogue, self.folder, rows)
            self._owed = []
        except sqlite3.Error as error:
            if health.named(error) != health.FULL:
                raise

    def _mark_going(self, catalogue: Catalogue, places: list[EntryName]) -> bool:
        """Mark rows as going. A full disk has no room for that; removing files makes room."""
        try:
            with catalogue:
                catalogue.mark(places, GOING)
        except sqlite3.Error as error:
            if health.named(error) != health.FULL:
                raise
            return False
        return True

    def fit(self, scope: Scope, budget: int) -> tuple[list[EntryName], int]:
        """Evict the least useful entries until the rest fits; return them and the bytes freed."""
        went: list[EntryName] = []
        freed = 0
        while True:
            excess = self.act(lambda catalogue: catalogue.nbytes(scope)) - budget
            if excess <= 0:
                return went, freed
            worst, places = self.act(lambda catalogue, e=excess: choose(catalogue, scope, e))  # type: ignore[misc]
            places = places or self.act(lambda catalogue: cycle(catalogue, scope))
            gone = self.remove(places) if places else 0
            if not gone:
                return went, freed
            self.change(lambda catalogue, w=worst: raise_floor(catalogue, w))  # type: ignore[misc]
            went, freed = went + places, freed + gone
