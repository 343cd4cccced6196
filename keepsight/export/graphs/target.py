"""Where an export goes: looked at before the long work, and filled in one step behind it.

The files are made in a hidden folder beside their final place and moved there whole, so no
reader finds half an export. A process that is killed leaves that folder; the next export to the
same place removes it, and knows by a lock that no other process works there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from keepsight.errors import InputError, KeepsightError
from keepsight.runtimes.manifest import NAME
from keepsight.system.places import check_new_folder

_LOCK = "lock"
_FULL = 2**20  # bytes free where something was just refused for want of room


class ExportFolder:
    """A folder that does not exist yet, or is empty."""

    def __init__(self, to: str | Path) -> None:
        try:
            self.path = path = Path(to).expanduser().resolve()
            check_new_folder(path)
            if os.path.ismount(path):
                raise InputError(f"{path} is where a disk is mounted; name a new folder below it")
            if not os.access(self._there(), os.W_OK | os.X_OK):
                raise PermissionError(13, "no right to write there")
        except (OSError, RuntimeError) as error:  # a ring of links is a RuntimeError
            raise _unwritable(to, error) from error
        self._prefix = f".{path.name}.exporting-"

    def _there(self) -> Path:
        """The nearest folder above it that exists: the others are made when the work begins."""
        above = next(path for path in self.path.parents if path.exists())
        if not above.is_dir():
            raise NotADirectoryError(20, "Not a directory")
        return above

    def check_space(self, needed: int) -> None:
        """Refuse where the disk has not so many bytes left."""
        free = shutil.disk_usage(self._there()).free
        if free < needed:
            raise InputError(
                f"{self.path} needs about {size_text(needed)}, and {size_text(free)} are free "
                "there; make room, or export to another disk"
            )

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder on the same disk; it is gone afterwards, whatever happens."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            made = Path(tempfile.mkdtemp(dir=self.path.parent, prefix=self._prefix))
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            with (made / _LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                folder = made / "export"
                folder.mkdir()
                yield folder
        except OSError as error:
            if isinstance(error, KeepsightError):
                raise
            raise _unwritable(self.path, error) from error
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def take(self, folder: Path) -> None:
        """Move a folder that is whole to its place."""
        try:
            # Some libraries write files that only their maker may read.
            mode = (folder / NAME).stat().st_mode
            for file in folder.rglob("*"):
                if file.is_file():
                    file.chmod(mode)
            if self.path.exists():
                self.path.rmdir()
            folder.rename(self.path)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def _remove_leftovers(self) -> None:
        """What processes left that were killed."""
        for path in self.path.parent.iterdir():
            if path.name.startswith(self._prefix) and path.is_dir() and not path.is_symlink():
                with suppress(OSError), (path / _LOCK).open("w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)


def check_room(folder: Path) -> None:
    """Say so where the disk is full: libraries that fail for it seldom name it."""
    if shutil.disk_usage(folder).free < _FULL:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _unwritable(path: object, error: Exception) -> Exception:
    why = getattr(error, "strerror", None) or error
    return InputError(f"{path} cannot be written: {why}; name another folder with --to")


def size_text(size: int) -> str:
    """In the unit that people think of disks and memory in."""
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"
