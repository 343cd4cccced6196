"""What is written here is its owner's alone: files of mode 0600 in folders of mode 0700.

People's pictures and what they asked are in it. The umask of the process is neither read nor
changed, and what existed before keeps its mode. A folder with the set-group-ID bit is one that its
owner shares with a group on purpose: what is made in it gets the rights that the group has there.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

FILE, FOLDER = 0o600, 0o700
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A folder to work in may be one that may not be listed.
_AT = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


def file_mode(inside: os.stat_result) -> int:
    """The mode of a new file in a folder."""
    return FILE | (inside.st_mode & 0o060 if inside.st_mode & stat.S_ISGID else 0)


def folder_mode(inside: os.stat_result) -> int:
    """The mode of a new folder in a folder."""
    shared = inside.st_mode & stat.S_ISGID
    return FOLDER | (stat.S_ISGID | inside.st_mode & 0o070 if shared else 0)


def new_file(name: str, flags: int, inside: int) -> int:
    """Open a file that is made in an open folder."""
    mode = file_mode(os.fstat(inside))
    handle = os.open(name, flags, mode, dir_fd=inside)
    grant(handle, mode)
    return handle


def grant(handle: int, mode: int) -> None:
    """Give an open file a mode that the umask may have narrowed; the umask never widens one."""
    if stat.S_IMODE(os.fstat(handle).st_mode) != mode:
        with contextlib.suppress(OSError):  # some file systems know no modes
            os.fchmod(handle, mode)


def new_folder(name: str, inside: int) -> None:
    """Make a folder in an open folder, where there is none of that name."""
    mode = folder_mode(os.fstat(inside))
    try:
        os.mkdir(name, mode, dir_fd=inside)
    except FileExistsError:
        return
    if mode != FOLDER:
        handle = os.open(name, _FOLDER, dir_fd=inside)
        try:
            grant(handle, mode)
        finally:
            os.close(handle)


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing; others keep their modes."""
    for folder in [*reversed(path.parents), path]:
        if not folder.exists():
            handle = os.open(folder.parent, _AT)
            try:
                new_folder(folder.name, handle)
            finally:
                os.close(handle)
    if not path.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(path))


def mode_at(path: Path) -> int:
    """The mode of a file that is written to a path: that of the file which is there, else a new
    one's."""
    with contextlib.suppress(OSError):
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            return stat.S_IMODE(status.st_mode) & 0o777
    return file_mode(path.parent.stat())


def reserve(path: Path) -> None:
    """Make an empty file where there is none, for a library that would make one for everybody to
    read. Where that fails the library says why."""
    with contextlib.suppress(OSError):
        handle = os.open(path.parent, _AT)
        try:
            os.close(new_file(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, handle))
        finally:
            os.close(handle)


def opener(path: str, flags: int) -> int:
    """For `open(..., opener=)`: a new file is its owner's alone."""
    return os.open(path, flags, FILE)
