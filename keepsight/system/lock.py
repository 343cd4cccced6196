"""Locks: a fair one that serves waiting threads in order, and a plain one for a few steps at a
time.

The scheduler takes the model for one step and again for the next. With a plain lock it would nearly
always get it back before a waiting thread has woken up; `FairLock` is handed over.

The garbage collector may end an abandoned stream at any moment: in any thread, under any lock, even
in the middle of the methods below. Such code must not wait. It leaves a note of what is to be done
(`leave`), and the owner of the lock does it. Appending to a deque is atomic, and each method checks
the notes after it has released its own guard, so no note is missed.

Ctrl-C waits while a thread has one of these locks (`interrupts.py`), so no step under it is left
half done.

A `FairLock` belongs to the process that made it: what it protects may be half written in a forked
child, which cannot take it. A `Mutex` is free in every child.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from keepsight.errors import Forked
from keepsight.system import forks
from keepsight.system.exits import MODELS, finish_before_exit
from keepsight.system.interrupts import LATER

logger = logging.getLogger(__name__)

_FEW = 64  # threads remembered
_STEP = 1.0  # seconds in which a thread gets from one step under the lock to the next


class FairLock:
    """Works like `threading.RLock`, with `with`. `what` names for people what it protects."""

    def __init__(self, what: str = "the model") -> None:
        self._what = what
        self._inside: dict[int, None] = {}  # threads at work beside it
        self._ending = False
        self._notes: deque[Callable[[], object]] = deque()
        self._failed: deque[BaseException] = deque()  # errors of notes; raised by the next call
        self._process = os.getpid()
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._owner: int | None = None
        self._handed: threading.Lock | None = None  # the thread whose turn it is, until it wakes up
        self._depth = 0
        self._left: dict[int, float] = {}  # until when threads had it
        finish_before_exit(self, MODELS)

    @property
    def unusable(self) -> bool:
        """Whether this process is a fork of the one that made the lock."""
        return os.getpid() != self._process

    @property
    def taken(self) -> bool:
        """Whether a thread has the lock."""
        return self._owner is not None

    @property
    def held(self) -> bool:
        """Whether this thread has the lock."""
        return self._owner == threading.get_ident()

    def acquire(self, timeout: float = -1.0) -> bool:
        """Wait for the lock, forever or this many seconds; return whether this thread has it.

        Returns at once for the thread that already has it.
        """
        LATER.__enter__()
        came = False
        try:
            came = self._acquire(timeout)
        finally:
            if not came:
                LATER.__exit__()
        return came

    def _acquire(self, timeout: float) -> bool:
        if self.unusable:
            raise Forked(self._what)
        if self._owner == threading.get_ident():
            self._depth += 1
            return True
        turn = self._queue_up()
        if turn is not None and not self._wait(turn, timeout):
            return False
        self._do_notes()
        while self._failed:
            logger.error(
                "an abandoned answer could not be released", exc_info=self._failed.popleft()
            )
        return True

    def release(self) -> None:
        """Hand the lock to the thread that has waited longest."""
        if self._owner != threading.get_ident():
            raise RuntimeError("the lock is released by a thread that does not have it")
        if self._depth > 1:
            self._depth -= 1
        else:
            self._release()
        LATER.__exit__()

    def _release(self) -> None:
        self._do_notes()
        with self._guard:
            self._owner, self._depth = None, 0
            if len(self._left) > _FEW:
                self._left.clear()  # of threads long gone
            self._left[threading.get_ident()] = time.monotonic()
            self._hand_over()
        self._look_again()

    def leave(self, note: Callable[[], object]) -> None:
        """Have something done under the lock, at once if it is free. Never waits.

        If a thread holds the lock, that thread does it on release.
        """
        with LATER:
            self._notes.append(note)
            self._look_again()

    # -- whose turn it is ------------------------------------------------------------------------

    def _queue_up(self) -> threading.Lock | None:
        """None if the lock was free and is now ours, otherwise what to wait for."""
        with self._guard:
            if self._is_free():
                self._take()
                return None
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
            return turn

    def _wait(self, turn: threading.Lock, timeout: float) -> bool:
        came = False
        try:
            if LATER.wait(turn, timeout):
                with self._guard:
                    self._handed, came = None, True
                    self._take()
        finally:
            if not came:  # interrupted, or too late: no thread may keep waiting for this one
                self._step_back(turn)
        return came

    def _step_back(self, turn: threading.Lock) -> None:
        with self._guard:
            if self._handed is turn:
                self._hand_over()
            else:
                self._waiting.remove(turn)
        self._look_again()

    def _try(self) -> bool:
        """Take the lock if that needs no waiting, not even for the guard."""
        if self.unusable or not self._guard.acquire(blocking=False):
            return False
        try:
            if not self._is_free():
                return False
            self._take()
            return True
        finally:
            self._guard.release()

    def _is_free(self) -> bool:
        return self._owner is None and self._handed is None

    def _take(self) -> None:
        self._owner = threading.get_ident()
        self._depth = 1

    def _hand_over(self) -> None:
        self._handed = self._waiting.popleft() if self._waiting else None
        if self._handed is not None:
            self._handed.release()

    # -- notes -----------------------------------------------------------------------------------

    def _do_notes(self) -> None:
        while self._notes:
            try:
                self._notes.popleft()()
            except Exception as error:  # another's error must not keep the lock from this one
                self._failed.append(error)
            except BaseException:  # an interrupt: it is raised when the lock is given back
                LATER.note()

    def _look_again(self) -> None:
        """Do the work noted meanwhile, unless another thread has the lock and will do it."""
        while self._notes and self._try():
            self._release()

    # -- the end ---------------------------------------------------------------------------------

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Work with PyTorch that does not need the lock: the process does not end in the middle
        of it, unless the thread waits for the lock."""
        me = threading.get_ident()
        if self.held or me in self._inside:
            yield
            return
        self._inside[me] = None
        if self._ending:
            self.acquire()  # never comes
        try:
            yield
        finally:
            del self._inside[me]

    def before_exit(self, seconds: float) -> None:
        """Take the lock for good: a daemon thread then stops where it next wants it, not inside
        PyTorch, where the process would crash. Waits for threads that just had it."""
        if self.unusable:
            return
        others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        if not self.acquire(seconds):
            return
        LATER.__exit__()
        self._ending, end = True, time.monotonic() + seconds
        while len(self._waiting) < len(self._busy() & others) and time.monotonic() < end:
            time.sleep(0.005)

    def _busy(self) -> set[int | None]:
        """Threads that may be inside PyTorch: at work beside the lock, or just out of it."""
        since = time.monotonic() - _STEP
        recent = {thread for thread, left_at in list(self._left.items()) if left_at > since}
        return {*self._inside, *recent}

    def __enter__(self) -> FairLock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class Mutex:
    """Works like `threading.Lock`, for a few steps that never wait for anything else."""

    def __init__(self) -> None:
        self._renew()
        forks.renew(self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> Mutex:
        LATER.__enter__()
        try:
            LATER.wait(self._lock)
        except BaseException:
            LATER.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        LATER.__exit__()
