"""The items of `/v1/responses`, as clients write them and as they received them.

Items of an earlier response (assistant messages, thoughts, tool calls) come back with additions of
clients.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from keepsight.server.api.unused import Open
from keepsight.server.media.parts import (
    BareImagePart,
    Id,
    Name,
    PicturePart,
    RefusalPart,
    Text,
    TextPart,
    VideoPart,
    Where,
    kind_of,
)


class InputFile(PicturePart):
    """A picture or a PDF."""

    type: Literal["input_file"]
    file_id: Name | None = None
    file_data: Where | None = None
    file_url: Where | None = None
    filename: Annotated[str, Field(max_length=1024)] | None = None


Part = Annotated[
    TextPart | RefusalPart | BareImagePart | VideoPart | InputFile, Discriminator("type")
]
Content = Annotated[
    Annotated[Text, Tag("as text")] | Annotated[list[Part], Tag("as parts")], Discriminator(kind_of)
]


class MessageItem(Open):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
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
    output: Content


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
