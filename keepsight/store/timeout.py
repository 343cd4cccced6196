"""Limits calls to a disk that may hang: each runs in a thread, and the caller waits for a limited
time.

A thread that waits for a disk cannot be interrupted, and readers hold the model's lock meanwhile.
So a slow call is abandoned, and the disk gets no further calls until it returns; readers compute
instead. A disk may also answer every call slowly. A request makes many calls, so the times of slow
calls are added up and the sum is limited too. When the abandoned call has returned, the disk is
used again after a pause that grows each time.

Threads belong to no store: an idle one waits some seconds for the next call, then ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from keepsight.store.health import SLOW, Health
from keepsight.system import forks
from keepsight.system.exits import begin

PATIENCE = 2.0  # seconds; a machine may be busy with other things
_QUICK = 0.5  # seconds; a shorter call does not count as slow
_TOGETHER = 4.0  # seconds that slow calls may take in total before a pause
_FORGOTTEN = 30.0  # seconds after which earlier slow calls no longer count
_RATE = 16 << 20  # bytes per second; slower data is better computed
_IDLE_FOR = 10.0  # seconds that a thread waits for another call
T = TypeVar("T")


class TimedCall(Generic[T]):
    """One call in progress."""

    def __init__(self, work: Callable[[TimedCall[T]], T]) -> None:
        self._work: Callable[[TimedCall[T]], T] | None = work
        self._ended = threading.Lock()
        self._ended.acquire()
        self._more = 0.0
        self.slack = 0.0  # seconds allowed for reading its bytes
        self._result: T
        self._error: BaseException | None = None
        self.afterwards: Callable[[], object] = lambda: None

    def run(self) -> None:
        """Make the call, in the thread for it."""
        work, self._work = self._work, None
        try:
            if work is not None:
                self._result = work(self)
        except BaseException as error:
            self._error = error
        self._ended.release()
        self.afterwards()

    def expect(self, nbytes: int) -> None:
        """Called by the work: the disk answered, and this many bytes will be read."""
        self._more = nbytes / _RATE
        self.slack += self._more

    def wait(self, seconds: float) -> bool:
        """Wait; return whether it finished in time."""
        begun = time.monotonic()
        while not self._ended.acquire(timeout=max(0.0, begun + seconds - time.monotonic())):
            if not self._more:
                return False
            seconds, self._more = seconds + self._more, 0.0
        return True

    def is_over(self) -> bool:
        """Whether it has finished by now, after a timeout."""
        return self._ended.acquire(blocking=False)

    def result(self) -> T:
        """The result."""
        if self._error is not None:
            raise self._error
        return self._result


class _Worker:
    """A thread's loop that makes calls, one at a time."""

    def __init__(self) -> None:
        self._call: TimedCall | None = None
        self._given = threading.Lock()  # measured: a third of the time of a queue
        self._given.acquire()

    def give(self, call: TimedCall) -> None:
        """Give it the next call; only for the thread that took this worker."""
        self._call = call
        self._given.release()

    def run(self) -> None:
        """Make calls until there was nothing to do for a while."""
        while True:
            if not self._given.acquire(timeout=_IDLE_FOR):
                with contextlib.suppress(ValueError, IndexError):
                    _IDLE.remove(self)
                    return
                continue  # another thread took it just now
            if self._call is not None:
                self._call.run()
            self._call = None  # the owner gave up this call
            _IDLE.append(self)


_IDLE: deque[_Worker] = deque()
if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_IDLE.clear)


def start(call: TimedCall) -> None:
    """Make the call in some thread; in this one if no thread can be started."""
    try:
        worker = _IDLE.pop()
    except IndexError:
        worker = _Worker()
        if begin(worker.run, "keepsight-disk") is None:  # the interpreter is exiting
            call.run()
            return
    worker.give(call)


class DiskCalls:
    """Calls to one disk that are abandoned if it is slow."""

    def __init__(self, health: Health) -> None:
        self.health = health
        self.start_anew()
        forks.renew(self.start_anew)

    def start_anew(self) -> None:
        """Reset the state: at first, and after a fork."""
        self._left: set[TimedCall] = set()
        self._took, self._last_slow = 0.0, float("-inf")

    @property
    def is_closed(self) -> bool:
        """Whether calls are allowed, because none is abandoned."""
        return bool(self._left) or (self.health.state == SLOW and self.health.is_aside)

    def ask(self, work: Callable[[TimedCall[T]], T], otherwise: T) -> T:
        """The result of the work; `otherwise` if the disk is too slow, or was so a moment ago."""
        return next(iter(self.ask_beside(work, 1)), otherwise)

    def ask_beside(self, work: Callable[[TimedCall[T]], T], count: int) -> list[T]:
        """Run the same work in several threads at once, which share it; return the results that
        arrive in time."""
        if self.is_closed:
            return []
        calls = [TimedCall(work) for _ in range(count)]
        for call in calls:
            start(call)
        begun = time.monotonic()
        late = [call for call in calls if not call.wait(PATIENCE)]
        for call in late:
            self._leave(call)
        if not late and self.health.state == SLOW:
            self.health.worked()
        self._count(begun, max((call.slack for call in calls), default=0.0))
        return [call.result() for call in calls if call not in late]

    def _count(self, begun: float, slack: float) -> None:
        """Add up the time of slow calls; too much counts as no answer."""
        now = time.monotonic()
        took = now - begun - slack
        if took < _QUICK:
            return
        self._took = took + (self._took if now - self._last_slow < _FORGOTTEN else 0.0)
        self._last_slow = now
        if self._took >= _TOGETHER:
            why = f"slow answers, of {self._took:.1f} s together"
            self._took = 0.0
            self.health.failed(TimeoutError(why), SLOW)

    def _leave(self, call: TimedCall) -> None:
        self._left.add(call)
        call.afterwards = lambda: self._left.discard(call)
        if call.is_over():  # just now
            self._left.discard(call)
        self.health.failed(TimeoutError(f"no answer within {PATIENCE:g} s"), SLOW)
