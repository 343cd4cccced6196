"""Messages from the wire to messages for the library: every picture fetched, checked and counted.

Runs in a worker thread. Nothing here decodes a picture; what is refused is refused by the header of
its file, before it costs anything.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import stat
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepsight.errors import ImageError
from keepsight.pictures import MAX_PIXELS
from keepsight.render import Message as Rendered
from keepsight.server import schema
from keepsight.server.bounds import check_sound, check_video
from keepsight.server.config import ServerConfig
from keepsight.server.fetch import Fetcher
from keepsight.server.files import Files
from keepsight.server.pages import LOW, is_pdf, pages, picture
from keepsight.server.problems import ApiError, invalid, refused
from keepsight.server.spoken import arguments_of

_LISTS = ("user", "assistant")  # roles whose content templates expect as a list of parts
_FETCHED = ("http", "https")
_VIDEO_MAGIC = (b"\x1aE\xdf\xa3", b"RIFF")


@dataclass
class Gatherer:
    """Gathers what one request speaks of. `tenant` is whose files may be meant."""

    config: ServerConfig
    files: Files
    tenant: str
    cap: int | None = None  # the request's own cap on pixels
    images: int = 0
    _fetched: dict[str, bytes] = field(default_factory=dict)

    def messages(self, messages: list[schema.Message], template: str) -> list[Rendered]:
        """All messages, for a template that must have a place for what they hold."""
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
        return [self._message(m, *m.places(i)) for i, m in enumerate(messages)]

    def _message(self, message: schema.Message, place: str, content: str) -> Rendered:
        role = "system" if message.role == "developer" else message.role
        made: Rendered = {"role": role, "content": self._content(message, content)}
        if message.role == "tool" and message.tool_call_id is None:
            raise invalid(f"{place}.tool_call_id", "a tool's message needs its tool_call_id")
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                made[name] = sound(value, f"{place}.{name}")
        if message.tool_calls:
            calls = enumerate(message.tool_calls)
            made["tool_calls"] = [_call(c, f"{place}.tool_calls[{i}]") for i, c in calls]
        return made

    def _content(self, message: schema.Message, place: str) -> Any:
        content = message.content
        if content is None:
            if message.refusal is not None:
                content = message.refusal
            elif message.tool_calls:
                return None
            else:
                raise invalid(place, f"{place} is missing; expected a text or a list of parts")
        if isinstance(content, str):
            text = sound(content, place)
            return [_text(text)] if message.role in _LISTS else text
        if not content:
            raise invalid(place, f"{place} is an empty list; expected at least one part")
        parts = []
        for i, part in enumerate(content):
            with _standing(f"{place}[{i}]"):
                parts += self._part(part, f"{place}[{i}]")
        if message.role not in _LISTS and all(part["type"] == "text" for part in parts):
            return "".join(part["text"] for part in parts)
        return parts

    def _part(self, part: Any, place: str) -> list[dict[str, Any]]:
        if isinstance(part, schema.TextPart):
            return [_text(sound(part.text, f"{place}.text"))]
        if isinstance(part, schema.RefusalPart):
            return [_text(sound(part.refusal, f"{place}.refusal"))]
        if isinstance(part, schema.ImagePart):
            where, cap = part.image_url, self._cap(part.image_url.detail, part.max_pixels)
            return self._pictures(self._bytes(where.url, f"{place}.image_url"), cap, place)
        if isinstance(part, schema.VideoPart):
            return [self._video(self._bytes(part.video_url.url, place))]
        if isinstance(part, schema.SoundPart):
            data = _decoded(part.input_audio.data, place)
            check_sound(data, self.config.bytes("clip_bytes"))
            return [{"type": "audio", "audio": data}]
        return self._file(part, place)

    def _video(self, data: bytes) -> dict[str, Any]:
        check_video(data, self.config.bytes("clip_bytes"))
        return {"type": "video", "video": data}

    def _cap(self, detail: str | None, pixels: int | None) -> int | None:
        caps = [self.cap, pixels, LOW if detail == "low" else None]
        return min((cap for cap in caps if cap is not None), default=None)

    def _file(self, part: schema.FilePart, place: str) -> list[dict[str, Any]]:
        file = part.file
        # The items of a response have these fields in the part itself.
        inside = place if place.startswith("input[") else f"{place}.file"
        if (file.file_id is None) == (file.file_data is None):
            raise invalid(inside, f"{place}: give either file_id or file_data")
        if file.file_id is not None:
            data = self.files.read(self.tenant, file.file_id, f"{inside}.file_id")
        else:
            data = _decoded(file.file_data or "", f"{inside}.file_data")
        return self._pictures(data, self._cap(part.detail, part.max_pixels), place)

    def _pictures(self, data: bytes, cap: int | None, place: str) -> list[dict[str, Any]]:
        """One picture, all pages of a PDF, or a video, by what the bytes are."""
        if not is_pdf(data) and _is_video(data):
            return [self._video(data)]
        found: list[Any]
        if is_pdf(data):
            room = self.config.max_images - self.images
            largest = min(self.config.max_image_pixels, MAX_PIXELS)
            found = list(pages(data, cap, self.config.pdf_dpi, max(1, room), largest))
        else:
            found = [picture(data, cap, self.config.max_image_pixels)]
        self.images += len(found)
        if self.images > self.config.max_images:
            raise ApiError(
                400,
                f"more than {self.config.max_images} images in one request",
                param=place,
                code="too_many_images",
            )
        return [{"type": "image", "image": image} for image in found]

    # -- addresses -------------------------------------------------------------------------------

    def _bytes(self, url: str, place: str) -> bytes:
        scheme = _scheme(url)
        if scheme == "data":
            return _decoded(url, place)
        if scheme in _FETCHED:
            if url not in self._fetched:
                left = self.config.bytes("url_bytes") - sum(map(len, self._fetched.values()))
                seconds = self.config.seconds("url_timeout")
                fetcher = Fetcher(max(left, 0), seconds, self.config.allow_private_urls)
                self._fetched[url] = fetcher.fetch(sound(url, place))
            return self._fetched[url]
        if url.startswith("file-"):
            return self.files.read(self.tenant, url, place)
        return self._local(sound(url, place), place)

    def _local(self, url: str, place: str) -> bytes:
        """A file under an allowed folder. What is not allowed looks like what is not there."""
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
            roots = [Path(root).expanduser().resolve() for root in self.config.allow_path]
            if not Path(text).is_absolute() or not any(path.is_relative_to(r) for r in roots):
                raise refusal
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > self.config.bytes("url_bytes"):
                raise refusal
            return path.read_bytes()
        except (OSError, RuntimeError, ValueError):
            raise refusal from None


@contextlib.contextmanager
def _standing(place: str) -> Iterator[None]:
    """Say of what is wrong with a file where it stands; those who look into it do not know."""
    try:
        yield
    except ImageError as error:
        text = f"{place}: {error}"
        raise ApiError(400, text, param=place, code="invalid_image") from error
    except ApiError as error:
        if error.param in ("messages", "image_url"):
            error.param, error.message = place, f"{place}: {error.message}"
        raise


def fetches(messages: list[schema.Message]) -> bool:
    """Whether anything in some messages would be fetched from elsewhere."""
    parts = (p for m in messages if isinstance(m.content, list) for p in m.content)
    return any(_scheme(where.url) in _FETCHED for p in parts if (where := _address(p)) is not None)


def _address(part: Any) -> schema.Address | schema.VideoAddress | None:
    if isinstance(part, schema.ImagePart):
        return part.image_url
    return part.video_url if isinstance(part, schema.VideoPart) else None


def _scheme(url: str) -> str:
    return url[:8].partition(":")[0].lower()


def sound(text: str, place: str) -> str:
    """Text that can be written as UTF-8; half a surrogate pair is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(place, f"{place} holds half of a surrogate pair, which is no text") from None
    return text


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _decoded(text: str, place: str) -> bytes:
    """The bytes of a data URI, or of base64 alone."""
    head, comma, body = text.partition(",") if text[:5].lower() == "data:" else ("", ",", text)
    try:
        if not comma:
            raise ValueError("there is no comma")
        if head and not head.lower().endswith(";base64"):
            return urllib.parse.unquote_to_bytes(body)
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ApiError(
            400,
            f"{place} cannot be decoded ({error}); expected data:image/png;base64,...",
            param=place,
            code="invalid_base64",
        ) from None


def _is_video(data: bytes) -> bool:
    if data[4:8] == b"ftyp":
        return data[8:11] not in (b"avi", b"hei", b"mif", b"msf")  # AVIF and HEIF are pictures
    return data[:4] == _VIDEO_MAGIC[0] or (data[:4] == _VIDEO_MAGIC[1] and data[8:11] == b"AVI")


def _call(call: schema.ToolCall, place: str) -> dict[str, Any]:
    """A call as templates want it: arguments as a record, where they are one."""
    arguments = arguments_of(sound(call.function.arguments, place))
    name = sound(call.function.name, place)
    return {
        "id": sound(call.id, place),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
