"""Threads shared by accounts in turn, so that no account waits for all of another's work.

Each account has a queue, and the queues take turns. No account gets all threads at once: a busy one
leaves a quarter of them for later work of others.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Generic, TypeVar

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
