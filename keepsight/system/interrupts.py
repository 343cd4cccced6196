"""Lets Ctrl-C come at safe moments only.

Python may raise `KeyboardInterrupt` between any two steps of the main thread: also between taking a
lock and the `try` that gives it back, or in the middle of a count. So an interrupt waits while the
main thread is inside `with LATER`, which every lock of this package is. It is raised at the end, or
by `check` between two passes of a model. Who presses again after a few seconds does not wait.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

AGAIN = 3.0  # seconds after which a second interrupt is raised at once
_LOOK = 0.05  # seconds between two looks while waiting for a lock


class Later:
    """While it is entered, in the main thread, an interrupt waits. May be nested."""

    def __init__(self) -> None:
        self._depth = 0
        self._noted = 0.0  # when an interrupt came; 0 if none waits
        self._handler: Callable[[int, FrameType | None], object] | None = None

    def __enter__(self) -> None:
        if not _is_main():
            return
        if not self._depth:
            self._noted = 0.0
            handler = signal.getsignal(signal.SIGINT)
            self._handler = handler if callable(handler) else None
            if self._handler is not None:
                signal.signal(signal.SIGINT, self._note)  # from here on nothing is raised
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        if not self._depth or not _is_main():
            return
        self._depth -= 1
        if not self._depth and self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._raise()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self._noted and now - self._noted > AGAIN
        self._noted = self._noted or now
        if again:
            self._raise()

    def _raise(self) -> None:
        if self._noted and self._handler is not None:
            self._noted = 0.0
            self._handler(signal.SIGINT, None)

    def note(self) -> None:
        """Let an interrupt that was raised wait after all."""
        self._noted = time.monotonic()

    def check(self) -> None:
        """Raise the interrupt that waits, if any."""
        if self._noted and self._depth and _is_main():
            self._raise()

    def wait(self, lock: threading.Lock, timeout: float = -1.0) -> bool:
        """Take a lock; an interrupt ends the wait."""
        if not self._depth or not _is_main():
            return lock.acquire(timeout=timeout)
        end = math.inf if timeout < 0 else time.monotonic() + timeout
        while not lock.acquire(timeout=max(0.0, min(_LOOK, end - time.monotonic()))):
            self.check()
            if time.monotonic() >= end:
                return False
        return True


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


LATER = Later()
