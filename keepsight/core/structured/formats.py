"""What an answer has to look like, from the many ways to say it.

`response_format` may be OpenAI's record, a JSON schema, a pydantic class, or a record with one of
`regex`, `choice` and `grammar`. All become a `Format`: a grammar as text, and a way to read the
answer. Sizes are bounded here, before anything is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from keepsight.errors import GrammarError
from keepsight.kinds import Record

LARGEST = 1 << 18  # characters of a schema, an expression or a grammar
DEEPEST = 64  # records and lists within each other
KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")
_TEXT = "text"
_NOT_OF_A_SCHEMA = ("json", "json_object", "regex", "choice", "choices", "grammar", "lark")
# One style, that of Python's `json.dumps`: what lies between values is forced and costs no step.
STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "if", "not")
# Where a schema has schemas.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_STANDARD = (
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
    "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template",
    "json-pointer", "relative-json-pointer", "regex",
)  # fmt: skip
_IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ALONE = ("items", "additionalProperties")


@dataclass(frozen=True)
class Format:
    """The form of an answer. `grammars` are entries of llguidance's list: first that of the whole
    answer, then those that it names."""

    kind: str
    grammars: tuple[Record, ...]
    place: str  # the caller's name for it, for errors
    read: Callable[[str], Any]  # the answer's text as a value
    parts: tuple[Format, ...] = ()  # what it is made of, to name the part that is wrong


def wanted(given: object, place: str = "response_format") -> Format | None:
    """The form that a caller asks for; None for plain text. What is no form is refused."""
    if given is None:
        return None
    if isinstance(given, Format):
        return given
    if isinstance(given, type) and hasattr(given, "model_json_schema"):
        return of_class(given, place)
    if not isinstance(given, Mapping):
        raise GrammarError(
            place,
            f"got a {type(given).__name__}; expected a JSON schema, a pydantic class, or a record "
            f"such as {{'type': 'json_object'}}; types: text, {', '.join(KINDS)}",
        )
    record, kind = dict(given), given.get("type")
    if kind == _TEXT:
        return None
    named = [name for name in ("json", "json_object", *KINDS[2:]) if name in record]
    if kind is None and len(record) == 1 and named:  # as in {"regex": "..."}
        kind = {"json": "json_schema"}.get(named[0], named[0])
    if kind == "json_object" and record.get("schema") is None:
        return of_schema({"type": "object"}, place, kind)
    if kind in ("json_schema", "json_object"):
        inside = record.get("json_schema", record.get("json", record))
        schema = inside.get("schema", record.get("json")) if isinstance(inside, Mapping) else inside
        if schema is None:
            raise GrammarError(
                place, "there is no schema in it; expected schema or json_schema.schema"
            )
        return of_schema(schema, place)
    if kind == "regex":
        return of_regex(_one_of(record, ("regex", "pattern"), place), place)
    if kind == "choice":
        return of_choices(_one_of(record, ("choice", "choices"), place), place)
    if kind == "grammar":
        return of_grammar(_one_of(record, ("grammar", "lark"), place), place)
    if kind is None and (mixed := [name for name in _NOT_OF_A_SCHEMA if name in record]):
        raise GrammarError(
            place,
            f"{mixed[0]!r} is no word of a JSON schema; give one form alone, as in "
            "{'choice': [...]}, {'regex': ...} or {'grammar': ...}",
        )
    return of_schema(record, place)


def of_class(model: Any, place: str) -> Format:
    """A pydantic class: the answer is read as an instance of it."""
    try:
        schema = model.model_json_schema()
    except Exception as error:  # a foreign class may raise anything
        raise GrammarError(place, f"{model.__name__} has no JSON schema: {error}") from error
    for one in _schemas(schema):  # names of pydantic's own, such as "path": the class checks them
        if one.get("format") not in (None, *_STANDARD):
            del one["format"]
    form = of_schema(schema, place)
    return Format(form.kind, form.grammars, place, model.model_validate_json)


def of_schema(schema: object, place: str, kind: str = "json_schema") -> Format:
    """A JSON schema: the answer is read as JSON."""
    return Format(kind, ({"json_schema": styled(schema, place)},), place, json.loads)


def styled(schema: object, place: str) -> Record:
    """A schema, checked, with the style of its answers."""
    if isinstance(schema, str):
        schema = _loaded(schema, place)
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise GrammarError(place, "a JSON schema is a record, as in {'type': 'object', ...}")
    check_size(schema, place)
    try:
        closed = json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise GrammarError(place, f"this schema is no JSON: {error}") from None
    if len(json.dumps(closed)) > LARGEST:
        raise GrammarError(place, f"this schema is larger than {LARGEST} characters")
    inner = list(_schemas(closed))
    for one in inner:
        _without_neutral(one)
    if not any(map(_combines, inner)):
        for one in inner:
            _close(one)
    own = closed.get("x-guidance")
    if own is not None:
        raise GrammarError(place, "'x-guidance' cannot be set by the caller; leave it out")
    return {**closed, "x-guidance": STYLE}


def of_regex(pattern: object, place: str) -> Format:
    """A regular expression that the whole answer matches."""
    text = _text(pattern, place, "a regular expression")
    return Format("regex", ({"regex": text},), place, str)


def of_choices(choices: object, place: str) -> Format:
    """One of several texts."""
    if not isinstance(choices, list | tuple) or not choices:
        raise GrammarError(place, "expected a list of at least one text to choose from")
    if not all(isinstance(one, str) and one for one in choices):
        raise GrammarError(place, "every choice has to be a text that is not empty")
    if sum(map(len, choices)) > LARGEST:
        raise GrammarError(place, f"these choices are longer than {LARGEST} characters")
    return Format("choice", ({"choice": list(choices)},), place, str)


def of_grammar(grammar: object, place: str) -> Format:
    """A grammar in Lark's language, or llama.cpp's."""
    text = _text(grammar, place, "a grammar")
    return Format("grammar", ({"lark_grammar": text},), place, str)


def _schemas(schema: Record) -> Iterator[Record]:
    """A schema and all schemas in it."""
    waiting: list[object] = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            for name in _BY_NAME:
                waiting += one[name].values() if isinstance(one.get(name), dict) else ()
            for name in _IN_LISTS:
                waiting += one[name] if isinstance(one.get(name), list) else ()
            waiting += [one[name] for name in _ALONE if name in one]


def check_size(value: object, place: str) -> None:
    """Refuse what is nested too deeply or has too many parts, without recursion."""
    layer, depth, count = [value], 0, 0
    while layer:
        inner: list[object] = []
        for one in layer:
            inner += one.values() if isinstance(one, Mapping) else ()
            inner += one if isinstance(one, list | tuple) else ()
            count += len(one) if isinstance(one, str) else 1
        if (depth := depth + 1) > DEEPEST or count > LARGEST:
            what = f"nested deeper than {DEEPEST}" if depth > DEEPEST else f"larger than {LARGEST}"
            raise GrammarError(place, f"this schema is {what}; expected a smaller one")
        layer = inner


def _combines(record: Record) -> bool:
    """Whether a record that is closed by itself would shut out those it is combined with, or hide
    that two of them fit."""
    both = "properties" in record and any(name in record for name in _COMBINING)
    one_of = "oneOf" in record and "discriminator" not in record
    return both or one_of or "allOf" in record


def _without_neutral(record: Record) -> None:
    """Leave out words that say nothing, or say it in other words that a grammar knows."""
    if record.get("uniqueItems") is False:
        del record["uniqueItems"]
    alone = not any(name in record for name in _COMBINING)
    if record.get("unevaluatedProperties") is False and alone:
        del record["unevaluatedProperties"]
        record.setdefault("additionalProperties", False)


def _close(record: Record) -> None:
    """Allow no properties beyond those named, where a schema says nothing about more: every answer
    is valid as before, and no model rambles on."""
    properties, needed = record.get("properties"), record.get("required", [])
    silent = not any(f"{name}Properties" in record for name in ("additional", "pattern"))
    known = isinstance(properties, dict) and isinstance(needed, list)
    if silent and known and {*map(str, needed)} <= {*(properties or {})}:
        record.setdefault("additionalProperties", False)


def _one_of(record: Record, names: tuple[str, ...], place: str) -> object:
    found = [record[name] for name in names if name in record]
    if len(found) != 1:
        raise GrammarError(place, f"expected {names[0]!r} beside 'type'")
    if more := [name for name in _NOT_OF_A_SCHEMA if name in record and name not in names]:
        raise GrammarError(place, f"{names[0]!r} and {more[0]!r} are two forms; give one alone")
    return found[0]


def _text(given: object, place: str, what: str) -> str:
    if not isinstance(given, str) or not given:
        raise GrammarError(place, f"expected {what} as a text that is not empty")
    if len(given) > LARGEST:
        raise GrammarError(place, f"this is longer than {LARGEST} characters")
    return given


def _loaded(text: str, place: str) -> object:
    if len(text) > LARGEST:
        raise GrammarError(place, f"this schema is larger than {LARGEST} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(place, f"this schema is no JSON: {error}") from None
