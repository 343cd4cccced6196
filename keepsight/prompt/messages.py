"""Converts messages to the form that chat templates want, and collects their media.

Callers use many dialects: parts named as OpenAI or Hugging Face name them; pictures as paths, URLs,
data or objects. A template sees roles, texts and the places of media.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable

from keepsight.errors import ImageError, InputError, MessagesError
from keepsight.kinds import Message, Record
from keepsight.media.medium import MEDIA, Medium

_TEXT_TYPES = ("text", "input_text", "output_text")
# Part types and the fields that hold their data. The family decides which modalities a model takes.
_DIALECTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "video": (("video", "video_url", "input_video"), ("video", "video_url")),
    "audio": (("audio", "audio_url", "input_audio"), ("audio", "audio_url", "input_audio")),
    "image": (("image", "image_url", "input_image"), ("image", "image_url", "base64", "file")),
}
NO_MESSAGES = (
    "expected a list of messages like "
    "{'role': 'user', 'content': [{'type': 'image', 'image': ...}, ...]}"
)
_NAMED = 3  # places in one note
_SECRET = re.compile(r"(?<=://)[^/@]*@|\?.*")  # of an address: a user with a password, the query
_ANY = ("url", "path")  # fields that do not tell their modality; without a type, an image


def user_message(text: object, images: object = None) -> Message:
    """One user turn: pictures first, then the text."""
    given = images if isinstance(images, list | tuple) else [] if images is None else [images]
    if not isinstance(text, str):
        raise InputError(f"the question is a {type(text).__name__}, expected a string")
    parts = [{"type": "image", "image": image} for image in given]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def parse_messages(messages: object) -> tuple[list[Message], list[tuple[str, object]]]:
    """Messages as the template wants them, and the media in order of appearance."""
    if isinstance(messages, dict):
        messages = [messages]
    if not isinstance(messages, list | tuple) or not messages:
        raise MessagesError(NO_MESSAGES)
    clean: list[Message] = []
    media: list[tuple[str, object]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise MessagesError(f"message {i} is not a dict with a 'role'")
        content = message.get("content")
        if isinstance(content, list | tuple):
            parts = [_parse_part(part, i, media) for part in content]
            clean.append({**message, "content": parts})
        elif isinstance(content, str) or (content is None and message.get("tool_calls")):
            clean.append(dict(message))
        else:
            raise MessagesError(
                f"message {i} has content of type {type(content).__name__}; expected a string or "
                "a list of parts"
            )
    return clean, media


def with_media(clean: list[Message], media: Iterable[Medium]) -> list[Message]:
    """Messages that were parsed, with their named media in their places."""
    waiting = iter(media)
    return [
        {
            **message,
            "content": [
                {**part, part["type"]: next(waiting)} if part["type"] in MEDIA else part
                for part in message["content"]
            ],
        }
        if isinstance(message.get("content"), list)
        else message
        for message in clean
    ]


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
    for modality, (types, fields) in _DIALECTS.items():
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
            try:
                value = base64.b64decode(value["data"], validate=True)
            except (ValueError, binascii.Error) as error:
                raise ImageError(f"message {i} has 'data' that is not base64: {error}") from None
        elif isinstance(value, dict) and modality == "image":
            value = None
        if value is not None:
            if field == "base64" and isinstance(value, str) and not value.startswith("data:"):
                return f"data:image/unknown;base64,{value}"
            return value
    one = "a video" if modality == "video" else f"an {modality}"
    inside = "sound" if modality == "audio" else one
    raise ImageError(f"message {i} has {one} part without {inside} in it")


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
