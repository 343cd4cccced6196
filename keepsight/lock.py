"""A lock that serves those who wait in the order they came, and that its holder may take again.

The scheduler of requests takes the model for one step and again for the next. With a plain lock it
would nearly always get it back before a waiting thread has woken up; here the lock is handed over.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """Used as `threading.RLock` is, with `with`."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._owner: int | None = None
        self._handed: threading.Lock | None = None  # whose turn it is, until that thread wakes up
        self._depth = 0

    def acquire(self) -> None:
        """Wait for one's turn; at once for the thread that has it already."""
        me = threading.get_ident()
        with self._guard:
            if self._owner == me:
                self._depth += 1
                return
            if self._owner is None and self._handed is None:
                self._owner, self._depth = me, 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # interrupted: nobody may be left waiting for this thread
            with self._guard:
                if self._handed is turn:
                    self._hand_over()
                else:
                    self._waiting.remove(turn)
            raise
        with self._guard:
            self._handed, self._owner, self._depth = None, me, 1

    def release(self) -> None:
        """Hand the lock to who has waited longest."""
        with self._guard:
            if self._owner != threading.get_ident():
                raise RuntimeError("the lock is released by a thread that does not have it")
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._hand_over()

    def _hand_over(self) -> None:
        self._handed = self._waiting.popleft() if self._waiting else None
        if self._handed is not None:
            self._handed.release()

    def __enter__(self) -> FairLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
