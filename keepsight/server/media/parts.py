"""The parts of a message: text, pictures, videos, sound and files, in the dialects of clients.

A picture may be an OpenAI part (`image_url` as a record or a bare string), one of Hugging Face's
(`{"type": "image", "image" | "url" | "path" | "base64": ...}`) or of Anthropic's (`source`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from keepsight.server.api.unused import Open
from keepsight.server.errors import invalid

Text = Annotated[str, Field(max_length=16_000_000)]
Where = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Id = Annotated[str, Field(min_length=1, max_length=4096)]  # may hold a whole thought
Detail = Literal["auto", "low", "high", "original"]
Pixels = Annotated[int, Field(ge=1024, le=120_000_000)]


def kind_of(value: object) -> str:
    """Which type of a union of text and list is meant."""
    return "as parts" if isinstance(value, list) else "as text"


def _address_kind(value: object) -> str:
    return "as text" if isinstance(value, str) else "as record"


class TextPart(Open):
    """Text."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    cache_control: JsonValue = None

    def echoes(self) -> bool:
        """Whether this is text of an earlier answer, which clients send back with additions."""
        return self.type == "output_text"


class RefusalPart(Open):
    """A refusal in an earlier answer; the model sees it as text."""

    type: Literal["refusal"]
    refusal: Text


class ThoughtPart(Open):
    """A thought in the content of an earlier answer."""

    type: Literal["thinking", "reasoning", "redacted_thinking"]
    thinking: Text | None = None
    text: Text | None = None

    def echoes(self) -> bool:
        return True


class ImageAddress(Open):
    """The address of a picture: http(s), a data URI, or a path under an allowed folder."""

    url: Where
    detail: Detail | None = None


Place = Annotated[
    Annotated[ImageAddress, Tag("as record")] | Annotated[Where, Tag("as text")],
    Discriminator(_address_kind),
]


class SizeLimits(Open):
    """The size limits of a processor."""

    shortest_edge: Pixels | None = None
    longest_edge: Pixels | None = None


class ProcessorOptions(Open):
    """`mm_processor_kwargs`: those processor options that limit the size of a picture."""

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    size: SizeLimits | None = None


class PixelLimits(Open):
    """How large pictures are shown to the model."""

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    mm_processor_kwargs: ProcessorOptions | None = None

    def limits(self) -> tuple[int | None, int | None]:
        """The minimum and maximum of pixels, from any of the fields."""
        more = self.mm_processor_kwargs or ProcessorOptions()
        size = more.size or SizeLimits()
        least = (self.min_pixels, more.min_pixels, size.shortest_edge)
        most = (self.max_pixels, more.max_pixels, size.longest_edge)
        return (
            max((n for n in least if n is not None), default=None),
            min((n for n in most if n is not None), default=None),
        )


class PicturePart(PixelLimits):
    """Fields of every part with a picture."""

    detail: Detail | None = None
    uuid: Id | None = None
    cache_control: JsonValue = None


class ImagePart(PicturePart):
    """A picture."""

    type: Literal["image_url"]
    image_url: Place


class EncodedSource(Open):
    """A picture in the body or at an address, as in Anthropic's API."""

    type: Literal["base64", "url"]
    data: Where | None = None
    url: Where | None = None
    media_type: JsonValue = None


class BareImagePart(PicturePart):
    """A picture as Hugging Face's templates, Responses and Anthropic's API write it; one of these
    fields holds it."""

    type: Literal["image", "input_image"]
    image: Place | None = None
    image_url: Place | None = None
    url: Where | None = None
    path: Where | None = None
    base64: Where | None = None
    data: Where | None = None
    source: EncodedSource | None = None
    file_id: Name | None = None
    mime_type: JsonValue = None  # the bytes tell what it is


class EmbedsPart(Open):
    """Features in place of a picture: a `.sight` file as base64, as a data URI, or by its id."""

    type: Literal["image_embeds"]
    image_embeds: JsonValue


class VideoAddress(Open):
    """The address of a video."""

    url: Where


VideoPlace = Annotated[
    Annotated[VideoAddress, Tag("as record")] | Annotated[Where, Tag("as text")],
    Discriminator(_address_kind),
]


class VideoPart(Open):
    """A video, if the model takes videos."""

    type: Literal["video_url", "video", "input_video"]
    video_url: VideoPlace | None = None
    video: VideoPlace | None = None
    url: Where | None = None
    path: Where | None = None
    uuid: Id | None = None
    cache_control: JsonValue = None


class Sound(Open):
    """Sound in the body."""

    data: Annotated[str, Field(min_length=1)]
    format: Literal["wav", "mp3", "flac", "ogg"] | None = None


class SoundPart(Open):
    """Sound, if the model takes sound."""

    type: Literal["input_audio"]
    input_audio: Sound
    uuid: Id | None = None


class FileHandle(Open):
    """An uploaded file by its id, or a file in the body as a data URI."""

    file_id: Name | None = None
    file_data: Where | None = None
    filename: Annotated[str, Field(max_length=1024)] | None = None


class FilePart(PicturePart):
    """A picture, or a PDF whose pages are pictures."""

    type: Literal["file"]
    file: FileHandle


Part = Annotated[
    TextPart
    | RefusalPart
    | ThoughtPart
    | ImagePart
    | BareImagePart
    | EmbedsPart
    | VideoPart
    | SoundPart
    | FilePart,
    Discriminator("type"),
]
Content = Annotated[
    Annotated[Text, Tag("as text")] | Annotated[list[Part], Tag("as parts")],
    Discriminator(kind_of),
]


Given = str | ImageAddress | VideoAddress | EncodedSource  # the fields that may hold a medium


def one_of(
    part: BareImagePart | VideoPart, names: tuple[str, ...], place: str
) -> tuple[Given, str]:
    """Return the one field of several that is given, and its name."""
    given = [name for name in names if getattr(part, name, None) is not None]
    if len(given) != 1:
        what = f"a part of type {part.type} needs one of {', '.join(names)}"
        raise invalid(place, f"{place}: {what}")
    return getattr(part, given[0]), given[0]


def thought_in(content: object) -> str | None:
    """Thoughts that are parts of the content."""
    if not isinstance(content, list):
        return None
    thoughts = [part for part in content if isinstance(part, ThoughtPart)]
    return "".join(part.thinking or part.text or "" for part in thoughts) or None
