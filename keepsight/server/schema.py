"""What the chat endpoint and its neighbours take, as models that refuse what they do not know.

Values are strict: `"1"` is not a number. Fields that OpenAI has and that cannot be honoured here
are named in `UNSUPPORTED`, each with the reason; a null there means the same as leaving it out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, PrivateAttr, Tag

Text = Annotated[str, Field(max_length=16_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Detail = Literal["auto", "low", "high", "original"]
Pixels = Annotated[int, Field(ge=1024, le=120_000_000)]
Unit = Annotated[float, Field(ge=0.0, le=1.0)]


class Strict(BaseModel):
    """A record without unknown fields and without guesses about types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


# -- parts of a message ------------------------------------------------------------------------


class TextPart(Strict):
    """Text."""

    type: Literal["text"]
    text: Text


class RefusalPart(Strict):
    """What an earlier answer refused; it is text to the model."""

    type: Literal["refusal"]
    refusal: Text


class Address(Strict):
    """Where a picture is: http(s), a data URI, or a path under an allowed folder."""

    url: Annotated[str, Field(min_length=1)]
    detail: Detail | None = None


class ImagePart(Strict):
    """A picture."""

    type: Literal["image_url"]
    image_url: Address
    max_pixels: Pixels | None = None


class VideoAddress(Strict):
    """Where a video is."""

    url: Annotated[str, Field(min_length=1)]


class VideoPart(Strict):
    """A video, where the model takes videos."""

    type: Literal["video_url"]
    video_url: VideoAddress


class Sound(Strict):
    """Sound in the body itself."""

    data: Annotated[str, Field(min_length=1)]
    format: Literal["wav", "mp3", "flac", "ogg"] | None = None


class SoundPart(Strict):
    """Sound, where the model takes sound."""

    type: Literal["input_audio"]
    input_audio: Sound


class FileHandle(Strict):
    """An uploaded file by its id, or a file in the body itself as a data URI."""

    file_id: Name | None = None
    file_data: Annotated[str, Field(min_length=1)] | None = None
    filename: Annotated[str, Field(max_length=1024)] | None = None


class FilePart(Strict):
    """A picture, or a PDF whose pages are pictures."""

    type: Literal["file"]
    file: FileHandle
    detail: Detail | None = None
    max_pixels: Pixels | None = None


Part = Annotated[
    TextPart | RefusalPart | ImagePart | VideoPart | SoundPart | FilePart, Discriminator("type")
]


def _kind(value: Any) -> str:
    return "as parts" if isinstance(value, list) else "as text"


Content = Annotated[
    Annotated[Text, Tag("as text")] | Annotated[list[Part], Tag("as parts")], Discriminator(_kind)
]


StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Stop = Annotated[
    Annotated[StopText, Tag("as text")]
    | Annotated[list[StopText], Field(max_length=16), Tag("as parts")],
    Discriminator(_kind),
]


# -- tools -------------------------------------------------------------------------------------


class Function(Strict):
    """A function that the model may ask for."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool."""

    type: Literal["function"]
    function: Function


class CalledFunction(Strict):
    """What the model asked for: `arguments` is JSON in a string, as the client got it."""

    name: Name
    arguments: Text


class ToolCall(Strict):
    """One call of a tool in an earlier answer."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # streams have it, and some clients send it back


class NamedFunction(Strict):
    """The name in a forced choice."""

    name: Name


class NamedTool(Strict):
    """A forced choice; it is known, and refused by name."""

    type: Literal["function"]
    function: NamedFunction


def choice_kind(value: Any) -> str | None:
    """How a choice of a tool is written."""
    if isinstance(value, dict | BaseModel):
        kind = value.get("type") if isinstance(value, dict) else "function"
        return "as function" if kind == "function" else None
    return "as text" if value in ("none", "auto", "required") else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("as text")]
    | Annotated[NamedTool, Tag("as function")],
    Discriminator(
        choice_kind,
        custom_error_type="tool_choice",
        custom_error_message="expected 'none', 'auto', 'required', or a function by its name, as "
        "in {'type': 'function', 'function': {'name': ...}}",
    ),
]


# -- messages ----------------------------------------------------------------------------------


class Message(Strict):
    """One message, also as an answer comes back from a client."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None
    refusal: Text | None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    # What the client calls this message, and its content, where it did not send `messages`.
    _place: str | None = PrivateAttr(default=None)
    _content_place: str | None = PrivateAttr(default=None)

    def called(self, place: str, content: str) -> Message:
        """The message, with what the client calls it and its content."""
        self._place, self._content_place = place, content
        return self

    def places(self, number: int) -> tuple[str, str]:
        """What the client calls the message of this number, and its content."""
        place = self._place or f"messages[{number}]"
        return place, self._content_place or f"{place}.content"


class StreamOptions(Strict):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Plain(Strict):
    """The one format of answers that is not constrained."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonValue = None


class Own(Strict):
    """What only this server knows."""

    report: bool = False


class Rendering(Strict):
    """What decides the prompt: of a request that answers, prepares or explains."""

    model: Name
    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None
    max_pixels: Pixels | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None


class ChatRequest(Rendering):
    """The body of `/v1/chat/completions`."""

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    min_p: Unit | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | None = None
    max_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: Plain | None = None
    modalities: list[Literal["text", "audio"]] | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    keepsight: Own | None = None
    # Known to OpenAI's API and not honoured here; see UNSUPPORTED.
    audio: JsonValue = None
    function_call: JsonValue = None
    functions: JsonValue = None
    metadata: JsonValue = None
    moderation: JsonValue = None
    prediction: JsonValue = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: JsonValue = None
    reasoning_effort: JsonValue = None
    store: JsonValue = None
    verbosity: JsonValue = None
    web_search_options: JsonValue = None


UNSUPPORTED: dict[str, str] = {
    "audio": "answers are text",
    "function_call": "deprecated; use tools and tool_choice",
    "functions": "deprecated; use tools",
    "metadata": "answers are not stored, so there is nothing to attach it to",
    "moderation": "there is no moderation model here",
    "prediction": "predicted outputs are not supported",
    "prompt_cache_options": "the cache keeps by usefulness; see /v1/prepare",
    "prompt_cache_retention": "the cache keeps by usefulness; see the server's --ttl",
    "reasoning_effort": "say it as the model's template does, in chat_template_kwargs",
    "store": "answers are not stored; leave it out or send false",
    "verbosity": "this model has no such setting",
    "web_search_options": "there is no web search here",
}
