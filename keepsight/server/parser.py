"""Parses the streamed output of a model: thoughts, text, and tool calls.

Qwen and Hermes write thoughts in `<think>`, and calls in `<tool_call>` as JSON or as tagged
parameters. Text that may become a tag is held back until it is certain.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class OutputPiece:
    """One piece of an answer: `kind` is `text`, `thought` or `call`."""

    kind: str
    text: str = ""
    name: str = ""  # name of the tool; `text` holds its arguments as JSON
    id: str = ""


class OutputParser:
    """Parses one answer."""

    def __init__(self, thinking: bool, thinks: bool, tools: bool) -> None:
        """`thinking`: the template already opened a thought. `thinks`, `tools`: what to look
        for."""
        self._in = "thought" if thinking else "text"
        self._thinks, self._tools = thinks or thinking, tools
        self._held = ""
        self._fresh = True  # only spaces so far: a thought may begin here
        self._after_thought = False  # empty lines after a thought are dropped

    @property
    def thinking(self) -> bool:
        """Whether a thought is open."""
        return self._in == "thought"

    def push(self, text: str) -> Iterator[OutputPiece]:
        """The pieces that are certain with this text."""
        self._held += text
        while self._held:
            before = (self._held, self._in)
            yield from self._advance()
            if (self._held, self._in) == before:
                return

    def finish(self) -> Iterator[OutputPiece]:
        """The rest; an unfinished call is text, because it cannot be run."""
        rest, self._held = self._held, ""
        if self._in == "call":
            call = read_call(rest.removesuffix(CALL_END))
            if call is not None:
                yield call
                return
            rest, self._in = CALL + rest, "text"
        if rest:
            yield from self._say(rest)

    def _advance(self) -> Iterator[OutputPiece]:
        if self._in == "call":
            inside, end, rest = self._held.partition(CALL_END)
            if end:
                call = read_call(inside)
                self._held, self._in = rest, "text"
                self._after_thought = call is not None
                yield call or OutputPiece("text", CALL + inside + CALL_END)
            return
        tags = self._tags()
        spot, tag = min(
            ((self._held.find(t), t) for t in tags if t in self._held), default=(-1, "")
        )
        if tag:
            head, self._held = self._held[:spot], self._held[spot + len(tag) :]
            yield from self._say(head, tag)
            self._in = tags[tag]
            self._after_thought = tag == THINK_END
            return
        keep = max((_overlap(self._held, t) for t in tags), default=0)
        head = self._held[: len(self._held) - keep]
        trimmed = head if self._in == "thought" or self._tools is False else head.rstrip()
        # Spaces before a call are dropped, so they wait for what follows.
        self._held = self._held[len(trimmed) :]
        yield from self._say(trimmed)

    def _tags(self) -> dict[str, str]:
        if self._in == "thought":
            return {THINK_END: "text"}
        tags = {CALL: "call"} if self._tools else {}
        # Only at the start of an answer: later it is ordinary text about thinking.
        before = self._held.partition(THINK)[0].strip()
        begins = self._thinks and self._fresh and THINK.startswith(before)
        return {**tags, THINK: "thought"} if begins else tags

    def _say(self, text: str, tag: str = "") -> Iterator[OutputPiece]:
        if self._in == "thought":
            text = text.lstrip("\n") if self._fresh else text
        elif self._after_thought:
            text = text.lstrip("\n")
        if tag in (CALL, THINK):
            text = text.rstrip()
        if text:
            if self._in == "text":
                self._after_thought = False
            self._fresh = self._fresh and not text.strip()
            yield OutputPiece(self._in, text)


def arguments_of(text: str) -> object:
    """The arguments of a call as templates want them: a record, if possible."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def read_call(text: str) -> OutputPiece | None:
    """Parse a call as JSON (Hermes, Qwen) or as tags (Qwen Coder, Qwen3.5); None if it is
    neither."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return _tagged(text)
    if not isinstance(record, dict) or not isinstance(record.get("name"), str):
        return None
    arguments = record.get("arguments", record.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return OutputPiece("call", arguments, record["name"], new_call_id())


def _tagged(text: str) -> OutputPiece | None:
    found = _FUNCTION.fullmatch(text)
    if found is None:
        return None
    arguments = {name: _value(value) for name, value in _PARAMETER.findall(found[2])}
    return OutputPiece("call", json.dumps(arguments, ensure_ascii=False), found[1], new_call_id())


def _value(text: str) -> object:
    """A tagged value: JSON if it is written as such, otherwise text."""
    if text[:1] in "[{" or text in ("true", "false", "null") or re.fullmatch(r"-?\d[\d.]*", text):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


def new_call_id() -> str:
    """An id for a call of a tool."""
    return f"call_{uuid.uuid4().hex}"


def _overlap(text: str, tag: str) -> int:
    """The number of characters at the end of `text` that begin `tag`."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
