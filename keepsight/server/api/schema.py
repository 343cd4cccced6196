"""The body of the chat endpoint and related routes, in the dialects of clients.

Values are strict: `"1"` is not a number. Unknown fields are accepted and reported (`unused.py`).
Known fields that cannot be honoured are in `UNSUPPORTED`, which are refused, or in `NAMED`, which
are accepted and reported, each with its reason. Null means the same as leaving a field out.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, JsonValue, PrivateAttr, Tag

from keepsight.core.decoding.stops import MOST as MOST_STOPS
from keepsight.server.api.unused import Open, Strict, Unused
from keepsight.server.media.parts import Content, Id, Name, PixelLimits, Text, kind_of

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
