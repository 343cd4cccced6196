"""Converts request messages for the library: every picture is fetched, checked and counted.

Runs in a worker thread. Nothing here decodes a picture; refusals need only the header of its file.
"""

from __future__ import annotations

import binascii
import contextlib
import math
import stat
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from keepsight.errors import ImageError
from keepsight.formats.package import Package
from keepsight.kinds import Message as Rendered
from keepsight.kinds import Record
from keepsight.media.pictures import MAX_PIXELS, size_of
from keepsight.media.sources import Source, from_base64
from keepsight.prompt.lengths import characters
from keepsight.server.api import schema
from keepsight.server.api.output_parser import arguments_of
from keepsight.server.api.unused import Unused, is_empty
from keepsight.server.config import ServerConfig
from keepsight.server.errors import ApiError, invalid, refused
from keepsight.server.limits.threads import LARGE_PICTURES, LARGE_TEXT, RenderedMessages
from keepsight.server.media import embeds, parts
from keepsight.server.media.bindings import Bindings
from keepsight.server.media.fetch import Fetcher
from keepsight.server.media.files import Files
from keepsight.server.media.images import LOW, ImageSizes, SentImage, is_pdf, pages, picture
from keepsight.server.media.media_limits import check_sound, check_video, is_video
from keepsight.server.media.origins import FETCHED, WORDS, scheme
from keepsight.system.places import expanded

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
    bindings: Bindings | None = None  # names that clients gave to pictures
    whose: str = ""  # tenant with the request's salt, which owns these names
    images: int = 0
    pixels: int = 0
    _fetched: dict[str, bytes] = field(default_factory=dict)

    def messages(self, messages: list[schema.ChatMessage], template: str) -> RenderedMessages:
        """All messages, for a template that must have a place for their contents."""
        if len(messages) > self.config.max_messages:
            raise invalid(
                "messages",
                f"{len(messages)} messages, this server takes at most {self.config.max_messages}",
            )
        for message in messages:
            if message.tool_calls and "tool_calls" not in template:
                raise refused(
                    "messages", "the chat template of this model has no place for tool_calls"
                )
        self._check_number(messages)
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
        more = {
            "name": message.name,
            "tool_call_id": message.tool_call_id,
            "reasoning_content": message.thought() or parts.thought_in(message.content),
        }
        for name, value in more.items():
            if value is not None:
                made[name] = checked_text(value, f"{place}.{name}")
        if message.tool_calls:
            calls = enumerate(message.tool_calls)
            made["tool_calls"] = [_call(c, f"{place}.tool_calls[{i}]") for i, c in calls]
        self._name_unused(message, place)
        return made

    def _name_unused(self, message: schema.ChatMessage, place: str) -> None:
        """Report the fields of a message that the prompt leaves out; refuse those it would need."""
        if not is_empty(message.function_call):
            raise refused(f"{place}.function_call", "deprecated; send it as tool_calls")
        if not is_empty(message.audio):
            self.unused.add(f"{place}.audio", "what was said is in content")
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
            text = checked_text(content, place)
            return [_text(text)] if message.role in _LISTS else text
        if not content:
            raise invalid(place, f"{place} is an empty list; expected at least one part")
        made = []
        for i, part in enumerate(content):
            with _located(f"{place}[{i}]"):
                if isinstance(part, parts.ThoughtPart) and message.role == "assistant":
                    continue
                made += self._part(part, f"{place}[{i}]")
        if message.role not in _LISTS and all(part["type"] == "text" for part in made):
            return "".join(part["text"] for part in made)
        return made or [_text("")]

    def _part(self, part: parts.Part, place: str) -> list[Record]:
        if isinstance(part, parts.TextPart):
            self._uncached(part, place)
            return [_text(checked_text(part.text, f"{place}.text"))]
        if isinstance(part, parts.RefusalPart):
            return [_text(checked_text(part.refusal, f"{place}.refusal"))]
        if isinstance(part, parts.ThoughtPart):
            raise invalid(place, f"{place}: thoughts are parts of an assistant's message")
        if isinstance(part, parts.ImagePart):
            return self._image(part, part.image_url, f"{place}.image_url", place)
        if isinstance(part, parts.BareImagePart):
            where, field_name = parts.one_of(part, _HOLDERS, place)
            return self._image(part, where, f"{place}.{field_name}", place)
        if isinstance(part, parts.EmbedsPart):
            inside, text = f"{place}.image_embeds", embeds.text_of(part, place)
            return embeds.features_only(self._bare([text], inside), place)
        if isinstance(part, parts.VideoPart):
            self._uncached(part, place)
            where, _ = parts.one_of(part, ("video_url", "video", "url", "path"), place)
            data = self._bytes(where if isinstance(where, str) else where.url or "", place)
            return [self._video(self._bound(part.uuid, data, place))]
        if isinstance(part, parts.SoundPart):
            data = _decoded(part.input_audio.data, place)
            check_sound(data, self.config.bytes("clip_bytes"))
            return [{"type": "audio", "audio": self._bound(part.uuid, data, place)}]
        return self._file(part, place)

    def _image(
        self, part: parts.PicturePart, where: parts.Given, inside: str, place: str
    ) -> list[Record]:
        """A picture from any of the fields that may hold it."""
        detail = part.detail
        if isinstance(where, parts.EncodedSource):
            if (where.data is None) == (where.url is None):
                raise invalid(inside, f"{inside}: give either data or url")
            where = where.data or where.url or ""
        if isinstance(where, parts.ImageAddress):
            detail = where.detail or detail
        where = where if isinstance(where, str) else where.url
        if inside.endswith((".base64", ".data", ".source")) and scheme(where) not in FETCHED:
            data = _decoded(where, inside)
        elif inside.endswith(".file_id"):
            data = self.files.read(self.tenant, where, inside)
        else:
            data = self._bytes(where, inside)
        return self._pictures(data, self._shown(part, detail, place), place, part)

    def _bare(self, images: list[JsonValue], place: str) -> list[Record]:
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
        check_video(data, self.config.bytes("clip_bytes"))
        return {"type": "video", "video": data}

    def _shown(self, part: parts.PicturePart | None, detail: str | None, place: str) -> SentImage:
        """The size of a picture: the part's own minimum, and the smallest of all maximums."""
        least, most = part.limits() if part is not None else (None, None)
        caps = [self.limits[1], most, LOW if detail == "low" else None]
        most = min((cap for cap in caps if cap is not None), default=None)
        return self.sizes.shown(
            self.limits[0] if least is None else least, most, place, self.unused
        )

    def _uncached(
        self, part: parts.TextPart | parts.PicturePart | parts.VideoPart, place: str
    ) -> None:
        if not is_empty(part.cache_control):
            why = "what was sent is remembered by itself; see /v1/cache/pin"
            self.unused.add(f"{place}.cache_control", why)

    def _bound(self, uuid: str | None, data: bytes, place: str) -> bytes:
        """The bytes unchanged, after their client's name is bound to them."""
        if uuid is not None and self.bindings is not None:
            self.bindings.bind(self.tenant, self.whose, uuid, data, f"{place}.uuid")
        return data

    def _file(self, part: parts.FilePart, place: str) -> list[Record]:
        file = part.file
        # Responses items have these fields in the part itself.
        inside = place if place.startswith("input[") else f"{place}.file"
        if (file.file_id is None) == (file.file_data is None):
            raise invalid(inside, f"{place}: give either file_id or file_data")
        if file.file_id is not None:
            data = self.files.read(self.tenant, file.file_id, f"{inside}.file_id")
        else:
            data = _decoded(file.file_data or "", f"{inside}.file_data")
        return self._pictures(data, self._shown(part, part.detail, place), place, part)

    def _pictures(
        self, data: bytes, shown: SentImage, place: str, part: parts.PicturePart | None = None
    ) -> list[Record]:
        """One picture, all pages of a PDF, or a video, depending on the bytes."""
        if part is not None:
            self._uncached(part, place)
            self._bound(part.uuid, data, place)
        if not is_pdf(data) and is_video(data):
            return [self._video(data)]
        found: list[bytes | Source | Package]
        if is_pdf(data):
            room = self.config.max_images - self.images
            largest = min(self.config.max_image_pixels, MAX_PIXELS)
            found = [*pages(data, shown, self.config.pdf_dpi, max(1, room), largest)]
            self.pixels += LARGE_PICTURES  # drawing is slow for any PDF
        elif embeds.is_package(data):
            found = [embeds.package_in(data, place, part, self.unused)]
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
                left = self.config.bytes("url_bytes") - sum(map(len, self._fetched.values()))
                seconds = self.config.seconds("url_timeout")
                fetcher = Fetcher(max(left, 0), seconds, self.config.allow_private_urls)
                self._fetched[url] = fetcher.fetch(checked_text(url, place))
            return self._fetched[url]
        if url.startswith("file-"):
            return self.files.read(self.tenant, url, place)
        return _bare_picture(url) or self._local(checked_text(url, place), place)

    def _local(self, url: str, place: str) -> bytes:
        """A file under an allowed folder. Forbidden files look like absent ones."""
        refusal = ApiError(
            400,
            f"{place}: expected an http(s) URL, a data URI or the id of an uploaded file; local "
            "files are read only under folders that the server allows (--allow-path)",
            param=place,
            code="invalid_image_url",
        )
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
            if not stat.S_ISREG(status.st_mode) or status.st_size > self.config.bytes("url_bytes"):
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


_HOLDERS = ("image", "image_url", "url", "path", "base64", "data", "source", "file_id")


def checked_text(text: str, place: str) -> str:
    """A text that can be written as UTF-8; unpaired surrogates are refused."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(place, f"{place} holds half of a surrogate pair, which is no text") from None
    return text


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
        raise ApiError(
            400,
            f"{place} cannot be decoded ({error}); expected data:image/png;base64,...",
            param=place,
            code="invalid_base64",
        ) from None


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
    arguments = given if isinstance(given, dict) else arguments_of(checked_text(given, place))
    name = checked_text(call.function.name, place)
    return {
        **({} if call.id is None else {"id": checked_text(call.id, place)}),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
