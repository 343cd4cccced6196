"""The bodies that clients send, in the dialects of many servers, and what becomes of each field.

The models below are the one table of fields: a field of a model is honoured. At the top of a body
`IGNORED` names those that are accepted without effect and `REFUSED` those that would change an
answer and cannot be done; any other unknown field is ignored, and named like the first. What is
unknown further inside is ignored without a word. Values are strict: `"1"` is not a number. Null
means the same as leaving a field out.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PrivateAttr, Tag
from pydantic_core import PydanticCustomError

from keepsight.core.decoding.stops import MOST as MOST_STOPS
from keepsight.server.errors import hint_for, invalid, missing, refused

HEADER = "x-keepsight-unused"
_MOST = 24  # names that are listed; the rest is counted
_LONGEST = 120  # characters per name
_STRANGE = re.compile(r"[^A-Za-z0-9_.\[\]:/@$+-]")  # not allowed in a header, or in a list in one

Text = Annotated[str, Field(max_length=16_000_000)]
Where = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Id = Annotated[str, Field(min_length=1, max_length=4096)]  # may hold a whole thought
Label = Annotated[str, Field(max_length=1024)]
Level = Annotated[str, Field(max_length=64)]
Salt = Annotated[str, Field(min_length=1, max_length=1024)]
Detail = Literal["auto", "low", "high", "original"]
Pixels = Annotated[int, Field(ge=1024, le=120_000_000)]
Unit = Annotated[float, Field(ge=0.0, le=1.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Tokens = Annotated[int, Field(ge=-1, le=10_000_000)]
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
TemplateOptions = dict[str, object]

T = TypeVar("T")
# A text, or something else: a list of parts or a record. Tags are left out of places in errors.
TextOr = Annotated[
    Annotated[Text, Tag("as text")] | Annotated[T, Tag("as parts")],
    Discriminator(
        lambda value: "as parts" if isinstance(value, list | dict | BaseModel) else "as text"
    ),
]


def kind_of(value: object, default: object = None) -> object:
    """The type that a record names."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return default if kind is None else kind


class Inner(BaseModel):
    """A record inside of a body; what is unknown in it is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


# -- parts of messages -----------------------------------------------------------------------------


class TextPart(Inner):
    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: Text


class RefusalPart(Inner):
    type: Literal["refusal"]
    refusal: Text


class ThoughtPart(Inner):
    type: Literal["thinking", "reasoning", "redacted_thinking"]
    thinking: Text | None = None
    text: Text | None = None


class JsonPart(Inner):
    type: Literal["input_json"]
    data: Annotated[
        Annotated[dict[str, object], Tag("as one")]
        | Annotated[list[dict[str, object]], Tag("as list")],
        Discriminator(lambda value: "as list" if isinstance(value, list) else "as one"),
    ]


class SizeLimits(Inner):
    shortest_edge: Pixels | None = None
    longest_edge: Pixels | None = None


class ProcessorOptions(Inner):
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    size: SizeLimits | None = None


class PixelLimits(Inner):
    """How large pictures are shown to the model."""

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    mm_processor_kwargs: ProcessorOptions | None = None

    def limits(self) -> tuple[int | None, int | None]:
        more = self.mm_processor_kwargs or ProcessorOptions()
        size = more.size or SizeLimits()
        least = filter(None, (self.min_pixels, more.min_pixels, size.shortest_edge))
        most = filter(None, (self.max_pixels, more.max_pixels, size.longest_edge))
        return max(least, default=None), min(most, default=None)


class Address(Inner):
    """Where a medium is, in the record that some dialects have for it: http(s), a data URI, the
    id of an upload, a path in an allowed folder, or base64."""

    url: Where | None = None
    data: Where | None = None
    file_id: Name | None = None
    file_data: Where | None = None
    file_url: Where | None = None
    detail: Detail | None = None


class MediaPart(PixelLimits, Address):
    """A picture, PDF, video, sound or package as OpenAI, Hugging Face's templates or Anthropic's
    API write it; one of the fields that its type may have holds it."""

    type: Literal[
        "image_url", "image", "input_image", "image_embeds", "video_url", "video", "input_video",
        "input_audio", "file", "input_file",
    ]  # fmt: skip
    image: TextOr[Address] | None = None
    image_url: TextOr[Address] | None = None
    video: TextOr[Address] | None = None
    video_url: TextOr[Address] | None = None
    source: Address | None = None
    input_audio: Address | None = None
    file: Address | None = None
    path: Where | None = None
    base64: Where | None = None
    image_embeds: object = None


Part = Annotated[TextPart | RefusalPart | ThoughtPart | JsonPart | MediaPart, Discriminator("type")]
Content = TextOr[Annotated[list[Part], Field(fail_fast=True)]]


# -- tools -----------------------------------------------------------------------------------------


class Function(Inner):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(Inner):
    type: Literal["function"]
    function: Function


class FunctionTool(Function):
    type: Literal["function"]


class Foreign(Inner):
    """A tool that another kind of server runs, or what it did (a search, a call): accepted, named,
    and not shown to the model."""

    type: Name


_FUNCTION, _HOSTED = Tag("as function"), Tag("as hosted")
_BY_KIND = Discriminator(
    lambda value: "as function" if kind_of(value, "function") == "function" else "as hosted"
)
AnyTool = Annotated[Annotated[Tool, _FUNCTION] | Annotated[Foreign, _HOSTED], _BY_KIND]
AnyFunctionTool = Annotated[
    Annotated[FunctionTool, _FUNCTION] | Annotated[Foreign, _HOSTED], _BY_KIND
]


class CalledFunction(Inner):
    """A called function: `arguments` is JSON in a string, as the client got it, or the record
    itself, as templates have it."""

    name: Name
    arguments: TextOr[dict[str, object]]


class ToolCall(Inner):
    id: Id | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class NamedFunction(Inner):
    name: Name


class ForcedChoice(Inner):
    type: Literal["function"]
    function: NamedFunction | None = None
    name: Name | None = None

    @property
    def named(self) -> str | None:
        return self.name if self.function is None else self.function.name


class AllowedChoice(Inner):
    """Some of the tools, although all are shown: so the prompt stays the same."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ForcedChoice], Field(min_length=1)]


_CHOICES = ("none", "auto", "required")


def _choice(value: object) -> object:
    """`{"type": "auto"}` is how some clients write `"auto"`; allowed tools are one record deeper in
    chat than in responses."""
    kind = kind_of(value)
    if kind == "allowed_tools" and isinstance(value, dict):
        deeper = value.get(kind)
        return {**deeper, "type": kind} if isinstance(deeper, dict) else value
    if isinstance(value, dict) and len(value) == 1 and kind in _CHOICES:
        return kind
    if value is None or kind == "function" or (isinstance(value, str) and value in _CHOICES):
        return value
    what = "expected 'none', 'auto', 'required', or a function by its name"
    raise PydanticCustomError("tool_choice", what)


_Chosen = Annotated[
    Annotated[ForcedChoice, Tag("as function")] | Annotated[AllowedChoice, Tag("as allowed_tools")],
    Discriminator(lambda value: f"as {kind_of(value)}"),
]
ToolChoice = Annotated[TextOr[_Chosen] | None, BeforeValidator(_choice)]


# -- the messages of chat and the items of responses -----------------------------------------------


class ChatMessage(Inner):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Id | None = None
    reasoning_content: Text | None = None
    reasoning: object = None  # another name of reasoning_content
    refusal: Text | None = None
    images: list[object] | None = None  # as in Ollama: base64, or addresses
    function_call: object = None
    prefix: bool | None = None  # DeepSeek's field for continuing an answer
    partial: bool | None = None  # and Kimi's
    # The client's names for this message and its content, if it did not send `messages`.
    _places: tuple[str, str] | None = PrivateAttr(default=None)

    def called(self, place: str, content: str) -> ChatMessage:
        self._places = place, content
        return self

    def places(self, number: int) -> tuple[str, str]:
        """The client's names for message `number` and its content."""
        return self._places or (f"messages[{number}]", f"messages[{number}].content")


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class MessageItem(Inner):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: Id | None = None


class ThoughtItem(Inner):
    type: Literal["reasoning"]
    id: Id | None = None
    summary: list[TextPart] | None = None
    content: list[TextPart] | None = None


class CallItem(Inner):
    type: Literal["function_call"]
    id: Id | None = None
    call_id: Id
    name: Name
    arguments: Text


class ResultItem(Inner):
    type: Literal["function_call_output"]
    id: Id | None = None
    call_id: Id
    output: Content


class Reference(Inner):
    type: Literal["item_reference"]
    id: Id


_ELSEWHERE = re.compile(r"(?!function_)(\w+_(call|call_output)$|mcp_|tool_search_|compaction)")


def _item_kind(value: object) -> str:
    kind = kind_of(value, "message")
    if not isinstance(kind, str):
        return "as message"
    return "as *_call" if _ELSEWHERE.match(kind) else f"as {kind}"


Item = Annotated[
    Annotated[MessageItem, Tag("as message")]
    | Annotated[ThoughtItem, Tag("as reasoning")]
    | Annotated[CallItem, Tag("as function_call")]
    | Annotated[ResultItem, Tag("as function_call_output")]
    | Annotated[Reference, Tag("as item_reference")]
    | Annotated[Foreign, Tag("as *_call")],
    Discriminator(_item_kind),
]


# -- what becomes of fields ------------------------------------------------------------------------

# What would change an answer and is not possible here, under all names that servers use.
_CONSTRAINING: dict[str, str] = {
    **dict.fromkeys(
        ("guided_decoding", "allowed_token_ids", "bad_words", "logits_processors"),
        "tokens cannot be constrained in this way; see structured_outputs",
    ),
    "use_beam_search": "beams are not decoded here",
    "best_of": "of several answers all are given; see n",
    "chat_template": "the template is the model's own; see chat_template_kwargs",
    "documents": "send them as messages",
    "truncate_prompt_tokens": "prompts are not cut",
    "prompt_logprobs": "only tokens of the answer are scored",
}
_WITHOUT_EFFECT: dict[str, str] = {
    "moderation": "there is no moderation model here",
    "prompt_cache_options": "what was used last is kept; see /v1/prepare",
    "prompt_cache_retention": "what was used last is kept; see the server's --ttl",
}
NO_VERBOSITY = "this model has no such setting"
# Values of refused fields that ask for nothing, beside empty ones.
_NEUTRAL: tuple[tuple[str, object], ...] = (
    ("best_of", 1),
    ("n", 1),
    ("truncate_prompt_tokens", -1),
    ("prompt_logprobs", 0),
)


def is_empty(value: object) -> bool:
    """Whether a value says nothing: null, false, or an empty text, list or record."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


class Body(PixelLimits):
    """A whole body: what is unknown in it is named or refused."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    IGNORED: ClassVar[dict[str, str]] = {}
    REFUSED: ClassVar[dict[str, str]] = {}


class Unused(dict[str, str]):
    """The fields of one request that have no effect, and why. They are told in a header, in the log
    and in the report, so that no option is silently ignored."""

    def add(self, place: str, why: str) -> None:
        self.setdefault(place, why)

    def hosted(self, tool: Foreign, place: str) -> None:
        self.add(place, f"there are no tools of the type {tool.type[:100]!r} here; see functions")

    def sift(self, body: Body) -> None:
        """Take the fields out of a body that are not honoured: name them, or refuse them."""
        extra = body.__pydantic_extra__ or {}
        for name, value in extra.items():
            if (why := body.REFUSED.get(name)) is not None:
                searches = name == "web_search_options" and value is not None  # {} does, too
                if searches or not (is_empty(value) or (name, value) in _NEUTRAL):
                    raise refused(name, why)
            elif not is_empty(value):
                why = body.IGNORED.get(name, "")
                if not why and len(self) < _MOST:  # finding a hint takes time
                    why = f"unknown; {hint_for(name[:_LONGEST], type(body).model_fields)}"
                self.add(name[:_LONGEST], why)
        extra.clear()

    def names(self) -> list[str]:
        """The names, safe for a header and a log: without spaces, commas and unusual characters."""
        named = [_STRANGE.sub("?", place)[:_LONGEST] or "?" for place in islice(self, _MOST)]
        return [*named, f"+{len(self) - _MOST}"] if len(self) > _MOST else named

    def notes(self) -> list[str]:
        notes = [f"not used: {place}: {why}" for place, why in islice(self.items(), _MOST)]
        return [*notes, f"not used: {len(self) - _MOST} more"] if len(self) > _MOST else notes


# -- bodies ----------------------------------------------------------------------------------------

StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None


def _stops(given: object) -> object:
    """One text is a list of it; an empty text, or none in a list, ends nothing."""
    if given in ("", []):
        return None
    return [given] if isinstance(given, str) else given


Stop = Annotated[Stops, BeforeValidator(_stops, json_schema_input_type=Label | Stops)]


class StreamOptions(Inner):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(Inner):
    """The form of an answer: what is beside its type is checked where the form is read."""

    PLACE: ClassVar[str] = "response_format"  # the client's name for it

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    type: Literal["text", "json_object", "json_schema", "regex", "choice", "grammar"]


class Forms(BaseModel):
    """The form of an answer in the fields of vLLM, SGLang, llama.cpp and Ollama."""

    structured_outputs: dict[str, object] | None = None
    guided_json: object = None
    guided_regex: Text | None = None
    guided_choice: list[object] | None = None
    guided_grammar: Text | None = None
    json_schema: object = None
    regex: Text | None = None
    ebnf: Text | None = None
    grammar: Text | None = None
    format: object = None


class TextFormat(ResponseFormat):
    PLACE: ClassVar[str] = "text.format"


class TextSettings(Inner):
    format: TextFormat | None = None
    verbosity: object = None


class KeepsightOptions(BaseModel):
    """Options that only this server has; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    report: bool = False


class Reasoning(Inner):
    """How much to think before an answer, and which thoughts are sent."""

    effort: Level | None = None
    enabled: bool | None = None
    summary: object = None
    generate_summary: object = None


class PromptOptions(Body):
    """Fields besides the messages that decide the prompt, in all dialects."""

    model: Name | None = None  # left out: the one that is served
    chat_template_kwargs: TemplateOptions | None = None
    cache_salt: Salt | None = None
    prompt_cache_key: Label | None = None
    reasoning_effort: Level | None = None
    reasoning: Reasoning | None = None
    thinking: object = None  # {"type": "enabled"} or "disabled", as in Anthropic's API
    enable_thinking: bool | None = None


class AnswerOptions(PromptOptions, Forms):
    """Fields that say how tokens are chosen, and how an answer is sent."""

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Unit | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: Stop = None
    skip_special_tokens: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    ignore_eos: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    parallel_tool_calls: bool | None = None
    service_tier: Level | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    keepsight: KeepsightOptions | None = None

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options is only allowed when stream is true")


class Rendering(PromptOptions):
    """Everything that decides the prompt of a request to answer, prepare or explain."""

    REFUSED: ClassVar[dict[str, str]] = _CONSTRAINING

    messages: Messages
    tools: list[AnyTool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def shown_tools(self) -> list[Tool]:
        return [tool for tool in self.tools or () if isinstance(tool, Tool)]

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message, in any dialect."""
        last = self.messages[-1]
        return bool(self.continue_final_message or last.prefix or last.partial)


class ChatRequest(Rendering, AnswerOptions):
    """The body of `/v1/chat/completions`."""

    IGNORED: ClassVar[dict[str, str]] = {
        **_WITHOUT_EFFECT,
        "metadata": "answers of this API are not stored, so there is nothing to attach it to",
        "prediction": "predicted outputs are not supported",
        "store": "answers of this API are not stored; see /v1/responses",
        "verbosity": NO_VERBOSITY,
    }
    REFUSED: ClassVar[dict[str, str]] = {
        **_CONSTRAINING,
        "audio": "answers are text",
        "function_call": "deprecated; use tools and tool_choice",
        "functions": "deprecated; use tools",
        "web_search_options": "there is no web search here",
    }

    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    cache_prompt: bool | None = None
    tool_choice: ToolChoice = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text", "audio"]] | None = None


class ResponsesRequest(AnswerOptions):
    """The body of `/v1/responses`."""

    IGNORED: ClassVar[dict[str, str]] = {
        **_WITHOUT_EFFECT,
        "context_management": "prompts are not cut",
        "max_tool_calls": "there are no tools that run here",
    }
    REFUSED: ClassVar[dict[str, str]] = {
        **_CONSTRAINING,
        "background": "answers come with the request; leave it out or send false",
        "conversation": "conversations are not stored; see previous_response_id",
        "prompt": "there are no stored prompts",
        "response_format": "send text.format",
    }

    input: TextOr[Annotated[list[Item], Field(min_length=1, fail_fast=True)]]
    instructions: Text | None = None
    previous_response_id: Id | None = None
    store: bool | None = None
    metadata: (
        Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=64)] | None
    ) = None
    max_output_tokens: Tokens | None = None
    include: list[str] | None = None
    tools: list[AnyFunctionTool] | None = None
    tool_choice: ToolChoice = None
    text: TextSettings | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ResetRequest(BaseModel):
    """What to forget: a tenant's own entries, or with `everyone` all; with `store` on disk too."""

    model_config = ConfigDict(extra="forbid", strict=True)  # this route must not guess

    cache_salt: Salt | None = None
    everyone: bool = False
    store: bool = False


class HeldRequest(PixelLimits):
    """What to pin or remove: a conversation, with `pictures_only` its pictures, or `images` by the
    keys in reports and `/v1/cache/images`."""

    model_config = ConfigDict(extra="forbid")  # this route must not guess

    model: Name
    messages: Messages | None = None
    images: Annotated[list[Key], Field(min_length=1, max_length=1000)] | None = None
    pictures_only: bool = False
    tools: list[AnyTool] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    cache_salt: Salt | None = None


class PinRequest(HeldRequest):
    """What to pin, whatever the budgets; `pinned: false` makes it evictable again."""

    pinned: bool = True


Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


def _prompt_kind(value: object) -> str:
    first = value[0] if isinstance(value, list) and value else value
    one = "ids" if isinstance(first, int | list) else "text"
    several = isinstance(value, list) and not isinstance(first, int)
    return f"as {one}{' of several' * several}"


Prompts = Annotated[
    Annotated[Text, Tag("as text")]
    | Annotated[Ids, Tag("as ids")]
    | Annotated[list[Text], Tag("as text of several"), Field(min_length=1, max_length=1024)]
    | Annotated[list[Ids], Tag("as ids of several"), Field(min_length=1, max_length=1024)],
    Discriminator(_prompt_kind),
]


class CompletionRequest(AnswerOptions):
    """The body of `/v1/completions`: one prompt or many, as texts or token ids."""

    IGNORED: ClassVar[dict[str, str]] = {"metadata": "answers are not stored"}
    REFUSED: ClassVar[dict[str, str]] = {
        "best_of": "of several answers all are given",
        "suffix": "answers only go on behind a prompt",
        "n": "one answer is given to each prompt; send the prompt several times",
        "prompt_logprobs": "send echo and logprobs",
        "response_format": "send structured_outputs, or a field such as guided_json",
    }

    prompt: Prompts
    max_tokens: Tokens | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(Rendering):
    """The body of `/tokenize`: a text, or messages as `/v1/chat/completions` takes them."""

    messages: Messages | None = None  # type: ignore[assignment]
    prompt: Text | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


# -- questions about one input ---------------------------------------------------------------------

MOST_QUESTIONS = 400  # as in OpenAI's API
MOST_DOCUMENTS = 1000


class SharedFields(Body):
    """Fields of all these bodies."""

    model: Name | None = None  # left out: the one that is served
    cache_salt: Salt | None = None
    keepsight: KeepsightOptions | None = None


class Asset(Inner):
    type: Literal["image"] = "image"
    format: Label | None = None
    data_base64: Where


class SystemOneRequest(SharedFields):
    """The body of `/v1/systemone`: questions by name, and images by the placeholders that stand for
    them in texts. `state` is a text, a record or a list."""

    state: object
    questions: Annotated[
        dict[str, dict[str, object]], Field(min_length=1, max_length=MOST_QUESTIONS)
    ]
    assets: dict[str, Asset] = Field(default_factory=dict)


class InputCall(Inner):
    type: Literal["function_call", "custom_tool_call"]
    call_id: Name
    name: Name
    arguments: Text | None = None
    input: Text | None = None


class InputOutput(Inner):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: Content


def _input_kind(value: object) -> str:
    kind = kind_of(value, "message")
    if kind in ("function_call", "custom_tool_call"):
        return "as call"
    return "as output" if str(kind).endswith("_output") else "as message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("as message")]
    | Annotated[InputCall, Tag("as call")]
    | Annotated[InputOutput, Tag("as output")],
    Discriminator(_input_kind),
]


class Question(Inner):
    name: Name | None = None
    instructions: Content


class Predicate(Question):
    type: Literal["predicate"]


class ChoiceOption(Inner):
    value: Annotated[
        Annotated[str, Tag("as text")] | Annotated[bool, Tag("as truth")],
        Discriminator(lambda value: "as truth" if isinstance(value, bool) else "as text"),
    ]
    description: Text | None = None


class Choice(Question):
    type: Literal["choice"]
    choices: Annotated[list[ChoiceOption], Field(min_length=2, max_length=255)]


class ScoreLevel(Inner):
    label: Where
    description: Text | None = None


class Rating(Question):
    type: Literal["score"]
    levels: Annotated[list[ScoreLevel], Field(min_length=2, max_length=255)]


class DecisionsRequest(SharedFields):
    """The body of `/v1/decisions`."""

    IGNORED: ClassVar[dict[str, str]] = {
        "prompt_cache_options": "what was used last is kept; see /v1/prepare",
        "service_tier": "there is one tier",
    }

    input: TextOr[Annotated[list[InputItem], Field(min_length=1)]]
    questions: Annotated[
        list[
            Annotated[
                Annotated[Predicate, Tag("as predicate")]
                | Annotated[Choice, Tag("as choice")]
                | Annotated[Rating, Tag("as score")],
                Discriminator(lambda value: f"as {kind_of(value)}"),
            ]
        ],
        Field(min_length=1, max_length=MOST_QUESTIONS),
    ]
    prompt_cache_key: Label | None = None
    safety_identifier: Label | None = None


class Parts(Inner):
    """A document that is no plain text: parts, or a text in a record."""

    content: Annotated[list[Part], Field(min_length=1)] | None = None
    text: Text | None = None


Document = TextOr[Parts]
Placed = tuple[Document, str]  # a document, and the client's name for it
Documents = Annotated[list[Document], Field(min_length=1, max_length=MOST_DOCUMENTS)]
OneOrMany = Annotated[
    Annotated[Documents, Tag("as parts")] | Annotated[Document, Tag("as one")],
    Discriminator(lambda value: "as parts" if isinstance(value, list) else "as one"),
]


class ScoreRequest(SharedFields):
    """The body of `/v1/score`: two texts, or one against many, or as many against as many."""

    IGNORED: ClassVar[dict[str, str]] = {"user": "nothing is counted by it"}

    text_1: OneOrMany | None = None
    text_2: OneOrMany | None = None
    queries: OneOrMany | None = None
    documents: OneOrMany | None = None
    data_1: OneOrMany | None = None
    data_2: OneOrMany | None = None
    instruction: Text | None = None

    def sides(self) -> tuple[list[Placed], list[Placed]]:
        """The documents of both sides, with the client's names for them."""
        pairs = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
        given = [pair for pair in pairs if any(getattr(self, name) is not None for name in pair)]
        sides = []
        for name in given[0] if given else pairs[0]:
            if (side := getattr(self, name)) is None:
                raise missing(name)
            several = enumerate(side) if isinstance(side, list) else ()
            sides.append([(one, f"{name}[{number}]") for number, one in several] or [(side, name)])
        one, two = sides
        if len(one) not in (1, len(two)):
            name, other = given[0]
            raise invalid(name, f"{len(one)} of {name} for {len(two)} of {other}")
        return one * (len(two) if len(one) == 1 else 1), two


class RerankRequest(SharedFields):
    """The body of `/v1/rerank`."""

    IGNORED: ClassVar[dict[str, str]] = {"user": "nothing is counted by it"}

    query: Document
    documents: Documents
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None
    instruction: Text | None = None


TABLE: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/completions": CompletionRequest,
    "/v1/prepare, /v1/cache/explain, /v1/cache/save": Rendering,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/systemone": SystemOneRequest,
    "/v1/decisions": DecisionsRequest,
    "/v1/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
}
