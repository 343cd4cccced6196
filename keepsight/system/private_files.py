"""Writes files that only their owner can read, whole or not at all: mode 0600, in folders of 0700.

They hold people's pictures and questions. The process's umask is neither read nor changed, and
existing files keep their modes. A folder with the set-group-ID bit is shared with a group on
purpose: new files in it get the rights that the group has there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

FILE, FOLDER = 0o600, 0o700
PART = ".part-"  # begins the name of a file that is being written
BUFFER = -1  # the system's default size


def file_mode(inside: os.stat_result) -> int:
    """The mode of a new file in a folder."""
    return FILE | (inside.st_mode & 0o060 if inside.st_mode & stat.S_ISGID else 0)


def folder_mode(inside: os.stat_result) -> int:
    """The mode of a new folder in a folder."""
    shared = inside.st_mode & stat.S_ISGID
    return FOLDER | (stat.S_ISGID | inside.st_mode & 0o070 if shared else 0)


def new_file(path: str | Path, mode: int | None = None) -> int:
    """Create and open a file to write."""
    if mode is None:
        mode = file_mode(os.stat(os.path.dirname(path) or "."))
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    grant(handle, mode)
    return handle


def grant(handle: int, mode: int) -> None:
    """Give an open file a mode that the umask may have narrowed; the umask never widens one."""
    if hasattr(os, "fchmod") and stat.S_IMODE(os.fstat(handle).st_mode) != mode:
        with contextlib.suppress(OSError):  # some file systems have no modes
            os.fchmod(handle, mode)


def new_folder(path: Path) -> None:
    """Create a folder, if none of that name exists."""
    mode = folder_mode(path.parent.stat())
    try:
        path.mkdir(mode)
    except FileExistsError:
        return
    if mode != FOLDER:
        with contextlib.suppress(OSError):  # some file systems have no modes
            path.chmod(mode)


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents; existing ones keep their modes."""
    for folder in [*reversed(path.parents), path]:
        if not folder.exists():
            new_folder(folder)
    if not path.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(path))


def mode_at(path: Path) -> int:
    """Mode of a file written to a path: that of the existing file, otherwise that of a new one."""
    with contextlib.suppress(OSError):
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            return stat.S_IMODE(status.st_mode) & 0o777
    return file_mode(path.parent.stat())


def reserve(path: Path) -> None:
    """Create an empty file if none exists, for a library that would make it readable by everybody.
    If that fails, the library reports why."""
    with contextlib.suppress(OSError):
        os.close(new_file(path))


def opener(path: str, flags: int) -> int:
    """For `open(..., opener=)`: only the owner can read a new file."""
    return os.open(path, flags, FILE)


class PartFile:
    """A file that is written under another name, and renamed to its own once it is whole."""

    def __init__(
        self, path: Path, parts: Iterable[bytes | memoryview], mode: int | None = None
    ) -> None:
        self.path, self._is_placed = path, False
        self._temporary = path.parent / f"{PART}{secrets.token_hex(8)}"
        self._file = os.fdopen(new_file(self._temporary, mode), "wb", BUFFER)
        try:
            self.size = sum(self._file.write(some) for some in parts)
            self._file.flush()
        except BaseException:
            self.drop()
            raise

    def sync(self) -> None:
        """Sync its bytes to the disk."""
        os.fsync(self._file.fileno())

    def put_in_place(self) -> None:
        """Rename it to its own name."""
        self._file.close()  # Windows renames no open file
        os.replace(self._temporary, self.path)
        self._is_placed = True

    def drop(self) -> None:
        """Close it; delete it if it was not renamed."""
        with contextlib.suppress(OSError):
            self._file.close()
        if not self._is_placed:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)


def write_whole(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file completely to the disk, or not at all; an existing one keeps its mode."""
    folders = [path.parent, *(folder.parent for folder in path.parents if not folder.exists())]
    make_folders(path.parent)
    part = PartFile(path, parts, mode_at(path))
    try:
        part.sync()
        part.put_in_place()
    finally:
        part.drop()
    for folder in folders:
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder outlive a power cut."""
    with contextlib.suppress(OSError):  # some file systems cannot; the rename still holds
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
