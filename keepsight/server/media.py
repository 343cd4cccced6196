"""Converts request messages for the library: every picture is fetched, checked and counted.

Runs in a worker thread. Nothing here decodes a picture; refusals need only the header of its file.
"""

from __future__ import annotations

import binascii
import contextlib
import functools
import io
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
from pydantic import BaseModel

from keepsight.errors import FileError, ImageError
from keepsight.formats import package, tensorfile
from keepsight.formats.package import Package
from keepsight.kinds import Message as Rendered
from keepsight.kinds import Options, Record
from keepsight.media.pictures import MAX_PIXELS, size_of
from keepsight.media.sources import Source, decode_bytes, from_base64
from keepsight.media.video_files import MAX_FRAMES
from keepsight.prompt.lengths import characters
from keepsight.server import schema
from keepsight.server.config import ServerConfig
from keepsight.server.errors import ApiError, invalid, refused
from keepsight.server.fetch import Fetcher
from keepsight.server.files import Files
from keepsight.server.parser import arguments_of
from keepsight.server.schema import Unused, is_empty
from keepsight.server.turns import LARGE_PICTURES, LARGE_TEXT, RenderedMessages
from keepsight.system import digests
from keepsight.system.optional import optional
from keepsight.system.places import expanded

_VIDEO_MAGIC = (b"\x1aE\xdf\xa3", b"RIFF")


def is_video(data: bytes) -> bool:
    """Whether bytes are a video, by their start: clients may claim any name and type."""
    if data[4:8] == b"ftyp":
        return data[8:11] not in (b"avi", b"hei", b"mif", b"msf")  # AVIF and HEIF are pictures
    return data[:4] == _VIDEO_MAGIC[0] or (data[:4] == _VIDEO_MAGIC[1] and data[8:11] == b"AVI")


def check_video(data: bytes, most: int) -> None:
    """Refuse a video whose frames would take more than `most` bytes."""
    av = optional("av", "video")
    try:
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.video[0]
            frame = 3 * stream.codec_context.width * stream.codec_context.height
            size = frames = 0
            for packet in container.demux(stream):
                frames += bool(packet.size)
                size = frames * frame
                if size > most or frames > MAX_FRAMES:
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


_ALONE = (
    "a tensor alone has no identity; send the bytes of a .sight file as base64 or a data URI, or "
    "the id of an uploaded one: it holds features, grid and identity"
)
_SIZES = ("detail", "min_pixels", "max_pixels", "mm_processor_kwargs")


def is_package(data: bytes) -> bool:
    """Whether bytes are a package, by their start: a header length and its beginning."""
    return data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= tensorfile.MAX_HEADER


def package_in(data: bytes, place: str, part: schema.PicturePart | None, unused: Unused) -> Package:
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
    for name in _SIZES:
        if getattr(part, name, None) is not None:
            unused.add(f"{place}.{name}", "features are as they were made")
    return found


LOW = 512 * 512  # the limit for `detail: "low"`


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
        self.by_pixels = {"min_pixels", "max_pixels"} <= set(known) and self._most > 0

    def shown(self, least: int | None, most: int | None, place: str, unused: Unused) -> SentImage:
        """The size for a request's limits: the processor's own rule with these limits."""
        if least is not None and most is not None and least > most:
            raise invalid(place, f"{place}: min_pixels {least} is more than max_pixels {most}")
        if not self.by_pixels:
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


def is_pdf(data: bytes) -> bool:
    """Whether bytes are a PDF, by their start: clients may claim any name and type."""
    return data[:1024].lstrip()[:5] == b"%PDF-"


def picture(data: bytes, shown: SentImage, largest: int) -> bytes | Source:
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


def pages(data: bytes, shown: SentImage, dpi: int, most: int, largest: int) -> Iterator[Source]:
    """The pages of a PDF, each at most `largest` pixels, drawn only if not yet known."""
    from keepsight.encode import documents  # the library is not thread-safe: one lock for all

    library, cap = documents.pdfium(), shown.most
    with documents.pdf_lock():
        try:
            document = library.PdfDocument(data)
        except library.PdfiumError:
            raise ImageError("a PDF cannot be opened: it is damaged, or needs a password") from None
        try:
            count = len(document)
            if not 0 < count <= most:
                what = f"a PDF has {count} pages; expected 1 to {most} in one request"
                raise invalid("messages", what)
            for number in range(count):
                size = document.get_page_size(number)
                width, height = (max(1, round(side * _scale(size, cap, dpi))) for side in size)
                if width * height > largest:
                    what = f"page {number + 1} of a PDF is {width}x{height} at {dpi} dpi"
                    raise _too_large(what, largest, "with max_pixels it is drawn smaller")
        finally:
            document.close()
    name = digests.digest("pdf bytes", data, str(library.PDFIUM_INFO), PIL.__version__)
    for number in range(count):
        label = f"page {number + 1} of a PDF"
        page = digests.digest("sent pdf page", name, number, dpi, cap)
        draw = functools.partial(_drawn, data, number, cap, dpi, label)
        yield Source(page, draw, label, [], options=shown.options)


def _scale(size: tuple[float, float], cap: int | None, dpi: int) -> float:
    """Pixels per point of a page, so that the picture stays below the limit."""
    scale = dpi / 72
    return scale if cap is None else min(scale, (cap / max(size[0] * size[1], 1)) ** 0.5)


def _drawn(data: bytes, number: int, cap: int | None, dpi: int, label: str) -> Image.Image:
    from keepsight.encode import documents

    library = documents.pdfium()
    with documents.pdf_lock():
        document = library.PdfDocument(data)
        try:
            page = document[number]
            width, height = page.get_size()
            scale = _scale((width, height), cap, dpi)
            area = width * height * scale * scale
            if not 1 <= area <= MAX_PIXELS:
                raise ImageError(f"{label} is {area:.0f} pixels large at {dpi} dpi")
            # In the library's own memory, because Python-made buffers block other threads.
            maker = library.PdfBitmap.new_foreign
            bitmap = page.render(scale=scale, rev_byteorder=True, bitmap_maker=maker)
            image: Image.Image = bitmap.to_pil()  # it copies RGB, and shares other formats
            return image if image.mode == "RGB" else image.convert("RGB")
        except library.PdfiumError:
            raise ImageError(f"{label} cannot be drawn") from None
        finally:
            document.close()


FETCHED = ("http", "https")
_ON_DISK = ("file-", "file:", "/")  # uploads by id, and files below allowed folders
_LONGEST_PATH = 4096  # base64 may begin with a slash too
WORDS = (schema.TextPart, schema.RefusalPart, schema.ThoughtPart)


def waits(messages: list[schema.ChatMessage]) -> bool:
    """Whether any medium of some messages is on a disk or at another server."""
    return any(
        scheme(address) in FETCHED
        or (address.startswith(_ON_DISK) and len(address) <= _LONGEST_PATH)
        for message in messages
        for given in (message.images, message.content)
        if isinstance(given, list)
        for address in _texts(given)
    )


def scheme(url: str) -> str:
    """The text before the first colon of an address."""
    return url[:8].partition(":")[0].lower()


def _texts(value: object) -> Iterator[str]:
    """All texts in a value that may be addresses."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, BaseModel) and not isinstance(value, WORDS):
        for name in type(value).model_fields:
            yield from _texts(getattr(value, name))


_LISTS = ("user", "assistant")  # roles whose content templates expect as a list of parts


@dataclass
class MessageReader:
    """Collects the media of one request. `tenant` owns the uploaded files."""

    config: ServerConfig
    files: Files
    tenant: str
    limits: tuple[int | None, int | None] = (None, None)  # of the request, in pixels
    sizes: ImageSizes = field(default_factory=lambda: ImageSizes(None, {}))
    unused: Unused = field(default_factory=Unused)
    images: int = 0
    pixels: int = 0
    _fetched: dict[str, bytes] = field(default_factory=dict)
    _shows_names: bool = False

    def messages(self, messages: list[schema.ChatMessage], template: str) -> RenderedMessages:
        """All messages, for a template that must have a place for their contents."""
        if len(messages) > (most := self.config.max_messages):
            what = f"{len(messages)} messages, this server takes at most {most}"
            raise invalid("messages", what)
        if "tool_calls" not in template and any(message.tool_calls for message in messages):
            raise refused("messages", "the chat template of this model has no place for tool_calls")
        self._check_number(messages)
        self._shows_names = _NAME.search(template) is not None
        made = RenderedMessages(self._message(m, *m.places(i)) for i, m in enumerate(messages))
        made.large = self.pixels >= LARGE_PICTURES or characters(made) > LARGE_TEXT
        return made

    def _check_number(self, messages: list[schema.ChatMessage]) -> None:
        """Count pictures before any is read: each part that is not text shows at least one."""
        shown = 0
        for number, message in enumerate(messages):
            place, content = message.places(number)
            given = message.content if isinstance(message.content, list) else []
            pictures = [spot for spot, part in enumerate(given) if not isinstance(part, WORDS)]
            room = self.config.max_images - shown
            if len(pictures) > room:
                raise self._too_many(f"{content}[{pictures[room]}]")
            shown += len(pictures) + len((message.role == "user" and message.images) or ())
            if shown > self.config.max_images:
                raise self._too_many(f"{place}.images")

    def _too_many(self, place: str) -> ApiError:
        what = f"more than {self.config.max_images} images in one request"
        return ApiError(400, what, param=place, code="too_many_images")

    def _message(self, message: schema.ChatMessage, place: str, content: str) -> Rendered:
        role = "system" if message.role == "developer" else message.role
        made: Rendered = {"role": role, "content": self._content(message, content)}
        if message.images and message.role == "user":
            shown = self._bare(message.images, f"{place}.images")
            made["content"] = [*shown, *made["content"]]
        if message.role == "tool" and message.tool_call_id is None:
            raise invalid(f"{place}.tool_call_id", "a tool's message needs its tool_call_id")
        thought = message.thought() or _thought_in(message.content)
        more = {"name": message.name, "tool_call_id": message.tool_call_id}
        more["reasoning_content"] = thought
        made |= {name: value for name, value in more.items() if value is not None}
        if message.tool_calls:
            calls = enumerate(message.tool_calls)
            made["tool_calls"] = [_call(c, f"{place}.tool_calls[{i}]") for i, c in calls]
        self._name_unused(message, place)
        return made

    def _name_unused(self, message: schema.ChatMessage, place: str) -> None:
        """Report the fields of a message that the prompt leaves out; refuse those it would need."""
        if not is_empty(message.function_call):
            raise refused(f"{place}.function_call", "deprecated; send it as tool_calls")
        if message.name is not None and message.role != "tool" and not self._shows_names:
            why = "the chat template of this model has no place for the names of speakers"
            self.unused.add(f"{place}.name", why)
        if message.images and message.role != "user":
            self.unused.add(f"{place}.images", "pictures are read in messages of the user")

    def _content(self, message: schema.ChatMessage, place: str) -> str | list[Record] | None:
        content = message.content
        if content is None or (content == [] and message.role == "assistant"):
            if message.refusal is not None:
                content = message.refusal
            elif message.tool_calls:
                return None
            elif message.role == "assistant" or message.images:
                content = ""
            else:
                raise invalid(place, f"{place} is missing; expected a text or a list of parts")
        if isinstance(content, str):
            text = content
            return [_text(text)] if message.role in _LISTS else text
        if not content:
            raise invalid(place, f"{place} is an empty list; expected at least one part")
        made = []
        for i, part in enumerate(content):
            with _located(f"{place}[{i}]"):
                if isinstance(part, schema.ThoughtPart) and message.role == "assistant":
                    continue
                made += self._part(part, f"{place}[{i}]")
        if message.role not in _LISTS and all(part["type"] == "text" for part in made):
            return "".join(part["text"] for part in made)
        return made or [_text("")]

    def _part(self, part: schema.Part, place: str) -> list[Record]:
        if isinstance(part, schema.TextPart):
            return [_text(part.text)]
        if isinstance(part, schema.RefusalPart):
            return [_text(part.refusal)]
        if isinstance(part, schema.ThoughtPart):
            raise invalid(place, f"{place}: thoughts are parts of an assistant's message")
        if isinstance(part, schema.ImagePart):
            where, field_name = _one_of(part, _HOLDERS, place)
            return self._image(part, where, f"{place}.{field_name}", place)
        if isinstance(part, schema.EmbedsPart):
            inside, text = f"{place}.image_embeds", part.image_embeds
            found = self._bare([text], inside) if text and isinstance(text, str) else [{}]
            if not all(isinstance(one.get("image"), Package) for one in found):
                raise refused(inside, _ALONE)
            return found
        if isinstance(part, schema.VideoPart):
            where, _ = _one_of(part, ("video_url", "video", "url", "path"), place)
            data = self._bytes(where if isinstance(where, str) else where.url or "", place)
            return [self._video(data)]
        if isinstance(part, schema.SoundPart):
            data = _decoded(part.input_audio.data, place)
            check_sound(data, self.config.clip_bytes)
            return [{"type": "audio", "audio": data}]
        return self._file(part, place)

    def _image(
        self, part: schema.PicturePart, where: Given, inside: str, place: str
    ) -> list[Record]:
        """A picture from any of the fields that may hold it."""
        detail = part.detail
        if isinstance(where, schema.EncodedSource):
            if (where.data is None) == (where.url is None):
                raise invalid(inside, f"{inside}: give either data or url")
            where = where.data or where.url or ""
        if isinstance(where, schema.Address):
            detail = where.detail or detail
        where = where if isinstance(where, str) else where.url
        if (
            inside.endswith((".base64", ".data", ".source", ".file_data"))
            and scheme(where) not in FETCHED
        ):
            data = _decoded(where, inside)
        elif inside.endswith(".file_id"):
            data = self.files.read(self.tenant, where, inside)
        else:
            data = self._bytes(where, inside)
        return self._pictures(data, self._shown(part, detail, place), place, part)

    def _bare(self, images: list[object], place: str) -> list[Record]:
        """Pictures beside a text, as in Ollama: bare base64, data URIs or addresses."""
        made = []
        for i, image in enumerate(images):
            here = f"{place}[{i}]"
            if not isinstance(image, str) or not image:
                raise invalid(here, f"{here}: expected base64, a data URI or an address")
            with _located(here):
                named = scheme(image) in (*FETCHED, "data", "file") or image.startswith("file-")
                data = self._bytes(image, here) if named else _decoded(image, here)
                made += self._pictures(data, self._shown(None, None, here), here)
        return made

    def _video(self, data: bytes) -> Record:
        check_video(data, self.config.clip_bytes)
        return {"type": "video", "video": data}

    def _shown(self, part: schema.PicturePart | None, detail: str | None, place: str) -> SentImage:
        """The size of a picture: the part's own minimum, and the smallest of all maximums."""
        least, most = part.limits() if part is not None else (None, None)
        caps = [self.limits[1], most, LOW if detail == "low" else None]
        most = min((cap for cap in caps if cap is not None), default=None)
        return self.sizes.shown(
            self.limits[0] if least is None else least, most, place, self.unused
        )

    def _file(self, part: schema.FilePart | schema.InputFile, place: str) -> list[Record]:
        held, inside = (
            (part.file, f"{place}.file") if isinstance(part, schema.FilePart) else (part, place)
        )
        where, name = _one_of(held, ("file_id", "file_data", "file_url"), inside)
        return self._image(part, where, f"{inside}.{name}", place)

    def _pictures(
        self, data: bytes, shown: SentImage, place: str, part: schema.PicturePart | None = None
    ) -> list[Record]:
        """One picture, all pages of a PDF, or a video, depending on the bytes."""
        if not is_pdf(data) and is_video(data):
            return [self._video(data)]
        found: list[bytes | Source | Package]
        if is_pdf(data):
            room = self.config.max_images - self.images
            largest = min(self.config.max_image_pixels, MAX_PIXELS)
            found = [*pages(data, shown, self.config.pdf_dpi, max(1, room), largest)]
            self.pixels += LARGE_PICTURES  # drawing is slow for any PDF
        elif is_package(data):
            found = [package_in(data, place, part, self.unused)]
        else:
            found = [picture(data, shown, self.config.max_image_pixels)]
            self.pixels += math.prod(size_of(data, "it"))
        self.images += len(found)
        if self.images > self.config.max_images:
            raise self._too_many(place)
        return [{"type": "image", "image": image} for image in found]

    # -- addresses -------------------------------------------------------------------------------

    def _bytes(self, url: str, place: str) -> bytes:
        where_from = scheme(url)
        if where_from == "data":
            return _decoded(url, place)
        if where_from in FETCHED:
            if url not in self._fetched:
                left = self.config.url_bytes - sum(map(len, self._fetched.values()))
                seconds = self.config.url_timeout
                fetcher = Fetcher(max(left, 0), seconds, self.config.allow_private_urls)
                self._fetched[url] = fetcher.fetch(url)
            return self._fetched[url]
        if url.startswith("file-"):
            return self.files.read(self.tenant, url, place)
        return _bare_picture(url) or self._local(url, place)

    def _local(self, url: str, place: str) -> bytes:
        """A file under an allowed folder. Forbidden files look like absent ones."""
        what = "expected an http(s) URL, a data URI or the id of an uploaded file; local files are"
        text = f"{place}: {what} read only under folders that the server allows (--allow-path)"
        refusal = ApiError(400, text, param=place, code="invalid_image_url")
        if not self.config.allow_path or "\0" in url:
            raise refusal
        text = url
        if url.startswith("file://"):
            text = urllib.request.url2pathname(urllib.parse.urlsplit(url).path)
        try:
            path = Path(text).resolve(strict=True)
            roots = [expanded(root).resolve() for root in self.config.allow_path]
            if not Path(text).is_absolute() or not any(path.is_relative_to(r) for r in roots):
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


_NAME = re.compile(r"\bmessage(\.name\b|\[.name.\])")  # of a speaker, in a chat template
Given = str | schema.Address | schema.EncodedSource  # the fields that may hold a medium


def _one_of(part: BaseModel, names: tuple[str, ...], place: str) -> tuple[Given, str]:
    """The one field of several that is given, and its name."""
    given = [name for name in names if getattr(part, name, None) is not None]
    if len(given) != 1:
        what = f"it needs one of {', '.join(names)}"
        raise invalid(place, f"{place}: {what}")
    return getattr(part, given[0]), given[0]


def _thought_in(content: object) -> str | None:
    """Thoughts that are parts of the content."""
    if not isinstance(content, list):
        return None
    thoughts = [part for part in content if isinstance(part, schema.ThoughtPart)]
    return "".join(part.thinking or part.text or "" for part in thoughts) or None


_HOLDERS = ("image", "image_url", "url", "path", "base64", "data", "source", "file_id")


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


def _call(call: schema.ToolCall, place: str) -> Record:
    """A tool call as templates want it: arguments as a record, if possible."""
    given = call.function.arguments
    arguments = given if isinstance(given, dict) else arguments_of(given)
    name = call.function.name
    return {
        **({} if call.id is None else {"id": call.id}),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
