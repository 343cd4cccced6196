"""One image of a source: its name, and how to open it later.

An item's name says where the image is, such as `scans.pdf#page=3`, and is the same in every run and
on every machine with the same sources. Its `place` leaves out where a source folder is on this
machine, so that all machines agree on the shard of each image. Names are labels: no file is ever
written under them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keepsight.errors import ImageError, InputError, KeepsightError
from keepsight.media.sources import (
    MAX_BYTES,
    Source,
    decode_bytes,
    file_label,
    open_source,
    read_bytes,
)
from keepsight.system import digests
from keepsight.system.words import check_dpi

# File types taken from a folder; a file named directly or by a glob with a suffix is always tried.
_SUFFIXES = {
    "image": r"avif|bmp|gif|heic|heif|jfif|jpe|jpeg|jpg|pbm|pgm|png|pnm|ppm|tga|tif|tiff|webp",
    "pdf": "pdf",
    "video": r"mp4|mov|mkv|webm|avi|m4v",
    "parquet": "parquet|pq",
    "arrow": "arrow|feather|ipc",
    "zip": "zip",
    "tar": r"tar|tgz|tbz2|tar\.gz|tar\.bz2|tar\.xz|tar\.zst",
    "list": "txt|lst|csv|tsv|jsonl|ndjson",
}
_KINDS = {kind: re.compile(rf".*\.(?:{s})", re.I | re.S) for kind, s in _SUFFIXES.items()}


def kind_of(path: str) -> str | None:
    """The kind of a file by its suffix, or None."""
    return next((kind for kind, suffixes in _KINDS.items() if suffixes.fullmatch(path)), None)


@dataclass(frozen=True)
class ReadOptions:
    """How sources are read."""

    column: str = "image"  # column of tables
    dpi: int = 144  # resolution of PDF pages
    fps: float | None = None  # frames per second of videos; None: a video is one medium

    def check(self) -> None:
        """Refuse impossible values by name."""
        check_dpi(self.dpi)
        if self.fps is not None and not 0 < self.fps <= 1000:
            raise InputError(f"fps={self.fps}; expected frames per second, up to 1000")


@dataclass(frozen=True)
class Item:
    """One image or video to encode."""

    name: str
    place: str
    open: Callable[[], Source]  # called in a thread; raises a KeepsightError if it cannot be opened
    nbytes: int = 0  # bytes in memory while it waits
    modality: str = "image"

    def in_shard(self, shard: tuple[int, int] | None) -> bool:
        """Whether a shard (number, count) contains it."""
        if shard is None:
            return True
        number, count = shard
        return int(digests.digest("shard", self.place)[:16], 16) % count == number - 1


def broken(name: str, place: str, error: str | Exception) -> Item:
    """An item that cannot be opened: it is reported, and the run continues."""
    reason = error if isinstance(error, KeepsightError) else ImageError(str(error))

    def refuse() -> Source:
        raise reason

    return Item(name, place, refuse)


def of_file(path: str, place: str) -> Item:
    """A file that holds one image."""
    return Item(path, place, lambda: open_source(Path(path)))


def of_bytes(data: bytes, name: str, place: str) -> Item:
    """An image from the bytes of a file."""
    if len(data) > MAX_BYTES:
        return broken(name, place, f"{name} is larger than {MAX_BYTES} bytes")
    return Item(name, place, lambda: _open_bytes(data, name), len(data))


def _open_bytes(data: bytes, name: str) -> Source:
    """Named like the same bytes elsewhere; only messages tell the place."""
    decode, file = lambda: decode_bytes(data, name), file_label(name)
    return dataclasses.replace(open_source(data), label=name, decode=decode, file=file)


def of_text(text: str, folder: str, name: str, place: str) -> Item:
    """An image behind a path (relative to `folder`), a URL or a data URI."""
    if not text.strip():
        return broken(name, place, f"{name}: there is no path in it")
    if text.startswith(("http://", "https://", "data:")):
        # The bytes of a URL are not kept: a list may have any number of them.
        return Item(name, place, lambda: of_bytes(read_bytes(text), name, place).open())
    if text.startswith("file://"):
        return Item(name, place, lambda: open_source(text))
    return Item(name, place, lambda: open_source(Path(folder, text)))


def of_value(value: object, folder: str, name: str, place: str) -> list[Item]:
    """The images in a cell of a table: bytes, {bytes, path}, a path, a URL, or a list of those."""
    if isinstance(value, list | tuple):
        parts = [of_value(v, folder, f"{name}#{i}", f"{place}#{i}") for i, v in enumerate(value)]
        return [item for part in parts for item in part]
    if isinstance(value, dict):
        data, path = value.get("bytes"), value.get("path")
        value = data if data is not None else path
    if isinstance(value, bytes | bytearray | memoryview):
        return [of_bytes(bytes(value), name, place)]
    if isinstance(value, str):
        return [of_text(value, folder, name, place)]
    if value is None:
        return [broken(name, place, f"{name}: the cell is empty")]
    why = (
        f"{name}: the cell holds a {type(value).__name__}, expected the bytes of an image file, "
        "{'bytes': ..., 'path': ...}, a path or a URL"
    )
    return [broken(name, place, why)]
