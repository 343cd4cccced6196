"""Names the problems of a disk, and how long the disk is left alone after each.

A disk that is full, read-only, slow or absent is not damaged: its entries are intact, and are used
again as soon as the disk allows. Only a file with wrong bytes is damaged. Each problem causes one
warning, however many entries it affects, and the disk is tried again after a growing pause.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
import time
from collections.abc import Callable

from keepsight.system import forks

logger = logging.getLogger(__name__)

OK = "ok"
FULL = "full"  # no room, or a limit on space or file size is reached
READ_ONLY = "read-only"
DENIED = "denied"  # no permission
GONE = "gone"  # the folder or its file system is missing
LOCKED = "locked"  # another process locks the catalogue for too long
SLOW = "slow"  # no answer within a reader's time limit
FAILING = "failing"  # device errors, too many open files, and other temporary errors
UNREACHABLE = "unreachable"  # an address does not answer
DAMAGED = "damaged"  # wrong bytes
PINNED = "pinned"  # pins leave no room for anything else

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0  # seconds that a disk is left alone
_QUIET = 600.0  # seconds in which a repeated problem is not logged again

_NUMBERS = {
    FULL: (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    READ_ONLY: (errno.EROFS,),
    DENIED: (errno.EACCES, errno.EPERM),
    GONE: (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EEXIST,  # a file is in the folder's place
        errno.ENODEV,
        errno.ENXIO,
        errno.ESTALE,
        errno.ENOTCONN,
    ),
    SLOW: (errno.ETIMEDOUT,),
}
_OF_NUMBER = {number: state for state, numbers in _NUMBERS.items() for number in numbers}

_OF_SQLITE = {
    sqlite3.SQLITE_FULL: FULL,
    sqlite3.SQLITE_READONLY: READ_ONLY,
    sqlite3.SQLITE_PERM: DENIED,
    sqlite3.SQLITE_AUTH: DENIED,
    sqlite3.SQLITE_BUSY: LOCKED,
    sqlite3.SQLITE_LOCKED: LOCKED,
    sqlite3.SQLITE_PROTOCOL: LOCKED,
    sqlite3.SQLITE_IOERR: FAILING,
    sqlite3.SQLITE_CANTOPEN: FAILING,
    sqlite3.SQLITE_NOMEM: FAILING,
    sqlite3.SQLITE_INTERRUPT: FAILING,
}
_OF_TEXT = {
    "locked": LOCKED,
    "is full": FULL,
    "readonly": READ_ONLY,
    "disk i/o": FAILING,
    "unable to open": FAILING,
}


def named(error: BaseException) -> str:
    """The kind of problem that an error is."""
    if isinstance(error, sqlite3.Error):
        return _of_sqlite(error)
    if isinstance(error, OSError) and error.errno is not None:
        return _OF_NUMBER.get(error.errno, FAILING)
    if isinstance(error, TimeoutError):
        return SLOW
    if isinstance(error, OSError):  # our own error: its cause tells more
        cause = error.__cause__
        return named(cause) if isinstance(cause, OSError | sqlite3.Error) else FAILING
    return DAMAGED


def reason(error: BaseException) -> str:
    """The text of an error without the file that met it, which may be another tenant's."""
    if isinstance(error, OSError) and error.strerror and error.errno is not None:
        return f"[Errno {error.errno}] {error.strerror}"
    return str(error)


def _of_sqlite(error: sqlite3.Error) -> str:
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_READONLY_DBMOVED:
        return GONE
    if code is not None:
        return _OF_SQLITE.get(code & 0xFF, DAMAGED)
    # Errors of Python's own module carry no code.
    text = str(error).lower() if isinstance(error, sqlite3.OperationalError) else ""
    return next((state for words, state in _OF_TEXT.items() if words in text), DAMAGED)


class Health:
    """The state of one disk for one kind of work; thread-safe."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self.start_anew()
        forks.renew(self.start_anew)

    def start_anew(self) -> None:
        """Reset the state: at first, and after a fork."""
        self._lock = threading.Lock()
        self.state, self.why = OK, ""
        self.since: float | None = None  # seconds since the epoch
        self._retry_at, self._failed_at, self._pause = 0.0, float("-inf"), FIRST_PAUSE
        self._warned: dict[str, float] = {}  # when each problem was last logged

    @property
    def is_aside(self) -> bool:
        """Whether it failed so recently that it is not tried again yet."""
        return self.state != OK and self._clock() < self._retry_at

    @property
    def wait(self) -> float | None:
        """Seconds until it should be tried again; None if nothing is wrong."""
        return None if self.state == OK else max(0.0, self._retry_at - self._clock())

    def failed(self, error: BaseException, state: str | None = None) -> None:
        """Report a failure; of several at one time only the first counts."""
        with self._lock:
            now, state = self._clock(), state or named(error)
            if state != self.state:
                self.since = time.time()
            elif now < self._retry_at:
                return
            again = now - self._failed_at < 2 * LONGEST_PAUSE
            self._pause = min(2 * self._pause, LONGEST_PAUSE) if again else FIRST_PAUSE
            self.state, self.why = state, reason(error)
            self._failed_at, self._retry_at = now, now + self._pause
            is_news = now >= self._warned.get(state, float("-inf")) + _QUIET
            self._warned[state] = now
        level = logging.WARNING if is_news else logging.DEBUG
        logger.log(level, "%s (%s: %s); going on without it", self._what, state, error)

    def worked(self) -> None:
        """Report success."""
        if self.state == OK:
            return
        with self._lock:
            self.state, self.why, self.since, self._retry_at = OK, "", None, 0.0
        logger.info("over: %s", self._what)

    def try_now(self) -> None:
        """End the pause, because a caller must know now."""
        self._retry_at = 0.0
