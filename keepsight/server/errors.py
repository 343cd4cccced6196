"""Errors in the form that OpenAI clients know.

Every refusal is an `ApiError`: a status, a helpful sentence, a type, the parameter and a code.
Errors of the library are mapped here, so that bad input is never a 500.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from keepsight.errors import (
    Busy,
    Closed,
    FileError,
    GrammarError,
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
        kind = _TYPES.get(self.status, "invalid_request_error")
        body = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": body}

    def headers(self) -> dict[str, str]:
        if self.retry_after is None:
            return {}
        return {"retry-after": str(max(1, round(self.retry_after + 0.5)))}


def refused(param: str, why: str) -> ApiError:
    """The error for a known field that cannot be honoured here."""
    return ApiError(400, f"{param}: {why}", param=param, code="unsupported_parameter")


def invalid(param: str | None, why: str) -> ApiError:
    """The error for an invalid value."""
    return ApiError(400, why, param=param, code="invalid_value")


def missing(param: str, what: str = "") -> ApiError:
    """The error for a parameter that is not there."""
    text = f"missing required parameter: {param!r}{what}"
    return ApiError(400, text, param=param, code="missing_required_parameter")


def from_error(error: BaseException) -> ApiError | None:
    """The refusal for a library error; None if it is the server's own fault."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code, param in _TABLE:
        if isinstance(error, kind):
            param = error.place if isinstance(error, GrammarError) else param
            text = _SAID.get(kind, "{}").format(error)
            after = error.retry_after if isinstance(error, Busy) else 5 if status == 503 else None
            return ApiError(status, text, param=param, code=code, retry_after=after)
    return None


# Errors of the library: status, code, parameter. The first that fits counts.
_TABLE: tuple[tuple[type[KeepsightError], int, str, str | None], ...] = (
    (Busy, 429, "queue_full", None),
    (PromptTooLong, 400, "context_length_exceeded", "messages"),
    (PinsFull, 400, "pins_full", None),
    (ImageError, 400, "invalid_image", "messages"),
    (FileError, 400, "invalid_package", "messages"),
    (UnsupportedInput, 400, "unsupported_input", None),
    (UnknownOption, 400, "unknown_parameter", None),
    (InputError, 400, "invalid_value", None),
    (Closed, 503, "shutting_down", None),
    (MissingExtra, 400, "unsupported_input", None),
)
_SAID: dict[type[KeepsightError], str] = {
    Closed: "the server is shutting down",
    MissingExtra: "this server lacks a library: {}",
}


def unknown(place: str, known: Iterable[str]) -> ApiError:
    """The error for an unknown field, with the known name that may have been meant."""
    text = f"unknown parameter: {place[:200]!r}; {hint_for(place, known)}"
    return ApiError(400, text, param=place[:200] or None, code="unknown_parameter")


def hint_for(place: str, known: Iterable[str]) -> str:
    """A hint at the known name that may have been meant."""
    head, dot, name = place.rpartition(".")
    near = difflib.get_close_matches(name[:100], sorted(known), n=1, cutoff=0.7)
    return f"did you mean {head}{dot}{near[0]}?" if near else "see /docs"


def from_validation(
    errors: Sequence[Mapping[str, Any]], body: type[BaseModel] | None = None
) -> ApiError:
    """First error of a body (or of a query, without `body`), in OpenAI's words."""
    first = errors[0]
    kind, about = first["type"], first.get("ctx", {})
    place = place_of(first["loc"])[:200]
    if kind == "extra_forbidden":
        alone = len(first["loc"]) == 1 and body is not None
        return unknown(place, body.model_fields if alone and body is not None else ())
    if kind == "missing":
        return missing(place)
    if not place:
        text = "the body is not a JSON object; is it sent with Content-Type: application/json?"
        return ApiError(400, text, code="invalid_json")
    why = first["msg"]
    if kind == "union_tag_invalid":
        expected = about["expected_tags"].replace("'as ", "'")
        shown = str(about["tag"]).removeprefix("as ")[:100]
        why = f"its type is {shown!r}, expected one of {expected}"
    elif kind == "union_tag_not_found":
        why = "it has no type"
    elif kind in ("model_attributes_type", "model_type", "dict_type"):
        why = "expected an object, as in {...}"
    return invalid(place, f"invalid value for {place!r}: {why}")


def place_of(location: Sequence[int | str]) -> str:
    """A location as in `messages[0].content`, without the tags of unions: those that begin with
    `as`, and the type of a part, which follows its number."""
    text = ""
    for number, part in enumerate(location):
        if isinstance(part, int):
            text += f"[{part}]"
        elif not part.startswith("as ") and location[max(0, number - 2)] != "as parts":
            text += f".{part}" if text else part
    return text
