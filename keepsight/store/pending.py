"""Writes that have not reached the disk: readable, in order, and bounded in bytes.

A caller waits for them while there is progress, but not forever for a hanging disk.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from keepsight.kinds import Record
from keepsight.store.contract import About, Entry, Tensors
from keepsight.store.folders.rows import row_of
from keepsight.store.layout import EntryName
from keepsight.store.losses import Losses
from keepsight.system.devices import COMPLETE, Fence

_OVERHEAD = 4096  # memory of a write besides its tensors
STUCK = 30.0  # seconds without progress after which a disk is given up


@dataclass
class PendingWrite:
    """One write that has not reached the disk."""

    place: EntryName
    record: Record
    tensors: Tensors | None  # None: a note, only JSON
    about: About
    metadata: Record = field(default_factory=dict)  # the metadata in the file
    nbytes: int = 0
    written: int = 0  # bytes on the disk, once written
    account: str | None = None  # account for the quota, if known
    ready: Fence = COMPLETE  # tensors from a device arrive before the write

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in (self.tensors or {}).values())

    def row(self, nbytes: int) -> Entry:
        """Its catalogue row, given its bytes on the disk."""
        now = time.time()
        created = self.metadata["created"] / 1000 if "created" in self.metadata else now
        return row_of(self.place, self.about, nbytes, created, now)


class Pending:
    """The queue of a writer. `changed` guards it, and is notified of every event."""

    def __init__(self, room: int) -> None:
        self.room = room  # bytes that may wait
        self.start_anew()

    def start_anew(self) -> None:
        """Empty it: at first, and after a fork."""
        self.changed = threading.Condition()  # reentrant: the collector may ring it, see `retire`
        self.jobs: dict[EntryName, PendingWrite] = {}
        self.nbytes = 0
        self.handed = self.done = 0
        self.order: deque[PendingWrite] = deque()
        self._moved = 0.0  # time of the last progress
        self.losses = Losses()

    def offer(self, job: PendingWrite) -> bool:
        """Add a write; False if there is no room."""
        job.nbytes = job.size + _OVERHEAD
        with self.changed:
            if self.jobs and self.nbytes + job.nbytes > self.room:
                return False
            self.jobs[job.place] = job
            self.nbytes += job.nbytes
            self.order.append(job)
            self.handed += 1
            return True

    def batch(self, most: int, room: int) -> list[PendingWrite]:
        """The next writes, limited in number and roughly in bytes."""
        taken: list[PendingWrite] = []
        with self.changed:
            while self.order and len(taken) < most and room > 0:
                taken.append(self.order.popleft())
                room -= taken[-1].nbytes
        return taken

    def forget(self, job: PendingWrite) -> bool:
        """Remove a write; False if it was not waiting."""
        with self.changed:
            if self.jobs.pop(job.place, None) is None:
                return False
            self.nbytes -= job.nbytes
            return True

    def stats(self, tenant: str | None) -> Record:
        """Bytes waiting, of one tenant or of all, and their limit."""
        mine = [job for job in list(self.jobs.values()) if tenant in (None, job.place.tenant)]
        return {"waiting": sum(job.nbytes for job in mine), "waiting_budget": self.room}

    # -- results --------------------------------------------------------------------------------

    def move(self) -> None:
        """Record progress."""
        self._moved = time.monotonic()

    def finish(self, count: int) -> None:
        """Record that this many writes are done, successful or not."""
        with self.changed:
            self.done += count
            self.move()
            self.changed.notify_all()

    def drain(self, seconds: float = float("inf")) -> bool:
        """Return when everything handed over before is done; False after a long silence of the
        disk, or at the deadline."""
        with self.changed:
            goal, begun = self.handed, time.monotonic()
            while self.done < goal:
                end = min(max(self._moved, begun) + STUCK, begun + seconds)
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self.changed.wait(left)
        return True

    def silence(self) -> str:
        """The message for a disk that does not answer."""
        waiting = len(self.jobs)
        return f"the disk has not answered for {STUCK:.0f} s, and {waiting} entries wait for it"
