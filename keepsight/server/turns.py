"""The threads of a server besides its model's; keys take turns in them.

Small requests are prepared at once, large ones by few threads: Python's threads take turns, so many
large ones at once would slow down everybody's tokens. What waits for a disk, another server or the
model has threads of its own. No account has more than three quarters of the threads, nor of the
places in their queue, so others wait behind little.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar
from weakref import WeakValueDictionary

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
        self.pool = ThreadPoolExecutor(count, name, begin)
        self._most = max(1, count - max(1, count // 4))
        self._free: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def start(self, call: Callable[[], T]) -> Future[T]:
        """Hand a call to the threads, when it is its account's turn."""
        turn = self._free.setdefault(account.get(), asyncio.Semaphore(self._most))
        loop = asyncio.get_running_loop()

        def done(_: object) -> None:  # not before: who hangs up leaves a thread at work
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(turn.release)

        await turn.acquire()
        future = self.pool.submit(call)
        future.add_done_callback(done)
        return future

    async def run(self, call: Callable[[], T]) -> T:
        return await asyncio.wrap_future(await self.start(call))


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
        self.small = ThreadsInTurn(8, "keepsight-small")
        self.large = ThreadsInTurn(few, "keepsight-large", _give_way)
        self.waiting = ThreadsInTurn(32, "keepsight-waiting")
        self.wait = self.waiting.run  # what waits for a disk, another server or the model
        self._own = threading.local()

    async def start(self, work: Callable[[], T], large: bool = False) -> Future[T]:
        if large:
            return await self.large.start(lambda: self._rested(work))
        return await self.small.start(work)

    async def run(self, work: Callable[[], T], large: bool = False) -> T:
        return await asyncio.wrap_future(await self.start(work, large))

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
        """Start no further calls."""
        for threads in (self.small, self.large, self.waiting):
            threads.pool.shutdown(wait=False, cancel_futures=True)


def _give_way() -> None:
    """Let other threads go first. Only Linux has a priority per thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
