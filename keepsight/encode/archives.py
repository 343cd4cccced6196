"""Reads images in tar and zip archives in place; nothing is unpacked to a disk.

The name of a member is a label, never a path. Members are read one at a time up to a limit,
whatever size an archive claims; links and devices are refused.
"""

from __future__ import annotations

import bz2
import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import IO

from keepsight.encode.items import Item, broken, of_bytes
from keepsight.errors import ImageError
from keepsight.media.sources import MAX_BYTES

MAX_MEMBERS = 10_000_000
MAX_UNPACKED = 1 << 40  # of a compressed tar, where skipping a member means unpacking it
_BLOCK = 512
_TORN = (tarfile.TarError, EOFError, zlib.error, zipfile.BadZipFile, OSError, ValueError)


def zip_items(path: str, place: str, images: Callable[[str], bool]) -> Iterator[Item]:
    """The images in a zip archive; `images` recognises them by name."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if len(members) > MAX_MEMBERS:
                raise ImageError(f"{path} has more than {MAX_MEMBERS} members")
            for member in members:
                if images(member.filename) and not member.is_dir():
                    yield _zip_item(archive, member, path, place)
    except (*_TORN, ImageError, NotImplementedError) as error:
        yield broken(path, place, f"{path} cannot be read as a zip archive: {error}")


def _zip_item(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: str, place: str) -> Item:
    name, place = f"{path}#{member.filename}", f"{place}#{member.filename}"
    if member.flag_bits & 1:
        return broken(name, place, f"{name} is encrypted; unpack it first")
    if member.file_size > MAX_BYTES:
        return broken(name, place, f"{name} is larger than {MAX_BYTES} bytes")
    try:
        with archive.open(member) as file:
            data = file.read(MAX_BYTES + 1)
    except (*_TORN, NotImplementedError, RuntimeError) as error:
        return broken(name, place, f"{name} cannot be unpacked: {error}")
    return of_bytes(data, name, place)


def tar_items(path: str, place: str, images: Callable[[str], bool]) -> Iterator[Item]:
    """The images in a tar archive, plain or compressed by gzip or bzip2."""
    try:
        with closing(_Bounded(path)) as file:
            # `r:` reads headers in place; the bounded file unpacks.
            with tarfile.open(fileobj=file, mode="r:", errorlevel=2) as archive:  # type: ignore[call-overload]
                yield from _members(archive, path, place, images)
                _check_end(archive, file)
    except (*_TORN, ImageError) as error:
        yield broken(path, place, f"{path} cannot be read further as a tar archive: {error}")


def _members(
    archive: tarfile.TarFile, path: str, place: str, images: Callable[[str], bool]
) -> Iterator[Item]:
    for number, member in enumerate(archive):
        if number == MAX_MEMBERS:
            raise ImageError(f"more than {MAX_MEMBERS} members")
        archive.members = []  # type: ignore[attr-defined]  # or it would remember them all
        if not member.isdir() and images(member.name):
            yield _tar_item(archive, member, f"{path}#{member.name}", f"{place}#{member.name}")


def _tar_item(archive: tarfile.TarFile, member: tarfile.TarInfo, name: str, place: str) -> Item:
    if not member.isreg():
        return broken(name, place, f"{name} is a link or a device and not a file; left alone")
    if member.size > MAX_BYTES:
        return broken(name, place, f"{name} is larger than {MAX_BYTES} bytes")
    file = archive.extractfile(member)
    data = file.read(MAX_BYTES) if file is not None else b""
    if len(data) != member.size:
        raise ImageError(f"it ends in the middle of {member.name}")
    return of_bytes(data, name, place)


def _check_end(archive: tarfile.TarFile, file: _Bounded) -> None:
    """An archive must end with zeros; `tarfile` also accepts a torn header."""
    file.seek(archive.offset)
    found = file.read(_BLOCK)
    if found != bytes(_BLOCK):
        raise ImageError("it breaks off, or what follows the last member is damaged")


class _Bounded(io.RawIOBase):
    """A file that is unpacked while it is read, and returns at most a member's limit at once.

    Long names and other tar headers are read whole, and a small compressed file may unpack to
    headers of any size.
    """

    def __init__(self, path: str) -> None:
        self._raw = open(path, "rb")  # noqa: SIM115  (closed by `close`)
        head = self._raw.read(4)
        self._raw.seek(0)
        self._file: IO[bytes] | gzip.GzipFile | bz2.BZ2File = self._raw
        self._packed = True
        if head.startswith(b"\x1f\x8b"):
            self._file = gzip.GzipFile(fileobj=self._raw)
        elif head.startswith(b"BZh"):
            self._file = bz2.BZ2File(self._raw)
        elif head.startswith((b"\xfd7zX", b"\x28\xb5\x2f\xfd")):
            self._raw.close()
            raise ImageError("xz and zstd are not supported; unpack it first")
        else:
            self._packed = False

    def read(self, size: int | None = -1) -> bytes:
        """Read some bytes from the current position."""
        if size is None or not 0 <= size <= MAX_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position from the start."""
        if self._packed and offset > MAX_UNPACKED:
            raise tarfile.ReadError(f"it unpacks to more than {MAX_UNPACKED} bytes")
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """The current position."""
        return int(self._file.tell())

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """Always, but forward moves have to unpack."""
        return True

    def close(self) -> None:
        """Close the file."""
        self._raw.close()
        super().close()
