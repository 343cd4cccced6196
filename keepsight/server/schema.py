"""Request fields without effect here: accepted, and reported in a header, the log and the report,
so that no option is silently ignored.

With `--unknown-fields refuse` the server refuses the first of them instead, with a hint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    PrivateAttr,
    Tag,
)

from keepsight.core.decoding.stops import MOST as MOST_STOPS
from keepsight.server.errors import hint_for, invalid, refused, unknown

HEADER = "x-keepsight-unused"
_MOST = 24  # names that are listed; the rest is counted
_LONGEST = 120  # characters per name
_STRANGE = re.compile(r"[^A-Za-z0-9_.\[\]:/@$+-]")  # not allowed in a header, or in a list in one


class Strict(BaseModel):
    """A record without unknown fields and without type coercion."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Open(Strict):
    """A record of an API with many dialects: unknown fields are accepted and reported."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    # Unknown names that may change an answer: always refused.
    CONSTRAINING: ClassVar[dict[str, str]] = {}
    # Known names that are never suggested.
    NOT_HONOURED: ClassVar[frozenset[str]] = frozenset()

    def echoes(self) -> bool:
        """Whether this is part of an earlier answer, to which clients add fields."""
        return False


def is_empty(value: object) -> bool:
    """Whether a value says nothing: null, false, or an empty text, list or record."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


class Unused:
    """The unused fields of one request."""

    def __init__(self, refuse: bool = False) -> None:
        self.refuse = refuse
        self._why: dict[str, str] = {}  # by name, in order of appearance
        self._more = 0

    def add(self, place: str, why: str) -> None:
        """Report a known field without effect, or refuse it."""
        if self.refuse:
            raise refused(place, why)
        self._note(place, why)

    def sift(self, body: BaseModel) -> None:
        """Remove unknown fields from a body at every depth, and note their names."""
        for record, path, quiet in _records(body, (), False):
            extra = record.__pydantic_extra__
            if not extra:
                continue
            for name, value in extra.items():
                if not (quiet or is_empty(value)):
                    self._unknown(record, place_of((*path, name[:_LONGEST])), name, value)
            extra.clear()

    def _unknown(self, record: Open, place: str, name: str, value: JsonValue) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(place, f"{place} is not a valid JSON number")
        if (why := record.CONSTRAINING.get(name)) is not None:
            if (name, value) not in _NEUTRAL:
                raise refused(place, why)
            return
        known = {field.alias or own for own, field in type(record).model_fields.items()}
        known -= record.NOT_HONOURED
        if self.refuse:
            raise unknown(place, known)
        if len(self._why) < _MOST:  # finding a hint takes time
            self._note(place, f"unknown; {hint_for(place, known)}")
        else:
            self._more += 1

    def _note(self, place: str, why: str) -> None:
        if place in self._why or len(self._why) < _MOST:
            self._why.setdefault(place, why)
        else:
            self._more += 1

    def names(self) -> list[str]:
        """The names, safe for a header and a log: without spaces, commas and unusual characters."""
        named = [_STRANGE.sub("?", place)[:_LONGEST] for place in self._why]
        return [*named, f"+{self._more}"] if self._more else named

    def header(self) -> str:
        """The names on one line; empty if everything was used."""
        return ", ".join(self.names())

    def notes(self) -> tuple[str, ...]:
        """The names with their reasons, as in a report."""
        notes = [f"not used: {place}: {why}" for place, why in self._why.items()]
        return (*notes, f"not used: {self._more} more") if self._more else tuple(notes)


_NEUTRAL: tuple[tuple[str, object], ...] = (
    ("best_of", 1),
    ("truncate_prompt_tokens", -1),
    ("prompt_logprobs", 0),
)


def _records(
    value: object, path: tuple[object, ...], quiet: bool
) -> Iterator[tuple[Open, tuple[object, ...], bool]]:
    """Every record of a body with the path to it, and whether it is part of an earlier answer."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            if isinstance(item, BaseModel):
                yield from _records(item, (*path, number), quiet)
    elif isinstance(value, BaseModel):
        if isinstance(value, Open):
            quiet = quiet or value.echoes()
            yield value, path, quiet
        for name, inside in value.__dict__.items():
            if isinstance(inside, list | BaseModel):
                yield from _records(inside, (*path, name), quiet)


def place_of(path: tuple[object, ...]) -> str:
    """The path as in `messages[0].content`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


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


Unit = Annotated[float, Field(ge=0.0, le=1.0)]
Tokens = Annotated[int, Field(ge=-1, le=10_000_000)]


StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Stop = Annotated[
    Annotated[StopText, Tag("as text")]
    | Annotated[list[StopText], Field(max_length=MOST_STOPS), Tag("as parts")],
    Discriminator(kind_of),
]
# An empty text, or none in a list, ends nothing.
StopOption = Annotated[Stop | None, BeforeValidator(lambda given: given or None)]


# -- tools -------------------------------------------------------------------------------------


class Function(Open):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Open):
    """A tool."""

    type: Literal["function"]
    function: Function


class HostedTool(Open):
    """A tool that another kind of server runs: accepted, reported, and not shown to the model."""

    type: Name

    def echoes(self) -> bool:
        """Always: it is reported as a whole, not by its fields."""
        return True

    def name_unused(self, place: str, unused: Unused) -> None:
        """Report it."""
        unused.add(place, f"there are no tools of the type {self.type[:100]!r} here; see functions")


def tool_kind(value: object) -> str:
    """Whether a tool is a function."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "as function" if kind in (None, "function") else "as hosted"


AnyTool = Annotated[
    Annotated[Tool, Tag("as function")] | Annotated[HostedTool, Tag("as hosted")],
    Discriminator(tool_kind),
]


def _arguments_kind(value: object) -> str:
    return "as record" if isinstance(value, dict) else "as text"


class CalledFunction(Open):
    """A called function: `arguments` is JSON in a string, as the client got it, or the record
    itself, as templates have it."""

    name: Name
    arguments: Annotated[
        Annotated[Text, Tag("as text")] | Annotated[dict[str, JsonValue], Tag("as record")],
        Discriminator(_arguments_kind),
    ]


class ToolCall(Open):
    """One call of a tool in an earlier answer."""

    id: Id | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # streams have it, and some clients send it back


class NamedFunction(Open):
    """The name in a forced choice."""

    name: Name


class ChatToolChoice(Open):
    """A forced tool choice; it is known, and refused by name."""

    type: Literal["function"]
    function: NamedFunction


_CHOICES = ("none", "auto", "required")


def choice_kind(value: object) -> str | None:
    """The form of a tool choice."""
    if isinstance(value, dict | BaseModel):
        kind = value.get("type") if isinstance(value, dict) else "function"
        return "as function" if kind == "function" else None
    return "as text" if value in _CHOICES else None


def plain_choice(value: object) -> object:
    """Convert `{"type": "auto"}`, as some clients write `"auto"`."""
    kind = value.get("type") if isinstance(value, dict) and len(value) == 1 else None
    return kind if kind in _CHOICES else value


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("as text")]
    | Annotated[ChatToolChoice, Tag("as function")],
    Discriminator(
        choice_kind,
        custom_error_type="tool_choice",
        custom_error_message="expected 'none', 'auto', 'required', or a function by its name, as "
        "in {'type': 'function', 'function': {'name': ...}}",
    ),
    BeforeValidator(plain_choice),
]


# -- messages ----------------------------------------------------------------------------------


class ChatMessage(Open):
    """One message, or an answer that a client sends back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Id | None = None
    reasoning_content: Text | None = None
    reasoning: JsonValue = None  # another name of reasoning_content
    refusal: Text | None = None
    images: list[JsonValue] | None = None  # as in Ollama: base64, or addresses
    annotations: JsonValue = None
    audio: JsonValue = None
    function_call: JsonValue = None
    prefix: bool | None = None  # DeepSeek's field for continuing an answer
    partial: bool | None = None  # and Kimi's
    # The client's names for this message and its content, if it did not send `messages`.
    _place: str | None = PrivateAttr(default=None)
    _content_place: str | None = PrivateAttr(default=None)

    def echoes(self) -> bool:
        """Whether this is an answer, which clients send back with additions."""
        return self.role == "assistant"

    def thought(self) -> str | None:
        """The thought before the answer."""
        if self.reasoning_content is None and isinstance(self.reasoning, str):
            return self.reasoning
        return self.reasoning_content

    def called(self, place: str, content: str) -> ChatMessage:
        """The message, with the client's names for it and its content."""
        self._place, self._content_place = place, content
        return self

    def places(self, number: int) -> tuple[str, str]:
        """The client's names for message `number` and its content."""
        place = self._place or f"messages[{number}]"
        return place, self._content_place or f"{place}.content"


class StreamOptions(Open):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(Open):
    """The one format of answers without constraints."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonValue = None


class KeepsightOptions(Strict):
    """Options that only this server has."""

    report: bool = False


class Reasoning(Open):
    """How much to think before an answer, and which thoughts are sent."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    enabled: bool | None = None
    summary: JsonValue = None
    generate_summary: JsonValue = None


# What would change an answer and is not possible here: refused under all names that servers use.
_CONSTRAINED = "tokens cannot be constrained here"
CONSTRAINING: dict[str, str] = {
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding",
         "structured_outputs", "grammar", "json_schema", "regex", "ebnf", "format",
         "allowed_token_ids", "bad_words", "logits_processors"), _CONSTRAINED
    ),
    "use_beam_search": "beams are not decoded here",
    "best_of": "of several answers all are given; see n",
    "chat_template": "the template is the model's own; see chat_template_kwargs",
    "documents": "send them as messages",
    "truncate_prompt_tokens": "prompts are not cut",
    "prompt_logprobs": "only tokens of the answer are scored",
}  # fmt: skip


TemplateOptions = dict[str, JsonValue]


class PromptOptions(PixelLimits):
    """Fields of both APIs besides the messages that decide the prompt."""

    chat_template_kwargs: TemplateOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    reasoning: Reasoning | None = None
    thinking: JsonValue = None  # {"type": "enabled"} or "disabled", as in Anthropic's API
    enable_thinking: bool | None = None


class AnswerOptions(PromptOptions):
    """Fields of both APIs: how tokens are chosen, and how an answer is sent."""

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Unit | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: StopOption = None
    skip_special_tokens: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    ignore_eos: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    parallel_tool_calls: bool | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    keepsight: KeepsightOptions | None = None


class Rendering(PromptOptions):
    """Everything that decides the prompt of a request to answer, prepare or explain."""

    CONSTRAINING: ClassVar[dict[str, str]] = CONSTRAINING

    model: Name | None = None  # left out: the one that is served
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[AnyTool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the model is shown."""
        return [tool for tool in self.tools or () if isinstance(tool, Tool)]

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message, in any dialect."""
        last = self.messages[-1]
        return bool(self.continue_final_message or last.prefix or last.partial)


UNSUPPORTED: dict[str, str] = {
    "audio": "answers are text",
    "function_call": "deprecated; use tools and tool_choice",
    "functions": "deprecated; use tools",
    "web_search_options": "there is no web search here",
}
NAMED: dict[str, str] = {
    "metadata": "answers of this API are not stored, so there is nothing to attach it to",
    "moderation": "there is no moderation model here",
    "prediction": "predicted outputs are not supported",
    "prompt_cache_options": "what was used last is kept; see /v1/prepare",
    "prompt_cache_retention": "what was used last is kept; see the server's --ttl",
    "store": "answers of this API are not stored; see /v1/responses",
    "verbosity": "this model has no such setting",
}


class ChatRequest(Rendering, AnswerOptions):
    """The body of `/v1/chat/completions`."""

    NOT_HONOURED: ClassVar[frozenset[str]] = frozenset((*UNSUPPORTED, *NAMED))

    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    cache_prompt: bool | None = None
    tool_choice: ToolChoice | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text", "audio"]] | None = None
    # Refused, see UNSUPPORTED.
    audio: JsonValue = None
    function_call: JsonValue = None
    functions: JsonValue = None
    web_search_options: JsonValue = None
    # Accepted and reported, see NAMED.
    metadata: JsonValue = None
    moderation: JsonValue = None
    prediction: JsonValue = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: JsonValue = None
    store: JsonValue = None
    verbosity: JsonValue = None


class InputFile(PicturePart):
    """A picture or a PDF."""

    type: Literal["input_file"]
    file_id: Name | None = None
    file_data: Where | None = None
    file_url: Where | None = None
    filename: Annotated[str, Field(max_length=1024)] | None = None


InputPart = Annotated[
    TextPart | RefusalPart | BareImagePart | VideoPart | InputFile, Discriminator("type")
]
ItemContent = Annotated[
    Annotated[Text, Tag("as text")] | Annotated[list[InputPart], Tag("as parts")],
    Discriminator(kind_of),
]


class MessageItem(Open):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ItemContent
    id: Id | None = None
    status: JsonValue = None
    phase: JsonValue = None

    def echoes(self) -> bool:
        """Whether this is an earlier answer, which clients send back with additions."""
        return self.role == "assistant"


class Thought(Open):
    """The text of a thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class Echo(Open):
    """A part of an earlier answer."""

    id: Id | None = None
    status: JsonValue = None

    def echoes(self) -> bool:
        """Always: clients send it back with additions."""
        return True


class ThoughtItem(Echo):
    """An earlier thought."""

    type: Literal["reasoning"]
    summary: list[Thought] | None = None
    content: list[Thought] | None = None
    encrypted_content: JsonValue = None


class CallItem(Echo):
    """An earlier tool call."""

    type: Literal["function_call"]
    call_id: Id
    name: Name
    arguments: Text


class ResultItem(Echo):
    """The result of a tool."""

    type: Literal["function_call_output"]
    call_id: Id
    output: ItemContent


class OtherItem(Echo):
    """An action of another server: a search, or a call of a hosted tool."""

    type: Name


class Reference(Open):
    """A stored item, by its id."""

    type: Literal["item_reference"]
    id: Id


def _item_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    kind = "message" if kind is None else kind
    if not isinstance(kind, str):
        return "as message"
    return "as another" if kind not in _FUNCTIONS and _HOSTED.match(kind) else f"as {kind}"


_FUNCTIONS = ("function_call", "function_call_output")
_HOSTED = re.compile(r"\w+_(call|call_output)$|mcp_|tool_search_|compaction")


Item = Annotated[
    Annotated[MessageItem, Tag("as message")]
    | Annotated[ThoughtItem, Tag("as reasoning")]
    | Annotated[CallItem, Tag("as function_call")]
    | Annotated[ResultItem, Tag("as function_call_output")]
    | Annotated[Reference, Tag("as item_reference")]
    | Annotated[OtherItem, Tag("as another")],
    Discriminator(_item_kind),
]


class FunctionTool(Function):
    """A tool in this API's form."""

    type: Literal["function"]


ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("as function")] | Annotated[HostedTool, Tag("as hosted")],
    Discriminator(tool_kind),
]


class ResponsesToolChoice(Open):
    """A forced tool choice; it is known, and refused by name."""

    type: Literal["function"]
    name: Name


ResponsesChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("as text")]
    | Annotated[ResponsesToolChoice, Tag("as function")],
    Discriminator(
        choice_kind,
        custom_error_type="tool_choice",
        custom_error_message="expected 'none', 'auto', 'required', or a function by its name, as "
        "in {'type': 'function', 'name': ...}",
    ),
    BeforeValidator(plain_choice),
]


class Format(Open):
    """The format of answers."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: JsonValue = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Open):
    """Settings of text."""

    format: Format | None = None
    verbosity: JsonValue = None


class ResponsesRequest(AnswerOptions):
    """The body of `/v1/responses`."""

    CONSTRAINING: ClassVar[dict[str, str]] = CONSTRAINING
    NOT_HONOURED: ClassVar[frozenset[str]] = frozenset()  # set below

    model: Name | None = None  # left out: the one that is served
    input: Annotated[
        Annotated[Text, Tag("as text")]
        | Annotated[list[Item], Field(min_length=1), Tag("as parts")],
        Discriminator(kind_of),
    ]
    instructions: Text | None = None
    previous_response_id: Id | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=64)] | (
        None
    ) = None
    max_output_tokens: Tokens | None = None
    include: list[str] | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: ResponsesChoice | None = None
    text: TextSettings | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Refused, see RESPONSES_REFUSED.
    background: JsonValue = None
    conversation: JsonValue = None
    prompt: JsonValue = None
    # Accepted and reported, see RESPONSES_NAMED.
    context_management: JsonValue = None
    max_tool_calls: JsonValue = None
    moderation: JsonValue = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: JsonValue = None


RESPONSES_REFUSED: dict[str, str] = {
    "background": "answers come with the request; leave it out or send false",
    "conversation": "conversations are not stored; see previous_response_id",
    "prompt": "there are no stored prompts",
}
RESPONSES_NAMED: dict[str, str] = {
    "context_management": "prompts are not cut",
    "max_tool_calls": "there are no tools that run here",
    "moderation": NAMED["moderation"],
    "prompt_cache_options": NAMED["prompt_cache_options"],
    "prompt_cache_retention": NAMED["prompt_cache_retention"],
}
ResponsesRequest.NOT_HONOURED = frozenset((*RESPONSES_REFUSED, *RESPONSES_NAMED))


def refuse_stream_options(body: AnswerOptions) -> None:
    """Refuse stream options without a stream."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only allowed when stream is true")
