"""Converts request messages for the library: every medium is fetched, checked and counted.

Runs in a worker thread. Nothing here decodes a picture; refusals need only the header of its file.
"""

from __future__ import annotations

import binascii
import contextlib
import functools
import io
import json
import math
import re
import stat
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import PIL
from PIL import Image

from keepsight.errors import FileError, ImageError
from keepsight.formats import package, tensorfile
from keepsight.formats.package import Package
from keepsight.kinds import Options, Record
from keepsight.media.pictures import MAX_PIXELS, size_of
from keepsight.media.sources import Source, decode_bytes, from_base64
from keepsight.media.video_files import MAX_FRAMES
from keepsight.prompt.lengths import characters
from keepsight.server.config import ServerConfig
from keepsight.server.errors import ApiError, invalid, refused
from keepsight.server.fetch import Fetcher
from keepsight.server.files import Files
from keepsight.server.parser import loaded
from keepsight.server.schema import (
    Address,
    ChatMessage,
    JsonPart,
    MediaPart,
    Part,
    RefusalPart,
    TextPart,
    ThoughtPart,
    ToolCall,
    Unused,
    is_empty,
)
from keepsight.server.turns import LARGE_PICTURES, LARGE_TEXT, RenderedMessages
from keepsight.system import digests
from keepsight.system.optional import optional
from keepsight.system.places import expanded

# -- what bytes are: clients may claim any name and type -------------------------------------------


def is_video(data: bytes) -> bool:
    if data[4:8] == b"ftyp":
        return data[8:11] not in (b"avi", b"hei", b"mif", b"msf")  # AVIF and HEIF are pictures
    return data[:4] == b"\x1aE\xdf\xa3" or (data[:4] == b"RIFF" and data[8:11] == b"AVI")


def is_pdf(data: bytes) -> bool:
    return data[:1024].lstrip()[:5] == b"%PDF-"


def is_package(data: bytes) -> bool:
    return data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= tensorfile.MAX_HEADER


def check_video(data: bytes, most: int) -> None:
    """Refuse a video whose frames would take more than `most` bytes."""
    av = optional("av", "video")
    try:
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.video[0]
            frame = 3 * stream.codec_context.width * stream.codec_context.height
            frames = 0
            for packet in container.demux(stream):
                frames += bool(packet.size)
                if frames * frame > most or frames > MAX_FRAMES:
                    raise _clip_too_large("a video", most)
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise ImageError(f"a video cannot be read: {type(error).__name__}") from None


def check_sound(data: bytes, most: int) -> None:
    """Refuse a sound whose samples would take more than `most` bytes."""
    soundfile = optional("soundfile", "audio")
    try:
        info = soundfile.info(io.BytesIO(data))
    except (RuntimeError, ValueError) as error:
        raise ImageError(f"a sound cannot be read: {type(error).__name__}") from None
    if 4 * info.frames * info.channels > most:
        raise _clip_too_large("a sound", most)


def _clip_too_large(what: str, most: int) -> ApiError:
    text = f"{what} would take more than {most} bytes when decoded; send a shorter or smaller one"
    return ApiError(400, text, param="messages", code="media_clip_too_large")


def _package_in(data: bytes, place: str) -> Package:
    """The package of an image, with every byte checked."""
    try:
        found = Package.from_record(
            *tensorfile.parse(data, "the file", package.KIND, package.FORMAT), where="the file"
        )
    except FileError as error:
        what = f"{place}: {error}"
        raise ApiError(400, what, param=place, code="invalid_package") from error
    if found.modality != "image":
        raise refused(place, f"a package of {found.modality!r}; expected an image package")
    return found


# -- how large pictures are shown ------------------------------------------------------------------


@dataclass(frozen=True)
class SentImage:
    """The size of a picture for the model: a limit in pixels, or options of the processor."""

    most: int | None = None
    options: tuple[tuple[str, object], ...] = ()


class ImageSizes:
    """How the model's processor sizes pictures, and which limits requests may set."""

    def __init__(self, image_processor: object, given: Options) -> None:
        """`given`: the processor options that the server was started with."""
        known = getattr(getattr(image_processor, "valid_kwargs", None), "__annotations__", {})
        size = dict(given.get("size") or getattr(image_processor, "size", None) or {})
        self._least = given.get("min_pixels") or size.get("shortest_edge") or 0
        self._most = given.get("max_pixels") or size.get("longest_edge") or 0
        self._older = [(name, None) for name in ("min_pixels", "max_pixels") if name in given]
        self._by_pixels = {"min_pixels", "max_pixels"} <= set(known) and self._most > 0

    def shown(self, least: int | None, most: int | None, place: str, unused: Unused) -> SentImage:
        """The size for a request's limits: the processor's own rule with these limits."""
        if least is not None and most is not None and least > most:
            raise invalid(place, f"{place}: min_pixels {least} is more than max_pixels {most}")
        if not self._by_pixels:
            if least is not None:
                unused.add(f"{place}.min_pixels", "this model's processor has its own sizes")
            return SentImage(most)
        if least is None and most is None:
            return SentImage()
        if least is not None and least > self._most:
            why = f"{least} pixels; this server shows at most {self._most} of a picture"
            raise refused(f"{place}.min_pixels", why)
        most = self._most if most is None else min(most, self._most)
        least = min(self._least, most) if least is None else least
        size = {"shortest_edge": least, "longest_edge": most}
        return SentImage(most, (("size", size), *self._older))


def _picture(data: bytes, shown: SentImage, largest: int) -> bytes | Source:
    """A picture for the library, in the size to be shown; only its header is read here."""
    width, height = size_of(data, "it")
    if width * height > largest:
        raise _too_large(f"an image is {width}x{height}", largest, "make it smaller first")
    if shown.options:
        name = digests.digest("image with options", data, dict(shown.options), PIL.__version__)
        decode = functools.partial(decode_bytes, data, "an image")
        return Source(name, decode, "an image", [], options=shown.options)
    cap = shown.most
    if cap is None or width * height <= cap:
        return data
    name = digests.digest("shrunk image", data, cap, PIL.__version__)
    return Source(name, lambda: _shrunk(data, cap), "an image", [])


def _shrunk(data: bytes, cap: int) -> Image.Image:
    image = decode_bytes(data, "an image")
    scale = (cap / (image.width * image.height)) ** 0.5
    size = max(1, int(image.width * scale)), max(1, int(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS)


def _too_large(what: str, largest: int, hint: str) -> ApiError:
    text = f"{what}, this server takes at most {largest} pixels; {hint}"
    return ApiError(400, text, param="messages", code="image_too_large")


def _pages(data: bytes, shown: SentImage, dpi: int, most: int, largest: int) -> Iterator[Source]:
    """The pages of a PDF, each at most `largest` pixels, drawn only if not yet known."""
    from keepsight.encode.documents import POINTS, Document  # optional: it needs pypdfium2

    document, cap = Document("a PDF", data), shown.most
    if not 0 < document.pages <= most:
        what = f"a PDF has {document.pages} pages; expected 1 to {most} in one request"
        raise invalid("messages", what)
    scales: list[float] = []  # pixels per point
    for number in range(document.pages):
        size, scale = document.size(number), dpi / POINTS
        if cap is not None:
            scale = min(scale, (cap / max(size[0] * size[1], 1)) ** 0.5)
        width, height = (max(1, round(side * scale)) for side in size)
        if width * height > largest:
            what = f"page {number + 1} of a PDF is {width}x{height} at {dpi} dpi"
            raise _too_large(what, largest, "with max_pixels it is drawn smaller")
        scales.append(scale)
    for number, scale in enumerate(scales):
        name = digests.digest("sent pdf page", document.name, number, dpi, cap)
        draw = functools.partial(_drawn, data, number, POINTS * scale)
        yield Source(name, draw, f"page {number + 1} of a PDF", [], options=shown.options)


def _drawn(data: bytes, number: int, dpi: float) -> Image.Image:
    """A page of a PDF that is open for so long: whoever holds a page holds no memory of PDFium."""
    from keepsight.encode.documents import Document

    return Document("a PDF", data).draw(number, dpi)


# -- messages --------------------------------------------------------------------------------------

_LOW = 512 * 512  # the limit for `detail: "low"`
_FETCHED = ("http", "https")
_LISTS = ("user", "assistant")  # roles whose content templates expect as a list of parts
_NAME = re.compile(r"\bmessage(\.name\b|\[.name.\])")  # of a speaker, in a chat template
_VIDEO = ("video_url", "video", "url", "path")
# The fields of a part that may hold its medium, by its type; and those of a record in such a field.
_HOLDERS = {
    "image_embeds": ("image_embeds",),
    **dict.fromkeys(("video_url", "video", "input_video"), _VIDEO),
    "input_audio": ("input_audio",),
    "file": ("file",),
    "input_file": ("file_id", "file_data", "file_url"),
}
_PICTURE = ("image", "image_url", "url", "path", "base64", "data", "source", "file_id")
_INSIDE = {
    "file": ("file_id", "file_data", "file_url"),
    "source": ("data", "url"),
    "input_audio": ("data",),
}
_BASE64 = ("base64", "data", "source", "file_data", "image_embeds")  # if it is no address
_ALONE = (
    "a tensor alone has no identity; send the bytes of a .sight file as base64 or a data URI, or "
    "the id of an uploaded one: it holds features, grid and identity"
)


class Waits(Exception):
    """A medium is on a disk or at another server, and this reader must not wait."""


def _scheme(url: str) -> str:
    """The text before the first colon of an address."""
    return url[:8].partition(":")[0].lower()


@dataclass
class MessageReader:
    """Reads the messages of one request. `tenant` owns the uploaded files. Unless it `may_wait`,
    it raises `Waits` where it would."""

    config: ServerConfig
    files: Files
    tenant: str
    limits: tuple[int | None, int | None] = (None, None)  # of the request, in pixels
    sizes: ImageSizes = field(default_factory=lambda: ImageSizes(None, {}))
    unused: Unused = field(default_factory=Unused)
    may_wait: bool = True
    _images: int = 0
    _pixels: int = 0
    _fetched: dict[str, bytes] = field(default_factory=dict)

    def messages(self, messages: list[ChatMessage], template: str) -> RenderedMessages:
        """All messages, for a template that must have a place for their contents."""
        if len(messages) > (most := self.config.max_messages):
            what = f"{len(messages)} messages, this server takes at most {most}"
            raise invalid("messages", what)
        if "tool_calls" not in template and any(message.tool_calls for message in messages):
            raise refused("messages", "the chat template of this model has no place for tool_calls")
        names = _NAME.search(template) is not None
        made = RenderedMessages(
            self._message(m, names, *m.places(i)) for i, m in enumerate(messages)
        )
        made.large = self._pixels >= LARGE_PICTURES or characters(made) > LARGE_TEXT
        return made

    def _count(self, place: str, more: int = 1) -> None:
        """Count a medium before any of its bytes are read or fetched."""
        self._images += more
        if self._images > self.config.max_images:
            what = f"more than {self.config.max_images} images in one request"
            raise ApiError(400, what, param=place, code="too_many_images")

    def _message(self, message: ChatMessage, names: bool, place: str, content: str) -> Record:
        role = "system" if message.role == "developer" else message.role
        made: Record = {"role": role, "content": self._content(message, content)}
        if message.images and role == "user":
            made["content"] = [*self._beside(message.images, place), *made["content"]]
        elif message.images:
            self.unused.add(f"{place}.images", "pictures are read in messages of the user")
        if not is_empty(message.function_call):
            raise refused(f"{place}.function_call", "deprecated; send it as tool_calls")
        if role == "tool" and message.tool_call_id is None:
            raise invalid(f"{place}.tool_call_id", "a tool's message needs its tool_call_id")
        if message.name is not None and role != "tool" and not names:
            why = "the chat template of this model has no place for the names of speakers"
            self.unused.add(f"{place}.name", why)
        more = {"name": message.name, "tool_call_id": message.tool_call_id}
        more["reasoning_content"] = _thought_of(message)
        made |= {name: value for name, value in more.items() if value is not None}
        if message.tool_calls:
            made["tool_calls"] = list(map(_called, message.tool_calls))
        return made

    def _beside(self, images: list[object], place: str) -> list[Record]:
        """Pictures beside a text, as in Ollama: bare base64, data URIs or addresses."""
        made = []
        for number, image in enumerate(images):
            here = f"{place}.images[{number}]"
            if not isinstance(image, str) or not image:
                raise invalid(here, f"{here}: expected base64, a data URI or an address")
            made += self.picture(image, "base64", here, here)
        return made

    def picture(self, given: str, name: str, place: str, inside: str) -> list[Record]:
        """What a field of this name alone holds, usually a picture. `place`: of the part."""
        self._count(place)
        with _located(place):
            return self._pictures(self._data(given, name, inside), None, None, place)

    def _content(self, message: ChatMessage, place: str) -> str | list[Record] | None:
        content, lists = message.content, message.role in _LISTS
        if content is None or (content == [] and message.role == "assistant"):
            if message.refusal is None and message.tool_calls and not message.images:
                return None
            content = message.refusal
            if content is None and message.role != "assistant" and not message.images:
                raise invalid(place, f"{place} is missing; expected a text or a list of parts")
        if content is None or isinstance(content, str):
            return [_text(content or "")] if lists else content or ""
        if not content:
            raise invalid(place, f"{place} is an empty list; expected at least one part")
        made = []
        for number, part in enumerate(content):
            with _located(f"{place}[{number}]"):
                if not (isinstance(part, ThoughtPart) and message.role == "assistant"):
                    made += self._part(part, f"{place}[{number}]")
        if not lists and all(part["type"] == "text" for part in made):
            return "".join(part["text"] for part in made)
        return made or [_text("")]

    def _part(self, part: Part, place: str) -> list[Record]:
        if isinstance(part, TextPart):
            return [_text(part.text)]
        if isinstance(part, RefusalPart):
            return [_text(part.refusal)]
        if isinstance(part, JsonPart):
            return [_text(json.dumps(part.data, ensure_ascii=False))]
        if isinstance(part, ThoughtPart):
            raise invalid(place, f"{place}: thoughts are parts of an assistant's message")
        given, name = _one_of(part, _HOLDERS.get(part.type, _PICTURE), place)
        detail, inside = part.detail, f"{place}.{name}"
        if isinstance(given, Address):
            detail = given.detail or detail
            given, inner = _one_of(given, _INSIDE.get(name, ("url",)), inside)
            if name == "file":
                name, inside = inner, f"{inside}.{inner}"
        if not isinstance(given, str) or not given:
            raise refused(inside, _ALONE)
        self._count(place)
        if part.type == "input_audio":
            data = _decoded(given, place)
            check_sound(data, self.config.clip_bytes)
            return [{"type": "audio", "audio": data}]
        data = self._data(given, name, inside)
        if _HOLDERS.get(part.type) is _VIDEO:
            return self._video(data)
        found = self._pictures(data, detail, part, place)
        if part.type == "image_embeds" and not isinstance(found[0].get("image"), Package):
            raise refused(inside, _ALONE)
        return found

    def _video(self, data: bytes) -> list[Record]:
        check_video(data, self.config.clip_bytes)
        return [{"type": "video", "video": data}]

    def _pictures(
        self, data: bytes, detail: str | None, part: MediaPart | None, place: str
    ) -> list[Record]:
        """One picture, all pages of a PDF, or a video, depending on the bytes."""
        if not is_pdf(data) and is_video(data):
            return self._video(data)
        least, most = part.limits() if part is not None else (None, None)
        caps = [self.limits[1], most, _LOW if detail == "low" else None]
        most = min((cap for cap in caps if cap is not None), default=None)
        least = self.limits[0] if least is None else least
        shown = self.sizes.shown(least, most, place, self.unused)
        found: list[bytes | Source | Package]
        if is_pdf(data):
            room = self.config.max_images - self._images + 1  # it is counted as one already
            largest = min(self.config.max_image_pixels, MAX_PIXELS)
            found = [*_pages(data, shown, self.config.pdf_dpi, room, largest)]
            self._count(place, len(found) - 1)
            self._pixels += LARGE_PICTURES  # drawing is slow for any PDF
        elif is_package(data):
            found = [_package_in(data, place)]
        else:
            found = [_picture(data, shown, self.config.max_image_pixels)]
            self._pixels += math.prod(size_of(data, "it"))
        return [{"type": "image", "image": image} for image in found]

    # -- addresses -------------------------------------------------------------------------------

    def _data(self, given: str, name: str, place: str) -> bytes:
        """The bytes that a field of this name holds, or says where they are."""
        scheme = _scheme(given)
        if name == "file_id" or given.startswith("file-"):
            self._wait()
            return self.files.read(self.tenant, given, place)
        if scheme in _FETCHED:
            self._wait()
            if given not in self._fetched:
                left = self.config.url_bytes - sum(map(len, self._fetched.values()))
                seconds, private = self.config.url_timeout, self.config.allow_private_urls
                self._fetched[given] = Fetcher(max(left, 0), seconds, private).fetch(given)
            return self._fetched[given]
        if scheme == "data" or (name in _BASE64 and scheme != "file"):
            return _decoded(given, place)
        return _bare_picture(given) or self._local(given, place)

    def _wait(self) -> None:
        if not self.may_wait:
            raise Waits

    def _local(self, url: str, place: str) -> bytes:
        """A file under an allowed folder. Forbidden files look like absent ones."""
        what = "expected an http(s) URL, a data URI or the id of an uploaded file; local files are"
        text = f"{place}: {what} read only under folders that the server allows (--allow-path)"
        refusal = ApiError(400, text, param=place, code="invalid_image_url")
        if not self.config.allow_path or "\0" in url:
            raise refusal
        self._wait()
        if url.startswith("file://"):
            url = urllib.request.url2pathname(urllib.parse.urlsplit(url).path)
        try:
            path = Path(url).resolve(strict=True)
            roots = [expanded(root).resolve() for root in self.config.allow_path]
            if not Path(url).is_absolute() or not any(path.is_relative_to(r) for r in roots):
                raise refusal
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > self.config.url_bytes:
                raise refusal
            return path.read_bytes()
        except (OSError, RuntimeError, ValueError):
            raise refusal from None


@contextlib.contextmanager
def _located(place: str) -> Iterator[None]:
    """Add the place in the request to an error about a file; its parser does not know the place."""
    try:
        yield
    except ImageError as error:
        text = f"{place}: {error}"
        raise ApiError(400, text, param=place, code="invalid_image") from error
    except ApiError as error:
        if error.param in ("messages", "image_url"):
            error.param, error.message = place, f"{place}: {error.message}"
        raise


def _one_of(part: object, names: tuple[str, ...], place: str) -> tuple[object, str]:
    """The one field of several that is given, and its name."""
    given = [name for name in names if getattr(part, name) is not None]
    if len(given) != 1:
        raise invalid(place, f"{place}: it needs {'one of ' * (len(names) > 1)}{', '.join(names)}")
    return getattr(part, given[0]), given[0]


def _thought_of(message: ChatMessage) -> str | None:
    """A thought in any of its places: a field, or parts of the content."""
    for said in (message.reasoning_content, message.reasoning):
        if isinstance(said, str):
            return said
    parts = message.content if isinstance(message.content, list) else ()
    thoughts = [part for part in parts if isinstance(part, ThoughtPart)]
    return "".join(part.thinking or part.text or "" for part in thoughts) or None


def _called(call: ToolCall) -> Record:
    """A call as templates want it: its arguments as a record, if possible."""
    given = call.function.arguments
    read = loaded(given) if isinstance(given, str) else given
    function = {"name": call.function.name, "arguments": read if isinstance(read, dict) else given}
    return {
        **({} if call.id is None else {"id": call.id}),
        "type": "function",
        "function": function,
    }


def _text(text: str) -> Record:
    return {"type": "text", "text": text}


def _decoded(text: str, place: str) -> bytes:
    """The bytes of a data URI, or of bare base64."""
    head, comma, body = text.partition(",") if text[:5].lower() == "data:" else ("", ",", text)
    try:
        if not comma:
            raise ValueError("there is no comma")
        if head and not head.lower().endswith(";base64"):
            return urllib.parse.unquote_to_bytes(body)
        return from_base64(body)
    except (ValueError, binascii.Error) as error:
        text = f"{place} cannot be decoded ({error}); expected data:image/png;base64,..."
        raise ApiError(400, text, param=place, code="invalid_base64") from None


def _bare_picture(text: str) -> bytes | None:
    """The bytes of bare base64 that begins like a picture; no path looks like that."""
    try:
        data = from_base64(text)
        return data if is_pdf(data) or min(size_of(data, "it")) > 0 else None
    except (ValueError, ImageError):
        return None
