"""Names the problems of a store, and leaves it alone for a while after each.

A disk that is full, read-only or absent is not damaged: its entries are intact, and are used again
as soon as it allows. Only wrong bytes are damage. Each problem causes one warning, however many
entries it affects.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

OK = "ok"
FULL = "full"  # no room, or a limit on space or file size is reached
READ_ONLY = "read-only"
DENIED = "denied"  # no permission
GONE = "gone"  # the folder or its file system is missing
LOCKED = "locked"  # another process locks the index for too long
FAILING = "failing"  # device errors, too many open files, and other temporary errors
UNREACHABLE = "unreachable"  # an address does not answer
DAMAGED = "damaged"  # wrong bytes

PAUSE = 30.0  # seconds that a store is left alone
_QUIET = 600.0  # seconds in which a repeated problem is not logged again

_OF_NUMBER = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), FULL),
    errno.EROFS: READ_ONLY,
    **dict.fromkeys((errno.EACCES, errno.EPERM), DENIED),
    # EEXIST and ENOTDIR: a file is in the folder's place.
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENODEV, errno.ENXIO), GONE),
    **dict.fromkeys((errno.ESTALE, errno.ENOTCONN), GONE),
}
_OF_SQLITE = {
    sqlite3.SQLITE_FULL: FULL,
    sqlite3.SQLITE_IOERR_SHMSIZE: FULL,  # no room for the memory that its processes share
    sqlite3.SQLITE_READONLY: READ_ONLY,
    **dict.fromkeys((sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH), DENIED),
    **dict.fromkeys((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL), LOCKED),
    **dict.fromkeys((sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN), FAILING),
    **dict.fromkeys((sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT), FAILING),
}


def named(error: BaseException) -> str:
    """The kind of problem that an error is."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)  # errors of Python's own module have none
        if code is None:
            return DAMAGED
        return _OF_SQLITE.get(code) or _OF_SQLITE.get(code & 0xFF, DAMAGED)
    if not isinstance(error, OSError):
        return DAMAGED
    if error.errno is not None:
        return _OF_NUMBER.get(error.errno, FAILING)
    cause = error.__cause__  # our own error: its cause tells more
    return named(cause) if isinstance(cause, OSError | sqlite3.Error) else FAILING


def reason(error: BaseException) -> str:
    """The text of an error without the file that met it, which may be another tenant's."""
    if isinstance(error, OSError) and error.strerror and error.errno is not None:
        return f"[Errno {error.errno}] {error.strerror}"
    return str(error) or type(error).__name__


class Health:
    """The state of one store for one kind of work. Every step is one assignment, so threads need
    no lock. `name`: that of every problem; otherwise the error says which one it is."""

    def __init__(
        self, what: str, clock: Callable[[], float] = time.monotonic, name: str | None = None
    ) -> None:
        self._what, self._clock, self._name = what, clock, name
        self.state, self.why = OK, ""
        self.since: float | None = None  # seconds since the epoch
        self._retry_at = 0.0
        self._warned: dict[str, float] = {}  # when each problem was last logged

    @property
    def is_aside(self) -> bool:
        """Whether it failed so recently that it is not tried again yet."""
        return self.state != OK and self._clock() < self._retry_at

    def failed(self, error: BaseException) -> None:
        """Report a failure."""
        now, state = self._clock(), self._name or named(error)
        if state != self.state:
            self.since = time.time()
        self.state, self.why, self._retry_at = state, reason(error), now + PAUSE
        is_news = now >= self._warned.get(state, float("-inf")) + _QUIET
        self._warned[state] = now
        level = logging.WARNING if is_news else logging.DEBUG
        logger.log(level, "%s (%s: %s); going on without it", self._what, state, error)

    def worked(self) -> None:
        """Report success."""
        if self.state != OK:
            self.state, self.why, self.since = OK, "", None
            logger.info("over: %s", self._what)

    def try_now(self) -> None:
        """End the pause, because a caller asked."""
        self._retry_at = 0.0
