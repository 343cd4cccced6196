"""The one thread that writes: what was handed over reaches the disk in order, and no answer waits.

What waits to be written is readable and bounded in bytes; what does not fit is refused and counted.
A disk that refuses is left alone for some seconds and then tried again, with one warning; `flush`
tells what was lost. When nothing is to be done, files that the book does not know are entered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from keepsight.errors import DamagedFile, StoreError, WrongFormatVersion
from keepsight.store import entryfile, layout
from keepsight.store.book import Book, name_of, row_of
from keepsight.store.contract import About, Entry, Tensors
from keepsight.store.folder import Folder, Part
from keepsight.store.keeper import Keeper
from keepsight.store.layout import Place

logger = logging.getLogger(__name__)

_BATCH, _BATCH_BYTES = 64, 64 << 20
_OVERHEAD = 4096  # what a write takes in memory beside its tensors
_REST = 1.0  # seconds over which uses are gathered
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0  # how long a disk that refused is left alone


@dataclass
class Job:
    """One write that has not reached the disk yet."""

    place: Place
    record: dict[str, Any]
    tensors: Tensors | None  # None: a note, JSON alone
    about: About
    told: dict[str, Any] = field(default_factory=dict)  # what the file says of its keeping
    nbytes: int = 0


class Writer:
    """The queue, the thread, and what both know of a store's health."""

    def __init__(
        self, folder: Folder, book: Book, budget: int | None, quota: int | None, waiting: int
    ) -> None:
        self.folder, self.book = folder, book
        self.budget, self.quota, self.waiting = budget, quota, waiting
        self._keeper = Keeper(folder, book, budget, quota)
        self.counts: dict[str, Counter[str]] = {}
        self.ended: set[Place] = set()  # read and found to be over or damaged; still in the book
        self.start_anew()
        _ALIVE.add(self)

    def start_anew(self) -> None:
        """With no thread and nothing to write, as at first and after a fork."""
        self.pending: dict[Place, Job] = {}
        self.pending_bytes = 0
        self.broken: str | None = None
        self._jobs: deque[Job] = deque()
        self._uses: Counter[Place] = Counter()
        self._events: Counter[str] = Counter()  # what was counted and is not in the book yet
        self._refused: set[Place] = set()
        self._handed = self._done = 0
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = self._grounded = False
        self._lost: list[str] = []
        self._retry_at, self._pause = 0.0, _FIRST_PAUSE

    # -- for whoever hands over or reads -----------------------------------------------------------

    def count(self, tenant: str, what: str, number: int = 1) -> None:
        """Add to what `stats` tells of a tenant."""
        with self._wake:
            self.counts.setdefault(tenant, Counter())[what] += number
            self._events[f"{what} {tenant}"] += number

    def hand_over(self, job: Job) -> None:
        """Take a write, if there is room for it."""
        size = sum(tensor.nbytes for tensor in (job.tensors or {}).values())
        limits = [limit for limit in (self.budget, self.quota) if limit is not None]
        job.nbytes = size + _OVERHEAD
        with self._wake:
            full = self.pending and self.pending_bytes + job.nbytes > self.waiting
            if job.place in self.pending:
                return
            if self._is_aside():
                self._lose(job.place)
            elif full or any(size > limit for limit in limits):
                self.count(job.place.tenant, "refused")
            else:
                self.pending[job.place] = job
                self.pending_bytes += job.nbytes
                self._jobs.append(job)
                self._handed += 1
                self._awake()

    def used(self, place: Place) -> None:
        """An entry was read; the book learns of it with the next batch."""
        with self._wake:
            self.count(place.tenant, "hits")
            first = not self._uses
            self._uses[place] += 1
            if first:
                self._awake()

    def over(self, place: Place) -> None:
        """An entry was read and cannot be used; the book learns of it with the next batch."""
        with self._wake:
            self.ended.add(place)
            self._awake()

    def is_there(self, place: Place) -> bool:
        """Whether a file stands at its place whose time is not over."""
        status = self.folder.status(name_of(place))
        if status is None or place in self.ended or not stat.S_ISREG(status.st_mode):
            return False
        return entryfile.live(status, time.time())

    def has_base(self, place: Place, about: About) -> bool:
        """Whether what an entry stands on is there, or will be: it may have the same key."""
        if about.stands_on is None or about.stands_on[1] == place.key:
            return True
        base = Place(place.tenant, *about.stands_on)
        return base in self.pending or self.is_there(base)

    def refuse(self, place: Place) -> None:
        """It stands on nothing; what came before it, to stand on it, goes with the next batch."""
        with self._wake:
            self.count(place.tenant, "refused")
            self._refused.add(place)
            self._awake()

    def drain(self) -> None:
        """Return when all that was handed over before has been dealt with, well or badly."""
        with self._wake:
            goal = self._handed
            self._wake.wait_for(lambda: self._done >= goal)

    def catch_up(self) -> None:
        """All that was handed over is dealt with, every use counted, all that is over gone."""
        self.drain()
        with self._wake:
            uses, self._uses = dict(self._uses), Counter()
            ended = list(self.ended)
        self._keeper.sweep_at = 0.0
        self._after(uses, ended)

    def flush(self) -> None:
        """Return when all that was handed over before is on the disk, or say what is not."""
        self.drain()
        with self._wake:
            lost, self._lost = self._lost, []
        if not lost and self.broken is not None and not self._probe():
            lost = [self.broken or ""]
        if lost:
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            raise StoreError(f"{self.folder.root} could not be written: {lost[0]}{more}")

    def close(self) -> None:
        """Finish writing and stop the thread; it starts again when needed."""
        with self._wake:
            thread, self._stopping = self._thread, True
            self._wake.notify_all()
        if thread is not None:
            thread.join()
        if self._events and self.folder.root.is_dir():
            self._after({}, [])
        self.book.close()

    def _awake(self) -> None:
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="keepsight-store", daemon=True)
            self._thread.start()
        self._wake.notify_all()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            batch, uses, ended = self._next()
            try:
                if batch:
                    self._write_batch(batch)
                self._after(uses, ended, {job.place.tenant for job in batch})
            except Exception:
                logger.exception("the store %s: housekeeping failed; going on", self.folder.root)
            with self._wake:
                self._done += len(batch)
                self._wake.notify_all()
                if self._stopping and not self._has_things_to_do():
                    self._thread = None
                    return

    def _next(self) -> tuple[list[Job], dict[Place, int], list[Place]]:
        """What to do now. Uses wait a moment for others, unless there is something to write."""
        if not self._has_work():
            pause = self._idle()
            with self._wake:
                if not self._has_work():
                    self._wake.wait(pause)
        with self._wake:
            if not (self._jobs or self._stopping) and self._has_things_to_do():
                self._wake.wait_for(lambda: self._jobs or self._stopping, _REST)
            batch: list[Job] = []
            room = _BATCH_BYTES if self.budget is None else max(1, self.budget // 16)
            while self._jobs and len(batch) < _BATCH and room > 0:
                batch.append(self._jobs.popleft())
                room -= batch[-1].nbytes
            uses, self._uses = dict(self._uses), Counter()
            return batch, uses, list(self.ended)

    def _has_work(self) -> bool:
        return self._stopping or self._has_things_to_do()

    def _has_things_to_do(self) -> bool:
        return bool(self._jobs or self._uses or self.ended or self._refused)

    def _idle(self) -> float | None:
        """Enter a folder that the book does not know; how long to sleep then, None for long."""
        try:
            more, gone = self._keeper.adopt_some()
            self._count_evictions(gone)
            return 0.0 if more else self._keeper.pause()
        except OSError as error:
            logger.debug("the store %s: %s", self.folder.root, error)
        except Exception:  # a thread that ended here would leave `flush` waiting for ever
            logger.exception("the store %s: housekeeping failed; going on", self.folder.root)
        return None

    def _after(
        self, uses: dict[Place, int], ended: list[Place], tenants: set[str] | None = None
    ) -> None:
        with self._wake:
            events, self._events = dict(self._events), Counter()
            refused, self._refused = self._refused, set()
        self._keeper.count(uses, events)
        with contextlib.suppress(OSError):
            self._keeper.let_fall([p for p in refused if p not in self.pending])
            self._keeper.sweep(ended)
        with self._wake:
            self.ended.difference_update(ended)
        if tenants:
            with contextlib.suppress(OSError):
                self._count_evictions(self._keeper.fit(tenants))

    def _count_evictions(self, gone: list[Place]) -> None:
        for place in gone:
            self.count(place.tenant, "evictions")

    # -- writing ---------------------------------------------------------------------------------

    def _write_batch(self, batch: list[Job]) -> None:
        try:
            if self._is_aside():
                return
            self._ground()
            wanted = [job for job in batch if self._is_wanted(job)]
            self._keeper.announce([self._row(job, 0) for job in wanted])
            written = self._write(wanted)
            there = {(row.tenant, row.kind, row.key) for row in written}
            self._keeper.enter(written, [job.place for job in wanted if job.place not in there])
            for job in wanted:  # its base may have gone while it was written
                if job.place in there and not self.has_base(job.place, job.about):
                    self.book.remove(self.book.act(lambda c, p=job.place: c.tower([p])))  # type: ignore[misc]
                    self.count(job.place.tenant, "refused")
        except OSError as error:
            self._step_aside(error)
        finally:
            for job in batch:
                if self._forget(job):
                    self._lose(job.place)

    def _ground(self) -> None:
        """The marker, before anything else is written: it says whose folder this is."""
        if self._grounded and self.folder.status(layout.MARKER) is not None:
            return
        try:
            layout.check_marker(self.folder.path(layout.MARKER).read_bytes(), str(self.folder.root))
        except (FileNotFoundError, DamagedFile):
            self.folder.write(layout.MARKER, [layout.marker_bytes()], None)
        except WrongFormatVersion as error:
            raise StoreError(str(error)) from error
        self._grounded = True

    def _is_wanted(self, job: Job) -> bool:
        """Not what is there already, and not what stands on nothing."""
        if self.is_there(job.place):
            self._keeper.enter_file(job.place)
        elif self.has_base(job.place, job.about):
            return True
        else:
            self.refuse(job.place)
        self._forget(job)
        return False

    def _row(self, job: Job, nbytes: int) -> Entry:
        now = time.time()
        created = job.told["created"] / 1000 if "created" in job.told else now
        return row_of(job.place, job.about, nbytes, created, now)

    def _write(self, jobs: list[Job]) -> list[Entry]:
        """The rows of what is on the disk then. What is not stays pending, and is lost."""
        begun = [(job, part) for job in jobs if (part := self._begin(job)) is not None]
        self.folder.finish([part for _, part in begun])
        rows = []
        for job, part in begun:
            if part.error is not None:
                self._step_aside(part.error)
                continue
            if self.broken is not None and not self._is_aside():
                self._recover()
            self._forget(job)
            self.count(job.place.tenant, "written")
            rows.append(self._row(job, part.size))
        return rows

    def _begin(self, job: Job) -> Part | None:
        place = job.place
        if self._is_aside():
            return None
        try:
            parts = entryfile.spelled(place.kind, place.key, job.tensors, job.record, job.told)
            return self.folder.begin(name_of(place), parts, layout.expiry(job.told))
        except OSError as error:
            self._step_aside(error)
        except Exception as error:
            self._forget(job)
            self._lose(place, str(error))
            logger.exception("writing %s failed; going on without it", name_of(place))
        return None

    def _forget(self, job: Job) -> bool:
        """It waits no longer; False when it did not wait."""
        with self._wake:
            if self.pending.pop(job.place, None) is None:
                return False
            self.pending_bytes -= job.nbytes
            return True

    # -- a disk that refuses ---------------------------------------------------------------------

    def _is_aside(self) -> bool:
        """Whether the disk refused so lately that it is not asked again yet."""
        return self.broken is not None and time.monotonic() < self._retry_at

    def _lose(self, place: Place, why: str | None = None) -> None:
        with self._wake:
            self._lost.append(f"{place.kind}/{place.key}: {why or self.broken}")

    def _step_aside(self, error: OSError) -> None:
        if self.broken is None:
            logger.warning(
                "the store %s cannot be written (%s); going on without it", self.folder.root, error
            )
        else:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self.broken = str(error)
        self._retry_at = time.monotonic() + self._pause

    def _recover(self) -> None:
        logger.info("the store %s can be written again", self.folder.root)
        self.broken, self._pause = None, _FIRST_PAUSE

    def _probe(self) -> bool:
        """Whether the disk takes writes again; asked when somebody wants to know for sure."""
        try:
            self.folder.write(layout.MARKER, [layout.marker_bytes()], None)
        except OSError as error:
            self.broken = str(error)
            return False
        self._recover()
        return True


_ALIVE: weakref.WeakSet[Writer] = weakref.WeakSet()


def _after_fork() -> None:
    """A child has neither the thread nor the right to its parent's connection."""
    for writer in list(_ALIVE):
        writer.start_anew()
        writer.book.abandon()


os.register_at_fork(after_in_child=_after_fork)
