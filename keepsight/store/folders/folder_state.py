"""The state of a store's folder: its owner, whether it exists, and whether it accepts writes.

A folder that vanished is not created again at once: its disk may be unmounted, and data written
there would be hidden when the disk returns.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading

from keepsight.errors import DamagedFile, StoreError, WrongFormatVersion
from keepsight.store import layout
from keepsight.store.contract import NOTHING
from keepsight.store.folders.catalogue import WRITING
from keepsight.store.folders.catalogue_guard import CatalogueGuard
from keepsight.store.folders.folder import Folder
from keepsight.store.folders.rows import row_of
from keepsight.store.health import FULL, GONE
from keepsight.store.layout import EntryName

_TRIAL = EntryName("", "alias", "0" * 64)  # key of an entry that does not exist


class FolderState:
    """Whether the folder can be written."""

    def __init__(self, folder: Folder, guard: CatalogueGuard) -> None:
        self.folder, self.guard, self.disk = folder, guard, guard.disk
        self.start_anew()

    def start_anew(self) -> None:
        """Reset the state: at first, and after a fork."""
        self._is_marked = False
        self._probing = threading.Lock()  # a returning disk must not fail one of two probes
        self._room = 0  # bytes of the largest entry that found no room

    def begin(self) -> None:
        """Write the marker before anything else: it names the owner of the folder. OSError if
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
        """Raise OSError if the folder has vanished. A removed folder is created again after a
        while, if its file system is there: until then, a person may be moving it."""
        if self.folder.is_gone() and self.disk.state != GONE:
            raise OSError(errno.ENOENT, f"the folder is gone: {self.folder.root}")

    def notice(self) -> None:
        """Record a disk failure if the folder has vanished."""
        try:
            self.look()
        except OSError as error:
            self.disk.failed(error)

    def failed(self, error: OSError, nbytes: int) -> None:
        """Record that an entry of this size could not be written."""
        self.disk.failed(error)
        self._room = max(self._room, nbytes)

    def probe(self, make: bool) -> bool:
        """Whether the disk accepts writes again. Called when a caller must know (`make` then
        creates a missing folder), and after a pause."""
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
        """Add a row, as an entry would need: a full disk can still change existing rows, but add
        none. A row that remains has no file, so it is removed when the catalogue is next opened."""
        self.guard.try_now()
        row = row_of(_TRIAL, NOTHING, 0, 0.0, 0.0)
        self.guard.try_to_change(lambda catalogue: catalogue.put([row], WRITING), None)
        if not self.disk.is_aside:
            self.guard.try_to_change(lambda catalogue: catalogue.drop([_TRIAL]), None)

    def _find_room(self) -> None:
        if shutil.disk_usage(self.folder.root).free < self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
