"""The threads of a server besides its model's; keys take turns in them.

Small requests are prepared at once, large ones by few threads: Python's threads take turns, so many
large ones at once would slow down everybody's tokens. What waits for a disk, another server or the
model has threads of its own. Each account has a queue, and the queues take turns; no account gets
all threads at once, a quarter is left for later work of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar

from keepsight.kinds import Record

T = TypeVar("T")

# The account of the current request; tasks that it starts inherit it.
account: ContextVar[str] = ContextVar("account", default="the server itself")

LARGE_BODY = 1 << 18  # bytes
LARGE_TEXT = 1 << 15  # characters
LARGE_PICTURES = 1 << 22  # pixels in all pictures of a request
_MOST_LARGE = 4  # threads for slow work: each may hold several copies of a picture in memory
_NICE = 10
_LONGEST_REST = 2.0  # seconds


class ThreadsInTurn:
    """A fixed number of threads for all accounts together."""

    def __init__(self, count: int, name: str, begin: Callable[[], None] | None = None) -> None:
        self._pool = ThreadPoolExecutor(count, name, begin)
        self._most = max(1, count - max(1, count // 4))  # most threads of one account at a time
        self._lines: dict[str, deque[_Work]] = {}  # accounts in order of service
        self._running: Counter[str] = Counter()
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        work = _Work(future, call)
        future.add_done_callback(lambda _: work.forget())
        with self._lock:
            self._pool.submit(self._do_some)  # raises after close
            self._lines.setdefault(account.get(), deque()).append(work)
        return future

    async def run(self, call: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self.submit(call))

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a thread."""
        with self._lock:
            return sum(map(len, self._lines.values()))

    def _do_some(self) -> None:
        """Work while something may start. If an account has all its threads, its next call starts
        when one of them finishes."""
        whose = self._next(None)
        while whose is not None:
            whose = self._next(whose)

    def _next(self, done: str | None) -> str | None:
        """Run the next call; return its account. `done` is the account whose call just ended."""
        with self._lock:
            if done is not None:
                self._running[done] -= 1
                if not self._running[done]:
                    del self._running[done]
            whose = next((one for one in self._lines if self._running[one] < self._most), None)
            if whose is None:
                return None
            line = self._lines.pop(whose)
            work = line.popleft()
            if line:
                self._lines[whose] = line  # behind all others
            self._running[whose] += 1
        work.do()
        return whose

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = [work for line in self._lines.values() for work in line]
            self._lines.clear()
        for work in left:
            work.future.cancel()


class _Work:
    """One waiting call; a cancelled one holds nothing."""

    def __init__(self, future: Future[T], call: Callable[[], T]) -> None:
        self.future, self._call = future, call

    def do(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._call())  # no longer cancelled, so not forgotten
        except BaseException as error:
            self.future.set_exception(error)

    def forget(self) -> None:
        del self._call


class RenderedMessages(list[Record]):
    """Messages for the library; `large` marks slow ones."""

    large = False


def is_large(messages: object) -> bool:
    return isinstance(messages, RenderedMessages) and messages.large


class Threads:
    """All threads of a server except those of its model."""

    def __init__(self, active: Callable[[], int]) -> None:
        """`active`: the number of requests being served."""
        self._active = active
        few = min(_MOST_LARGE, max(1, (os.cpu_count() or 1) // 2))
        self._small = ThreadsInTurn(8, "keepsight-small")
        self.large = ThreadsInTurn(few, "keepsight-large", _give_way)
        self._waiting = ThreadsInTurn(32, "keepsight-waiting")
        self.wait = self._waiting.run  # what waits for a disk, another server or the model
        self._own = threading.local()

    def submit(self, work: Callable[[], T], large: bool = False) -> Future[T]:
        return self.large.submit(lambda: self._rested(work)) if large else self._small.submit(work)

    async def run(self, work: Callable[[], T], large: bool = False) -> T:
        return await asyncio.wrap_future(self.submit(work, large))

    def _rested(self, work: Callable[[], T]) -> T:
        """Call it after this thread has rested as long as it worked before, if others are served:
        so one client's large requests take at most half of the interpreter's time."""
        rest = getattr(self._own, "until", 0.0) - time.monotonic()
        if rest > 0 and self._active() > 1:
            time.sleep(rest)
        begun = time.thread_time()
        try:
            return work()
        finally:
            spent = min(time.thread_time() - begun, _LONGEST_REST)
            self._own.until = time.monotonic() + spent

    def close(self) -> None:
        for threads in (self._small, self.large, self._waiting):
            threads.close()


def _give_way() -> None:
    """Let other threads go first. Only Linux has a priority per thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
