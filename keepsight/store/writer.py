"""What a folder and an address have in common: one thread that writes, in order, while no answer
waits for it.

Waiting entries are readable and bounded in bytes; what does not fit is refused and counted. A store
that raises is left alone for a while (`health`), and `flush` says what was lost. Every few batches,
and when nothing more waits, the thread looks after the store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

from keepsight.errors import NotStored
from keepsight.kinds import Record
from keepsight.store import layout
from keepsight.store.contract import About, Content, Entry, EntryName, Found
from keepsight.store.health import OK, Health, reason
from keepsight.system import forks
from keepsight.system.devices import COMPLETE, Fence, to_host
from keepsight.system.exits import STORES, begin, finish_before_exit

logger = logging.getLogger(__name__)

ROOM = 1 << 30  # bytes that may wait; further entries are refused
EVENTS = ("hits", "misses", "evictions", "written", "refused")
Sum = tuple[str, str, int, int]  # a tenant, a kind, and their entries and bytes
# What became of a write; any other text says why the entry is lost.
WRITTEN, THERE, REFUSED = "written", "there", "refused"
_OVERHEAD = 4096  # memory of a write besides its tensors
_BATCH, _BATCH_BYTES = 64, 64 << 20
_BATCHES = 8  # after which the thread looks after the store
_REST = 1.0  # seconds without writes after which it does so, too
_SLEEP = 10.0  # the longest time between two looks at the store
_GATHERED = 100_000  # uses that wait for a store that refuses
_TENANTS = 10_000  # whose counts are in memory
_NAMED = 1000  # lost entries that are named; of others only the number is known


class Job:
    """One write that is waiting; its tensors begin to leave their device."""

    def __init__(self, name: EntryName, content: Content, about: About, account: str) -> None:
        self.name, self.content, self.about, self.account = name, content, about, account
        self.metadata = layout.metadata_of(about, account, name.tenant)
        self.base = name.on(about.depends_on)
        self.ready: Fence = COMPLETE
        if content[0] is not None:
            tensors, self.ready = to_host(content[0])
            self.content = tensors, content[1]
        self.nbytes = self.size + _OVERHEAD

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in (self.content[0] or {}).values())

    def entry(self, nbytes: int) -> Entry:
        """Its row in a listing."""
        found = layout.entry_of(self.name, self.metadata, nbytes, time.time(), time.time())
        return replace(found, cost=self.about.cost)


class Counts:
    """Counts of events since a store was opened: of all, and of each of the latest tenants."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str | None, Counter[str]] = {}

    def count(self, tenant: str, what: str) -> None:
        """Count an event."""
        with self._lock:
            for whose in (tenant, None):
                counts = self._of.pop(whose, Counter())
                counts[what] += 1
                self._of[whose] = counts
            if len(self._of) > _TENANTS:
                del self._of[next(iter(self._of))]

    def of(self, tenant: str | None, events: Iterable[str] = EVENTS) -> dict[str, int]:
        """The counts of one tenant, or of all."""
        with self._lock:
            found = self._of.get(tenant, Counter())
            return {event: found[event] for event in events}


class Writer:
    """The queue and its thread, counts, and health of a store.

    Who inherits from it finds entries (`find`), writes a batch of them (`write`), and may look
    after itself now and then (`tidy`). `problem` names every problem, if the error does not.
    """

    root: Path | None = None
    budget: int | None = None
    quota: int | None = None

    def __init__(self, label: str, room: int, problem: str | None = None) -> None:
        self.label, self.room = label, room
        self.health = Health(f"the store {label} cannot be written", name=problem)
        self.reads = Health(f"the store {label} cannot be read", name=problem)
        self.counts = Counts()
        self._start_anew()
        forks.renew(self._start_anew)  # a forked child has none of its parent's threads
        finish_before_exit(self, STORES)

    def _start_anew(self) -> None:
        self._changed = threading.Condition()  # reentrant: the collector may ring it, see `retire`
        self.jobs: dict[EntryName, Job] = {}  # in order
        self.nbytes = 0
        self.uses = Counter[EntryName]()  # reads that are not in the store's index yet
        self._lost: dict[EntryName, str] = {}
        self._lost_more = Counter[str]()  # by tenant
        self._thread: threading.Thread | None = None
        self._is_ending = False

    def find(self, names: list[EntryName]) -> dict[EntryName, Found]:
        """Those entries that are written, intact and not expired."""
        raise NotImplementedError

    def write(self, jobs: list[Job], became: dict[EntryName, str]) -> None:
        """Write entries, and enter what became of each; what is not entered is refused."""
        raise NotImplementedError

    def tidy(self) -> None:
        """Look after the store."""

    def let_go(self) -> None:
        """Release what the thread used."""

    # -- for callers -----------------------------------------------------------------------------

    def read(self, names: Iterable[EntryName]) -> dict[EntryName, Found]:
        """Those entries that wait or are written."""
        wanted = list(names)
        jobs = {name: job for name in wanted if (job := self.waiting(name))}
        found = self.find([name for name in wanted if name not in jobs])
        found |= {name: (job.content, job.metadata) for name, job in jobs.items()}
        for name in wanted:
            self.counts.count(name.tenant, "hits" if name in found else "misses")
        return found

    def put(self, name: EntryName, content: Content, about: About, account: str) -> None:
        """Queue a write, if there is room for it and nothing else speaks against it."""
        if name in self.jobs:
            return
        job = Job(name, content, about, account)
        why_not = larger_than(job.size, self.budget, self.quota)
        with self._changed:
            if name in self.jobs:
                return
            if self.health.is_aside:
                why_not = self.health.why
            elif self.jobs and self.nbytes + job.nbytes > self.room:
                why_not = "too much waits to be written"
            if why_not is not None:
                self._lose(name, why_not)
                return
            self.jobs[name] = job
            self.nbytes += job.nbytes
            self._awake()

    def waiting(self, name: EntryName) -> Job | None:
        """The entry among those that wait, once it is whole, if it has not expired."""
        job = self.jobs.get(name)
        if job is None or layout.expired(job.metadata):
            return None
        job.ready.wait()
        return job

    def used(self, name: EntryName) -> None:
        """Record that an entry was read, or set aside."""
        with self._changed:
            if len(self.uses) < _GATHERED:
                self.uses[name] += 1
            self._awake()

    def take_uses(self) -> Counter[EntryName]:
        """What was read since the last call."""
        with self._changed:
            uses, self.uses = self.uses, Counter()
            return uses

    def told(
        self,
        tier: str,
        sums: Iterable[Sum],
        counted: float | None,
        whose: str | None,
        *more: Health,
    ) -> Record:
        """The statistics of the store: what is in it (by kind and tenant), when that was counted
        (in seconds since the epoch, or None), counts of events since it was opened and what waits
        of `whose`, and the first of its problems ("ok", or its name), since when, and why."""
        kinds: dict[str, Counter[str]] = {}
        tenants: dict[str, Counter[str]] = {}
        for tenant, kind, entries, nbytes in sums:
            size = {"entries": entries, "bytes": nbytes}
            kinds.setdefault(kind, Counter()).update(size)
            tenants.setdefault(tenant, Counter()).update(size)
        healths = (self.health, self.reads, *more)
        worst = next((health for health in healths if health.state != OK), self.health)
        mine = [job for job in list(self.jobs.values()) if whose in (None, job.name.tenant)]
        return {
            "root": self.label,
            "tier": tier,
            **{what: sum(one[what] for one in kinds.values()) for what in ("entries", "bytes")},
            "kinds": {kind: dict(one) for kind, one in kinds.items()},
            "tenants": {tenant: dict(one) for tenant, one in tenants.items()},
            "counted": counted,
            "state": worst.state,
            "since": worst.since,
            "broken": worst.why or None,
            **self.counts.of(whose),
            "waiting": sum(job.nbytes for job in mine),
            "waiting_budget": self.room,
            "budget": self.budget,
            "quota": self.quota,
        }

    def drain(self, seconds: float | None = None) -> bool:
        """Return when everything handed over before is written or lost, or at the deadline."""
        with self._changed:
            last = next(reversed(self.jobs.values()), None)
        while self._thread is None and self.jobs:  # at exit no threads are started
            self._write_some()
        with self._changed:
            return self._changed.wait_for(
                lambda: last is None or self.jobs.get(last.name) is not last, seconds
            )

    def catch_up(self) -> None:
        """Drain, and look after the store now."""
        self.drain()
        self._look_after()

    def flush(self, tenant: str | None = None) -> None:
        """Return when everything handed over before is safe; raise with what is not. A store that
        was left alone is tried again by the next write."""
        self.drain()
        self.health.try_now()
        with self._changed:
            mine = {n: why for n, why in self._lost.items() if tenant in (None, n.tenant)}
            self._lost = {n: why for n, why in self._lost.items() if n not in mine}
            more = self._lost_more if tenant is None else Counter({tenant: self._lost_more[tenant]})
            self._lost_more = self._lost_more - more
        if count := len(mine) + more.total():
            reasons = {name[:2]: why for name, why in mine.items()}
            raise NotStored.of(self.label, reasons, count, self.health.why or None)

    def close(self, seconds: float | None = None) -> None:
        """Finish writing, or give up after `seconds`; stop the thread until it is needed again."""
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            thread, self._is_ending = self._thread, self._thread is not None
            self._changed.notify_all()
        if not self.drain(seconds):
            logger.warning("giving up on the store %s: entries wait for it", self.label)
        elif thread is not None:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        else:
            self._look_after()
            self.let_go()

    before_exit = close

    def retire(self) -> None:
        """Write what waits and end the thread. This does not wait: the garbage collector calls it,
        in any thread and under any lock."""
        self._is_ending = True
        if self._thread is None:
            self.let_go()
        elif self._changed.acquire(blocking=False):
            self._changed.notify_all()
            self._changed.release()

    # -- the thread ------------------------------------------------------------------------------

    def _awake(self) -> None:
        if self._thread is None:
            self._is_ending = False
            self._thread = begin(self._run, "keepsight-store")
        self._changed.notify_all()

    def _run(self) -> None:
        pause, batches = _REST, 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.jobs or self._is_ending, pause)
                is_last, waits = self._is_ending, bool(self.jobs)
            if waits:
                self._write_some()
                batches, pause = batches + 1, _REST
            if is_last or not waits or batches >= _BATCHES:
                self._look_after()
                pause, batches = _SLEEP, 0
            with self._changed:
                if is_last and not self.jobs:
                    self.let_go()
                    self._thread, self._is_ending = None, False
                    return

    def _write_some(self) -> None:
        """Write one batch, and keep nothing of it."""
        batch: list[Job] = []
        room = _BATCH_BYTES
        with self._changed:
            for job in islice(self.jobs.values(), _BATCH):
                batch.append(job)
                if (room := room - job.nbytes) <= 0:
                    break
        became: dict[EntryName, str] = {}
        why = self.health.why
        if not self.health.is_aside:
            try:
                self.write(batch, became)
                why = REFUSED
                self.health.worked()
            except Exception as error:
                self.health.failed(error)
                why = reason(error)
        with self._changed:
            for job in batch:
                self._settle(job, became.get(job.name, why))
            self._changed.notify_all()

    def _settle(self, job: Job, what: str) -> None:
        del self.jobs[job.name]
        self.nbytes -= job.nbytes
        if what == REFUSED and job.base is not None:  # what lost its base is lost with it
            what = self._lost.get(job.base, what)
        if what in (WRITTEN, THERE, REFUSED):
            self._lost.pop(job.name, None)
            if what != THERE:
                self.counts.count(job.name.tenant, what)
        else:
            self._lose(job.name, what)

    def _lose(self, name: EntryName, why: str) -> None:
        """Record that this entry will not be written."""
        self.counts.count(name.tenant, "refused")
        if len(self._lost) < _NAMED or name in self._lost:
            self._lost[name] = why
        else:
            self._lost_more[name.tenant] += 1

    def _look_after(self) -> None:
        if not self.health.is_aside:
            try:
                self.tidy()
            except Exception as error:
                self.health.failed(error)


def larger_than(nbytes: int, budget: int | None, quota: int | None) -> str | None:
    """Why an entry can never be accepted, or None if it can."""
    for limit, what in ((budget, "budget of the store"), (quota, "quota of a tenant")):
        if limit is not None and nbytes > limit:
            return f"its {nbytes:,} bytes are more than the {what}, {limit:,}"
    return None
