"""The folder of an export: checked before the long work, and filled in one step after it.

Files are written to a hidden folder beside their final place and moved there at once, so no reader
finds half an export. A killed process leaves that folder; the next export to the same place removes
it, and a lock shows that no other process works there.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from keepsight.errors import InputError, KeepsightError
from keepsight.runtimes.manifest import NAME
from keepsight.system.places import check_new_folder, expanded

_LOCK = "lock"
_FULL = 2**20  # free bytes below which "no space" is the likely reason


class ExportFolder:
    """A folder that does not exist yet, or is empty."""

    def __init__(self, to: str | Path) -> None:
        try:
            self.path = path = expanded(to).resolve()
            check_new_folder(path)
            if os.path.ismount(path):
                raise InputError(f"{path} is where a disk is mounted; name a new folder below it")
            if not os.access(self._there(), os.W_OK | os.X_OK):
                raise PermissionError(13, "no right to write there")
        except (OSError, RuntimeError) as error:  # circular links raise a RuntimeError
            raise _unwritable(to, error) from error
        self._prefix = f".{path.name}.exporting-"

    def _there(self) -> Path:
        """The nearest existing parent folder; the others are created when the work begins."""
        above = next(path for path in self.path.parents if path.exists())
        if not above.is_dir():
            raise NotADirectoryError(20, "Not a directory")
        return above

    def check_space(self, needed: int) -> None:
        """Refuse if the disk has too few bytes left."""
        free = shutil.disk_usage(self._there()).free
        if free < needed:
            raise InputError(
                f"{self.path} needs about {size_text(needed)}, and {size_text(free)} are free "
                "there; make room, or export to another disk"
            )

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder on the same disk, which is removed afterwards in any case."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            made = Path(tempfile.mkdtemp(dir=self.path.parent, prefix=self._prefix))
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            with FileLock(made / _LOCK):
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
        """Move a complete folder to its place."""
        try:
            # Some libraries write files that only their owner may read.
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
        """Remove leftovers of killed processes."""
        for path in self.path.parent.iterdir():
            if path.name.startswith(self._prefix) and path.is_dir() and not path.is_symlink():
                with suppress(OSError):  # also a Timeout: another process works there
                    with FileLock(path / _LOCK, timeout=0):
                        pass
                    shutil.rmtree(path, ignore_errors=True)


def check_room(folder: Path) -> None:
    """Report a full disk: libraries that fail for it seldom name it."""
    if shutil.disk_usage(folder).free < _FULL:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _unwritable(path: object, error: Exception) -> Exception:
    why = getattr(error, "strerror", None) or error
    return InputError(f"{path} cannot be written: {why}; name another folder with --to")


def size_text(size: int) -> str:
    """A size in the unit that people use for disks and memory."""
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"
