"""Threads shared by accounts in turn, so that no account waits for all of another's work.

Each account has a queue, and the queues take turns. No account gets all threads at once: a busy one
leaves a quarter of them for later work of others.
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
from typing import Generic, TypeVar

from keepsight.kinds import Record

T = TypeVar("T")

# The account of the current request; tasks that it starts inherit it.
account: ContextVar[str] = ContextVar("account", default="the server itself")


class ThreadsInTurn:
    """A fixed number of threads for all accounts together."""

    def __init__(self, count: int, name: str, begin: Callable[[], None] | None = None) -> None:
        self._pool = ThreadPoolExecutor(count, name, begin)
        self._most = max(1, count - max(1, count // 4))  # most threads of one account at a time
        self._lines: dict[str, deque[_Work]] = {}  # accounts in order of service
        self._running: Counter[str] = Counter()
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a call in some thread, when it is its account's turn."""
        work = _Work(call)
        with self._lock:
            self._pool.submit(self._do_some)  # raises after close
            self._lines.setdefault(account.get(), deque()).append(work)
        return work.future

    async def run(self, call: Callable[[], T]) -> T:
        """The result of a call, for the event loop to await."""
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
            may = (name for name in self._lines if self._running[name] < self._most)
            whose = next(may, None)
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
        """Stop: start no further calls."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = [work for line in self._lines.values() for work in line]
            self._lines.clear()
        for work in left:
            work.future.cancel()


class _Work(Generic[T]):
    """One waiting call; a cancelled one holds nothing."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._call: Callable[[], T] | None = call
        self.future.add_done_callback(self._forget)

    def do(self) -> None:
        """Call it, unless it was cancelled."""
        call = self._call
        if call is None or not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(call())
        except BaseException as error:
            self.future.set_exception(error)

    def _forget(self, _: Future[T]) -> None:
        self._call = None


LARGE_BODY = 1 << 18  # bytes
LARGE_TEXT = 1 << 15  # characters
LARGE_PICTURES = 1 << 22  # pixels in all pictures of a request
_SMALL = 8  # threads for quick work
_MOST_LARGE = 4  # threads for slow work: each may hold several copies of a picture in memory
_NICE = 10
_LONGEST_REST = 2.0  # seconds


class RenderedMessages(list[Record]):
    """Messages for the library; `large` marks slow ones."""

    large = False


def is_large(messages: object) -> bool:
    """Whether making a prompt of some messages is slow."""
    return isinstance(messages, RenderedMessages) and messages.large


class Threads:
    """All threads of a server except those of its model and of fetching."""

    def __init__(self, active: Callable[[], int]) -> None:
        """`active`: the number of requests being served."""
        self._active = active
        self._small = ThreadsInTurn(_SMALL, "keepsight-small")
        few = min(_MOST_LARGE, max(1, (os.cpu_count() or 1) // 2))
        self.large = ThreadsInTurn(few, "keepsight-large", _give_way)
        self._own = threading.local()

    def submit(self, work: Callable[[], T], large: bool = False) -> Future[T]:
        """Run a call in some thread."""
        return self.large.submit(lambda: self._rested(work)) if large else self._small.submit(work)

    async def run(self, work: Callable[[], T], large: bool = False) -> T:
        """The result of a call, for the event loop to await."""
        return await asyncio.wrap_future(self.submit(work, large))

    def _rested(self, work: Callable[[], T]) -> T:
        """Call it after this thread has rested as long as it worked before."""
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
        """Stop: start no further calls."""
        for threads in (self._small, self.large):
            threads.close()


def _give_way() -> None:
    """Let other threads go first. Only Linux has a priority per thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
