"""Reads images in tar and zip archives in place; nothing is unpacked to a disk.

The name of a member is a label, never a path. Members are read one at a time up to a limit,
whatever size an archive claims; links and devices are refused.
"""

from __future__ import annotations

import bz2
import gzip
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import IO, cast

from keepsight.encode.items import At, Item, broken, of_bytes
from keepsight.errors import ImageError
from keepsight.media.sources import MAX_BYTES
from keepsight.system.suffixes import kind_of

MAX_MEMBERS = 10_000_000
_BLOCK = 512
_DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, NotImplementedError),
    *(EOFError, OSError, ValueError, RuntimeError, ImageError),
)


def _is_image(name: str) -> bool:
    return kind_of(name) == "image" and not os.path.basename(name).startswith(".")


def zip_items(at: At) -> Iterator[Item]:
    """The images in a zip archive."""
    try:
        with zipfile.ZipFile(at.name) as archive:
            members = archive.infolist()
            if len(members) > MAX_MEMBERS:
                raise ImageError(f"more than {MAX_MEMBERS} members")
            for member in members:
                if _is_image(member.filename) and not member.is_dir():
                    yield _zip_item(archive, member, at.spot(member.filename))
    except _DAMAGED as error:
        yield broken(at, f"{at.name} cannot be read as a zip archive: {error}")


def zip_count(path: str) -> int | None:
    """The number of images in a zip archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(map(_is_image, archive.namelist()))
    except _DAMAGED:
        return None


def _zip_item(archive: zipfile.ZipFile, member: zipfile.ZipInfo, at: At) -> Item:
    if member.flag_bits & 1:
        return broken(at, f"{at.name} is encrypted; unpack it first")
    if member.file_size > MAX_BYTES:
        return broken(at, f"{at.name} is larger than {MAX_BYTES} bytes")
    try:
        with archive.open(member) as file:
            return of_bytes(file.read(MAX_BYTES + 1), at)
    except _DAMAGED as error:
        return broken(at, f"{at.name} cannot be unpacked: {error}")


def tar_items(at: At) -> Iterator[Item]:
    """The images in a tar archive, plain or compressed by gzip or bzip2."""
    try:
        with closing(_Bounded(at.name)) as file:
            # `r:` reads headers in place; the bounded file unpacks.
            with tarfile.open(fileobj=file, mode="r:", errorlevel=2) as archive:  # type: ignore[call-overload]
                for number, member in enumerate(archive):
                    if number == MAX_MEMBERS:
                        raise ImageError(f"more than {MAX_MEMBERS} members")
                    archive.members = []  # or it would remember them all
                    if _is_image(member.name) and not member.isdir():
                        yield _tar_item(archive, member, at.spot(member.name))
                file.seek(archive.offset)
                if file.read(_BLOCK) != bytes(_BLOCK):  # `tarfile` also accepts a torn header
                    raise ImageError("it breaks off, or what follows the last member is damaged")
    except _DAMAGED as error:
        yield broken(at, f"{at.name} cannot be read further as a tar archive: {error}")


def _tar_item(archive: tarfile.TarFile, member: tarfile.TarInfo, at: At) -> Item:
    if not member.isreg():
        return broken(at, f"{at.name} is a link or a device and not a file; left alone")
    if member.size > MAX_BYTES:
        return broken(at, f"{at.name} is larger than {MAX_BYTES} bytes")
    file = archive.extractfile(member)
    data = file.read(MAX_BYTES) if file is not None else b""
    if len(data) != member.size:
        raise ImageError(f"it ends in the middle of {member.name}")
    return of_bytes(data, at)


class _Bounded:
    """A file that is unpacked while it is read, and returns at most a member's limit at once.

    Long names and other tar headers are read whole, and a small compressed file may unpack to
    headers of any size.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            head = file.read(4)
        if head.startswith((b"\xfd7zX", b"\x28\xb5\x2f\xfd")):
            raise ImageError("xz and zstd are not supported; unpack it first")
        unpacking = {b"\x1f\x8b": gzip.GzipFile, b"BZh": bz2.BZ2File}
        found = (opened for start, opened in unpacking.items() if head.startswith(start))
        self._file: IO[bytes] = cast(Callable[..., IO[bytes]], next(found, open))(path, "rb")
        self.seek, self.tell, self.close = self._file.seek, self._file.tell, self._file.close

    def read(self, size: int = -1) -> bytes:
        """Read some bytes from the current position."""
        if not 0 <= size <= MAX_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)
