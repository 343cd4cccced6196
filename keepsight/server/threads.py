"""Threads in which requests are made ready: small ones at once, large ones one after another.

Python's threads take turns, so a large request in each of them would slow down the tokens of all.
There are few threads for large ones. They have a lower priority, and rest as long as they worked
while anybody else is being served.
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
from keepsight.server.turns import ThreadsInTurn

T = TypeVar("T")

LARGE_BODY = 1 << 18  # bytes
LARGE_TEXT = 1 << 15  # characters
LARGE_PICTURES = 1 << 22  # pixels, of all that a request shows
_SMALL = 8  # threads for what is quick
_MOST_LARGE = 4  # threads for what is not: each may have a picture in memory, several times
_NICE = 10
_LONGEST_REST = 2.0  # seconds


class RenderedMessages(list[Record]):
    """Messages for the library; `large` says that there is much to do for them."""

    large = False


def is_large(messages: object) -> bool:
    """Whether it takes long to make a prompt of some messages."""
    return isinstance(messages, RenderedMessages) and messages.large


class Threads:
    """All threads of a server but those of its model and of its fetching."""

    def __init__(self, active: Callable[[], int]) -> None:
        """`active`: how many requests are being served."""
        self._active = active
        self._small = ThreadsInTurn(_SMALL, "keepsight-small")
        few = min(_MOST_LARGE, max(1, (os.cpu_count() or 1) // 2))
        self.large = ThreadsInTurn(few, "keepsight-large", _give_way)
        self._own = threading.local()

    def submit(self, work: Callable[[], T], large: bool = False) -> Future[T]:
        """Do it in some thread."""
        return self.large.submit(lambda: self._rested(work)) if large else self._small.submit(work)

    async def run(self, work: Callable[[], T], large: bool = False) -> T:
        """The result of it, which the event loop waits for."""
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
        """Stop: no further call begins."""
        for threads in (self._small, self.large):
            threads.close()


def _give_way() -> None:
    """Let other threads go first. Only Linux gives a thread a priority of its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
