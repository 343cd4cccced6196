"""Opens the catalogue while another process opens it too, or where nothing can be written.

SQLite waits for locks, except when a first reader changes the journal mode: two such processes
would wait forever, so it raises "locked" at once. The other process is done within moments, so this
is retried for as long as other locks are waited for.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path

from keepsight.store import health
from keepsight.store.folders.catalogue import Catalogue

_PATIENCE = 5.0  # seconds, as for any other lock of the catalogue
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1


def opened(path: Path) -> Catalogue:
    """Open the catalogue at a path; raise the last error if it stays locked."""
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
    """Open the catalogue of an unwritable folder; None if unreadable or incomplete."""
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
    """Whether nobody writes it: we could not write it, and all of it is in its one file."""
    if os.access(path.parent, os.W_OK):
        return False
    try:
        return not os.stat(f"{os.fspath(path)}-wal").st_size
    except FileNotFoundError:
        return True
    except OSError:
        return False
