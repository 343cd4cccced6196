"""Reads the files of entries, each within a time that depends on its size.

Damaged files are set aside with a warning and count as absent; unreachable files stay.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from keepsight.errors import FileError, WrongFormatVersion
from keepsight.store.folders.folder import Folder
from keepsight.store.folders.rows import name_of
from keepsight.store.folders.writer import Writer
from keepsight.store.health import SLOW
from keepsight.store.layout import EntryName
from keepsight.store.timeout import TimedCall

logger = logging.getLogger(__name__)
_READERS = max(1, min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2))
T = TypeVar("T")


class EntryFiles:
    """The files of one folder; its writer is told which are gone."""

    def __init__(self, folder: Folder, writer: Writer) -> None:
        self._folder, self._writer, self._reach = folder, writer, writer.reach

    def read(self, read: Callable[[Path, str, str], T], place: EntryName) -> T | None:
        """Read a file. Only a wrong file is set aside, not an unreachable one."""
        return self.read_all(read, [place]).get(place)

    def read_all(
        self, read: Callable[[Path, str, str], T], places: Sequence[EntryName]
    ) -> dict[EntryName, T]:
        """Read several files in parallel: checking bytes takes longer than reading them."""
        waiting = deque(places)

        def work(call: TimedCall[dict[EntryName, T]]) -> dict[EntryName, T]:
            found = {}
            with contextlib.suppress(IndexError):  # nothing waits any more
                while place := waiting.popleft():
                    one = self._read(read, place, call)
                    if one is not None:
                        found[place] = one
            return found

        parts = self._reach.ask_beside(work, min(len(places), _READERS))
        return {place: one for part in parts for place, one in part.items()}

    def _read(
        self, read: Callable[[Path, str, str], T], place: EntryName, call: TimedCall
    ) -> T | None:
        path = self._folder.path(name_of(place))
        try:
            call.expect(os.stat(path).st_size)
            found = read(path, place.kind, place.key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except WrongFormatVersion as error:
            # Another version's entry is intact, and somebody may still want it.
            logger.warning("%s; left as it is", error)
        except (FileError, IsADirectoryError) as error:
            self.set_aside(place, error)
        except OSError as error:
            self._reach.health.failed(error)
        else:
            if self._reach.health.state != SLOW:  # it may have come far too late
                self._reach.health.worked()
            return found
        return None

    def set_aside(self, place: EntryName, error: object) -> None:
        """Move a file out of the way, with one warning."""
        path = self._folder.path(name_of(place))
        logger.warning("damaged entry set aside: %s (%s)", path, error)
        try:
            self._folder.set_aside(name_of(place))
        except OSError:
            return  # an unwritable folder: the file stays, and stays absent
        self._writer.over(place)
