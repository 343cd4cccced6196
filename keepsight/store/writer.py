"""The one writing thread of a store: entries are written in order, and no answer waits for it.

Waiting entries are readable and bounded in bytes; what does not fit is refused and counted. A store
that raises is left alone for a while (`health`), and `flush` says what was lost. Every few batches,
and when nothing more waits, the thread looks after the store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from keepsight.errors import NotStored
from keepsight.kinds import Record
from keepsight.store import layout
from keepsight.store.contract import About, Content, Entry, EntryName, Name
from keepsight.store.health import Health, reason
from keepsight.system import forks
from keepsight.system.devices import COMPLETE, Fence, to_host
from keepsight.system.exits import STORES, begin, finish_before_exit

logger = logging.getLogger(__name__)

ROOM = 1 << 30  # bytes that may wait; further entries are refused
COUNTED = ("hits", "misses", "evictions", "written", "refused")
# What became of a write; any other text says why the entry is lost.
WRITTEN, THERE, REFUSED = "written", "there", "refused"
_OVERHEAD = 4096  # memory of a write besides its tensors
_BATCH, _BATCH_BYTES = 64, 64 << 20
_BATCHES = 8  # after which the thread looks after the store
_REST = 1.0  # seconds over which uses are collected
_SLEEP = 60.0  # the longest time between two looks at the store
_GATHERED = 100_000  # uses that wait for a store that refuses
_TENANTS = 10_000  # whose counts are in memory
_NAMED = 1000  # lost entries that are named; of others only the number is known


@dataclass(eq=False)
class Job:
    """One write that is waiting."""

    name: EntryName
    content: Content
    about: About
    account: str
    metadata: Record
    nbytes: int = 0
    ready: Fence = COMPLETE  # tensors from a device arrive before the write

    @classmethod
    def of(cls, name: EntryName, content: Content, about: About, account: str) -> Job:
        """The write of an entry; its tensors begin to leave their device."""
        tensors, record = content
        job = cls(name, content, about, account, layout.metadata_of(about, account, name.tenant))
        if tensors is not None:
            tensors, job.ready = to_host(tensors)
            job.content = tensors, record
        job.nbytes = job.size + _OVERHEAD
        return job

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in (self.content[0] or {}).values())

    def entry(self, nbytes: int) -> Entry:
        """Its row in a listing."""
        now = time.time()
        return Entry(
            self.name.kind,
            self.name.key,
            nbytes=nbytes,
            used=now,
            created=now,
            uses=1,
            cost=self.about.cost,
            depends_on=self.about.depends_on,
            media=tuple(self.about.media),
            expires=layout.expiry(self.metadata),
            tenant=self.name.tenant,
            account=self.account,
        )


class Counts:
    """Counts of events since a store was opened: of all, and of each of the latest tenants."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: Counter[str] = Counter()
        self._of: OrderedDict[str, Counter[str]] = OrderedDict()
        self._fresh: Counter[str] = Counter()  # by event and tenant

    def count(self, tenant: str, what: str, more: int = 1) -> None:
        """Count events."""
        with self._lock:
            self._all[what] += more
            self._of.setdefault(tenant, Counter())[what] += more
            self._of.move_to_end(tenant)
            while len(self._of) > _TENANTS:
                self._of.popitem(last=False)
            if len(self._fresh) < _GATHERED:
                self._fresh[f"{what} {tenant}"] += more

    def of(self, tenant: str | None) -> dict[str, int]:
        """The counts of one tenant, or of all."""
        with self._lock:
            found = self._all if tenant is None else self._of.get(tenant, Counter())
            return {name: found[name] for name in COUNTED}

    def take(self) -> dict[str, int]:
        """What was counted since the last call, as facts of an index."""
        with self._lock:
            fresh, self._fresh = self._fresh, Counter()
            return dict(fresh)


@dataclass
class Uses:
    """What readers found, for the store's index."""

    read: Counter[EntryName] = field(default_factory=Counter)
    over: set[EntryName] = field(default_factory=set)  # expired, or set aside

    @property
    def any(self) -> bool:
        """Whether there is anything to record."""
        return bool(self.read or self.over)


class Writer:
    """The queue, the thread, and the health of a store.

    `write` writes a batch and says what became of each entry; `tidy` looks after the store and says
    in how many seconds it wants to do so again; `let_go` is called when the thread ends.
    """

    def __init__(
        self,
        where: str,
        room: int,
        write: Callable[[list[Job]], dict[EntryName, str]],
        tidy: Callable[[Uses], float | None] = lambda uses: None,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        self.where, self.room = where, room
        self._write, self._tidy, self._let_go = write, tidy, let_go
        self.health = Health(f"the store {where} cannot be written")
        self.counts = Counts()
        self._start_anew()
        forks.renew(self._start_anew)  # a forked child has none of its parent's threads
        finish_before_exit(self, STORES)

    def _start_anew(self) -> None:
        self._changed = threading.Condition()  # reentrant: the collector may ring it, see `retire`
        self.jobs: dict[EntryName, Job] = {}
        self._order: deque[Job] = deque()
        self.nbytes = self._handed = self._done = 0
        self.uses = Uses()
        self._lost: dict[EntryName, str] = {}
        self._lost_more: Counter[str] = Counter()  # by tenant
        self._thread: threading.Thread | None = None
        self._is_ending = False

    # -- for callers -----------------------------------------------------------------------------

    def hand_over(self, job: Job, why_not: str | None) -> None:
        """Queue a write if there is room for it, and nothing else speaks against it."""
        with self._changed:
            if job.name in self.jobs:
                return
            if self.health.is_aside:
                why_not = self.health.why
            elif self.jobs and self.nbytes + job.nbytes > self.room:
                why_not = "too much waits to be written"
            if why_not is not None:
                self.lose(job.name, why_not)
                return
            self.jobs[job.name] = job
            self.nbytes += job.nbytes
            self._order.append(job)
            self._handed += 1
            self._awake()

    def waiting(self, name: EntryName) -> Job | None:
        """The entry among those that wait, if it has not expired."""
        job = self.jobs.get(name)
        return None if job is None or layout.expired(job.metadata) else job

    def used(self, name: EntryName, is_over: bool = False) -> None:
        """Record that an entry was read, or that it is unusable."""
        with self._changed:
            if is_over:
                self.uses.over.add(name)
            elif len(self.uses.read) < _GATHERED:
                self.uses.read[name] += 1
            self._awake()

    def lose(self, name: EntryName, why: str) -> None:
        """Record that this entry will not be written."""
        self.counts.count(name.tenant, "refused")
        with self._changed:
            if len(self._lost) < _NAMED or name in self._lost:
                self._lost[name] = why
            else:
                self._lost_more[name.tenant] += 1

    def stats(self, tenant: str | None) -> Record:
        """Counts, and bytes waiting, of one tenant or of all."""
        mine = [job for job in list(self.jobs.values()) if tenant in (None, job.name.tenant)]
        waiting = {"waiting": sum(job.nbytes for job in mine), "waiting_budget": self.room}
        return self.counts.of(tenant) | waiting

    def drain(self, seconds: float = float("inf")) -> bool:
        """Return when everything handed over before is written or lost, or at the deadline."""
        end = time.monotonic() + seconds
        while self._thread is None and self._order:  # at exit no threads are started
            self._write_some()
        with self._changed:
            goal = self._handed
            timeout = None if seconds == float("inf") else max(0.0, end - time.monotonic())
            return self._changed.wait_for(lambda: self._done >= goal, timeout)

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
        count = len(mine) + more.total()
        if count:
            reasons: dict[Name, str] = {(n.kind, n.key): why for n, why in mine.items()}
            raise NotStored.of(self.where, reasons, count, self.health.why or None)

    def close(self, seconds: float = float("inf")) -> None:
        """Finish writing, or give up after `seconds`; stop the thread until it is needed again."""
        end = time.monotonic() + seconds
        thread = self._thread
        self._end()
        if not self.drain(seconds):
            logger.warning("giving up on the store %s: entries wait for it", self.where)
            return
        if thread is not None:
            thread.join(None if seconds == float("inf") else max(0.0, end - time.monotonic()))
        else:
            self._look_after()
            self._let_go()

    before_exit = close

    def retire(self) -> None:
        """Write what waits and end the thread. This does not wait: the garbage collector calls it,
        in any thread and under any lock."""
        self._is_ending = True
        if self._thread is None:
            self._let_go()
        elif self._changed.acquire(blocking=False):
            self._changed.notify_all()
            self._changed.release()

    def _end(self) -> None:
        with self._changed:
            self._is_ending = self._thread is not None
            self._changed.notify_all()

    def _awake(self) -> None:
        if self._thread is None:
            self._is_ending = False
            self._thread = begin(self._run, "keepsight-store")
        self._changed.notify_all()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        pause, batches = _REST, 0
        while True:
            with self._changed:
                self._wait(pause, is_due=batches > 0)
                is_last = self._is_ending  # what was counted before it was told to end is kept
                waits = bool(self._order)
            if waits:
                self._write_some()
                batches += 1
            if is_last or not waits or batches >= _BATCHES:
                pause, batches = self._look_after(), 0
            with self._changed:
                if is_last and not self._order:
                    self._let_go()
                    self._thread, self._is_ending = None, False
                    return

    def _wait(self, seconds: float, is_due: bool) -> None:
        """Wait for work; with something to record, only a moment for more of it."""

        def is_called() -> bool:
            return bool(self._order) or self._is_ending

        if not is_due:
            self._changed.wait_for(lambda: is_called() or self.uses.any, seconds)
        if is_due or self.uses.any:
            self._changed.wait_for(is_called, _REST)

    def _write_some(self) -> None:
        """Write one batch, and keep nothing of it."""
        batch: list[Job] = []
        with self._changed:
            room = _BATCH_BYTES
            while self._order and len(batch) < _BATCH and room > 0:
                batch.append(self._order.popleft())
                room -= batch[-1].nbytes
        self._write_batch(batch)
        with self._changed:
            self._done += len(batch)
            self._changed.notify_all()

    def _write_batch(self, batch: list[Job]) -> None:
        became: dict[EntryName, str] = {}
        why = self.health.why
        if not self.health.is_aside:
            try:
                became = self._write(batch)
                if not self.health.is_aside:  # some of it may have failed
                    self.health.worked()
            except Exception as error:
                self.health.failed(error)
                why = reason(error)
        for job in batch:
            with self._changed:
                if self.jobs.get(job.name) is job:
                    self._forget(job)
            what, on = became.get(job.name, why), job.about.depends_on
            if what == REFUSED and on is not None:  # what lost its base is lost with it
                what = self._lost.get(EntryName(*on, job.name.tenant), what)
            self._settle(job.name, what)

    def _settle(self, name: EntryName, what: str) -> None:
        if what in (WRITTEN, REFUSED):
            self.counts.count(name.tenant, what)
        elif what != THERE:
            self.lose(name, what)
            return
        with self._changed:
            self._lost.pop(name, None)

    def _forget(self, job: Job) -> None:
        del self.jobs[job.name]
        self.nbytes -= job.nbytes

    def _look_after(self) -> float:
        """Look after the store; in how many seconds to do so again."""
        if self.health.is_aside:
            return _SLEEP
        with self._changed:
            uses, self.uses = self.uses, Uses(over=self.uses.over)
        try:
            pause = self._tidy(Uses(uses.read, set(uses.over)))
        except Exception as error:
            self.health.failed(error)
            return _SLEEP
        self.uses.over -= uses.over
        return _SLEEP if pause is None else min(_SLEEP, pause)


def larger_than(nbytes: int, budget: int | None, quota: int | None) -> str | None:
    """Why an entry can never be accepted, or None if it can."""
    for limit, what in ((budget, "budget of the store"), (quota, "quota of a tenant")):
        if limit is not None and nbytes > limit:
            return f"its {nbytes:,} bytes are more than the {what}, {limit:,}"
    return None
