"""Opens pictures from bytes: allowed formats, and refusals before decoding.

Readers of formats trust the file. A small file may claim an enormous picture, or millions of parts
that Python reads one by one. So a file is checked here first: its format must be one of `FORMATS`,
its structure of a plausible size, and its pixels within the caller's limit.
"""

from __future__ import annotations

import importlib
import io
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterator

from PIL import Image, UnidentifiedImageError

from keepsight.errors import ImageError

MAX_PIXELS = 120_000_000  # decoded 360 MB; larger pictures are refused as decompression bombs
# Other readers trust files too much (an icon holds a picture of any size) or run programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "HEIF")
_HEIF = frozenset(b"heic heix heim heis hevc hevx mif1 msf1".split())  # without AVIF's
_PARTS = 65_536  # chunks, segments or blocks that a reader handles in Python
_SCANS = 100  # scans of a progressive JPEG; each covers the whole picture
_TAGS = 4096  # tags of a TIFF
_STRIPS = 1 << 18  # strips or tiles of a TIFF
_TILE = 1 << 22  # pixels per tile, even for a small picture
_SLOWLY_READ = 4 << 20  # bytes of formats decoded in Python: PNM as text, run-length BMP
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_QUIET = threading.Lock()  # warning filters are shared by all threads


def size_of(data: bytes, label: str) -> tuple[int, int]:
    """Width and height from the header alone; the caller decides how many pixels are too many."""
    with opened(data, label) as image:
        return image.size


def decode(data: bytes, label: str) -> Image.Image:
    """An upright RGB picture, as Transformers' `load_image` gives it."""
    with opened(data, label) as image:
        check_size(image.size, label)
        try:
            image.load()
            with _QUIET, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of any EXIF values
                turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
            upright = image.copy() if turn is None else image.transpose(turn)
        except Exception as error:  # PIL's decoders may raise anything for a damaged file
            raise ImageError(f"{label} cannot be decoded: {error}; is it truncated?") from error
    return upright if upright.mode == "RGB" else upright.convert("RGB")


def check_size(size: tuple[int, int], label: str) -> None:
    """Refuse an empty or far too large picture."""
    width, height = size
    if width < 1 or height < 1:
        raise ImageError(f"{label} is {width}x{height}: there is nothing to see")
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"{label} is {width}x{height}, more than {MAX_PIXELS} pixels: refused as a possible "
            "decompression bomb; make it smaller first"
        )


def opened(data: bytes, label: str) -> Image.Image:
    """The picture with only its header read."""
    if not data:
        raise ImageError(f"{label} is empty")
    Image.init()  # repeated after each newly registered plugin
    heif = data[4:8] == b"ftyp" and data[8:12] in _HEIF and b"avif" not in data[16:64]
    if heif and "HEIF" not in Image.OPEN:
        return _opened_heif(data, label)
    try:
        for start, check in _CHECKS.items():
            if data.startswith(start):
                check(data)
        with _QUIET, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Image.open(io.BytesIO(data), formats=[f for f in FORMATS if f in Image.OPEN])
    except UnidentifiedImageError:
        raise ImageError(
            f"{label} is not an image in a format that is opened here ({', '.join(FORMATS)}), or "
            "it is damaged"
        ) from None
    except Image.DecompressionBombError as error:
        raise ImageError(f"{label}: {error}") from None
    except _Refused as error:
        raise ImageError(f"{label} is refused: {error}; save it again, as PNG or JPEG") from None
    except Exception as error:
        raise ImageError(f"{label} cannot be decoded: {error}; is it truncated?") from error


def _opened_heif(data: bytes, label: str) -> Image.Image:
    """A HEIC photo, opened with Pillow's plugin for it, which is not registered globally."""
    try:
        plugin = importlib.import_module("pillow_heif")
    except ImportError:
        raise ImageError(
            f"{label} is a HEIC photo, and Pillow's plugin for these is not installed here: "
            "pip install pillow-heif, or save the photo as JPEG"
        ) from None
    try:
        image: Image.Image = plugin.HeifImageFile(io.BytesIO(data))
    except Exception as error:  # it may raise anything for a damaged file
        raise ImageError(f"{label} cannot be decoded: {error}; is it truncated?") from error
    return image


# -- the structure of a file ----------------------------------------------------------------------


class _Refused(Exception):
    """A file made to be slow, or to take memory."""


def _count(parts: Iterator[object], what: str) -> None:
    """Refuse more parts than a reader should handle."""
    for number, _ in enumerate(parts):
        if number == _PARTS:
            raise _Refused(f"it has more than {_PARTS} {what}")


def _check_png(data: bytes) -> None:
    def chunks() -> Iterator[int]:
        at = 8
        while at + 8 <= len(data) and data[at + 4 : at + 8] != b"IEND":
            yield at
            at += 12 + int.from_bytes(data[at : at + 4], "big")

    _count(chunks(), "chunks")


def _check_jpeg(data: bytes) -> None:
    def segments() -> Iterator[int]:
        at = 2
        while at + 4 <= len(data) and data[at : at + 2] != b"\xff\xda":
            yield at
            marker = data[at + 1] if data[at] == 0xFF else None
            if marker in (None, 0x00, 0xFF):  # no marker, or a padded one
                at += 1
            elif 0xD0 <= marker <= 0xD9 or marker == 0x01:  # type: ignore[operator]
                at += 2
            else:
                at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")

    _count(segments(), "segments")
    if data.count(b"\xff\xda") > _SCANS:
        raise _Refused(f"it has more than {_SCANS} scans")


def _check_gif(data: bytes) -> None:
    def blocks() -> Iterator[int]:
        at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
        while at < len(data) and data[at] not in b",;":
            yield at
            extension = data[at] == 0x21
            at += 2 if extension else 1
            while extension and at < len(data) and data[at]:
                yield at
                at += 1 + data[at]

    if len(data) > 13:
        _count(blocks(), "blocks before its first picture")


def _check_bmp(data: bytes) -> None:
    run_length = int.from_bytes(data[30:34], "little") in (1, 2)
    if run_length and len(data) > _SLOWLY_READ:
        raise _Refused(f"it is a run-length BMP of more than {_SLOWLY_READ} bytes")


_SPACE = rb"(?:\s|#[^\r\n]*[\r\n])+"
_PNM = re.compile(rb"P[1-6fF]" + _SPACE + rb"\d+" + _SPACE + rb"\d+" + _SPACE)


def _check_pnm(data: bytes) -> None:
    if data[1:2] not in b"0123456fFy":
        return
    if not _PNM.match(data[:4096]):
        raise _Refused("its header is damaged, or longer than 4096 bytes")
    if data[1:2] in b"123" and len(data) > _SLOWLY_READ:
        raise _Refused(f"it is a text PNM of more than {_SLOWLY_READ} bytes")


def _check_tiff(data: bytes) -> None:
    order = "<" if data[:2] == b"II" else ">"
    large = 43 in (data[2], data[3])  # BigTIFF: eight bytes where others have four
    head, count, entry = ("8xQ", "Q", "HHQ8s") if large else ("4xI", "H", "HHI4s")
    (at,) = struct.unpack_from(order + head, data)
    (entries,) = struct.unpack_from(order + count, data, at)
    if entries > _TAGS:
        raise _Refused(f"it has more than {_TAGS} tags")
    found: dict[int, tuple[int, int]] = {}
    size = struct.calcsize(order + entry)
    start = at + struct.calcsize(order + count)
    for spot in range(start, min(start + size * entries, len(data) - size + 1), size):
        tag, kind, number, value = struct.unpack_from(order + entry, data, spot)
        short = struct.unpack_from(order + ("H" if kind == 3 else "I"), value)[0]
        found[tag] = number, short
    if max(found.get(tag, (0, 0))[0] for tag in (273, 279, 324, 325)) > _STRIPS:
        raise _Refused(f"it has more than {_STRIPS} strips or tiles")
    width, height, across, down = (found.get(tag, (0, 0))[1] for tag in (256, 257, 322, 323))
    if across * down > max(width * height, _TILE):
        raise _Refused(f"its tiles are {across}x{down}")


_CHECKS: dict[bytes, Callable[[bytes], None]] = {
    b"\x89PNG": _check_png,
    b"\xff\xd8": _check_jpeg,
    b"GIF8": _check_gif,
    b"BM": _check_bmp,
    b"II": _check_tiff,
    b"MM": _check_tiff,
    b"P": _check_pnm,
}
