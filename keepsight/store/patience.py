"""Opening the catalogue while another process opens it too.

SQLite waits for a lock that others hold, but not where a first reader wants to change how the file
is journalled: two that wait for each other would wait for ever, so it says "locked" at once. The
other is done within moments, so whoever is told so tries again, for as long as one waits elsewhere.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from keepsight.store.catalogue import Catalogue

_PATIENCE = 5.0  # seconds, as for any other lock of the catalogue
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1


def opened(path: Path) -> Catalogue:
    """The catalogue at a path; the error where it is still locked at the end."""
    until, pause = time.monotonic() + _PATIENCE, _FIRST_PAUSE
    while True:
        try:
            return Catalogue(path)
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() + pause > until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def is_busy(error: BaseException) -> bool:
    """Whether somebody else has it at the moment."""
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
