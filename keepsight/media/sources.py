"""Images in any form: opened once, checked, and named by their bytes.

As in Transformers, treatment depends on the form: files, URLs, data URIs and bytes are decoded like
its `load_image` does (upright after EXIF, transparency dropped), while a PIL image or an array goes
to the image processor unchanged. Nothing here knows a model.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import os
import re
import stat
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from email.message import Message
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import PIL
import torch
from PIL import Image

from keepsight.errors import ImageError, MediaChanged, UnsupportedInput
from keepsight.kinds import Clip, Decoded
from keepsight.media import pictures
from keepsight.media.pictures import check_size
from keepsight.media.video_files import VideoFile
from keepsight.system import digests

MAX_BYTES = 256 << 20
_BASE64 = 1 << 20  # characters decoded at once; each four are three bytes
_BAND = 1 << 20  # pixels
_LONGEST_LABEL = 120  # characters
_AGAIN = "ask again, or edit its turn in a session"
_VIDEO = (".mp4", ".mov", ".mkv", ".webm", ".avi")
Readable = str | os.PathLike[str] | bytes | bytearray | memoryview


@dataclass(frozen=True)
class Download:
    """What an address gave, and the headers of a request that asks whether it changed since."""

    data: bytes
    asking: Mapping[str, str]


Material: TypeAlias = "bytes | Decoded | Clip"
Fetch: TypeAlias = Callable[[str], bytes]  # gives what lies at an address now


def download(url: str, known: Download | None = None) -> Download:
    """What an address gives now; `known` itself if the server says that it is unchanged."""
    asking = known.asking if known is not None else {}
    try:
        request = urllib.request.Request(url)
        for name, value in asking.items():
            request.add_unredirected_header(name, value)  # a tag is of one address alone
        with urllib.request.urlopen(request, timeout=60) as response:  # http(s) only
            data: bytes = response.read(MAX_BYTES + 1)
            asking = _asking(response.headers) if response.url == url else {}
    except (OSError, ValueError, http.client.HTTPException) as error:
        if known is not None and isinstance(error, urllib.error.HTTPError) and error.code == 304:
            return known
        raise ImageError(f"{url} could not be fetched: {error}") from error
    if len(data) > MAX_BYTES:
        raise ImageError(f"{url} is larger than {MAX_BYTES} bytes")
    return Download(data, asking)


def fetched(url: str) -> bytes:
    """What an address gives now, for callers who remember nothing."""
    return download(url).data


def _asking(headers: Message) -> dict[str, str]:
    """The headers that ask a server for a change, if its answer tells one byte from another."""
    tag, changed = headers.get("ETag", ""), headers.get("Last-Modified", "")
    if tag and not tag.startswith("W/"):
        return {"If-None-Match": tag}
    try:
        age = parsedate_to_datetime(headers.get("Date", "")) - parsedate_to_datetime(changed)
    except (TypeError, ValueError):
        return {}
    # Its seconds are whole: what changed in this one may change in it again.
    return {"If-Modified-Since": changed} if age.total_seconds() > 1 else {}


@dataclass(frozen=True)
class Source:
    """A named image that is decoded only when needed.

    `name` is the digest of the given bytes: of a file, or of pixels. `decode` gives the image
    processor's input. While `fresh` holds something, that is what was named; afterwards the image
    is read and compared with its name again.
    """

    name: str
    decode: Callable[[], Decoded | Clip]
    label: str
    fresh: list[bytes] | list[bool]
    modality: str = "image"
    options: tuple[tuple[str, object], ...] = ()  # options of the processor for this image alone
    file: str = ""  # its display name in lists of a store; never used for lookup
    where: str = ""  # the path or address that it was read from
    data: Material | None = None  # what was given, if its owner did not only name a place
    held: HeldMaterial | None = None  # what a session keeps of it
    video: VideoFile | None = None  # for files of which only some frames may be used

    def digest(self, decoded: Decoded | Clip, settings: str) -> str:
        """The source digest: decoded pixels and every setting of their preprocessing."""
        if isinstance(decoded, tuple):
            return digests.digest("source", self.name, settings)  # named by its decoded pixels
        return digests.digest("source", *_pixel_parts(decoded), settings)

    def kept(self, held: HeldMaterial) -> Source:
        """The same for a session: whatever becomes of the file or of the owner's pixels."""

        def decode() -> Decoded | Clip:
            data = held.data
            if data is None:
                return self.decode()  # from its place again, if that is unchanged
            return decode_bytes(data, self.label) if isinstance(data, bytes) else data

        self.fresh.clear()
        return replace(self, decode=decode, fresh=[], held=held)

    def material(self) -> Material | None:
        """What a session keeps: the bytes of a file, or a copy of what its owner may change."""
        data = next((one for one in self.fresh if isinstance(one, bytes)), self.data)
        if isinstance(data, tuple):
            return _own(data[0]), data[1]
        return data.copy() if isinstance(data, Image.Image) else _own(data)


@dataclass(eq=False)
class HeldMaterial:
    """What a session was given, or None where the budget took it back."""

    data: Material | None

    @property
    def nbytes(self) -> int:
        """Its bytes in memory."""
        data = self.data[0] if isinstance(self.data, tuple) else self.data
        if isinstance(data, Image.Image):
            width, height = data.size
            return width * height * len(data.getbands()) * (4 if data.mode in ("I", "F") else 1)
        return 0 if data is None else data.nbytes if isinstance(data, np.ndarray) else len(data)


def _own(data: Any) -> Any:
    """A copy of an array that its owner could change."""
    fixed = not isinstance(data, np.ndarray) or (data.flags.owndata and not data.flags.writeable)
    return data if fixed else data.copy()


def file_label(where: str) -> str:
    """The last part of a path or URL that a store may remember: no folder, no host, no query.

    For a URL only if it looks like a file name; otherwise its end may be a secret.
    """
    if where.lower().startswith("data:"):
        return ""
    is_url = re.match(r"[a-z]+://", where, re.IGNORECASE) is not None
    try:
        text = urllib.parse.unquote(urllib.parse.urlsplit(where).path) if is_url else where
    except ValueError:  # no address
        return ""
    name = Path(text.rstrip()).name
    if is_url and not re.fullmatch(r"[^/]+\.[A-Za-z0-9]{2,5}", name):
        return ""
    return "".join(c for c in name if c.isprintable())[:_LONGEST_LABEL]


def open_source(image: object, fetch: Fetch = fetched) -> Source:
    """A source from any form of image."""
    if isinstance(image, Source):
        return image  # already opened
    if isinstance(image, Image.Image):
        return _from_pil(image)
    if isinstance(image, np.ndarray | torch.Tensor):
        return _from_array(image)
    if isinstance(image, bytes | bytearray | memoryview):
        return _from_bytes(bytes(image), "the bytes")
    if isinstance(image, str) and image.startswith("data:"):
        return _from_bytes(_data_uri(image), "the data URI")
    if isinstance(image, str | os.PathLike):
        place = _local(image)
        return _from_place(str(place), lambda: read_bytes(place, fetch))
    raise ImageError(
        f"a {type(image).__name__} is not an image; expected a path, URL, data URI, PIL image, "
        "numpy array, torch tensor, bytes or a Package"
    )


def _local(where: str | os.PathLike[str]) -> str | Path:
    """An address, or the path of a file."""
    if not isinstance(where, str) or where.startswith(("http://", "https://")):
        return where if isinstance(where, str) else Path(where)
    if where.startswith("file://"):
        where = urllib.request.url2pathname(urllib.parse.urlparse(where).path)
    return Path(where)


def read_bytes(where: Readable, fetch: Fetch = fetched) -> bytes:
    """The bytes behind a path, a URL, a data URI, or bytes themselves."""
    if isinstance(where, bytes | bytearray | memoryview):
        return bytes(where)
    if isinstance(where, str) and where.startswith("data:"):
        return _data_uri(where)
    place = _local(where)
    return _read(place) if isinstance(place, Path) else fetch(place)


def _data_uri(text: str) -> bytes:
    head, comma, body = text.partition(",")
    try:
        if not comma:
            raise ValueError("no comma")
        if head.endswith(";base64"):
            return from_base64(body)
        return urllib.parse.unquote_to_bytes(body)
    except (ValueError, binascii.Error) as error:
        raise ImageError(
            f"the data URI cannot be decoded ({error}); expected data:image/png;base64,..."
        ) from None


# Base64 with line breaks, as in mail, or in the URL alphabet.
_OTHER_MARKS = "\n\r \t-_"
_AS_USUAL = str.maketrans("-_", "+/", "\n\r \t")


def from_base64(text: str) -> bytes:
    """Decode base64 in pieces, so that a long text lets other threads run in between."""
    if any(mark in text for mark in _OTHER_MARKS):
        text = text.translate(_AS_USUAL)
    if len(text) % 4 and not text.endswith("="):
        text += "=" * (-len(text) % 4)
    parts = []
    for start in range(0, len(text), _BASE64):
        piece = text[start : start + _BASE64]
        if "=" in piece and start + _BASE64 < len(text):
            raise binascii.Error("it goes on after its padding")
        parts.append(base64.b64decode(piece, validate=True))
        time.sleep(0)
    return b"".join(parts)


def _from_place(where: str, read: Callable[[], bytes]) -> Source:
    """The picture that lies at a path or an address now."""
    fresh = [read()]
    name = file_name(fresh[0])

    def decode() -> Decoded:
        data = fresh[0] if fresh else read()
        if not fresh and file_name(data) != name:
            raise MediaChanged(f"{where} changed after it was named; {_AGAIN}")
        return decode_bytes(data, where)

    return Source(name, decode, where, fresh, file=file_label(where), where=where)


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        if status.st_size > MAX_BYTES:
            raise ImageError(f"{path} is larger than {MAX_BYTES} bytes")
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise OSError("a pipe or a device, which may never end")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        text = str(path) if len(str(path)) < 200 else f"{str(path)[:200]}…"
        raise ImageError(f"{text}: no image can be read there ({reason})") from None


def file_name(data: bytes) -> str:
    """The name of a file with these bytes."""
    return digests.digest("file", data, PIL.__version__)


def _from_bytes(data: bytes, label: str) -> Source:
    name = file_name(data)
    return Source(name, lambda: decode_bytes(data, label), label, [], data=data)


def decode_bytes(data: bytes, label: str) -> Image.Image:
    """An upright RGB image from an encoded one, as Transformers' `load_image` gives it."""
    if label.lower().endswith(_VIDEO):
        raise UnsupportedInput(f"{label} is a video; pass it as a part of type 'video'")
    return pictures.decode(data, label)


def _from_pil(image: Image.Image) -> Source:
    check_size(image.size, "the image")
    try:
        image.load()
        name = digests.digest("pixels", *_pixel_parts(image))
    except Exception as error:  # a lazily opened file that is damaged or already closed
        raise ImageError(f"the image cannot be decoded: {error}") from error

    return _in_memory(image, name, "a PIL image")


def _from_array(image: np.ndarray | torch.Tensor) -> Source:
    if image.dtype not in (np.uint8, torch.uint8):
        raise ImageError(
            f"the array is {image.dtype}, expected uint8 values from 0 to 255; "
            "for floats from 0 to 1 pass (255 * x).round() as uint8"
        )
    array = as_array(image)
    if array.ndim == 2:
        array = array[..., None].repeat(3, -1)
    if array.ndim != 3 or not {array.shape[0], array.shape[-1]} & {1, 3, 4}:
        raise ImageError(
            f"the array has shape {array.shape}, expected (height, width, channels) or "
            "(channels, height, width) with 1, 3 or 4 channels"
        )
    channels_first = array.shape[-1] not in (1, 3, 4)
    height_width = array.shape[1:] if channels_first else array.shape[:2]
    check_size((height_width[1], height_width[0]), "the array")
    return _in_memory(array, digests.digest("pixels", *_pixel_parts(array)), "an array")


def as_array(given: np.ndarray | torch.Tensor) -> np.ndarray:
    """A plain array: subclasses (`np.matrix`) have their own ideas of shapes."""
    try:
        return np.asarray(given.detach().cpu() if isinstance(given, torch.Tensor) else given)
    except (TypeError, RuntimeError, NotImplementedError) as error:  # sparse, or without data
        raise ImageError(f"the tensor cannot be read: {error}") from error


def _in_memory(image: Decoded, name: str, label: str) -> Source:
    """A source of pixels that their owner may change in place at any time."""
    fresh = [True]

    def decode() -> Decoded:
        if not fresh and digests.digest("pixels", *_pixel_parts(image)) != name:
            raise MediaChanged(f"{label} was changed after it was named; {_AGAIN}")
        return image

    return Source(name, decode, label, fresh, data=image)


def _pixel_parts(image: Decoded) -> tuple[digests.Part | list[int], ...]:
    if isinstance(image, np.ndarray):
        return "array", image
    transparency = repr(image.info.get("transparency"))
    return "pil", image.mode, list(image.size), _pixels(image), repr(_palette(image)), transparency


def _pixels(image: Image.Image) -> bytes | bytearray:
    """The bytes of `tobytes`, in bands: a large picture would need two copies at once, one of them
    made while no other thread can run."""
    width, height = image.size
    rows = max(1, _BAND // max(1, width))
    if height <= rows:
        return image.tobytes()
    pixels = bytearray()
    for top in range(0, height, rows):
        pixels += image.crop((0, top, width, min(top + rows, height))).tobytes()
    return pixels


def _palette(image: Image.Image) -> tuple[str, list[int] | None] | None:
    """The colours, with alpha only if the palette has it: PIL writes the alpha of `transparency`
    into the colours when the image is first converted, which changes nothing."""
    if image.mode not in ("P", "PA"):
        return None
    own_alpha = image.palette is not None and image.palette.mode == "RGBA"
    mode = "RGBA" if own_alpha else "RGB"
    return mode, image.getpalette(mode)
