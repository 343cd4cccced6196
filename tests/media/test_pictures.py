"""Files that are small and cost much: refused by what they say of themselves, before decoding."""

from __future__ import annotations

import io
import struct
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.hostile import encoded
from support.models import picture
from transformers.image_utils import load_image

from keepsight.errors import ImageError
from keepsight.media import pictures, sources

WRITTEN = ("PNG", "JPEG", "WEBP", "TIFF", "AVIF")
ORIENTATION = 274


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def flat_png(side: int, before: bytes = b"", behind: bytes = b"") -> bytes:
    """A grey PNG of a few bytes, with chunks before and behind its pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(side + 1)) for _ in range(side)) + packer.flush()
    data = [head, before, chunk(b"IDAT", rows), behind, chunk(b"IEND")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(data)


def icon(inside: bytes) -> bytes:
    """An icon that says it is 16x16, and holds whatever it does."""
    place = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(inside), 22)
    return struct.pack("<HHH", 0, 1, 1) + place + inside


def tiff(tags: dict[int, int], data: bytes = b"", count: int = 1) -> bytes:
    """A grey TIFF of 16x16 with more tags; `count` is how many strips it says that it has."""
    base = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 273: 8, 277: 1, 279: len(data)}
    entries = sorted({**base, **tags}.items())
    rows = [struct.pack("<HHII", t, 4, count if t == 273 else 1, value) for t, value in entries]
    return b"".join(
        [b"II*\0", struct.pack("<I", 8 + len(data)), data, struct.pack("<H", len(rows)), *rows]
    )


JPEG = encoded(picture(1), "JPEG")
SCANS = encoded(picture(1, 64, 64), "JPEG", progressive=True)
LAST_SCAN = SCANS[SCANS.rindex(b"\xff\xda") : -2]
GIF_HEAD = b"GIF89a" + struct.pack("<HHBBB", 16, 16, 0, 0, 0)
MANY = 70_000
REFUSED: dict[str, tuple[bytes, str]] = {
    "an icon that holds a large picture": (icon(flat_png(64)), "not an image in a format"),
    "PostScript": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "not an image in a format",
    ),
    "chunks": (flat_png(8, before=chunk(b"abCd") * MANY), "more than 65536 chunks"),
    "pieces of pixels": (flat_png(8, behind=chunk(b"IDAT") * MANY), "more than 65536 chunks"),
    "texts behind the pixels": (flat_png(8, behind=chunk(b"tEXt", b"a\0b") * MANY), "65536 chunks"),
    "padding": (JPEG[:2] + b"\xff" * MANY + JPEG[2:], "more than 65536 segments"),
    "segments": (JPEG[:2] + b"\xff\xe5\0\2" * MANY + JPEG[2:], "more than 65536 segments"),
    "scans": (SCANS[:-2] + LAST_SCAN * 100 + SCANS[-2:], "more than 100 scans"),
    "blocks": (GIF_HEAD + b"\x21\xfe" + b"\1a" * MANY + b"\0;", "more than 65536 blocks"),
    "bytes that are no block": (GIF_HEAD + b"\0" * MANY + b";", "more than 65536 blocks"),
    "a long comment": (b"P6\n#" + b"a" * MANY + b"\n2 2 255\n" + bytes(12), "longer than 4096"),
    "numbers in letters": (b"P3\n9 9 255\n" + b"1 " * (3 << 20), "text PNM"),
    "runs": (b"BM" + bytes(28) + b"\1\0\0\0" + bytes(5 << 20), "run-length"),
    "a tile that is larger than its picture": (
        tiff({322: 20_000, 323: 20_000, 324: 8, 325: 9}, b"x"),
        "tiles are 20000x20000",
    ),
    "strips": (tiff({}, b"x", 1 << 20), "more than 262144 strips"),
    "tags": (b"II*\0\x08\0\0\0" + b"\xff\xff" + bytes(100), "more than 4096 tags"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_small_file_that_costs_much_is_refused(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, why = REFUSED[what]
    monkeypatch.setattr(Image.core, "new", None)  # room for pixels is not even asked for
    for look in (pictures.size_of, pictures.decode):
        with pytest.raises(ImageError, match=why):
            look(data, "it")


def test_what_is_just_not_too_much_is_opened() -> None:
    ordinary = {
        "PNG": flat_png(8, behind=chunk(b"tEXt", b"a\0b") * 60_000),
        "JPEG": JPEG[:2] + b"\xff\xe5\0\2" * 60_000 + JPEG[2:],
        "progressive": SCANS,
        "many tiles": encoded(picture(1, 64, 64), "TIFF", compression="tiff_deflate"),
        "letters": b"P3 # a picture\n1 1 255\n1 2 3\n",
        "raw": b"P6\n#one\n#two\n1 1\n255\n123",
    }
    for data in ordinary.values():
        assert pictures.decode(data, "it").mode == "RGB"


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_format_is_turned_upright_as_transformers_does(
    kind: str, orientation: int, tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = encoded(picture(3, 48, 80), kind, exif=exif)
    path = tmp_path / f"turned.{kind.lower()}"
    path.write_bytes(data)
    seen = pictures.decode(data, "it")
    assert np.array_equal(np.asarray(seen), np.asarray(load_image(str(path))))
    assert pictures.size_of(data, "it") == Image.open(io.BytesIO(data)).size


def test_an_orientation_in_xmp_counts_too(tmp_path: Path) -> None:
    path = tmp_path / "turned.png"
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><d tiff:Orientation="6"/></x:xmpmeta>'
    text = chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)
    path.write_bytes(encoded(picture(3, 48, 80))[:33] + text + encoded(picture(3, 48, 80))[33:])
    seen = pictures.decode(path.read_bytes(), "it")
    assert seen.size == (80, 48) == load_image(str(path)).size


def test_warnings_of_a_file_are_nobodys(recwarn: Any) -> None:
    """Each would be another text, and Python remembers every text that it has warned of."""
    tags = {30_000 + number: 1 for number in range(50)}
    data = tiff(tags, bytes(1 << 12), 9)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        pictures.size_of(data, "it")
    assert not recwarn.list


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "1", "P", "LA", "I;16", "F", "CMYK"])
def test_a_large_picture_is_named_band_by_band_as_in_one(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = Image.effect_noise((37, 101), 80).convert("RGB")
    image = Image.new(mode, (37, 101), 1000) if mode == "I;16" else pixels.convert(mode)
    whole, name = image.tobytes(), sources.open_source(image).name
    monkeypatch.setattr(sources, "_BAND", 37 * 8)
    at_once: list[int] = []
    tobytes = Image.Image.tobytes

    def noted(band: Image.Image) -> bytes:
        at_once.append(band.height)
        return tobytes(band)

    monkeypatch.setattr(Image.Image, "tobytes", noted)
    assert sources._pixels(image) == whole
    assert sources.open_source(image).name == name and max(at_once) == 8


def heic(size: tuple[int, int]) -> bytes:
    """A phone's photo held upright: on its side, with a note that says so."""
    import pillow_heif

    image = Image.new("RGB", size, "white")
    image.paste("red", (0, 0, size[0] // 4, size[1]))
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    buffer = io.BytesIO()
    pillow_heif.from_pillow(image).save(buffer, exif=turned.tobytes())
    return buffer.getvalue()


def test_a_heic_photo_is_opened_upright_and_nothing_is_registered() -> None:
    data = heic((64, 48))
    image = pictures.decode(data, "it")
    assert pictures.size_of(data, "it") == image.size == (48, 64)
    assert image.mode == "RGB" and image.getpixel((24, 4))[1] < 60
    assert "HEIF" not in Image.OPEN
    with pytest.raises(ImageError, match="cannot be decoded"):
        pictures.decode(data[: len(data) // 2], "it")


def test_a_heic_photo_says_what_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(ImageError, match="HEIC photo.* pip install pillow-heif.* JPEG"):
        pictures.size_of(b"\0\0\0\x18ftypheic" + bytes(64), "it")
