"""Opening the catalogue: while another process opens it too, and where nothing can be written.

SQLite waits for a lock that others hold, but not where a first reader wants to change how the file
is journalled: two that wait for each other would wait for ever, so it says "locked" at once. The
other is done within moments, so so this is tried again, for as long as one waits elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path

from keepsight.store import health
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
            if health.named(error) != health.LOCKED or time.monotonic() + pause > until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def opened_to_read(path: Path) -> Catalogue | None:
    """The catalogue of a folder in which nothing can be written; None where it cannot be read so,
    or does not know all files."""
    for mode in ("mode=ro", "immutable=1"):
        if mode == "immutable=1" and not _is_still(path):
            continue
        with contextlib.suppress(sqlite3.Error):
            found = Catalogue(path, mode)
            if found.fact("complete"):
                return found
            found.close()
    return None


def _is_still(path: Path) -> bool:
    """Whether we could not write it, and all of it is in its one file: so no process writes it
    now."""
    if os.access(path.parent, os.W_OK):
        return False
    try:
        return not os.stat(f"{os.fspath(path)}-wal").st_size
    except FileNotFoundError:
        return True
    except OSError:
        return False
