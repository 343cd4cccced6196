"""The one writing thread: entries reach the disk in order, and no answer waits for it.

Waiting entries are readable and bounded in bytes; what does not fit is refused and counted. A
refusing disk is left alone for some seconds and tried again, with one warning; `flush` tells what
was lost. In idle time, files that the catalogue lacks are added to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Sequence

from keepsight.errors import StoreError
from keepsight.store import entryfile, layout
from keepsight.store.contract import About, Entry
from keepsight.store.folders.after_write import CatalogueUpdater
from keepsight.store.folders.catalogue_guard import CatalogueGuard
from keepsight.store.folders.folder import Folder, PartFile
from keepsight.store.folders.folder_state import FolderState
from keepsight.store.folders.rows import begin_accounts, name_of
from keepsight.store.health import LONGEST_PAUSE, OK, PINNED, Health
from keepsight.store.layout import EntryName
from keepsight.store.losses import TOO_MUCH, larger_than
from keepsight.store.pending import STUCK, Pending, PendingWrite
from keepsight.store.tally import PendingCounts, StoreCounters, StoredCounts
from keepsight.store.timeout import DiskCalls
from keepsight.system import forks
from keepsight.system.exits import STORES, begin, finish_before_exit

logger = logging.getLogger(__name__)

_BATCH, _BATCH_BYTES = 64, 64 << 20
_REST = 1.0  # seconds over which uses are collected


class Writer:
    """The queue, the thread, and the health of a store's disk."""

    def __init__(
        self,
        folder: Folder,
        guard: CatalogueGuard,
        budget: int | None,
        quota: int | None,
        waiting: int,
    ) -> None:
        self.folder, self.guard, self.disk = folder, guard, guard.disk
        self.budget, self.quota = budget, quota
        self.tally, self.pending = StoreCounters(), Pending(waiting)
        self.reach = DiskCalls(Health(f"the store {folder.root} cannot be read"))
        self.pins = Health(f"the store {folder.root} takes nothing more")
        self.crowded: set[str] = set()  # tenants that pins left no room
        self._keeper = CatalogueUpdater(folder, guard, budget, quota)
        self._ground = FolderState(folder, guard)
        self.start_anew()
        forks.renew(self.start_anew)
        finish_before_exit(self, STORES)

    def start_anew(self) -> None:
        """Reset to no thread and nothing to write: at first, and after a fork."""
        self.pending.start_anew()
        self.tally.start_anew()
        self._wake = self.pending.changed
        self._asked: dict[str, tuple[int, float]] = {}  # tenants to count: behind which, since when
        self._thread: threading.Thread | None = None
        self._stopping = self._retired = False
        self._ground.start_anew()

    # -- for callers ------------------------------------------------------------------------------

    def hand_over(self, job: PendingWrite) -> None:
        """Queue a write, if there is room for it."""
        too_large = larger_than(job.size, self.budget, self.quota)
        with self._wake:
            if job.place in self.pending.jobs:
                return
            if self.disk.is_aside or too_large is not None:
                self._lose(job.place, too_large or self.disk.why)
            elif not self.pending.offer(job):
                self._lose(job.place, TOO_MUCH)
            else:
                self._awake()

    def used(self, place: EntryName) -> None:
        """Record that an entry was read, for the next batch of catalogue changes."""
        if self.tally.use(place):
            with self._wake:
                self._awake()

    def over(self, place: EntryName) -> None:
        """Record an entry that was read and is unusable, for the next batch of changes."""
        self.tally.end(place)
        with self._wake:
            self._awake()

    def is_there(self, place: EntryName) -> bool:
        """Whether its file exists and has not expired."""
        status = self.folder.status(name_of(place))
        if status is None or place in self.tally.ended or not stat.S_ISREG(status.st_mode):
            return False
        return entryfile.live(status, time.time())

    def has_base(self, place: EntryName, about: About) -> bool:
        """Whether the base of an entry is stored or queued; it may have the same key."""
        if about.depends_on is None or about.depends_on[1] == place.key:
            return True
        base = EntryName(place.tenant, *about.depends_on)
        return base in self.pending.jobs or self.is_there(base)

    def pin(self, place: EntryName, pinned: bool) -> bool:
        """Pin an existing entry, if budget and quota have room; return whether it exists."""
        return self._keeper.pin(place, pinned)

    def refuse(self, place: EntryName) -> None:
        """Refuse an entry without its base; the next batch removes its queued dependents."""
        self.tally.refuse(place)
        with self._wake:
            self._awake()

    def counted(self, tenant: str, wait: float) -> StoredCounts | None:
        """A tenant's count: a new one if done within `wait` seconds, otherwise the last one.
        After one call waited in vain, the others do not wait."""
        with self._wake:
            now = time.monotonic()
            since = self._asked.get(tenant, (0, now))[1]
            self._asked[tenant] = self.pending.handed, since
            if now - min(since for _, since in self._asked.values()) >= wait:
                wait = 0.0
            self._awake()
            self._wake.wait_for(lambda: tenant not in self._asked, wait)
        return self.tally.known.get(tenant)

    def drain(self) -> None:
        """Return when everything handed over before is done, successful or not."""
        self._work_off()
        if not self.pending.drain():
            raise StoreError(f"{self.folder.root} could not be written: {self.pending.silence()}")

    def catch_up(self) -> None:
        """Finish everything handed over, count every use, and remove everything expired."""
        self.drain()
        self._keeper.sweep_at = 0.0
        self._keeper.pay(at_once=True)
        self._after()

    def flush(self, tenant: str | None = None) -> None:
        """Return when all writes handed over before are on the disk, or raise with what is not."""
        self.drain()
        broken = self.disk.state != OK and not self._ground.probe(make=True)
        why = self.disk.why if broken else None
        self.pending.losses.report(str(self.folder.root), tenant, why)
        if broken:
            raise StoreError(f"{self.folder.root} could not be written: {why}")

    def close(self, seconds: float = float("inf")) -> None:
        """Finish writing or give up after `seconds`; stop the thread until it is needed again."""
        with self._wake:
            thread, self._stopping = self._thread, True
            self._wake.notify_all()
        self._work_off()
        if thread is not None:
            if not self.pending.drain(seconds):
                logger.warning(
                    "giving up on the store %s: %s", self.folder.root, self.pending.silence()
                )
                return
            thread.join(min(seconds, STUCK))
        self._let_go()

    before_exit = close

    def retire(self) -> None:
        """Called for a dropped store: write what waits and end the thread. This does not wait,
        because the garbage collector calls it."""
        self._stopping = self._retired = True
        if self._thread is None:
            self.guard.try_to_close()
        elif self._wake.acquire(blocking=False):
            self._wake.notify_all()
            self._wake.release()

    def _let_go(self) -> None:
        if self.tally.has_events and os.path.isdir(self.folder.root) and not self.disk.is_aside:
            self._after()
        self.guard.close()

    def _awake(self) -> None:
        if self._thread is None:
            self._stopping = False
            self._thread = begin(self._run, "keepsight-store")
        self._wake.notify_all()

    def _work_off(self) -> None:
        """If no thread can be started, the waiting caller does the work."""
        while self._thread is None and self._has_things_to_do():
            self._round()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._round():
            pass
        if self._retired:
            self._let_go()

    def _round(self) -> bool:
        """Process one batch and keep nothing of it; return whether to continue."""
        batch = self._next()
        tenants = {job.place.tenant for job in batch}
        try:
            if batch:
                self._write_batch(batch)
            if self._asked:
                self._keeper.sweep_at = 0.0
            self._after(tenants, batch)
            self._count_all(len(batch), tenants)
        except Exception:
            logger.exception("the store %s: housekeeping failed; going on", self.folder.root)
        with self._wake:
            self.pending.finish(len(batch))
            if self._stopping and not self._has_things_to_do():
                self._thread = None
                return False
            return True

    def _next(self) -> list[PendingWrite]:
        """The next batch to write. Uses wait briefly for others, if nothing else is due."""
        if not self._has_work():
            pause = self._idle()
            with self._wake:
                if not self._has_work():  # `retire` may have notified just before this
                    self._wake.wait(LONGEST_PAUSE if pause is None else pause)
        with self._wake:
            if self._has_things_to_do():
                self._wake.wait_for(self._is_urgent, _REST)
        room = _BATCH_BYTES if self.budget is None else max(1, self.budget // 16)
        return self.pending.batch(_BATCH, room)

    def _is_urgent(self) -> bool:
        return bool(self.pending.order or self._asked or self._stopping)

    def _has_work(self) -> bool:
        return self._stopping or self._has_things_to_do()

    def _has_things_to_do(self) -> bool:
        """Whether there is work now: a refusing disk gets none until its pause is over."""
        due = self.tally.is_due and not self.disk.is_aside
        return bool(self.pending.order or self._asked or due)

    def _idle(self) -> float | None:
        """Add files of an unknown folder; return how long to sleep then, None for long."""
        if self.disk.state != OK and (self.disk.is_aside or not self._ground.probe(make=False)):
            return self.disk.wait or LONGEST_PAUSE
        try:
            more, gone = self._keeper.adopt_some()
            self.tally.evicted(gone)
            return 0.0 if more else self._keeper.pause()
        except OSError as error:
            self.guard.note(error)
        except Exception:  # if the thread ended here, `flush` would wait forever
            logger.exception("the store %s: housekeeping failed; going on", self.folder.root)
        return LONGEST_PAUSE

    def _after(self, tenants: set[str] | None = None, batch: Sequence[PendingWrite] = ()) -> None:
        due = self.tally.take()
        if self.disk.is_aside or not self._keeper.count(due.uses, due.events):
            self.tally.put_back(PendingCounts({}, due.events, [], set()))
        if self.disk.is_aside:
            self.tally.put_back(PendingCounts({}, {}, [], due.refused))
            return
        with contextlib.suppress(OSError):
            self._keeper.let_fall([p for p in due.refused if p not in self.pending.jobs])
            self._keeper.sweep(due.ended)
        self.tally.settle(due)
        if tenants:
            with contextlib.suppress(OSError):
                gone = self._keeper.fit(tenants)
                self.tally.evicted(gone)
                self._notice_pins({job.place: job.written for job in batch if job.written}, gone)

    def _notice_pins(self, sizes: dict[EntryName, int], gone: list[EntryName]) -> None:
        """Log if something just written could not stay because of pins."""
        crowded = self._keeper.crowded_out({p: sizes[p] for p in gone if p in sizes})
        for place, why in crowded.items():
            self._lose(place, why)
        if crowded:
            self.crowded = {place.tenant for place in crowded}
            self.pins.failed(StoreError(next(iter(crowded.values()))), PINNED)
        elif sizes:
            self.pins.worked()

    def _count_all(self, done: int, changed: set[str]) -> None:
        """Count requested tenants once earlier writes are done, and known ones that changed."""
        with self._wake:
            goal = self.pending.done + done
            asked = {tenant for tenant, (behind, _) in self._asked.items() if behind <= goal}
        try:
            if asked:
                self._ground.notice()
                self._complete()
            for tenant in asked | (changed & self.tally.known.keys()):
                self.tally.know(tenant, self._keeper.counted(tenant))
        except OSError as error:
            self.guard.note(error)
        finally:
            with self._wake:
                for tenant in asked:
                    self._asked.pop(tenant, None)

    def _complete(self) -> None:
        """Add files that others wrote to the catalogue, until there is something to write."""
        more = True
        while more and not (self.pending.order or self._stopping):
            more, gone = self._keeper.adopt_some()
            self.tally.evicted(gone)

    # -- writing ---------------------------------------------------------------------------------

    def _write_batch(self, batch: list[PendingWrite]) -> None:
        try:
            if self.disk.is_aside:
                return
            self._ground.begin()
            wanted = [job for job in batch if self._is_wanted(job)]
            accounts = {job.place.tenant: job.account for job in batch if job.account is not None}
            if not self._keeper.announce([job.row(0) for job in wanted], accounts):
                return
            written = self._write(wanted, accounts)
            there = {EntryName.of(row) for row in written}
            self._keeper.enter(written, [job.place for job in wanted if job.place not in there])
            for job in wanted:  # its base may have been removed meanwhile
                if job.place in there and not self.has_base(job.place, job.about):
                    self.guard.remove(self.guard.act(lambda c, p=job.place: c.tower([p])))  # type: ignore[misc]
                    self.tally.count(job.place.tenant, "refused")
        except OSError as error:
            self.guard.note(error)
        finally:
            for job in batch:
                if self.pending.forget(job):
                    self._lose(job.place, self.disk.why)

    def _is_wanted(self, job: PendingWrite) -> bool:
        """Whether to write it: it is not stored yet, and its base is."""
        if self.is_there(job.place):
            self._keeper.enter_file(job.place)
        elif self.has_base(job.place, job.about):
            return True
        else:
            self.refuse(job.place)
        self.pending.forget(job)
        return False

    def _write(self, jobs: list[PendingWrite], accounts: dict[str, str]) -> list[Entry]:
        """Write entries; return their rows. Entries not written stay queued and are lost."""
        begun = [(job, part) for job in jobs if (part := self._begin(job)) is not None]
        marks = begin_accounts(self.folder, accounts)
        self.folder.finish([*marks, *(part for _, part in begun)])
        rows = []
        for job, part in begun:
            if part.error is not None:
                self._ground.failed(part.error, job.nbytes)
                if self.pending.forget(job):
                    self._lose(job.place, self.disk.why or str(part.error))
                continue
            if not self.disk.is_aside:
                self.disk.worked()
            self.pending.forget(job)
            self.pending.losses.found(job.place.tenant, (job.place.kind, job.place.key))
            self.tally.count(job.place.tenant, "written")
            job.written = part.size
            rows.append(job.row(part.size))
        return rows

    def _begin(self, job: PendingWrite) -> PartFile | None:
        place = job.place
        self.pending.move()
        if self.disk.is_aside:
            return None
        try:
            job.ready.wait()
            parts = entryfile.spelled(place.kind, place.key, job.tensors, job.record, job.metadata)
            part = self.folder.begin(name_of(place), parts, layout.expiry(job.metadata))
            too_large = larger_than(part.size, self.budget, self.quota)
            if too_large is None:
                return part
            part.drop()
            self.pending.forget(job)
            self._lose(place, too_large)
        except OSError as error:
            self._ground.failed(error, job.nbytes)
        except Exception as error:
            self.pending.forget(job)
            self._lose(place, str(error))
            logger.exception("writing %s failed; going on without it", name_of(place))
        return None

    # -- a refusing disk --------------------------------------------------------------------------

    def _lose(self, place: EntryName, why: str) -> None:
        self.pending.losses.add(place.tenant, (place.kind, place.key), why)
        self.tally.count(place.tenant, "refused")
