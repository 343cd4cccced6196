"""The queue of entries to write to an address, and the threads that write them.

Entries are readable from the moment they are handed over. Several are written at a time, but never
one before its base, nor two of one key out of order. So an interruption never leaves an entry
without the one it depends on.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from keepsight.kinds import Record
from keepsight.store import layout
from keepsight.store.contract import About, Entry, Tensors
from keepsight.store.losses import TOO_MUCH, Losses
from keepsight.system import forks
from keepsight.system.devices import COMPLETE, Fence, to_host
from keepsight.system.exits import STORES, begin, finish_before_exit
from keepsight.system.lock import Mutex

logger = logging.getLogger(__name__)

_AT_ONCE = 4
ROOM = 1 << 30  # bytes that may wait; further entries are refused


@dataclass(eq=False)
class RemoteWrite:
    """One entry in the queue."""

    name: str  # its place at the address
    kind: str
    key: str
    tensors: Tensors | None  # None: a note
    record: Record
    about: About
    base: str | None  # the name of its base
    metadata: Record  # the metadata for its file
    nbytes: int
    tenant: str
    after: list[RemoteWrite] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    failed: str | None = None
    unwanted: bool = False  # deleted while it was queued
    ready: Fence = COMPLETE  # tensors from a device arrive before the write

    def leave_device(self) -> None:
        """Start copying its tensors to the host, if they lie elsewhere."""
        if self.tensors is not None:
            self.tensors, self.ready = to_host(self.tensors)

    def entry(self) -> Entry:
        """Its data as a catalogue would have it."""
        now = time.time()
        return Entry(
            self.kind,
            self.key,
            self.nbytes,
            used=now,
            created=now,
            cost=self.about.cost,
            depends_on=self.about.depends_on,
            media=tuple(self.about.media),
            expires=layout.expiry(self.metadata),
            tenant=self.tenant,
        )


class Outbox:
    """A bounded queue and the threads that empty it."""

    def __init__(self, write: Callable[[RemoteWrite], None], room: int = ROOM) -> None:
        self._write, self._room = write, room
        self._lock = Mutex()
        self._forget()
        forks.renew(self._forget)  # a forked child has none of its parent's threads
        finish_before_exit(self, STORES)

    def _forget(self) -> None:
        self._jobs: dict[str, RemoteWrite] = {}
        self._keys: dict[str, list[RemoteWrite]] = {}
        self._late: list[RemoteWrite] = []
        self._queue: queue.SimpleQueue[RemoteWrite | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.losses = Losses()
        self.nbytes = 0

    def find(self, name: str) -> RemoteWrite | None:
        """The queued entry of that name, if any."""
        job = self._jobs.get(name)
        return None if job is None or job.unwanted else job

    def offer(self, job: RemoteWrite) -> bool:
        """Add an entry; False if there is no room, and then `settle` reports it."""
        with self._lock:
            if self.nbytes + job.nbytes > self._room:
                self.losses.add(job.tenant, (job.kind, job.key), TOO_MUCH)
                return False
            base = None if job.base is None else self._jobs.get(job.base)
            job.after = [*self._keys.get(job.key, []), *([] if base is None else [base])]
            self._jobs[job.name] = job
            self._keys.setdefault(job.key, []).append(job)
            self.nbytes += job.nbytes
            if len(self._threads) < min(_AT_ONCE, len(self._jobs)):
                thread = begin(self._work, "keepsight-outbox")
                self._threads += [] if thread is None else [thread]
        self._queue.put(job)
        return True

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            self._attempt(job)
            job = None  # keep nothing of it while waiting for the next

    def _attempt(self, job: RemoteWrite) -> None:
        try:
            self._one(job)
        except Exception as error:
            job.failed = str(error)
            if not isinstance(error, OSError):
                logger.exception("writing %s/%s failed; going on", job.kind, job.key)
        self._over(job)

    def _one(self, job: RemoteWrite) -> None:
        # The write it waits for was queued earlier, so it is running or done: this always ends.
        for earlier in job.after:
            earlier.done.wait()
            if earlier.failed is not None and earlier.name != job.name:
                raise OSError(f"{earlier.kind}/{earlier.key} was not written: {earlier.failed}")
        job.ready.wait()
        if not job.unwanted:
            self._write(job)

    def _over(self, job: RemoteWrite) -> None:
        with self._lock:
            if self._jobs.get(job.name) is job:
                del self._jobs[job.name]
            self._keys[job.key].remove(job)
            if not self._keys[job.key]:
                del self._keys[job.key]
            self.nbytes -= job.nbytes
            if job.failed is not None and not job.unwanted:
                self.losses.add(job.tenant, (job.kind, job.key), job.failed)
                # Its write may still succeed, long after it was given up.
                self._late = [*self._late[-1000:], job]
                job.tensors, job.record = None, {}
        job.after = []
        job.done.set()

    def stats(self, tenant: str | None) -> Record:
        """Bytes waiting, of one tenant or of all, and their limit."""
        mine = [job for job in self.waiting() if tenant in (None, job.tenant)]
        return {"waiting": sum(job.nbytes for job in mine), "waiting_budget": self._room}

    def waiting(self) -> list[RemoteWrite]:
        """All queued entries."""
        with self._lock:
            return list(self._jobs.values())

    def settle(self, seconds: float = float("inf")) -> bool:
        """Return when everything handed over before is written or lost, or at the deadline."""
        end = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while not self._threads:  # at exit the interpreter starts no threads
                if (job := self._queue.get_nowait()) is not None:
                    self._attempt(job)
        waiting = self.waiting()
        return all(job.done.wait(_left(end)) for job in waiting)

    def withdraw(self, unwanted: Callable[[RemoteWrite], bool]) -> None:
        """Cancel these writes, including one that hangs and may still succeed."""
        with self._lock:
            for job in [*self._jobs.values(), *self._late]:
                job.unwanted = job.unwanted or unwanted(job)
            self._late = [job for job in self._late[-1000:] if not job.unwanted]

    def close(self) -> None:
        """Write what waits and stop."""
        self.settle()
        threads = self._threads
        self.retire()
        for thread in threads:
            thread.join()

    def retire(self) -> None:
        """Let the threads end after writing what waits. This does not wait: the garbage collector
        calls it for a dropped store."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)

    before_exit = settle


def _left(end: float) -> float | None:
    return None if end == float("inf") else max(0.0, end - time.monotonic())
