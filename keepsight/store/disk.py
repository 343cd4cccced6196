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
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from keepsight.errors import DamagedFile, FileError, PinsFull, StoreError, WrongFormatVersion
from keepsight.kinds import Record
from keepsight.store import files, index, layout
from keepsight.store.contract import About, Below, Content, Entry, EntryName, Found
from keepsight.store.files import DAMAGED, PART, Folder, PartFile
from keepsight.store.health import GONE, OK, Health, summary
from keepsight.store.index import Base, Index, Scope
from keepsight.store.tenants import Store
from keepsight.store.writer import (
    COUNTED,
    REFUSED,
    ROOM,
    THERE,
    WRITTEN,
    Job,
    Uses,
    Writer,
    larger_than,
)

logger = logging.getLogger(__name__)

_READERS = max(1, min(4, os.cpu_count() or 1))
_DEEPER = 64  # number of dependents after which no further level is looked up
_WEEK = 7 * 86400.0
_UNDER_WAY = 2.0  # seconds in which a writer that entered a row puts its file in place
T = TypeVar("T")


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


class Disk:
    """The entries of all tenants in one folder. `Keeper` says what its methods promise."""

    def __init__(self, folder: Folder, budget: int | None, quota: int | None, waiting: int) -> None:
        self.root, self.label, self.budget, self.quota = (
            folder.root,
            str(folder.root),
            budget,
            quota,
        )
        self._files, self._index = folder, Index(folder)
        self._reads = Health(f"the store {folder.root} cannot be read")
        self._listing = Health(f"the index of the store {folder.root} cannot be read")
        self._writer = Writer(self.label, waiting, self._write, self._tidy, self._index.close)
        self.drain, self.flush, self.close = (
            self._writer.drain,
            self._writer.flush,
            self._writer.close,
        )
        self.retire = self._writer.retire
        self._is_marked = False
        with contextlib.suppress(OSError):  # a new folder, or one out of reach
            try:
                layout.check_marker(folder.read_file(layout.MARKER), self.label)
            except DamagedFile as error:
                logger.warning("%s; written anew", error)

    # -- reading ---------------------------------------------------------------------------------

    def has(self, name: EntryName) -> bool:
        """Whether reading this entry should work. The index says when it expires; where it is
        busy, refuses, or does not know the file, the file says so."""
        if name in self._writer.jobs:
            return True
        if name in self._writer.uses.over or not self._files.is_there(name):
            return False
        row = None
        if not self._listing.is_aside:
            try:
                row = self._index.look(lambda base: index.row(base, name), None, wait=False)
            except StoreError as error:
                self._listing.failed(error)
        return not (self._is_over(name) if row is None else row.is_over(time.time()))

    def tier(self, name: EntryName) -> str | None:
        return "disk" if self.has(name) else None

    def read(self, names: Iterable[EntryName]) -> dict[EntryName, Found]:
        found: dict[EntryName, Found] = {}
        on_disk = []
        for name in names:
            job = self._writer.waiting(name)
            if job is None:
                on_disk.append(name)
                continue
            job.ready.wait()
            found[name] = job.content, job.metadata
            self._writer.counts.count(name.tenant, "hits")
        read = self._read(files.read, on_disk)
        for name in on_disk:
            self._writer.counts.count(name.tenant, "hits" if name in read else "misses")
            if name in read:
                self._writer.used(name)
        return found | read

    def _read(
        self, read: Callable[[Path, EntryName], Found], names: list[EntryName]
    ) -> dict[EntryName, Found]:
        """Read several files side by side: checking bytes takes longer than reading them."""
        if self._reads.is_aside:
            return {}
        if len(names) < 2:
            found = [self._read_one(read, name) for name in names]
        else:
            with ThreadPoolExecutor(min(_READERS, len(names)), "keepsight-read") as pool:
                found = list(pool.map(lambda name: self._read_one(read, name), names))
        return {n: one for n, one in zip(names, found, strict=True) if one is not None}

    def _read_one(self, read: Callable[[Path, EntryName], Found], name: EntryName) -> Found | None:
        """Only a wrong file is set aside, not an unreachable one."""
        try:
            content, metadata = read(self._files.path(layout.place(*name)), name)
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
            self._reads.failed(error)
            return None
        self._reads.worked()
        if layout.expired(metadata):
            self._writer.used(name, is_over=True)
            return None
        return content, metadata

    def reject(self, name: EntryName, why: str) -> None:
        place = layout.place(*name)
        logger.warning("damaged entry set aside: %s (%s)", self._files.path(place), why)
        with contextlib.suppress(OSError):  # in an unwritable folder it stays, and stays absent
            self._files.set_aside(place)
            self._writer.used(name, is_over=True)

    def below(self, tenant: str, kind: str, base: str | None, count: int) -> Below:
        """Dependents of an entry, of its kind, level by level; for None, entries without a base. A
        conversation is a chain of entries: one query finds many of them."""
        if self._listing.is_aside:
            return {}
        try:
            none: dict[str | None, list[EntryName]] = {}
            listed = self._index.look(lambda b: _levels(b, tenant, kind, base, count), none)
        except StoreError as error:
            self._listing.failed(error)
            return {}
        self._listing.worked()
        names = [name for level in listed.values() for name in level]
        read = self._read(files.read_record, names)
        return {
            key: [(name.key, read[name][0][1]) for name in level if name in read]
            for key, level in listed.items()
        }

    # -- writing ---------------------------------------------------------------------------------

    def put(self, name: EntryName, content: Content, about: About, account: str) -> None:
        """Hand over an entry to the writer, which looks whether it exists and has its base."""
        if name not in self._writer.jobs:
            job = Job.of(name, content, about, account)
            self._writer.hand_over(job, larger_than(job.size, self.budget, self.quota))

    def _write(self, jobs: list[Job]) -> dict[EntryName, str]:
        """Write entries. A row is committed before its file is put in place: so whatever is there
        can be deleted. Between the two nobody removes the row, see `Index.remove`."""
        if self._files.is_gone() and self._writer.health.state == OK:
            raise _gone(self.root)  # somebody may be moving it
        self._mark()
        became: dict[EntryName, str] = {}
        begun: list[tuple[Job, PartFile]] = []
        try:
            for job in jobs:
                self._begin(job, became, begun)
            files.together(part.sync for _, part in begun)
            there = [job for job in jobs if became.get(job.name) == THERE]
            self._index.change(lambda base: self._enter(base, there, begun, became))
            entered = self._index.file

            def put_in_place(base: Base) -> None:
                if self._index.file != entered:  # a missing row says nothing about a deletion
                    raise OSError(f"the index of {self.root} was lost while entries were written")
                _put_in_place(base, begun, became)

            self._index.change(put_in_place)
            self._files.sync_folders(part for _, part in begun)
            self._writer.uses.over -= {job.name for job, _ in begun}
        finally:
            for _, part in begun:
                part.drop()
        self._fit({job.account for job in jobs}, begun, became)
        return became

    def _begin(
        self, job: Job, became: dict[EntryName, str], begun: list[tuple[Job, PartFile]]
    ) -> None:
        is_over = job.name in self._writer.uses.over or (
            job.about.ttl is not None and self._is_over(job.name)
        )
        if self._files.is_there(job.name) and not is_over:
            became[job.name] = THERE
            return
        try:
            job.ready.wait()
            parts = files.spelled(job.name, job.content, job.metadata)
            part = self._files.begin(layout.place(*job.name), parts)
        except OSError:
            raise
        except Exception as error:
            became[job.name] = str(error)
            logger.exception("writing %s failed; going on without it", layout.place(*job.name))
            return
        too_large = larger_than(part.size, self.budget, self.quota)
        if too_large is None:
            begun.append((job, part))
        else:
            part.drop()
            became[job.name] = too_large

    def _enter(
        self,
        base: Base,
        there: list[Job],
        begun: list[tuple[Job, PartFile]],
        became: dict[EntryName, str],
    ) -> None:
        """Add the rows of what is written, and of files that are there without one."""
        for job in there:
            found = self._files.as_found(job.name)
            if found is not None and index.row(base, job.name) is None:
                index.put(base, [found])
        for job, part in begun:
            on = job.about.depends_on
            on_name = None if on is None else EntryName(*on, job.name.tenant)
            if on_name is None or self._has_row(base, on_name):
                index.put(base, [job.entry(part.size)])
            else:
                became[job.name] = REFUSED

    def _has_row(self, base: Base, name: EntryName) -> bool:
        return index.row(base, name) is not None or self._files.is_there(name)

    def _mark(self) -> None:
        """Write the marker before anything else: it says whose the folder is."""
        if self._is_marked and self._files.status(layout.MARKER) is not None:
            return
        try:
            layout.check_marker(self._files.read_file(layout.MARKER), self.label)
        except (FileNotFoundError, NotADirectoryError, DamagedFile):
            self._files.write(layout.MARKER, [layout.marker_bytes()])
        self._is_marked = True

    # -- looking after the folder ----------------------------------------------------------------

    def _tidy(self, uses: Uses) -> float | None:
        """Record uses, remove what is expired; return in how many seconds the next one will be."""
        facts = self._writer.counts.take()

        def enter(base: Base) -> list[EntryName]:
            index.use(base, uses.read, time.time())
            index.add_facts(base, facts)
            # Set aside: what depends on it waits for a new copy.
            index.drop(base, [name for name in uses.over if self._is_missing(name)])
            return index.expired(base, time.time())

        if self._index.is_store():
            over = self._index.change(enter)
            over += [name for name in uses.over if self._is_over(name)]
            if over:
                self._index.remove(lambda base: over)
            end = self._index.look(index.next_end, None)
            return None if end is None else max(1.0, end - time.time())
        return None

    def _is_over(self, name: EntryName) -> bool:
        """Whether a file says that it is expired; it may have been written again meanwhile."""
        with contextlib.suppress(OSError, FileError):
            path = self._files.path(layout.place(*name))
            return layout.expired(files.read_metadata(path, name))
        return False

    def _is_missing(self, name: EntryName) -> bool:
        return self._files.status(layout.place(*name)) is None

    def _fit(
        self, accounts: set[str], begun: list[tuple[Job, PartFile]], became: dict[EntryName, str]
    ) -> None:
        """Evict what exceeds a budget or a quota. What was just written and goes at once because
        of pins is lost."""
        limits = [(Scope.account(account), self.quota, "quota of a tenant") for account in accounts]
        limits.append((Scope(), self.budget, "budget of the store"))
        for scope, limit, what in limits:
            if limit is None:
                continue
            gone = set(self._evict(scope, limit))
            went = {job.name: part.size for job, part in begun if job.name in gone}
            if not went:
                continue
            room = limit - self._index.change(partial(index.held, scope=scope))
            why = f"pins take too much of the {what}, {limit:,}; unpin something"
            became |= {name: why for name, size in went.items() if size > room}

    def _evict(self, scope: Scope, limit: int) -> list[EntryName]:
        gone, _ = self._index.fit(scope, limit)
        for name in gone:
            self._writer.counts.count(name.tenant, "evictions")
        return gone

    # -- entries ---------------------------------------------------------------------------------

    def entry(self, name: EntryName) -> Entry | None:
        self._writer.catch_up()
        if not self.has(name):
            return None
        return self._row(name)

    def entries(self, tenant: str | None) -> Iterator[Entry]:
        self._writer.catch_up()
        yield from self._index.entries(Scope.tenant(tenant))

    def tenants(self) -> list[str]:
        self._writer.catch_up()
        return self._index.look(index.tenants, [])

    def pin(self, name: EntryName, pinned: bool) -> bool:
        self._writer.catch_up()
        note = index.pin_name(name)

        def enter(base: Base) -> bool:
            entry = index.row(base, name)
            if entry is None or not self.has(name):
                return False
            index.pin(base, name, pinned)
            for limit, scope in (
                (self.quota, Scope.account(entry.account)),
                (self.budget, Scope()),
            ):
                if pinned and limit is not None and index.held(base, scope) > limit:
                    raise PinsFull.no_room("entries of the store", "its budget or a quota", limit)
            if pinned:
                self._files.write(note, [b"{}"])
            else:
                self._files.remove(note)
            return True

        try:
            if not self._index.is_store():
                return False
            found = self._index.change(enter)
        except OSError as error:
            raise StoreError(f"{self.root}: no pin can be set or removed: {error}") from error
        if found and not pinned:
            self._files.remove_empty([note])
        return found

    def remove(
        self, tenant: str | None, names: Iterable[EntryName] | None = None, image: str | None = None
    ) -> int:
        self._writer.catch_up()
        if image is not None:
            freed = self._index.remove(lambda base: index.with_image(base, tenant or "", image))[1]
        elif names is not None:
            doomed = list(names)
            freed = self._index.remove(lambda base: doomed)[1]
        else:
            freed = self._index.fit(Scope.tenant(tenant), -1, pins=True)[1]
            for whose in self._tenants_in(tenant):
                self._files.sweep(whose, 0.0)
        return freed

    def gc(self, tenant: str | None, budget: int) -> int:
        before = self._size(tenant)
        self._writer.catch_up()
        self._evict(Scope.tenant(tenant), budget)
        for whose in self._tenants_in(tenant):
            self._files.sweep(whose, _WEEK)
        return before - self._size(tenant)

    def _size(self, tenant: str | None) -> int:
        self._writer.catch_up()
        return self._index.look(lambda base: index.nbytes(base, Scope.tenant(tenant)), 0)

    def _tenants_in(self, tenant: str | None) -> list[str]:
        return self._files.tenants() if tenant is None else [tenant]

    def stats(self, tenant: str, whose: str | None, wait: float) -> Record:
        """Entries and bytes per kind, from the index; counts since it was opened, and `ever`."""
        self._writer.drain(wait)
        if self._files.is_gone():
            if self._writer.health.state == OK:
                self._writer.health.failed(_gone(self.root))
        elif self._writer.health.state == GONE and self.root.is_dir():
            self._writer.health.worked()
        kinds: dict[str, dict[str, int]] = {}
        ever = dict.fromkeys(COUNTED, 0)
        counted: float | None = time.time()

        def look(base: Base) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
            facts = {what: index.fact(base, f"{what} {tenant}") for what in COUNTED}
            return index.totals(base, tenant), facts

        try:
            kinds, ever = self._index.look(look, (kinds, ever))
            self._listing.worked()
        except StoreError as error:
            self._listing.failed(error)
            counted = None
        healths = (self._writer.health, self._reads, self._listing)
        return {
            **summary(self.label, "disk", kinds, counted, healths),
            "ever": ever,
            **self._writer.stats(whose),
            "budget": self.budget,
            "quota": self.quota,
        }

    # -- check -----------------------------------------------------------------------------------

    def check(self, tenant: str | None, repair: bool) -> list[str]:
        """Read everything in full; return one line per problem. `repair` sets damaged files aside
        and fills the index again.

        Files that no store wrote and entries of other versions are named, but not repaired.
        """
        self._writer.catch_up()
        found: list[str] = []
        if not self._index.is_sound():
            found.append(f"{self.root}: the index is damaged")
            if not repair:
                return found
            self._index.delete()
        if not self._index.is_store():
            return found
        rows: list[str] = []  # what is wrong in the index
        for whose in self._tenants_in(tenant):
            for shard in self._shards(whose, found):
                for last in self._files.names(shard):
                    if not last.startswith(PART) and not last.endswith(DAMAGED):
                        self._check_file(f"{shard}/{last}", found, rows, repair)
        self._check_rows(tenant, rows)
        if repair and rows:
            self._index.delete()
        found += rows
        for entry in self._index.look(index.without_base, list[Entry]()):
            if tenant in (None, entry.tenant):
                base = "/".join(entry.depends_on or ())
                found.append(f"{self._spelled(entry.name)}: depends on {base}, which is absent")
                if repair:
                    self._index.remove(lambda base, n=entry.name: [n])  # type: ignore[misc]
        for whose in self._tenants_in(tenant) if repair else ():
            self._files.sweep(whose, _WEEK)
        return found

    def _spelled(self, name: EntryName) -> Path:
        return self._files.path(layout.place(*name))

    def _shards(self, tenant: str, found: list[str]) -> Iterator[str]:
        """The folders of a tenant's entries that are folders."""
        kinds = [f"{layout.tenant_prefix(tenant)}{kind}" for kind in layout.KINDS]
        for folder in [*kinds, *self._files.shards(tenant)]:
            status = self._files.status(folder)
            if status is not None and not stat.S_ISDIR(status.st_mode):
                found.append(
                    f"{self._files.path(folder)}: a link or a file where a folder should be; "
                    "nothing in it is used"
                )
            elif status is not None and folder not in kinds:
                yield folder

    def _check_file(self, place: str, found: list[str], rows: list[str], repair: bool) -> None:
        """Read a file, and compare it with its row: a wrong one could cause intact entries to be
        removed."""
        path, name, status = self._files.path(place), layout.parse(place), self._files.status(place)
        if name is None:
            found.append(f"{path}: no store wrote this file")
            return
        try:
            if status is not None and not stat.S_ISREG(status.st_mode):
                raise DamagedFile(f"{path}: a link or a folder where a file should be")
            files.read(path, name)
        except FileNotFoundError:
            return  # it was removed meanwhile
        except WrongFormatVersion as error:
            found.append(str(error))
        except FileError as error:
            found.append(str(error))
            if repair:
                self._files.set_aside(place)
                self._index.change(lambda base: index.drop(base, [name]))
            return
        except OSError as error:
            found.append(f"{path}: {error}")
            return
        true, row = self._files.as_found(name), self._row(name)
        if true is None:
            return
        if row is None:
            rows.append(f"{path}: not in the index")
        elif row.nbytes != true.nbytes:
            rows.append(f"{path}: {true.nbytes} bytes, the index says {row.nbytes}")
        elif (row.depends_on, sorted(row.media)) != (true.depends_on, sorted(true.media)):
            rows.append(f"{path}: the index says something else of what it belongs to")

    def _check_rows(self, tenant: str | None, rows: list[str]) -> None:
        """Find rows without a file. A row is committed before its file is put in place, so another
        process has a while to do that."""
        entries = self._index.entries(Scope.tenant(tenant))
        missing = [entry.name for entry in entries if self._is_missing(entry.name)]
        if missing:
            time.sleep(_UNDER_WAY)
        for name in missing:
            if self._is_missing(name) and self._row(name) is not None:
                rows.append(f"{self._spelled(name)}: in the index, but there is no such file")
        for name in list(self._index.pins()):
            row = self._row(name)
            if tenant in (None, name.tenant) and row is not None and not row.pinned:
                path = self._files.path(index.pin_name(name))
                rows.append(f"{path}: the index knows no such pin")

    def _row(self, name: EntryName) -> Entry | None:
        return self._index.look(lambda base: index.row(base, name), None)


def _gone(root: Path) -> OSError:
    return FileNotFoundError(errno.ENOENT, f"the folder is gone: {root}")


def _put_in_place(
    base: Base, begun: list[tuple[Job, PartFile]], became: dict[EntryName, str]
) -> None:
    """Put files in place whose rows are still there."""
    for job, part in begun:
        if job.name in became:
            continue
        if index.row(base, job.name) is None:  # deleted meanwhile
            became[job.name] = REFUSED
            continue
        part.put_in_place()
        became[job.name] = WRITTEN


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
