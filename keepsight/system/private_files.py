"""Creates files that only their owner can read: mode 0600 in folders of mode 0700.

They hold people's pictures and questions. The process's umask is neither read nor changed, and
existing files keep their modes. A folder with the set-group-ID bit is shared with a group on
purpose: new files in it get the rights that the group has there.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

FILE, FOLDER = 0o600, 0o700


def file_mode(inside: os.stat_result) -> int:
    """The mode of a new file in a folder."""
    return FILE | (inside.st_mode & 0o060 if inside.st_mode & stat.S_ISGID else 0)


def folder_mode(inside: os.stat_result) -> int:
    """The mode of a new folder in a folder."""
    shared = inside.st_mode & stat.S_ISGID
    return FOLDER | (stat.S_ISGID | inside.st_mode & 0o070 if shared else 0)


def new_file(path: str | Path) -> int:
    """Create and open a file to write."""
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
