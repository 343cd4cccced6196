"""A folder that outlives the process: files, and an index of them.

Reads use only the files, so no reader waits for the index. All that is written goes through one
thread (`writer`). A damaged entry is named in a warning, moved aside and reported absent, so it is
computed again. A folder belongs to one machine, because the index needs memory shared between its
processes; a disk that hangs may hang an answer.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from keepsight.errors import DamagedFile, FileError, PinsFull, StoreError, WrongFormatVersion
from keepsight.kinds import Record
from keepsight.store import files, index, layout
from keepsight.store.contract import Below, Entry, EntryName, Found
from keepsight.store.files import DAMAGED, Folder
from keepsight.store.health import GONE, OK, Health
from keepsight.store.index import Base, Index, Scope, of_account, of_tenant
from keepsight.store.view import Store
from keepsight.store.writer import REFUSED, ROOM, THERE, WRITTEN, Job, Sum, Writer, larger_than
from keepsight.system.private_files import PART, PartFile

logger = logging.getLogger(__name__)

_READERS = max(1, min(4, os.cpu_count() or 1))
_DEEPER = 64  # number of dependents after which no further level is looked up
_WEEK = 7 * 86400.0
_UNDER_WAY = 2.0  # seconds in which a writer that entered a row puts its file in place
T = TypeVar("T")
Began = dict[EntryName, tuple[Job, PartFile]]


class DiskStore(Store):
    """A folder of tensor files and small JSON notes, each under a kind and a key.

    `budget` limits the bytes of the whole folder, `quota` those of each tenant together with all
    its salts, and `waiting` those that may wait in memory to be written.
    """

    def __init__(
        self,
        root: str | Path,
        budget: int | None = None,
        *,
        quota: int | None = None,
        waiting: int = ROOM,
    ) -> None:
        if "://" in str(root):
            raise StoreError(f"{root}: only local folders can be a store here; see open_store")
        super().__init__(Disk(Folder(root), budget, quota, waiting))


class Disk(Writer):
    """The entries of all tenants in one folder. `Store` says what its methods promise."""

    def __init__(self, folder: Folder, budget: int | None, quota: int | None, waiting: int) -> None:
        super().__init__(str(folder.root), waiting)
        self._files, self._index = folder, Index(folder)
        self.root, self.budget, self.quota = folder.root, budget, quota
        self._listing = Health(f"the index of the store {self.label} cannot be read")
        self._is_marked = False
        with contextlib.suppress(OSError):  # a new folder, or one out of reach
            try:
                layout.check_marker(folder.read_file(layout.MARKER), self.label)
            except DamagedFile as error:
                logger.warning("%s; written anew", error)

    # -- reading ---------------------------------------------------------------------------------

    def tier(self, name: EntryName) -> str | None:
        return "disk" if name in self.jobs or self._is_there(name) else None

    def _is_there(self, name: EntryName) -> bool:
        """Whether a file is there and not over. The index says when it expires; where it is busy,
        refuses, or does not know the file, the file says so."""
        if not self._files.is_there(name):
            return False
        entry = self._listed(lambda base: index.row(base, name), None, wait=False)
        entry = entry or self._files.entry(name)
        return entry is not None and not entry.is_over(time.time())

    def _listed(
        self, work: Callable[[Base], T], otherwise: T, wait: bool = True, again: bool = False
    ) -> T:
        """What the index says; `otherwise` if it refuses, or did so recently and is not asked
        `again`."""
        if self._listing.is_aside and not again:
            return otherwise
        try:
            found = self._index.look(work, otherwise, wait)
        except StoreError as error:
            self._listing.failed(error)
            return otherwise
        self._listing.worked()
        return found

    def find(self, names: list[EntryName]) -> dict[EntryName, Found]:
        found = self._read(self._files.read, names)
        for name in found:
            self.used(name)
        return found

    def _read(
        self, read: Callable[[EntryName], Found], names: list[EntryName]
    ) -> dict[EntryName, Found]:
        """Read several files side by side: checking bytes takes longer than reading them."""
        if self.reads.is_aside:
            return {}
        found = files.together(partial(self._read_one, read), names, _READERS)
        return {name: it for name, it in zip(names, found, strict=True) if it is not None}

    def _read_one(self, read: Callable[[EntryName], Found], name: EntryName) -> Found | None:
        """Only a wrong file is set aside, not an unreachable one."""
        try:
            found = read(name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except WrongFormatVersion as error:
            # Another version's entry is intact, and somebody may still want it.
            logger.warning("%s; left as it is", error)
            return None
        except (FileError, IsADirectoryError) as error:
            self.reject(name, str(error))
            return None
        except OSError as error:
            self.reads.failed(error)
            return None
        self.reads.worked()
        return None if layout.expired(found[1]) else found

    def reject(self, name: EntryName, why: str) -> None:
        place = layout.place(*name)
        logger.warning("damaged entry set aside: %s (%s)", self._files.path(place), why)
        with contextlib.suppress(OSError):  # in an unwritable folder it stays
            self._files.set_aside(place)
            self.used(name)

    def below(self, tenant: str, kind: str, base: str | None, count: int) -> Below:
        """Dependents of an entry, of its kind, level by level; for None, entries without a base. A
        conversation is a chain of entries: one query finds many of them."""
        none: dict[str | None, list[EntryName]] = {}
        listed = self._listed(lambda b: _levels(b, tenant, kind, base, count), none)
        names = [name for level in listed.values() for name in level]
        read = self._read(self._files.read_record, names)
        return {
            key: [(name.key, read[name][0][1]) for name in level if name in read]
            for key, level in listed.items()
        }

    # -- writing ---------------------------------------------------------------------------------

    def write(self, jobs: list[Job], became: dict[EntryName, str]) -> None:
        """Write entries. A row is committed before its file is put in place: so whatever is there
        can be deleted. Between the two nobody removes the row, see `Index.remove`."""
        if self._files.is_gone() and self.health.state == OK:
            raise _gone(self.label)  # somebody may be moving it
        if not self._is_marked or self._files.status(layout.MARKER) is None:
            layout.mark(self._files.read_file, self._files.write, self.label)
            self._is_marked = True
        there = [job.name for job in jobs if self._is_there(job.name)]
        begun: Began = {}
        try:
            for job in jobs:
                if job.name not in there:
                    self._begin(job, became, begun)
            files.together(lambda one: one[1].sync(), begun.values())
            self._index.change(lambda base: self._enter(base, there, begun, became))
            became |= dict.fromkeys(there, THERE)
            entered = self._index.file

            def put_in_place(base: Base) -> None:
                if self._index.file != entered:  # a missing row says nothing about a deletion
                    raise OSError(f"the index of {self.label} was lost while entries were written")
                for name, (_, part) in begun.items():
                    if name not in became and index.row(base, name) is not None:
                        self._files.put_in_place(part)
                        became[name] = WRITTEN

            self._index.change(put_in_place)
        finally:
            self._files.sync_folders(part for _, part in begun.values())
            for _, part in begun.values():
                part.drop()
        self._fit({job.account for job in jobs}, begun, became)

    def _begin(self, job: Job, became: dict[EntryName, str], begun: Began) -> None:
        """Write the file of an entry under a temporary name."""
        try:
            job.ready.wait()
            parts = layout.spelled(job.name, job.content, job.metadata)
            part = self._files.begin(layout.place(*job.name), parts)
        except OSError:
            raise
        except Exception as error:
            became[job.name] = str(error)
            logger.exception("writing %s failed; going on without it", layout.place(*job.name))
            return
        if too_large := larger_than(part.size, self.budget, self.quota):
            became[job.name] = too_large
            part.drop()
        else:
            begun[job.name] = job, part

    def _enter(
        self, base: Base, there: list[EntryName], begun: Began, became: dict[EntryName, str]
    ) -> None:
        """Add the rows of what is written, and of files that are there without one; record uses."""
        self._enter_uses(base)
        found = [self._files.entry(name) for name in there if index.row(base, name) is None]
        index.put(base, filter(None, found))
        for name, (job, part) in begun.items():
            on = job.base
            if on is None or index.row(base, on) is not None or self._files.is_there(on):
                index.put(base, [job.entry(part.size)])
            else:
                became[name] = REFUSED

    def _fit(self, accounts: set[str], begun: Began, became: dict[EntryName, str]) -> None:
        """Evict what exceeds a budget or a quota. What was just written and goes at once because
        of pins is lost."""
        limits = [(of_account(account), self.quota, "quota of a tenant") for account in accounts]
        for scope, limit, what in [*limits, (index.EVERYTHING, self.budget, "budget of the store")]:
            if limit is None:
                continue
            gone = self._evict(scope, limit)
            if went := begun.keys() & gone.keys():
                room = limit - self._index.change(partial(index.held, scope=scope))
                why = f"pins take too much of the {what}, {limit:,}; unpin something"
                became |= {name: why for name in went if begun[name][1].size > room}

    def _evict(self, scope: Scope, limit: int) -> index.Gone:
        gone = self._index.fit(scope, limit)
        for name in gone:
            self.counts.count(name.tenant, "evictions")
        return gone

    def let_go(self) -> None:
        self._index.close()

    def tidy(self) -> None:
        """Record uses, and remove what is expired."""
        if self._index.is_store():
            self._index.change(self._enter_uses)
            self._index.remove(index.over(time.time()))

    def _enter_uses(self, base: Base) -> None:
        uses = self.take_uses()
        index.use(base, uses)
        # Set aside: what depends on it waits for a new copy.
        index.drop(base, [name for name in uses if self._is_missing(name)])

    def _is_missing(self, name: EntryName) -> bool:
        return self._files.status(layout.place(*name)) is None

    # -- entries ---------------------------------------------------------------------------------

    def entry(self, name: EntryName) -> Entry | None:
        self.catch_up()
        return self._row(name) if self._is_there(name) else None

    def entries(self, tenant: str | None) -> Iterator[Entry]:
        self.catch_up()
        yield from self._index.entries(of_tenant(tenant))

    def _row(self, name: EntryName) -> Entry | None:
        return self._index.look(lambda base: index.row(base, name), None)

    def pin(self, name: EntryName, pinned: bool) -> bool:
        """A pin is a small file as well, so that it outlives the index."""
        note = layout.pin_place(name)
        entry = self.entry(name)
        if entry is None:
            return False

        def enter(base: Base) -> None:
            index.pin(base, name, pinned)
            for limit, scope in (
                (self.quota, of_account(entry.account)),
                (self.budget, index.EVERYTHING),
            ):
                if pinned and limit is not None and index.held(base, scope) > limit:
                    raise PinsFull.no_room("entries of the store", "its budget or a quota", limit)
            if pinned:
                self._files.write(note, [b"{}"])
            else:
                self._files.remove(note)

        try:
            self._index.change(enter)
        except OSError as error:
            raise StoreError(f"{self.label}: no pin can be set or removed: {error}") from error
        if not pinned:
            self._files.remove_empty([note])
        return True

    def remove(
        self, tenant: str | None, names: Iterable[EntryName] | None = None, image: str | None = None
    ) -> int:
        self.catch_up()
        if image is not None:
            return sum(self._index.remove(index.of_image(tenant, image)).values())
        gone = self._index.remove(of_tenant(tenant) if names is None else list(names))
        if names is None:
            self._files.sweep(tenant, 0.0)
        return sum(gone.values())

    def gc(self, tenant: str | None, budget: int) -> int:
        self.catch_up()
        gone = self._evict(of_tenant(tenant), budget)
        self._files.sweep(tenant, _WEEK)
        return sum(gone.values())

    def stats(self, tenant: str | None, whose: str | None, wait: float) -> Record:
        """Entries and bytes per kind, from the index; counts since it was opened."""
        self.drain(wait)
        if self._files.is_gone():
            if self.health.state == OK:
                self.health.failed(_gone(self.label))
        elif self.health.state == GONE and os.path.isdir(self.label):
            self.health.worked()
        none = list[Sum]()
        sums = self._listed(lambda b: index.totals(b, of_tenant(tenant)), none, again=True)
        counted = time.time() if self._listing.state == OK else None
        return self.told("disk", sums, counted, whose, self._listing)

    # -- check -----------------------------------------------------------------------------------

    def check(self, tenant: str | None, repair: bool) -> list[str]:
        """Read everything in full; return one line per problem. `repair` sets damaged files aside
        and fills the index again.

        Files that no store wrote and entries of other versions are named, but not repaired.
        """
        self.catch_up()
        found: list[str] = []
        if not self._index.is_sound():
            found.append(f"{self.label}: the index is damaged")
            if not repair:
                return found
            self._index.delete()
        if not self._index.is_store():
            return found
        rows: list[str] = []  # what is wrong in the index
        for place in self._places(tenant):
            try:
                rows += self._check_file(place, repair)
            except FileError as error:
                found.append(str(error))
            except OSError as error:
                found.append(f"{place}: {error}")
        rows += self._check_rows(tenant)
        if repair and rows:
            self._index.delete()
        found += rows
        lost = self._index.look(lambda base: index.names(base, index.LOST_BASE), list[EntryName]())
        for name in [name for name in lost if tenant in (None, name.tenant)]:
            found.append(f"{self._path(name)}: what it depends on is absent")
            if repair:
                self._index.remove([name])
        if repair:
            self._files.sweep(tenant, _WEEK)
        return found

    def _places(self, tenant: str | None) -> Iterator[str]:
        """What lies where entries lie."""
        for shard in self._files.shards(tenant):
            for last in self._files.names(shard):
                if not last.startswith(PART) and not last.endswith(DAMAGED):
                    yield f"{shard}/{last}"

    def _check_file(self, place: str, repair: bool) -> list[str]:
        """Read a file, and compare it with its row: a wrong one could cause intact entries to be
        removed."""
        path, name = self._files.path(place), layout.parse(place)
        if name is None:
            raise DamagedFile(f"{path}: no store wrote this file")
        try:
            if not self._files.is_there(name) and self._files.status(place) is not None:
                raise DamagedFile(f"{path}: a link or a folder where a file should be")
            self._files.read(name)
        except FileNotFoundError:
            return []  # it was removed meanwhile
        except WrongFormatVersion:
            raise
        except FileError:
            if repair:
                self._files.set_aside(place)
                self._index.change(lambda base: index.drop(base, [name]))
            raise
        true, entry = self._files.entry(name), self._row(name)
        if true is None:
            return []
        if entry is None:
            return [f"{path}: not in the index"]
        if entry.nbytes != true.nbytes:
            return [f"{path}: {true.nbytes} bytes, the index says {entry.nbytes}"]
        if (entry.depends_on, sorted(entry.media)) != (true.depends_on, sorted(true.media)):
            return [f"{path}: the index says something else of what it belongs to"]
        return []

    def _check_rows(self, tenant: str | None) -> Iterator[str]:
        """Find rows without a file. A row is committed before its file is put in place, so another
        process has a while to do that."""
        entries = self._index.entries(of_tenant(tenant))
        missing = [entry.name for entry in entries if self._is_missing(entry.name)]
        if missing:
            time.sleep(_UNDER_WAY)
        for name in missing:
            if self._is_missing(name) and self._row(name) is not None:
                yield f"{self._path(name)}: in the index, but there is no such file"
        for name in self._files.pins():
            row = self._row(name) if tenant in (None, name.tenant) else None
            if row is not None and not row.pinned:
                yield f"{self._path(name)}: the index knows no such pin"

    def _path(self, name: EntryName) -> Path:
        return self._files.path(layout.place(*name))


def _gone(root: str) -> OSError:
    return FileNotFoundError(errno.ENOENT, f"the folder is gone: {root}")


def _levels(
    base: Base, tenant: str, kind: str, on: str | None, count: int
) -> dict[str | None, list[EntryName]]:
    """By key of their base: the most recently used dependents, and level by level theirs. A key
    missing in the result was not looked up."""
    found: dict[str | None, list[EntryName]] = {}
    level: list[str | None] = [on]
    number = 0
    while level and number < _DEEPER:
        here = {key: index.latest_upon(base, tenant, kind, key, count) for key in level}
        number += sum(map(len, here.values()))
        found |= here
        level = [name.key for names in here.values() for name in names if name.key not in found]
    return found
