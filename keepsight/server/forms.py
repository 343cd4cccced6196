"""The form of an answer that a request asks for, from every dialect, and the grammar of calls.

OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, and the fields of llama.cpp,
SGLang and Ollama say what the text has to be; `tool_choice` and `strict` tools say which calls may
come, in the syntax that the model writes and `parser.py` reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keepsight.core.structured.formats import (
    Format,
    of_choices,
    of_grammar,
    of_regex,
    of_schema,
    styled,
    wanted,
)
from keepsight.errors import GrammarError
from keepsight.kinds import Record
from keepsight.server import schema
from keepsight.server.errors import invalid, refused
from keepsight.server.parser import CALL, CALL_END, alternatives, types_of
from keepsight.server.schema import Unused, is_empty

Maker = Callable[[Any, str], Format]
Numbered = tuple[int, schema.Tool]  # a tool, with its number in the request


# -- what the text of an answer has to be ----------------------------------------------------------


def _any_object(_: object, place: str) -> Format:
    return of_schema({"type": "object"}, place, "json_object")


_FIELDS: dict[str, Maker] = {
    **dict.fromkeys(("guided_json", "json_schema", "format"), of_schema),
    **dict.fromkeys(("guided_regex", "regex"), of_regex),
    "guided_choice": of_choices,
    **dict.fromkeys(("guided_grammar", "ebnf", "grammar"), of_grammar),
}
_OF_VLLM: dict[str, Maker] = {
    "json": of_schema,
    "regex": of_regex,
    "choice": of_choices,
    "grammar": of_grammar,
    "json_object": _any_object,
}
_WITHOUT_EFFECT = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")


def text_form(body: schema.Forms, unused: Unused) -> Format | None:
    """What the text of an answer has to be; at most one field may say it."""
    found: Format | None = None
    for name in ("response_format", "structured_outputs", *_FIELDS):
        given = getattr(body, name, None)
        if given is None or given in ("", {}, False):
            continue
        if isinstance(given, schema.ResponseFormat):
            form = wanted(given.model_dump(), given.PLACE)
        elif name == "structured_outputs":
            form = _of_vllm(given, unused)
        elif name == "format" and given == "json":  # Ollama's
            form = _any_object(given, name)
        else:
            form = _FIELDS[name](given, name)
        if form is not None and found is not None:
            raise invalid(name, f"{name} and {found.place} both say what the answer has to be")
        found = form or found
    return found


def _of_vllm(given: Record, unused: Unused) -> Format:
    place = "structured_outputs"
    for name, value in given.items():
        if name in _OF_VLLM or is_empty(value):
            continue
        if name not in _WITHOUT_EFFECT:
            raise refused(f"{place}.{name[:100]}", "it cannot be honoured here")
        unused.add(f"{place}.{name}", "answers always have one style, and no more properties")
    kinds = [name for name in _OF_VLLM if given.get(name) not in (None, False)]
    if len(kinds) != 1:
        raise invalid(place, f"expected one of {', '.join(_OF_VLLM)}")
    return _OF_VLLM[kinds[0]](given[kinds[0]], f"{place}.{kinds[0]}")


def form_of(body: schema.ChatRequest, syntax: CallSyntax, unused: Unused) -> Format | None:
    """The form of the answer to a request; None if it is free."""
    text, choice = text_form(body, unused), body.tool_choice
    tools: list[Numbered] = [
        (n, tool)
        for n, tool in enumerate(body.tools or ())
        if isinstance(tool, schema.Tool) and choice != "none"
    ]
    if some := isinstance(choice, schema.ForcedChoice | schema.AllowedChoice):
        chosen = choice.tools if isinstance(choice, schema.AllowedChoice) else [choice]
        named = {one.named for one in chosen}
        for name in named.difference(tool.function.name for _, tool in tools):
            known = ", ".join(repr(tool.function.name) for _, tool in tools[:20]) or "none"
            raise invalid("tool_choice", f"there is no tool {str(name)[:100]!r}; tools: {known}")
        tools = [(n, tool) for n, tool in tools if tool.function.name in named]
    if isinstance(choice, schema.ForcedChoice):
        return _calls(tools[:1], syntax, "tool_choice", 1, 1, forced=True)
    most = 1 if body.parallel_tool_calls is False else None
    if "required" in (choice, getattr(choice, "mode", None)):
        if not tools:
            raise invalid("tool_choice", "tool_choice is 'required', and there are no tools")
        return _calls(tools, syntax, "tool_choice", 1, most, forced=True)
    if text is not None and tools:  # an answer of the form, or calls
        calls = _calls(tools, syntax, text.place, 1, most)
        grammars = (
            {"lark_grammar": "start: @text | @calls"},
            {"name": "text", **text.grammars[0]},
            {"name": "calls", **calls.grammars[0]},
        )
        return Format("calls", grammars, text.place, str, (text, *calls.parts))
    if some or any(tool.function.strict for _, tool in tools):
        return _calls(tools, syntax, "tools", 0, most)
    return text


def _calls(
    tools: Sequence[Numbered],
    syntax: CallSyntax,
    place: str,
    least: int,
    most: int | None,
    forced: bool = False,
) -> Format:
    """Calls of some of a request's tools. The arguments of a strict tool fit its schema, and those
    of a forced one unless it says that it is not strict."""
    bound, parts = list[BoundTool](), list[Format]()
    for number, tool in tools:
        strict, parameters = tool.function.strict, tool.function.parameters
        where = f"tools[{number}].function.parameters"
        if parameters is None or not (strict or (forced and strict is None)):
            parameters = {"type": "object"}
        elif parameters.get("type", "object") != "object":
            raise GrammarError(where, "arguments are a record; expected {'type': 'object'}")
        else:
            parts.append(of_schema(parameters, where))  # refuses by its own name
        bound.append(BoundTool(tool.function.name, parameters, where))
    grammar = syntax.grammar(bound, least, most)
    return Format("calls", ({"lark_grammar": grammar},), place, str, tuple(parts))


# -- how calls are written -------------------------------------------------------------------------

# What tags without quotes can say of a call, and of a value; and words without effect.
_OF_CALLS = ("type", "properties", "required", "additionalProperties", "strict")
_OF_UNIONS = ("$ref", "anyOf", "oneOf")
_REMARKS = (
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$comment", "$defs", "definitions", "$schema", "$id",
)  # fmt: skip
_KEY = re.compile(r"[^>\s]+")
_TEXT = r"/(.|\n)*/"  # any, as an expression of Lark's language
# Likewise: the end of a text between tags, and what would end it earlier for a reader.
_TAIL = r"\n<\/parameter>\n"
_ENDS = r"[^\n]<\/parameter>|<\/parameter>[^\n]|<\/function>|<\/tool_call>"


@dataclass(frozen=True)
class BoundTool:
    """A tool that may be called, and what its arguments have to be. `place`: of that schema."""

    name: str
    parameters: Record
    place: str


class CallSyntax:
    """How a model writes calls: as JSON (Hermes, Qwen) or as tags (Qwen Coder, Qwen3.5).
    `own`: the marks that are tokens of their own, which are not text for llguidance."""

    def __init__(self, tagged: bool, own: frozenset[str]) -> None:
        self._tagged, self._own = tagged, own

    def grammar(self, tools: Sequence[BoundTool], least: int, most: int | None) -> str:
        """Calls of some tools in Lark's language. With `least` 0 a call may come at any place of a
        text."""
        lines = [f"call: {' | '.join(f'call_{n}' for n in range(len(tools)))}"]
        for number, tool in enumerate(tools):
            try:
                lines += self._call(f"call_{number}", tool.name, tool.parameters)
            except ValueError as error:
                raise GrammarError(tool.place, f"it cannot be enforced: {error}") from None
        if least and most is None:
            head = f'start: opened ("\\n" opened)*\nopened: {self._mark(CALL)} call'
        elif least:
            head = f"start: {self._mark(CALL)} call"
        else:
            opening = f"opening[lazy]: /(.|\\n)*{CALL}/"
            if CALL in self._own:
                opening = f"opening: {_TEXT} {CALL}"
            head = f"start: (opening call)* TEXT\nTEXT: {_TEXT}\n{opening}"
        return "\n".join([head, *lines])

    def _mark(self, text: str) -> str:
        return text if text in self._own else _quoted(text)

    def _call(self, rule: str, name: str, parameters: Record) -> Iterator[str]:
        if self._tagged:
            yield from self._tags(rule, name, parameters)
            return
        begin = f'\n{{"name": {json.dumps(name)}, "arguments": '
        inner = f"{_quoted(begin)} {_json(parameters)} {_quoted('}' + chr(10))}"
        yield f"{rule}: {inner} {self._mark(CALL_END)}"

    def _tags(self, rule: str, name: str, parameters: Record) -> Iterator[str]:
        _refuse_more(parameters, _OF_CALLS)
        needed = parameters.get("required") or []
        properties = dict.fromkeys(needed, True) | (parameters.get("properties") or {})
        spots = []
        for number, (key, value) in enumerate(properties.items()):
            if not _KEY.fullmatch(key):
                raise ValueError(f"the name {key[:40]!r} in a call that this model writes as tags")
            spot = f"{rule}_{number}"
            spots.append(spot + ("" if key in needed else "?"))
            if isinstance(value, dict) and any(name in value for name in _OF_UNIONS):
                _refuse_more(value, _OF_UNIONS)
            kinds = list(alternatives(value, parameters))
            inner = [f"{spot}_{kind}" for kind in range(len(kinds))]
            yield f"{spot}: {_quoted(f'<parameter={key}>' + chr(10))} ({' | '.join(inner)})"
            for its, one in zip(inner, kinds, strict=True):
                yield from _tagged_value(its, one, parameters)
        if not properties and parameters.get("additionalProperties") is not False:
            spots.append(f"{rule}_any*")
            yield from _text_between(f"{rule}_any", r"<parameter=[^>\s]+>\n(.|\n)*")
        begin = _quoted(f"\n<function={name}>\n")
        inside = " ".join([begin, *spots, _quoted("</function>\n")])
        yield f"{rule}: {inside} {self._mark(CALL_END)}"


def _tagged_value(rule: str, value: Record, parameters: Record) -> Iterator[str]:
    """A value between tags: a text without quotes, or JSON."""
    end = _quoted("\n</parameter>\n")
    if types_of(value, parameters) != {"string"}:
        shared = {n: parameters[n] for n in ("$defs", "definitions") if n in parameters}
        yield f"{rule}: {_json(value | shared)} {end}"
        return
    if "enum" in value or "const" in value:
        _refuse_more(value, ("type", "enum", "const"))
        texts = value.get("enum", [value.get("const")])
        yield f"{rule}: ({' | '.join(map(_quoted, texts))}) {end}"
        return
    _refuse_more(value, ("type", "minLength", "maxLength"))
    least, most = value.get("minLength", 0), value.get("maxLength", "")
    count = f"{{{least},{most}}}" if least or most != "" else "*"
    yield from _text_between(rule, rf"(.|\n){count}")


def _text_between(rule: str, text: str) -> Iterator[str]:
    """A text to the end of its tags, without what reads as an end."""
    yield f"{rule}[lazy]: {rule.upper()}"
    yield f"{rule.upper()}: /{text}{_TAIL}/ & ~/(.|\\n)*({_ENDS})(.|\\n)*/"


def _refuse_more(value: Record, known: Sequence[str]) -> None:
    """Refuse what this model's tags, which have no quotes, cannot express."""
    more = sorted(value.keys() - {*known, *_REMARKS})
    if more:
        raise ValueError(f"{more[0]!r} in a call that this model writes without quotes")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(parameters: Record) -> str:
    return f"%json {json.dumps(styled(parameters, 'parameters'))}"
