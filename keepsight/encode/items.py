"""One image of a source: its name, and how to open it later.

An item's name says where the image is, such as `scans.pdf#page=3`, and is the same in every run and
on every machine with the same sources. Its `place` leaves out where a source folder is on this
machine, so that all machines agree on the shard of each image. Names are labels: no file is ever
written under them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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


@dataclass(frozen=True)
class ReadOptions:
    """How sources are read."""

    column: str = "image"  # column of tables
    dpi: int = 144  # resolution of PDF pages
    fps: float | None = None  # frames per second of videos; None: a video is one medium

    def check(self) -> None:
        """Refuse impossible values by name."""
        check_dpi(self.dpi)
        fps = 1 if self.fps is None else self.fps
        if not isinstance(fps, int | float) or not 0 < fps <= 1000:
            raise InputError(f"fps={self.fps!r}; expected frames per second, up to 1000")


class At(NamedTuple):
    """Where an image is: its name, and its place, which is equal on all machines."""

    name: str
    place: str

    def spot(self, text: object) -> At:
        """A spot inside, such as `page=3`."""
        return At(f"{self.name}#{text}", f"{self.place}#{text}")


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


def broken(at: At, error: str | Exception) -> Item:
    """An item that cannot be opened: it is reported, and the run continues."""

    def refuse() -> Source:
        raise error if isinstance(error, KeepsightError) else ImageError(str(error))

    return Item(*at, refuse)


def of_bytes(data: bytes, at: At) -> Item:
    """An image from the bytes of a file; named like the same bytes elsewhere."""
    if len(data) > MAX_BYTES:
        return broken(at, f"{at.name} is larger than {MAX_BYTES} bytes")

    def opened() -> Source:
        decode, file = lambda: decode_bytes(data, at.name), file_label(at.name)
        return dataclasses.replace(open_source(data), label=at.name, decode=decode, file=file)

    return Item(*at, opened, len(data))


def of_text(text: str, folder: str, at: At) -> Item:
    """An image behind a path (relative to `folder`), a URL or a data URI."""
    if not text.strip():
        return broken(at, f"{at.name}: there is no path in it")
    if text.startswith(("http://", "https://", "data:")):
        # The bytes of a URL are not kept: a list may have any number of them.
        return Item(*at, lambda: of_bytes(read_bytes(text), at).open())
    return Item(
        *at, lambda: open_source(text if text.startswith("file://") else Path(folder, text))
    )


def of_value(value: object, folder: str, at: At) -> Iterator[Item]:
    """The images in a cell of a table: bytes, {bytes, path}, a path, a URL, or a list of those."""
    if isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from of_value(part, folder, at.spot(number))
        return
    if isinstance(value, dict):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes | bytearray | memoryview):
        yield of_bytes(bytes(value), at)
    elif isinstance(value, str):
        yield of_text(value, folder, at)
    elif value is None:
        yield broken(at, f"{at.name}: the cell is empty")
    else:
        wanted = "the bytes of an image file, {'bytes': ..., 'path': ...}, a path or a URL"
        yield broken(at, f"{at.name}: the cell holds a {type(value).__name__}, expected {wanted}")
