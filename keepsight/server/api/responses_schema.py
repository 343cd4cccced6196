"""The body of `/v1/responses`, and its translation to the chat API.

Items of an earlier response may come back unchanged, by their ids, or all together by that
response's id; `response_store.py` resolves ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag

from keepsight.server.api import schema
from keepsight.server.api.items import (
    CallItem,
    InputFile,
    Item,
    MessageItem,
    OtherItem,
    Part,
    ResultItem,
    ThoughtItem,
)
from keepsight.server.api.schema import Tokens
from keepsight.server.api.unused import Open, Unused, is_empty
from keepsight.server.errors import ApiError, invalid, refused
from keepsight.server.media import parts
from keepsight.server.media.parts import Name, PixelLimits, Text, kind_of


class FunctionTool(schema.Function):
    """A tool in this API's form."""

    type: Literal["function"]


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("as function")] | Annotated[schema.HostedTool, Tag("as hosted")],
    Discriminator(schema.tool_kind),
]


class ResponsesToolChoice(Open):
    """A forced tool choice; it is known, and refused by name."""

    type: Literal["function"]
    name: Name


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("as text")]
    | Annotated[ResponsesToolChoice, Tag("as function")],
    Discriminator(
        schema.choice_kind,
        custom_error_type="tool_choice",
        custom_error_message="expected 'none', 'auto', 'required', or a function by its name, as "
        "in {'type': 'function', 'name': ...}",
    ),
    BeforeValidator(schema.plain_choice),
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


class ResponsesRequest(schema.AnswerOptions):
    """The body of `/v1/responses`."""

    CONSTRAINING: ClassVar[dict[str, str]] = schema.CONSTRAINING
    NOT_HONOURED: ClassVar[frozenset[str]] = frozenset()  # set below

    model: Name | None = None  # left out: the one that is served
    input: Annotated[
        Annotated[Text, Tag("as text")]
        | Annotated[list[Item], Field(min_length=1), Tag("as parts")],
        Discriminator(kind_of),
    ]
    instructions: Text | None = None
    previous_response_id: parts.Id | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=64)] | (
        None
    ) = None
    max_output_tokens: Tokens | None = None
    include: list[str] | None = None
    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    text: TextSettings | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Refused, see UNSUPPORTED.
    background: JsonValue = None
    conversation: JsonValue = None
    prompt: JsonValue = None
    # Accepted and reported, see NAMED.
    context_management: JsonValue = None
    max_tool_calls: JsonValue = None
    moderation: JsonValue = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: JsonValue = None


UNSUPPORTED: dict[str, str] = {
    "background": "answers come with the request; leave it out or send false",
    "conversation": "conversations are not stored; see previous_response_id",
    "prompt": "there are no stored prompts",
}
NAMED: dict[str, str] = {
    "context_management": "prompts are not cut",
    "max_tool_calls": "there are no tools that run here",
    "moderation": schema.NAMED["moderation"],
    "prompt_cache_options": schema.NAMED["prompt_cache_options"],
    "prompt_cache_retention": schema.NAMED["prompt_cache_retention"],
}
ResponsesRequest.NOT_HONOURED = frozenset((*UNSUPPORTED, *NAMED))
_SAME = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "parallel_tool_calls",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "stop", "skip_special_tokens",
    "service_tier", "user", "safety_identifier", "prompt_cache_key", "cache_salt",
    "chat_template_kwargs", "keepsight", "min_tokens", "ignore_eos", "stop_token_ids",
    "reasoning", "reasoning_effort", "thinking", "enable_thinking", *PixelLimits.model_fields,
)  # fmt: skip
_SCORED = "message.output_text.logprobs"
Placed = tuple[Item, str]  # an item, and the client's name for it


def in_its_words(problem: ApiError) -> ApiError:
    """A refusal of the chat API, with this API's names for fields."""
    names = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
    given = problem.param or ""
    name = names.get(given, given.replace(".function.", "."))
    if name != given:
        problem.param, problem.message = name, problem.message.replace(given, name, 1)
    return problem


def items_of(body: ResponsesRequest) -> list[Placed]:
    """The items of a body in any form."""
    if isinstance(body.input, str):
        return [(MessageItem(role="user", content=body.input), "input")]
    return [(item, f"input[{number}]") for number, item in enumerate(body.input)]


def as_chat(
    body: ResponsesRequest, items: Sequence[Placed] | None = None, unused: Unused | None = None
) -> schema.ChatRequest:
    """The same request for the chat API. `items` are those of the whole conversation, if it is
    longer than the body, with all references resolved."""
    items = items_of(body) if items is None else items
    unused = Unused() if unused is None else unused
    for name, why in UNSUPPORTED.items():
        if not is_empty(getattr(body, name)):
            raise refused(name, why)
    if body.text is not None and body.text.format and body.text.format.type != "text":
        raise refused("text.format", "only {'type': 'text'} can be honoured here")
    scored = _SCORED in (body.include or ())
    if body.top_logprobs and not scored:
        raise invalid("top_logprobs", f"it needs include: ['{_SCORED}']")
    _name_unused(body, unused)
    same = {name: getattr(body, name) for name in _SAME}
    choice = body.tool_choice
    if isinstance(choice, ResponsesToolChoice):
        choice = "required"  # refused with it
    return schema.ChatRequest(
        **same,
        messages=_messages(body, _used(items, unused)),
        tools=list(_tools(body, unused)) or None,
        tool_choice=choice,
        max_completion_tokens=body.max_output_tokens,
        logprobs=True if scored else None,
        top_logprobs=body.top_logprobs if scored else None,
    )


def _name_unused(body: ResponsesRequest, unused: Unused) -> None:
    """Report the known fields that have no effect here."""
    for name, why in NAMED.items():
        if not is_empty(getattr(body, name)):
            unused.add(name, why)
    if body.text is not None and not is_empty(body.text.verbosity):
        unused.add("text.verbosity", schema.NAMED["verbosity"])
    if body.truncation == "auto":
        unused.add("truncation", "prompts are not cut; what is too long is refused")
    options = body.stream_options
    if options is not None and options.include_usage is not None:
        unused.add("stream_options.include_usage", "the last event of a response has usage")
    if options is not None and options.include_obfuscation:
        unused.add("stream_options.include_obfuscation", "events are not padded here")
    for number, name in enumerate(body.include or ()):
        if name != _SCORED:
            unused.add(f"include[{number}]", f"{name[:100]!r} is not to be had here")


def _tools(body: ResponsesRequest, unused: Unused) -> Iterator[schema.Tool]:
    for number, tool in enumerate(body.tools or ()):
        if isinstance(tool, schema.HostedTool):
            tool.name_unused(f"tools[{number}]", unused)
            continue
        if tool.strict:
            unused.add(f"tools[{number}].strict", "a hint: arguments are not constrained here")
        fields = tool.model_dump(exclude={"type", "strict"})
        yield schema.Tool(type="function", function=schema.Function(**fields))


def _used(items: Sequence[Placed], unused: Unused) -> list[Placed]:
    """The items that a prompt has a place for; others are reported."""
    for item, place in items:
        if isinstance(item, OtherItem):
            unused.add(place, f"items of the type {item.type[:100]!r} have no place in a prompt")
    return [placed for placed in items if not isinstance(placed[0], OtherItem)]


def _messages(body: ResponsesRequest, items: Sequence[Placed]) -> list[schema.ChatMessage]:
    made: list[schema.ChatMessage] = []
    if body.instructions is not None:
        system = schema.ChatMessage(role="system", content=body.instructions)
        made.append(system.called("instructions", "instructions"))
    if isinstance(body.input, str) and len(items) == 1:
        asked = schema.ChatMessage(role="user", content=body.input)
        return [*made, asked.called("input", "input")]
    thought: str | None = None
    for item, place in items:
        if isinstance(item, ThoughtItem):
            thought = "\n".join(filter(None, (thought, _thought(item)))) or thought
            continue
        if thought and not _answers(item):
            made.append(_only_thought(thought))
            thought = None
        _append(made, item, thought, place)
        thought = None
    made += [_only_thought(thought)] if thought else []
    if not made:
        raise invalid("input", "there is no message in input")
    return made


def _thought(item: ThoughtItem) -> str:
    """The thought itself, or its summary if only that was sent."""
    return "".join(part.text for part in item.content or item.summary or [])


def _answers(item: Item) -> bool:
    return isinstance(item, CallItem) or getattr(item, "role", None) == "assistant"


def _only_thought(thought: str) -> schema.ChatMessage:
    """An answer that was cut off before its text began."""
    return schema.ChatMessage(role="assistant", content="", reasoning_content=thought)


def _append(made: list[schema.ChatMessage], item: Item, thought: str | None, place: str) -> None:
    """Append an item as a message; tool calls join their answer."""
    if isinstance(item, ResultItem):
        content = item.output if isinstance(item.output, str) else _parts(item.output)
        message = schema.ChatMessage(role="tool", content=content, tool_call_id=item.call_id)
        made.append(message.called(place, f"{place}.output"))
    elif isinstance(item, CallItem):
        function = schema.CalledFunction(name=item.name, arguments=item.arguments)
        call = schema.ToolCall(id=item.call_id, function=function)
        if made and made[-1].role == "assistant" and thought is None:
            made[-1].tool_calls = [*(made[-1].tool_calls or []), call]
        else:
            message = schema.ChatMessage(
                role="assistant", tool_calls=[call], reasoning_content=thought
            )
            made.append(message.called(place, f"{place}.content"))
    elif isinstance(item, MessageItem):
        content = item.content if isinstance(item.content, str) else _parts(item.content)
        reasoning = thought if item.role == "assistant" else None
        message = schema.ChatMessage(role=item.role, content=content, reasoning_content=reasoning)
        made.append(message.called(place, f"{place}.content"))


def _parts(given: Sequence[Part]) -> list[parts.Part]:
    return [_part(part) for part in given]


def _part(part: Part) -> parts.Part:
    """A part in the form of the chat API; only files differ."""
    if not isinstance(part, InputFile):
        return part
    names = ("file_url", "file_id", "file_data")
    given = [name for name in names if getattr(part, name) is not None]
    if len(given) != 1:
        raise invalid("input", f"a part of type {part.type} needs one of {', '.join(names)}")
    same = {name: getattr(part, name) for name in parts.PicturePart.model_fields}
    if part.file_url is not None:
        return parts.ImagePart(type="image_url", image_url=part.file_url, **same)
    handle = parts.FileHandle(file_id=part.file_id, file_data=part.file_data)
    return parts.FilePart(type="file", file=handle, **same)
