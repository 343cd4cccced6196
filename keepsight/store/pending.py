"""What was handed over and is not on the disk yet: readable, in order, and bounded in bytes.

A caller waits for it as long as there is progress, and not forever for a disk that hangs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from keepsight.kinds import Record
from keepsight.store.contract import About, Entry, Tensors
from keepsight.store.layout import EntryName
from keepsight.store.losses import Losses
from keepsight.store.rows import row_of
from keepsight.system.devices import COMPLETE, Fence

_OVERHEAD = 4096  # what a write takes in memory beside its tensors
STUCK = 30.0  # seconds without any progress after which a disk is no longer waited for


@dataclass
class PendingWrite:
    """One write that has not reached the disk yet."""

    place: EntryName
    record: Record
    tensors: Tensors | None  # None: a note, JSON alone
    about: About
    metadata: Record = field(default_factory=dict)  # what the file says of the entry
    nbytes: int = 0
    written: int = 0  # bytes on the disk, once it is there
    account: str | None = None  # whose quota it counts against, where that is known
    ready: Fence = COMPLETE  # before it, tensors that came from a device are not here yet

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in (self.tensors or {}).values())

    def row(self, nbytes: int) -> Entry:
        """It as the catalogue has it, with so many bytes on the disk."""
        now = time.time()
        created = self.metadata["created"] / 1000 if "created" in self.metadata else now
        return row_of(self.place, self.about, nbytes, created, now)


class Pending:
    """The queue of a writer. `changed` guards it, and is notified of all that happens to it."""

    def __init__(self, room: int) -> None:
        self.room = room  # bytes that may wait
        self.start_anew()

    def start_anew(self) -> None:
        """With nothing in it, as at first and after a fork."""
        self.changed = threading.Condition()  # reentrant: the collector may ring it, see `retire`
        self.jobs: dict[EntryName, PendingWrite] = {}
        self.nbytes = 0
        self.handed = self.done = 0
        self.order: deque[PendingWrite] = deque()
        self._moved = 0.0  # when there was progress last
        self.losses = Losses()

    def offer(self, job: PendingWrite) -> bool:
        """Take a write; False where there is no room for it."""
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
        """The next writes: so many at most, and about so many bytes."""
        taken: list[PendingWrite] = []
        with self.changed:
            while self.order and len(taken) < most and room > 0:
                taken.append(self.order.popleft())
                room -= taken[-1].nbytes
        return taken

    def forget(self, job: PendingWrite) -> bool:
        """It waits no longer; False when it did not wait."""
        with self.changed:
            if self.jobs.pop(job.place, None) is None:
                return False
            self.nbytes -= job.nbytes
            return True

    def stats(self, tenant: str | None) -> Record:
        """Bytes that wait, of one tenant or of all, and how many may."""
        mine = [job for job in list(self.jobs.values()) if tenant in (None, job.place.tenant)]
        return {"waiting": sum(job.nbytes for job in mine), "waiting_budget": self.room}

    # -- what became of them -----------------------------------------------------------------------

    def move(self) -> None:
        """There is progress."""
        self._moved = time.monotonic()

    def finish(self, count: int) -> None:
        """So many were dealt with, well or badly."""
        with self.changed:
            self.done += count
            self.move()
            self.changed.notify_all()

    def drain(self, seconds: float = float("inf")) -> bool:
        """Return when all that was handed over before has been dealt with; False where the disk did
        not answer for long, or the time is over."""
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
        """What to say of a disk that does not answer."""
        waiting = len(self.jobs)
        return f"the disk has not answered for {STUCK:.0f} s, and {waiting} entries wait for it"
