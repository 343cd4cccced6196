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

# Fields of other servers, and what they hold.
_FIELDS = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "format": "json_schema",
}
_MAKERS: dict[str, Callable[[Any, str], Format]] = {
    "json_schema": of_schema,
    "json_object": lambda _, place: of_schema({"type": "object"}, place, "json_object"),
    "regex": of_regex,
    "choice": of_choices,
    "grammar": of_grammar,
}
_OF_VLLM = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_WITHOUT_EFFECT = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
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
                lines += self._call(number, tool.name, tool.parameters)
            except ValueError as error:
                raise GrammarError(tool.place, f"it cannot be enforced: {error}") from None
        if least:
            again = ' ("\\n" call)*' if most is None else ""
            head = [f"start: {self._mark(CALL)} call{again}"]
            if again:
                head = [f'start: opened ("\\n" opened)*\nopened: {self._mark(CALL)} call']
        else:
            head = [f"start: (opening call)* TEXT\nTEXT: {_TEXT}", self._opening()]
        return "\n".join([*head, *lines])

    def _mark(self, text: str) -> str:
        return text if text in self._own else _quoted(text)

    def _opening(self) -> str:
        if CALL in self._own:
            return f"opening: {_TEXT} {CALL}"
        return f"opening[lazy]: /(.|\\n)*{CALL}/"

    def _call(self, number: int, name: str, parameters: Record) -> list[str]:
        rule = f"call_{number}"
        if not self._tagged:
            begin = f'\n{{"name": {json.dumps(name)}, "arguments": '
            inner = f"{_quoted(begin)} {_json(parameters)} {_quoted('}' + chr(10))}"
            return [f"{rule}: {inner} {self._mark(CALL_END)}"]
        return list(self._tags(rule, name, parameters))

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


# -- from a body to a form -------------------------------------------------------------------------


def form_of(body: schema.ChatRequest, syntax: CallSyntax, unused: Unused) -> Format | None:
    """The form of the answer to a request; None if it is free."""
    text = text_form(body, unused)
    tools = body.shown_tools if body.tool_choice != "none" else []
    choice = body.tool_choice
    if isinstance(choice, schema.ForcedChoice):
        name = choice.function.name if choice.function is not None else choice.name
        found = [(n, tool) for n, tool in _functions(body) if tool.function.name == name]
        if not found:
            known = ", ".join(repr(tool.function.name) for tool in tools[:20]) or "none"
            raise invalid("tool_choice", f"there is no tool {str(name)[:100]!r}; tools: {known}")
        return _calls(found[:1], syntax, "tool_choice", 1, 1, forced=True)
    numbered = [(n, tool) for n, tool in _functions(body) if tools]
    most = 1 if body.parallel_tool_calls is False else None
    if choice == "required":
        if not numbered:
            raise invalid("tool_choice", "tool_choice is 'required', and there are no tools")
        return _calls(numbered, syntax, "tool_choice", 1, most, forced=True)
    strict = any(tool.function.strict for _, tool in numbered)
    if text is not None and numbered:
        return _either(text, _calls(numbered, syntax, text.place, 1, most))
    if strict:
        return _calls(numbered, syntax, "tools", 0, most)
    return text


def _functions(body: schema.ChatRequest) -> list[tuple[int, schema.Tool]]:
    """The tools that a model may call, with their numbers in the request."""
    return [(n, tool) for n, tool in enumerate(body.tools or ()) if isinstance(tool, schema.Tool)]


def _calls(
    tools: Sequence[tuple[int, schema.Tool]],
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
        if parameters is not None and (strict is True or (forced and strict is None)):
            if parameters.get("type", "object") != "object":
                raise GrammarError(where, "arguments are a record; expected {'type': 'object'}")
            parts.append(of_schema(parameters, where))  # refuses by its own name
            bound.append(BoundTool(tool.function.name, parameters, where))
        else:
            bound.append(BoundTool(tool.function.name, {"type": "object"}, where))
    grammar = syntax.grammar(bound, least, most)
    return Format("calls", ({"lark_grammar": grammar},), place, str, tuple(parts))


def _either(text: Format, calls: Format) -> Format:
    """An answer of a form, or calls."""
    grammars = (
        {"lark_grammar": "start: @text | @calls"},
        {"name": "text", **text.grammars[0]},
        {"name": "calls", **calls.grammars[0]},
    )
    return Format("calls", grammars, text.place, str, (text, *calls.parts))


def text_form(body: schema.Forms, unused: Unused) -> Format | None:
    """What the text of an answer has to be; at most one field may say it."""
    names = ("response_format", "structured_outputs", *_FIELDS)
    asked = [(name, getattr(body, name, None)) for name in names]
    found: list[Format] = []
    for name, given in asked:
        if given is None or given in ("", {}, False):
            continue
        form = _form(name, given, unused)
        if form is not None and found:
            raise invalid(name, f"{name} and {found[0].place} both say what the answer has to be")
        found += [] if form is None else [form]
    return found[0] if found else None


def _form(name: str, given: object, unused: Unused) -> Format | None:
    if name == "structured_outputs" and isinstance(given, dict):
        return _of_vllm(given, unused)
    if isinstance(given, schema.ResponseFormat):
        return wanted(given.model_dump(), name)
    if name == "format" and given == "json":  # Ollama's
        return _MAKERS["json_object"](None, name)
    return _MAKERS[_FIELDS[name]](given, name)


def _of_vllm(given: Record, unused: Unused) -> Format | None:
    place = "structured_outputs"
    kinds = [name for name in (*_OF_VLLM, "json_object") if given.get(name) not in (None, False)]
    for name, value in given.items():
        if name in (*_OF_VLLM, "json_object") or is_empty(value):
            continue
        if name not in _WITHOUT_EFFECT:
            raise refused(f"{place}.{name[:100]}", "it cannot be honoured here")
        unused.add(f"{place}.{name}", "answers always have one style, and no more properties")
    if len(kinds) != 1:
        raise invalid(place, f"expected one of {', '.join(_OF_VLLM)} and json_object")
    kind = kinds[0]
    return _MAKERS[_OF_VLLM.get(kind, kind)](given[kind], f"{place}.{kind}")
