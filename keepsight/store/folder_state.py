"""The folder of a store as a whole: whose it is, whether it is there, and whether it takes writes.

A folder that was there and is not is no reason to make one at once: its disk may have been taken
away, and what is written in its place would lie under it when it comes back.
"""

from __future__ import annotations

import errno
import os
import threading

from keepsight.errors import DamagedFile, StoreError, WrongFormatVersion
from keepsight.store import layout
from keepsight.store.catalogue import WRITING
from keepsight.store.catalogue_guard import CatalogueGuard
from keepsight.store.contract import NOTHING
from keepsight.store.folder import Folder
from keepsight.store.health import FULL, GONE
from keepsight.store.layout import EntryName
from keepsight.store.rows import row_of

_TRIAL = EntryName("", "alias", "0" * 64)  # of an entry that does not exist


class Ground:
    """Whether the folder can be written."""

    def __init__(self, folder: Folder, guard: CatalogueGuard) -> None:
        self.folder, self.guard, self.disk = folder, guard, guard.disk
        self.start_anew()

    def start_anew(self) -> None:
        """As at first, and after a fork."""
        self._is_marked = False
        self._probing = threading.Lock()  # a disk that comes back must not fail one of two probes
        self._room = 0  # bytes of the largest entry that found none

    def begin(self) -> None:
        """The marker, before anything else is written: it says whose folder this is. OSError where
        nothing can be written."""
        self.look()
        if self._is_marked and self.folder.status(layout.MARKER) is not None:
            return
        try:
            layout.check_marker(self.folder.read_file(layout.MARKER), str(self.folder.root))
        except (FileNotFoundError, DamagedFile):
            self.folder.write(layout.MARKER, [layout.marker_bytes()], None)
        except WrongFormatVersion as error:
            raise StoreError(str(error)) from error
        self._is_marked = True

    def look(self) -> None:
        """Raise OSError if the folder has vanished. A removed folder is made again after a
        while, if its file system is there: until then, a person may be moving it."""
        if self.folder.is_gone() and self.disk.state != GONE:
            raise OSError(errno.ENOENT, f"the folder is gone: {self.folder.root}")

    def notice(self) -> None:
        """Record it as a failure of the disk if the folder has vanished."""
        try:
            self.look()
        except OSError as error:
            self.disk.failed(error)

    def failed(self, error: OSError, nbytes: int) -> None:
        """An entry of that size could not be written."""
        self.disk.failed(error)
        self._room = max(self._room, nbytes)

    def probe(self, make: bool) -> bool:
        """Whether the disk takes writes again; asked when somebody wants to know for sure (then
        `make` the folder if it is gone), and when it was left alone for long enough."""
        with self._probing:
            return self._probe(make)

    def _probe(self, make: bool) -> bool:
        self.disk.try_now()
        try:
            if self.folder.is_gone() and not make:
                if self.folder.can_be_made():
                    return False  # by the next write
                raise OSError(errno.ENOENT, f"the folder is gone: {self.folder.root}")
            if self.disk.state == FULL:
                self._find_room()
            self.folder.write(layout.MARKER, [layout.marker_bytes()], None)
            self._try_catalogue()
        except OSError as error:
            self.disk.failed(error)
        if self.disk.is_aside:
            return False
        self.disk.worked()
        self._room = 0
        return True

    def _try_catalogue(self) -> None:
        """Enter a row, as an entry would need it: on a full disk what is there already can be
        changed while no row can be added. One that stays has no file, so the next to open the
        catalogue removes it."""
        self.guard.try_now()
        row = row_of(_TRIAL, NOTHING, 0, 0.0, 0.0)
        self.guard.try_to_change(lambda catalogue: catalogue.put([row], WRITING), None)
        if not self.disk.is_aside:
            self.guard.try_to_change(lambda catalogue: catalogue.drop([_TRIAL]), None)

    def _find_room(self) -> None:
        free = os.statvfs(self.folder.root)
        if free.f_bavail * free.f_frsize < self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
