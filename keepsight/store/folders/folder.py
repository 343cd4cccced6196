"""Files below one root, and never outside: no link inside the store is followed.

The root itself may be a link, because its owner chose it. Below it each folder is looked at before
a file in it is created, renamed or removed, and links are refused; nobody else can put one there,
because folders are private. The meaning of names is not known here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from keepsight.errors import InputError, StoreError
from keepsight.formats import tensorfile
from keepsight.system import private_files
from keepsight.system.places import expanded

PART, DAMAGED = ".part-", ".damaged"
BUFFER = -1  # the system's default size
_AT_ONCE = 16  # syncs sent to the disk together
_TIMES = 5  # attempts to create a folder that others remove
_LEFT_OVER = 3600.0  # seconds; no writer is at work on one part for so long


@dataclass
class PartFile:
    """A file that is written but not yet renamed to its place."""

    folder: Path
    last: str
    temporary: str
    file: BinaryIO
    size: int = 0
    error: OSError | None = None
    placed: bool = False

    def attempt(self, step: Callable[[], None]) -> None:
        """Run one step of finishing, unless an earlier one failed."""
        if self.error is None:
            try:
                step()
            except OSError as error:
                self.error = error

    def sync(self) -> None:
        """Sync its bytes to the disk."""
        self.attempt(lambda: os.fsync(self.file.fileno()))

    def put_in_place(self) -> None:
        """Rename it to its final name."""
        self.file.close()  # Windows renames no open file
        try:
            self._rename()
        except (IsADirectoryError, NotADirectoryError, FileExistsError):
            _aside(self.folder / self.last)  # a folder where a file should be
            self._rename()
        self.placed = True

    def _rename(self) -> None:
        os.replace(self.folder / self.temporary, self.folder / self.last)

    def drop(self) -> None:
        """Close it; delete it if it was not renamed."""
        with contextlib.suppress(OSError):
            self.file.close()
        if not self.placed:
            with contextlib.suppress(OSError):
                os.unlink(self.folder / self.temporary)


class Folder:
    """A root and the files below it, by names such as `package/ab/abcd.sight`."""

    def __init__(self, root: str | Path) -> None:
        try:
            if b"\0" in os.fsencode(root):
                raise ValueError("it has a zero byte in it")
        except ValueError as error:  # also: half of a surrogate pair
            raise InputError(f"{str(root)!r} is no path: {error}") from None
        self.root = expanded(root)
        self._fresh: set[str] = set()  # folders with new subfolders that are not synced
        self._mount: Path | None = None  # mount point of the root when it was last seen

    def look(self) -> None:
        """Record the root's mount point, if it exists."""
        if self._mount is None and os.path.isdir(self.root):
            self._mount = _mount_of(self.root)

    def can_be_made(self) -> bool:
        """Whether the root could be created again at its place."""
        there = self._mount is None or os.path.ismount(self._mount)
        return there and os.path.isdir(self.root.parent)

    def is_gone(self) -> bool:
        """Whether the root existed and is now missing, or only its mount point is left."""
        if self._mount is None:
            return False
        return not (os.path.isdir(self.root) and os.path.ismount(self._mount))

    def path(self, name: str) -> Path:
        """The path of a name."""
        return self.root / name

    def status(self, name: str) -> os.stat_result | None:
        """The status of a name (for a link, of the link); None if absent."""
        try:
            return os.lstat(self.root / name)
        except (OSError, ValueError):
            return None

    def read_file(self, name: str) -> bytes:
        """The bytes of a small file; a pipe in its place, which blocks forever, is refused."""
        status = self.status(name)
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"{name} is no file: {self.root}")
        return self.path(name).read_bytes()

    def write(self, name: str, parts: Iterable[bytes | memoryview], until: float | None) -> int:
        """Write a file completely to the disk, or not at all; return its size in bytes."""
        (done,) = self.finish([self.begin(name, parts, until)])
        if done.error is not None:
            raise done.error
        return done.size

    def begin(
        self, name: str, parts: Iterable[bytes | memoryview], until: float | None
    ) -> PartFile:
        """Write a file under a temporary name; `finish` renames it.

        `until` becomes its modification time: see `entryfile.live`.
        """
        *folders, last = name.split("/")
        self._make_root()
        temporary = f"{PART}{secrets.token_hex(8)}"
        inside, handle = self._new_file(folders, temporary)
        part = PartFile(inside, last, temporary, os.fdopen(handle, "wb", BUFFER))
        try:
            part.size = sum(part.file.write(some) for some in parts)
            part.file.flush()
            if until is not None:
                os.utime(inside / temporary, (time.time(), max(0.0, until)))
        except BaseException:
            part.drop()
            raise
        return part

    def _new_file(self, folders: list[str], last: str) -> tuple[Path, int]:
        """A folder, and an open new file in it. A process may remove the still empty folder
        (`remove_empty`); then it is created again."""
        for left in reversed(range(_TIMES)):
            try:
                inside = self._inside(folders, make=True)
                return inside, private_files.new_file(inside / last)
            except FileNotFoundError:
                if not left:
                    raise
        raise FileNotFoundError(f"{self.root}: the folder is removed again and again")

    def finish(self, parts: list[PartFile]) -> list[PartFile]:
        """Sync files and rename them; each then has its `error`, or none.

        First the bytes of all, then the names of all, then the folders, each group at once: a disk
        syncs many files in little more time than one.
        """
        _together(part.sync for part in parts)
        for part in parts:
            part.attempt(part.put_in_place)
        fresh, self._fresh = self._fresh, set()
        folders = {part.folder for part in parts if part.error is None}
        folders |= {self.root / folder for folder in fresh}
        _together(partial(tensorfile.sync_folder, folder) for folder in folders)
        for part in parts:
            part.drop()
        return parts

    def remove(self, name: str) -> bool:
        """Remove a file (of a link, the link); return whether it existed."""
        *folders, last = name.split("/")
        try:
            os.unlink(self._inside(folders) / last)
        except FileNotFoundError:
            return False
        return True

    def remove_empty(self, folder: str, below: str) -> None:
        """Remove a folder and its parents while they are empty and below `below`."""
        while folder.startswith(f"{below}/"):
            above, _, last = folder.rpartition("/")
            try:
                os.rmdir(self._inside(above.split("/")) / last)
            except OSError:
                return
            folder = above

    def set_aside(self, name: str) -> None:
        """Move whatever has this name out of the way."""
        *folders, last = name.split("/")
        with contextlib.suppress(FileNotFoundError):
            _aside(self._inside(folders) / last)

    def scan(self, folders: str) -> Iterator[tuple[str, os.stat_result]]:
        """Every file two levels below a folder such as `package`; links are not followed."""
        for shard in self.names(folders):
            for name in self.names(f"{folders}/{shard}"):
                status = self.status(f"{folders}/{shard}/{name}")
                if status is not None:
                    yield f"{folders}/{shard}/{name}", status

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty for a link or a file."""
        status = self.status(folder) if folder else None
        if status is not None and not stat.S_ISDIR(status.st_mode):
            return []
        try:
            return sorted(os.listdir(self.root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _make_root(self) -> None:
        first = self._mount is None
        if self._mount is not None and not os.path.ismount(self._mount):
            raise OSError(errno.ENODEV, f"nothing is mounted any more at {self._mount}")
        if os.path.isdir(self.root):
            self.look()
            return
        above = [folder for folder in self.root.parents if not folder.exists()]
        if not first and not os.path.isdir(self.root.parent):
            raise OSError(errno.ENOENT, f"the folder is gone: {self.root.parent}")
        private_files.make_folders(self.root)
        self.look()
        for folder in [self.root, *above]:
            tensorfile.sync_folder(folder.parent)

    def _inside(self, folders: list[str], make: bool = False) -> Path:
        """The folder at the end of these steps, none of which is a link."""
        here = self.root
        for depth, step in enumerate(folders):
            here = here / step
            try:
                mode = os.lstat(here).st_mode
            except FileNotFoundError:
                if not make:
                    raise
                private_files.new_folder(here)
                self._fresh.add("/".join(folders[:depth]))
                mode = os.lstat(here).st_mode
            if not stat.S_ISDIR(mode):
                raise StoreError(
                    f"{here} is a link or no folder; a store follows no links inside itself "
                    "(its root may be one): move it away"
                )
        return here


def _mount_of(folder: Path) -> Path:
    """The mount point of a folder."""
    here = folder.resolve()
    while not os.path.ismount(here):
        here = here.parent
    return here


def _together(steps: Iterable[Callable[[], None]]) -> None:
    """Sync several files at once (measured: 64 syncs in 10 ms instead of 360)."""
    waiting = list(steps)
    if len(waiting) < 2:
        for step in waiting:
            step()
        return
    try:
        with ThreadPoolExecutor(min(_AT_ONCE, len(waiting)), "keepsight-sync") as pool:
            for done in [pool.submit(step) for step in waiting]:
                done.result()
    except RuntimeError:  # at exit the interpreter starts no threads
        for step in waiting:
            step()


def left_over(status: os.stat_result) -> bool:
    """Whether a part of a file was left by a dead writer."""
    return status.st_mtime <= time.time() - _LEFT_OVER


def _aside(path: Path) -> None:
    try:
        os.replace(path, path.with_suffix(DAMAGED))
    except FileNotFoundError:
        raise
    except OSError:  # a folder, or something lies there that is one
        os.replace(path, path.with_suffix(f".{secrets.token_hex(4)}{DAMAGED}"))
