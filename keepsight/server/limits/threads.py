"""Threads that prepare requests: small ones at once, large ones one after another.

Python's threads take turns, so many large requests at once would slow down everybody's tokens. Few
threads handle large ones. These have a lower priority, and while anybody else is served they rest
as long as they worked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from keepsight.kinds import Record
from keepsight.server.limits.turns import ThreadsInTurn

T = TypeVar("T")

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
