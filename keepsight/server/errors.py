"""Errors in the form that OpenAI clients know.

Every refusal is an `ApiError`: a status, a helpful sentence, a type, the parameter and a code.
Errors of the library are mapped here, so that bad input is never a 500.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel, JsonValue, Tag

from keepsight.errors import (
    Busy,
    Closed,
    FileError,
    ImageError,
    InputError,
    KeepsightError,
    MissingExtra,
    PinsFull,
    PromptTooLong,
    UnknownOption,
    UnsupportedInput,
)
from keepsight.kinds import Record

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


_LENGTH = {
    "max_tokens": "here it is max_tokens",
    "max_output_tokens": "here it is max_output_tokens",
}
# Names that other servers use for fields of ours; the first known one is suggested.
ELSEWHERE: dict[str, dict[str, str]] = {
    "max_new_tokens": _LENGTH,
    "n_predict": _LENGTH,
    "num_predict": _LENGTH,
    "max_tokens": {"max_output_tokens": "did you mean max_output_tokens?"},
    "cache_control": {"": "what was sent is remembered by itself; see /v1/cache/pin"},
    "system": {
        "instructions": "here it is instructions",
        "messages": "send it as a message of the role system",
    },
}


class ApiError(Exception):
    """One refusal, ready to be sent."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    def body(self) -> Record:
        """The JSON of the refusal."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        body = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": body}

    def headers(self) -> dict[str, str]:
        """Headers that say when to try again."""
        if self.retry_after is None:
            return {}
        return {"retry-after": str(max(1, round(self.retry_after + 0.5)))}


def refused(param: str, why: str) -> ApiError:
    """The error for a known field that cannot be honoured here."""
    return ApiError(400, f"{param}: {why}", param=param, code="unsupported_parameter")


def invalid(param: str | None, why: str) -> ApiError:
    """The error for an invalid value."""
    return ApiError(400, why, param=param, code="invalid_value")


def from_error(error: BaseException) -> ApiError | None:
    """The refusal for a library error; None if it is the server's own fault."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(429, str(error), code="queue_full", retry_after=error.retry_after)
    for kind, code in _CODES:
        if isinstance(error, kind):
            return ApiError(400, str(error), param=_param(error), code=code)
    if isinstance(error, Closed):
        return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
    if isinstance(error, MissingExtra):
        return ApiError(400, f"this server lacks a library: {error}", code="unsupported_input")
    return None


_CODES: tuple[tuple[type[KeepsightError], str], ...] = (
    (PromptTooLong, "context_length_exceeded"),
    (PinsFull, "pins_full"),
    (ImageError, "invalid_image"),
    (FileError, "invalid_package"),
    (UnsupportedInput, "unsupported_input"),
    (UnknownOption, "unknown_parameter"),
    (InputError, "invalid_value"),
)


def _param(error: BaseException) -> str | None:
    return "messages" if isinstance(error, ImageError | PromptTooLong | FileError) else None


def unknown(place: str, known: Iterable[str]) -> ApiError:
    """The error for an unknown field, with the known name that may have been meant."""
    text = f"unknown parameter: {place[:200]!r}; {hint_for(place, known)}"
    return ApiError(400, text, param=place[:200] or None, code="unknown_parameter")


def hint_for(place: str, known: Iterable[str]) -> str:
    """A hint at the known name that may have been meant."""
    head, _, name = place.rpartition(".")
    names = set(known)
    for here, hint in ELSEWHERE.get(name, {}).items():
        if not here or here in names:
            return hint
    near = difflib.get_close_matches(name[:100], sorted(names), n=1, cutoff=0.7)
    return f"did you mean {f'{head}.' if head else ''}{near[0]}?" if near else "see /docs"


def from_validation(errors: Sequence[Record], body: object = None) -> ApiError:
    """First validation error of a request, in OpenAI's words. `body` is the type of the body."""
    error = errors[0] if errors else {"type": "invalid", "loc": (), "msg": "the body is not valid"}
    kind, location = str(error.get("type", "")), tuple(error.get("loc", ()))
    if location and location[0] in _SOURCES:
        body, location = body if location[0] == "body" else None, location[1:]
    if kind == "extra_forbidden":
        head, known = place_in(body, location[:-1])
        place = f"{head}.{location[-1]}" if head else str(location[-1])
        return unknown(place, known)
    place, _ = place_in(body, location)
    if kind == "missing":
        what = f"missing required parameter: {place!r}" if place else "the request has no body"
        return ApiError(400, what, param=place or None, code="missing_required_parameter")
    if kind in ("json_invalid", "model_attributes_type") and not place:
        text = "the body is not a JSON object; is it sent with Content-Type: application/json?"
        return ApiError(400, text, code="invalid_json")
    if kind == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    place = place[:200]
    text = f"invalid {f'value for {place!r}' if place else 'body'}: {_wrong(kind, error)}"
    return ApiError(400, text, param=place or None, code="invalid_value")


def _wrong(kind: str, error: Record) -> str:
    """What is wrong with a value, in the words of JSON."""
    about = error.get("ctx", {})
    if kind == "union_tag_invalid":
        expected = str(about.get("expected_tags", "")).replace("'as ", "'")
        shown = str(about.get("tag")).removeprefix("as ")[:100]
        return f"its type is {shown!r}, expected one of {expected}"
    if kind == "union_tag_not_found":
        return "it has no type"
    if kind == "recursion_depth_exceeded":
        return "it is nested too deep"
    if kind in ("model_attributes_type", "model_type", "dict_type"):
        return "expected an object, as in {...}"
    return str(error.get("msg", "not valid"))


_SOURCES = ("body", "query", "path", "header")


def place_in(body: object, location: Sequence[object]) -> tuple[str, set[str]]:
    """The place as in `messages[0].content`, and the field names there. `body` is the type of the
    whole; if unknown, each part of the location counts."""
    text, kind = "", body
    for number, part in enumerate(location):
        if kind is JsonValue:  # every second part is a type, which the client did not write
            rest = location[number:]
            return text + "".join(map(_step, rest[1::2])), set()
        branches = _branches(kind)
        if len(branches) > 1:
            kind = next((branch for branch in branches if part in _labels(branch)), None)
            continue
        text += _step(part) if text else str(part)
        kind = _inside(branches[0] if branches else None, part)
    fields = (_fields(branch) for branch in _branches(kind))
    return text, {name for names in fields for name in names}


def _step(part: object) -> str:
    return f"[{part}]" if isinstance(part, int) else f".{part}"


def _branches(kind: object) -> list[object]:
    """The types that a value may have, without null."""
    if get_origin(kind) is Annotated and not _tag(kind):
        return _branches(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        members = [branch for one in get_args(kind) for branch in _branches(one)]
        return [one for one in members if one is not types.NoneType]
    return [kind]


def _tag(kind: object) -> str | None:
    marks = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((mark.tag for mark in marks if isinstance(mark, Tag)), None)


def _labels(branch: object) -> set[str]:
    """The names of a branch in a location: its tag, its types, or its class."""
    if tag := _tag(branch):
        return {tag}
    fields = _fields(branch)
    own = get_args(fields["type"]) if get_origin(fields.get("type")) is Literal else ()
    return {*own, getattr(branch, "__name__", "")}


def _inside(kind: object, part: object) -> object:
    """The type of one field, item or value."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if isinstance(part, str) and (fields := _fields(kind)):
        return fields.get(part)
    arguments = get_args(kind)
    return arguments[-1] if get_origin(kind) in (list, dict) and arguments else None


def _fields(kind: object) -> Record:
    """The names that clients write, with their types."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return {}
    return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
