"""Calls to a disk that may hang: each runs in a thread, and the caller waits for a limited time.

A thread that waits for a disk cannot be interrupted, and readers hold the model while they wait. So
a call that takes too long is abandoned, and nothing more is asked of that disk until it returns:
whoever wanted to read computes instead. A disk may also answer every call, but slowly. A request
makes many calls, so the time of slow calls is added up, and the sum is limited too. When the
abandoned call has returned, the disk is used again after a pause, which grows each time.

The threads belong to no store: an idle one waits some seconds for the next call, then ends.
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
_QUICK = 0.5  # seconds; a call of less is no sign of a slow disk
_TOGETHER = 4.0  # seconds that slow calls may take together, before the disk is left alone
_FORGOTTEN = 30.0  # seconds after which slow calls of before do not count
_RATE = 16 << 20  # bytes a second; what comes slower is better computed
_IDLE_FOR = 10.0  # seconds that a thread waits for more to do
T = TypeVar("T")


class TimedCall(Generic[T]):
    """One call on its way."""

    def __init__(self, work: Callable[[TimedCall[T]], T]) -> None:
        self._work: Callable[[TimedCall[T]], T] | None = work
        self._ended = threading.Lock()
        self._ended.acquire()
        self._more = 0.0
        self.slack = 0.0  # of the time that it took, what reading its bytes may take
        self._result: T
        self._error: BaseException | None = None
        self.afterwards: Callable[[], object] = lambda: None

    def run(self) -> None:
        """Do it, in a thread for that."""
        work, self._work = self._work, None
        try:
            if work is not None:
                self._result = work(self)
        except BaseException as error:
            self._error = error
        self._ended.release()
        self.afterwards()

    def expect(self, nbytes: int) -> None:
        """Called by the work: the disk answered, and so many bytes will be read."""
        self._more = nbytes / _RATE
        self.slack += self._more

    def wait(self, seconds: float) -> bool:
        """Whether it came back in time."""
        begun = time.monotonic()
        while not self._ended.acquire(timeout=max(0.0, begun + seconds - time.monotonic())):
            if not self._more:
                return False
            seconds, self._more = seconds + self._more, 0.0
        return True

    def is_over(self) -> bool:
        """Whether it has come back by now, after a wait that ran out of time."""
        return self._ended.acquire(blocking=False)

    def result(self) -> T:
        """What came back."""
        if self._error is not None:
            raise self._error
        return self._result


class _Worker:
    """What a thread does that makes calls, one at a time."""

    def __init__(self) -> None:
        self._call: TimedCall | None = None
        self._given = threading.Lock()  # measured: a third of the time that a queue takes
        self._given.acquire()

    def give(self, call: TimedCall) -> None:
        """Give it the next call; only the thread that took this worker may."""
        self._call = call
        self._given.release()

    def run(self) -> None:
        """Until there has been nothing to do for a while."""
        while True:
            if not self._given.acquire(timeout=_IDLE_FOR):
                with contextlib.suppress(ValueError, IndexError):
                    _IDLE.remove(self)
                    return
                continue  # somebody took it at this very moment
            if self._call is not None:
                self._call.run()
            self._call = None  # what it holds has no owner any more
            _IDLE.append(self)


_IDLE: deque[_Worker] = deque()
os.register_at_fork(after_in_child=_IDLE.clear)


def start(call: TimedCall) -> None:
    """Have it made by some thread; by this one where no thread can be had any more."""
    try:
        worker = _IDLE.pop()
    except IndexError:
        worker = _Worker()
        if begin(worker.run, "keepsight-disk") is None:  # the interpreter is ending
            call.run()
            return
    worker.give(call)


class Reach:
    """Calls to one disk that are given up when it is slow."""

    def __init__(self, health: Health) -> None:
        self.health = health
        self.start_anew()
        forks.renew(self.start_anew)

    def start_anew(self) -> None:
        """With no call under way, as at first and after a fork."""
        self._left: set[TimedCall] = set()
        self._took, self._last_slow = 0.0, float("-inf")

    @property
    def is_closed(self) -> bool:
        """Whether no call is waiting at the moment."""
        return bool(self._left) or (self.health.state == SLOW and self.health.is_aside)

    def ask(self, work: Callable[[TimedCall[T]], T], otherwise: T) -> T:
        """The result of the work; `otherwise` where the disk takes too long, or took too long a
        moment ago."""
        return next(iter(self.ask_beside(work, 1)), otherwise)

    def ask_beside(self, work: Callable[[TimedCall[T]], T], count: int) -> list[T]:
        """Run the same work in so many threads at once, which share it; the results that come in
        time."""
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
        """Add up what slow calls take; too much of it is no answer either."""
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
        if call.is_over():  # at this very moment
            self._left.discard(call)
        self.health.failed(TimeoutError(f"no answer within {PATIENCE:g} s"), SLOW)
