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
from keepsight.system.places import check_new_folder, expanded

_LOCK = "lock"
_FULL = 2**20  # free bytes below which "no space" is the likely reason


@contextmanager
def _named(path: object, kinds: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        if isinstance(error, KeepsightError):
            raise
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"{path} cannot be written: {why}; name another folder with --to"
        ) from error


def check_target(to: str | Path) -> Path:
    """The path of a folder that does not exist yet, or is empty."""
    with _named(to, (OSError, RuntimeError)):  # the second of circular links
        check_new_folder(expanded(to))
        path = expanded(to).resolve()
        if os.path.ismount(path):
            raise InputError(f"{path} is where a disk is mounted; name a new folder below it")
        above = _above(path)
        if not above.is_dir():
            raise NotADirectoryError(20, "Not a directory")
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(13, "no right to write there")
    return path


def _above(path: Path) -> Path:
    """The nearest existing parent; the others are created when the work begins."""
    return next(parent for parent in path.parents if parent.exists())


def check_space(path: Path, needed: int) -> None:
    """Refuse if the disk has too few bytes left."""
    free = shutil.disk_usage(_above(path)).free
    if free < needed:
        raise InputError(
            f"{path} needs about {size_text(needed)}, and {size_text(free)} are free there; make "
            "room, or export to another disk"
        )


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder on the same disk: it takes its place in the end, or is removed."""
    prefix = f".{path.name}.exporting-"
    with _named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent, prefix)
        made = Path(tempfile.mkdtemp(dir=path.parent, prefix=prefix))
        try:
            with FileLock(made / _LOCK):
                folder = made / "export"
                folder.mkdir()
                yield folder
                mode = folder.stat().st_mode & 0o666
                for file in folder.rglob("*"):
                    if file.is_file():
                        file.chmod(mode)  # some libraries write files for their owner alone
                if path.exists():
                    path.rmdir()
                folder.rename(path)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _remove_leftovers(home: Path, prefix: str) -> None:
    """Remove what killed processes left."""
    for path in home.iterdir():
        if path.name.startswith(prefix) and path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # also a Timeout: another process works there
                with FileLock(path / _LOCK, timeout=0):
                    pass
                shutil.rmtree(path, ignore_errors=True)


def check_room(folder: Path) -> None:
    """Report a full disk: libraries that fail for it seldom name it."""
    if shutil.disk_usage(folder).free < _FULL:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def size_text(size: int) -> str:
    """A size in the unit that people use for disks and memory."""
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"
