"""Parses the streamed output of a model: thoughts, text, and tool calls.

Qwen and Hermes write thoughts in `<think>`, and calls in `<tool_call>` as JSON or as tagged
parameters. Text that may become a tag is held back until it is certain.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from keepsight.core.structured.thoughts import THINK, THINK_END
from keepsight.kinds import Record

CALL, CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NUMBER = re.compile(r"-?\d[\d.]*")
_DEEP = 8  # references and unions within each other that are followed


@dataclass(frozen=True)
class OutputPiece:
    """One piece of an answer: `kind` is `text`, `thought` or `call`."""

    kind: str
    text: str = ""
    name: str = ""  # name of the tool; `text` holds its arguments as JSON
    id: str = ""


class OutputParser:
    def __init__(
        self,
        thinking: bool,
        thinks: bool,
        tools: bool,
        parameters: Mapping[str, Record] | None = None,
    ) -> None:
        """`thinking`: the template already opened a thought. `thinks`, `tools`: what to look
        for. `parameters`: the schemas of arguments, by the names of tools."""
        self._in = "thought" if thinking else "text"
        self._thinks, self._tools = thinks or thinking, tools
        self._parameters = parameters or {}
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
            if (call := _read_call(rest.removesuffix(CALL_END), self._parameters)) is not None:
                yield call
                return
            rest, self._in = CALL + rest, "text"
        yield from self._say(rest)

    def _advance(self) -> Iterator[OutputPiece]:
        if self._in == "call":
            inside, end, rest = self._held.partition(CALL_END)
            if end:
                call = _read_call(inside, self._parameters)
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
        if self._in == "text" and self._tools:
            head = head.rstrip()  # spaces before a call are dropped, so they wait for what follows
        self._held = self._held[len(head) :]
        yield from self._say(head)

    def _tags(self) -> dict[str, str]:
        if self._in == "thought":
            return {THINK_END: "text"}
        tags = {CALL: "call"} if self._tools else {}
        # Only at the start of an answer: later it is ordinary text about thinking.
        before = self._held.partition(THINK)[0].strip()
        begins = self._thinks and self._fresh and THINK.startswith(before)
        return {**tags, THINK: "thought"} if begins else tags

    def _say(self, text: str, tag: str = "") -> Iterator[OutputPiece]:
        if self._after_thought or (self._in == "thought" and self._fresh):
            text = text.lstrip("\n")
        if tag in (CALL, THINK):
            text = text.rstrip()
        if text:
            self._after_thought = False
            self._fresh = self._fresh and not text.strip()
            yield OutputPiece(self._in, text)


def _overlap(text: str, tag: str) -> int:
    """The number of characters at the end of `text` that begin `tag`."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)


# -- calls -----------------------------------------------------------------------------------------


def loaded(text: str) -> object:
    """A text as JSON; itself if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _read_call(text: str, parameters: Mapping[str, Record]) -> OutputPiece | None:
    """Parse a call as JSON (Hermes, Qwen) or as tags (Qwen Coder, Qwen3.5); None if it is
    neither."""
    record = loaded(text)
    if isinstance(record, str) and (found := _FUNCTION.fullmatch(text)) is not None:
        name, known = found[1], parameters.get(found[1], {})
        schemas = known.get("properties")
        schemas = schemas if isinstance(schemas, dict) else {}
        arguments: object = {
            key: _value(value, types_of(schemas[key], known) if key in schemas else None)
            for key, value in _PARAMETER.findall(found[2])
        }
    elif isinstance(record, dict) and isinstance(record.get("name"), str):
        name, arguments = record["name"], record.get("arguments", record.get("parameters", {}))
    else:
        return None
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return OutputPiece("call", arguments, name, f"call_{uuid.uuid4().hex}")


def _value(text: str, types: set[str] | None) -> object:
    """A tagged value: JSON if its schema wants some, or without a schema if it looks like it;
    otherwise text."""
    looks = text[:1] in "[{" or text in ("true", "false", "null") or _NUMBER.fullmatch(text)
    if types == {"string"} or (types is None and not looks):
        return text
    value = loaded(text)
    return value if types is None or types_of({"const": value}, {}) & types else text


# -- schemas of arguments --------------------------------------------------------------------------

_NAMES: dict[type, set[str]] = {
    str: {"string"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"},
    list: {"array"}, dict: {"object"}, type(None): {"null"},
}  # fmt: skip
_EVERY = frozenset(name for names in _NAMES.values() for name in names)


def alternatives(schema: object, root: Record) -> Iterator[Record]:
    """The schemas of which a value fits one, each of one type if it says so."""
    waiting: list[tuple[object, int]] = [(schema, 0)]
    while waiting:
        one, depth = waiting.pop(0)
        if not isinstance(one, dict):
            yield {}
        elif isinstance(one.get("$ref"), str) and depth < _DEEP:
            waiting.append((_referenced(one["$ref"], root), depth + 1))
        elif depth < _DEEP and isinstance(union := one.get("anyOf", one.get("oneOf")), list):
            waiting += [(each, depth + 1) for each in union]
        elif isinstance(one.get("type"), list):
            waiting += [({**one, "type": each}, depth) for each in one["type"]]
        elif isinstance(one.get("enum"), list) and len(kinds := _kinds(one["enum"])) > 1:
            for kind in kinds:
                yield {"enum": [value for value in one["enum"] if type(value) is kind]}
        else:
            yield one


def types_of(schema: object, root: Record) -> set[str]:
    """The types that a value of a schema may have."""
    found: set[str] = set()
    for one in alternatives(schema, root):
        values = one.get("enum", [one["const"]] if "const" in one else None)
        if isinstance(values, list):
            found |= {name for kind in _kinds(values) for name in _NAMES.get(kind, set())}
        else:
            found |= {one["type"]} if isinstance(one.get("type"), str) else _EVERY
    return found


def _kinds(values: list[object]) -> list[type]:
    return list(dict.fromkeys(map(type, values)))


def _referenced(place: str, root: Record) -> object:
    """What a reference names; an empty schema if it is not there."""
    found: object = root
    for name in place.removeprefix("#").strip("/").split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return found
