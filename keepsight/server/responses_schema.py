"""What `/v1/responses` takes, and the same said in the words of the chat API.

Items of an earlier response may come back as the client got them: messages, thoughts, calls of
tools. Nothing is stored here, so what would refer to something stored is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from keepsight.server import schema
from keepsight.server.problems import ApiError, invalid, refused
from keepsight.server.schema import Detail, Name, Own, Pixels, Strict, Text, Unit, _kind

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Strict):
    """Text from the user's side."""

    type: Literal["input_text"]
    text: Text


class OutputText(Strict):
    """Text of an earlier answer."""

    type: Literal["output_text"]
    text: Text
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    logprobs: list[JsonValue] | None = None


class InputImage(Strict):
    """A picture by URL, data URI or the id of an uploaded file."""

    type: Literal["input_image"]
    image_url: Annotated[str, Field(min_length=1)] | None = None
    file_id: Name | None = None
    detail: Detail | None = None
    max_pixels: Pixels | None = None


class InputFile(Strict):
    """A picture or a PDF."""

    type: Literal["input_file"]
    file_id: Name | None = None
    file_data: Annotated[str, Field(min_length=1)] | None = None
    file_url: Annotated[str, Field(min_length=1)] | None = None
    filename: Annotated[str, Field(max_length=1024)] | None = None
    detail: Detail | None = None
    max_pixels: Pixels | None = None


class InputVideo(Strict):
    """A video, where the model takes videos."""

    type: Literal["input_video"]
    video_url: Annotated[str, Field(min_length=1)]


Part = Annotated[
    InputText | OutputText | InputImage | InputFile | InputVideo | schema.RefusalPart,
    Discriminator("type"),
]
Content = Annotated[
    Annotated[Text, Tag("as text")] | Annotated[list[Part], Tag("as parts")], Discriminator(_kind)
]


class MessageItem(Strict):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: Name | None = None
    status: Status | None = None
    phase: None = None


class Thought(Strict):
    """The text of a thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ThoughtItem(Strict):
    """An earlier thought."""

    type: Literal["reasoning"]
    id: Name | None = None
    summary: list[Thought] | None = None
    content: list[Thought] | None = None
    encrypted_content: None = None
    status: Status | None = None


class CallItem(Strict):
    """An earlier call of a tool."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Text
    id: Name | None = None
    status: Status | None = None


class ResultItem(Strict):
    """What a tool said."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Content
    id: Name | None = None
    status: Status | None = None


def _item_kind(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else "message"
    return f"as {kind}" if isinstance(kind, str) else "as message"


Item = Annotated[
    Annotated[MessageItem, Tag("as message")]
    | Annotated[ThoughtItem, Tag("as reasoning")]
    | Annotated[CallItem, Tag("as function_call")]
    | Annotated[ResultItem, Tag("as function_call_output")],
    Discriminator(_item_kind),
]


class FunctionTool(Strict):
    """A tool, as this API writes it."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class NamedTool(Strict):
    """A forced choice; it is known, and refused by name."""

    type: Literal["function"]
    name: Name


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("as text")]
    | Annotated[NamedTool, Tag("as function")],
    Discriminator(
        schema.choice_kind,
        custom_error_type="tool_choice",
        custom_error_message="expected 'none', 'auto', 'required', or a function by its name, as "
        "in {'type': 'function', 'name': ...}",
    ),
]


class Format(Strict):
    """The format of answers."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: JsonValue = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Strict):
    """Settings of text."""

    format: Format | None = None
    verbosity: JsonValue = None


class ResponsesRequest(Strict):
    """The body of `/v1/responses`."""

    model: Name
    input: Annotated[
        Annotated[Text, Tag("as text")]
        | Annotated[list[Item], Field(min_length=1), Tag("as parts")],
        Discriminator(_kind),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Unit | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    stream: bool | None = None
    stream_options: schema.StreamOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None
    max_pixels: Pixels | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    top_k: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    keepsight: Own | None = None
    # Known to OpenAI's API and not honoured here; see UNSUPPORTED.
    background: JsonValue = None
    context_management: JsonValue = None
    conversation: JsonValue = None
    max_tool_calls: JsonValue = None
    moderation: JsonValue = None
    previous_response_id: JsonValue = None
    prompt: JsonValue = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: JsonValue = None
    reasoning: JsonValue = None
    store: JsonValue = None


UNSUPPORTED: dict[str, str] = {
    "background": "answers come with the request; leave it out or send false",
    "context_management": "there is none here",
    "conversation": "nothing is stored; send the items of the conversation as input",
    "max_tool_calls": "there are no tools that run here",
    "moderation": schema.UNSUPPORTED["moderation"],
    "previous_response_id": "nothing is stored; send the items of the conversation as input",
    "prompt": "there are no stored prompts",
    "prompt_cache_options": schema.UNSUPPORTED["prompt_cache_options"],
    "prompt_cache_retention": schema.UNSUPPORTED["prompt_cache_retention"],
    "reasoning": "say it as the model's template does, in chat_template_kwargs",
    "store": "answers are not stored; leave it out or send false",
}
_SAME = (
    "model", "temperature", "top_p", "top_k", "seed", "stream", "parallel_tool_calls",
    "service_tier", "user", "safety_identifier", "prompt_cache_key", "cache_salt",
    "chat_template_kwargs", "max_pixels", "keepsight",
)  # fmt: skip


def in_its_words(problem: ApiError) -> ApiError:
    """A refusal of the chat API, about what the client of this one calls otherwise."""
    names = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
    given = problem.param or ""
    name = names.get(given, given.replace(".function.", "."))
    if name != given:
        problem.param, problem.message = name, problem.message.replace(given, name, 1)
    return problem


def as_chat(body: ResponsesRequest) -> schema.ChatRequest:
    """The same request in the words of the chat API."""
    for name, why in UNSUPPORTED.items():
        value = getattr(body, name)
        if value is not None and not (name in ("store", "background") and value is False):
            raise refused(name, why)
    if body.text is not None and body.text.verbosity is not None:
        raise refused("text.verbosity", schema.UNSUPPORTED["verbosity"])
    if body.text is not None and body.text.format and body.text.format.type != "text":
        raise refused("text.format", "only {'type': 'text'} can be honoured here")
    if body.truncation == "auto":
        raise refused("truncation", "prompts are not cut; expected 'disabled'")
    if body.top_logprobs and not body.include:
        raise invalid("top_logprobs", "it needs include: ['message.output_text.logprobs']")
    if body.stream_options is not None and body.stream_options.include_usage is not None:
        raise refused("stream_options.include_usage", "the last event of a response has usage")
    same = {name: getattr(body, name) for name in _SAME}
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        choice = "required"  # refused with it
    return schema.ChatRequest(
        **same,
        messages=_messages(body),
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=choice,
        max_completion_tokens=body.max_output_tokens,
        logprobs=True if body.include else None,
        top_logprobs=body.top_logprobs if body.include else None,
    )


def _tool(tool: FunctionTool) -> schema.Tool:
    told = tool.model_dump(exclude={"type"})
    return schema.Tool(type="function", function=schema.Function(**told))


def _messages(body: ResponsesRequest) -> list[schema.Message]:
    made: list[schema.Message] = []
    if body.instructions is not None:
        told = schema.Message(role="system", content=body.instructions)
        made.append(told.called("instructions", "instructions"))
    if isinstance(body.input, str):
        asked = schema.Message(role="user", content=body.input)
        return [*made, asked.called("input", "input")]
    thought: str | None = None
    for number, item in enumerate(body.input):
        if isinstance(item, ThoughtItem):
            thought = "\n".join(filter(None, (thought, _thought(item)))) or thought
            continue
        if thought and not _answers(item):
            made.append(_only_thought(thought))
            thought = None
        _append(made, item, thought, f"input[{number}]")
        thought = None
    made += [_only_thought(thought)] if thought else []
    if not made:
        raise invalid("input", "there is no message in input")
    return made


def _thought(item: ThoughtItem) -> str:
    """The thought itself; where that was not sent, what is told of it."""
    return "".join(part.text for part in item.content or item.summary or [])


def _answers(item: Any) -> bool:
    return isinstance(item, CallItem) or getattr(item, "role", None) == "assistant"


def _only_thought(thought: str) -> schema.Message:
    """An answer that was cut off before it said anything."""
    return schema.Message(role="assistant", content="", reasoning_content=thought)


def _append(made: list[schema.Message], item: Any, thought: str | None, place: str) -> None:
    """An item as a message; calls of tools join the answer that made them."""
    if isinstance(item, ResultItem):
        content = item.output if isinstance(item.output, str) else _parts(item.output)
        said = schema.Message(role="tool", content=content, tool_call_id=item.call_id)
        made.append(said.called(place, f"{place}.output"))
    elif isinstance(item, CallItem):
        function = schema.CalledFunction(name=item.name, arguments=item.arguments)
        call = schema.ToolCall(id=item.call_id, function=function)
        if made and made[-1].role == "assistant" and thought is None:
            made[-1].tool_calls = [*(made[-1].tool_calls or []), call]
        else:
            said = schema.Message(role="assistant", tool_calls=[call], reasoning_content=thought)
            made.append(said.called(place, f"{place}.content"))
    else:
        content = item.content if isinstance(item.content, str) else _parts(item.content)
        reasoning = thought if item.role == "assistant" else None
        said = schema.Message(role=item.role, content=content, reasoning_content=reasoning)
        made.append(said.called(place, f"{place}.content"))


def _parts(parts: list[Any]) -> list[Any]:
    return [_part(part) for part in parts]


def _part(part: Any) -> Any:
    if isinstance(part, InputText | OutputText):
        return schema.TextPart(type="text", text=part.text)
    if isinstance(part, schema.RefusalPart):
        return part
    if isinstance(part, InputVideo):
        where = schema.VideoAddress(url=part.video_url)
        return schema.VideoPart(type="video_url", video_url=where)
    names = ("image_url", "file_url", "file_id", "file_data")
    given = [name for name in names if getattr(part, name, None) is not None]
    if len(given) != 1:
        raise invalid("input", f"a part of type {part.type} needs one of {', '.join(names)}")
    value = getattr(part, given[0])
    if given[0] in ("image_url", "file_url"):
        address = schema.Address(url=value, detail=part.detail)
        return schema.ImagePart(type="image_url", image_url=address, max_pixels=part.max_pixels)
    handle = schema.FileHandle(**{given[0]: value})
    return schema.FilePart(type="file", file=handle, detail=part.detail, max_pixels=part.max_pixels)
