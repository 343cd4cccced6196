"""Converts messages to the form that chat templates want, and collects their media.

Callers use many dialects: parts named as OpenAI or Hugging Face name them; pictures as paths, URLs,
data or objects. A template sees roles, texts and the places of media.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence

from keepsight.errors import ImageError, MessagesError
from keepsight.kinds import Message, Record
from keepsight.media.medium import Medium

_TEXT_TYPES = ("text", "input_text", "output_text")
# Part types and the fields that hold their data. The family decides which modalities a model takes.
_MEDIA: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "video": (("video", "video_url", "input_video"), ("video", "video_url")),
    "audio": (("audio", "audio_url", "input_audio"), ("audio", "audio_url", "input_audio")),
    "image": (("image", "image_url", "input_image"), ("image", "image_url", "base64", "file")),
}
_NAMED = 3  # places in one note
_SECRET = re.compile(r"(?<=://)[^/@]*@|\?.*")  # of an address: a user with a password, the query
_ANY = ("url", "path")  # fields that do not tell their modality; without a type, an image


def parse_messages(messages: object) -> tuple[list[Message], list[tuple[str, object]]]:
    """Messages as the template wants them, and the media in order of appearance."""
    media: list[tuple[str, object]] = []
    return [parse_message(one, i, media) for i, one in enumerate(listed(messages))], media


def listed(messages: object) -> Sequence[object]:
    """A conversation as a list of messages; one message becomes a list of one."""
    if isinstance(messages, dict):
        messages = [messages]
    if not isinstance(messages, list | tuple) or not messages:
        raise MessagesError(
            "expected a list of messages like "
            "{'role': 'user', 'content': [{'type': 'image', 'image': ...}, ...]}"
        )
    return messages


def parse_message(message: object, i: int, media: list[tuple[str, object]]) -> Message:
    """Message `i` as the template wants it; its media are appended to `media`."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise MessagesError(f"message {i} is not a dict with a 'role'")
    content = message.get("content")
    if (content is None and message.get("tool_calls")) or isinstance(content, str):
        return dict(message)
    if isinstance(content, list | tuple):
        return dict(message, content=[_parse_part(part, i, media) for part in content])
    raise MessagesError(
        f"message {i} has content of type {type(content).__name__}; expected a string or "
        "a list of parts"
    )


def _parse_part(part: object, i: int, media: list[tuple[str, object]]) -> Record:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        media.append(("image", part))
        return {"type": "image"}
    kind = part.get("type")
    if kind in _TEXT_TYPES or (kind is None and "text" in part):
        if not isinstance(part.get("text"), str):
            raise MessagesError(f"message {i} has a text part without a string 'text'")
        return {"type": "text", "text": part["text"]}
    for modality, (types, fields) in _MEDIA.items():
        telling = (*fields, *_ANY) if modality == "image" else fields
        if kind in types or (kind is None and any(field in part for field in telling)):
            media.append((modality, _medium_of(part, i, modality, fields)))
            return {"type": modality}
    raise MessagesError(
        f"message {i} has a part of type {kind!r}; expected 'text', 'image' or 'image_url', or "
        "'video' or 'audio' where the model takes them"
    )


def _medium_of(part: Message, i: int, modality: str, fields: tuple[str, ...]) -> object:
    for field in (*fields, *_ANY):
        value = part.get(field)
        if isinstance(value, dict) and "url" in value:
            value = value["url"]
        elif isinstance(value, dict) and isinstance(value.get("data"), str):
            value = _from_base64(value["data"], i)
        elif isinstance(value, dict) and modality == "image":
            value = None
        if value is not None:
            if field == "base64" and isinstance(value, str) and not value.startswith("data:"):
                return f"data:image/unknown;base64,{value}"
            return value
    one = "a video" if modality == "video" else f"an {modality}"
    inside = "sound" if modality == "audio" else one
    raise ImageError(f"message {i} has {one} part without {inside} in it")


def _from_base64(data: str, i: int) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ImageError(f"message {i} has 'data' that is not base64: {error}") from None


def kept_notes(history: list[Message]) -> list[str]:
    """A report's note on pictures of earlier turns, which lie elsewhere and are not read again."""
    content = [one["content"] for one in history if isinstance(one.get("content"), list)]
    parts = [part for its in content for part in its if isinstance(part, dict)]
    media = [part.get(part.get("type")) for part in parts]
    places = [one.opened.where for one in media if isinstance(one, Medium) and one.opened]
    known = [_SECRET.sub("", place) for place in dict.fromkeys(places) if place]
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    shown = ", ".join(known[:_NAMED])
    return [f"kept as first seen, and not read again: {shown}{more}"] if known else []
