"""Where the media of a request come from: the request itself, a disk, or the network.

Separate threads wait for disks and other servers. So requests that contain their media never wait
for those that do not.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from pydantic import BaseModel

from keepsight.server.api import schema
from keepsight.server.media import parts

FETCHED = ("http", "https")
_ON_DISK = ("file-", "file:", "/")  # uploads by id, and files below allowed folders
_LONGEST_PATH = 4096  # base64 may begin with a slash too
WORDS = (parts.TextPart, parts.RefusalPart, parts.ThoughtPart)


class BodyOrigin(enum.Enum):
    """The slowest origin of anything in a request."""

    REQUEST = "request"
    DISK = "disk"
    ELSEWHERE = "elsewhere"


def origin_of(messages: list[schema.ChatMessage]) -> BodyOrigin:
    """The origin of the media in some messages."""
    found = BodyOrigin.REQUEST
    for message in messages:
        for address in _addresses(message):
            if scheme(address) in FETCHED:
                return BodyOrigin.ELSEWHERE
            if address.startswith(_ON_DISK) and len(address) <= _LONGEST_PATH:
                found = BodyOrigin.DISK
    return found


def scheme(url: str) -> str:
    """The text before the first colon of an address."""
    return url[:8].partition(":")[0].lower()


def _addresses(message: schema.ChatMessage) -> Iterator[str]:
    """All texts of a message that may be addresses."""
    yield from (image for image in message.images or () if isinstance(image, str))
    for part in message.content if isinstance(message.content, list) else ():
        if not isinstance(part, WORDS):
            yield from _texts(part)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _texts(getattr(value, name))
