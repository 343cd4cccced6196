"""Refusals in the form that OpenAI clients know: a status, a message, a type, a parameter, a code.

Errors of the library are mapped here, so that bad input is never a 500.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keepsight import errors
from keepsight.kinds import Record

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    **dict.fromkeys((500, 503, 504), "server_error"),
}


class ApiError(Exception):
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
    """A known field that cannot be honoured here."""
    return ApiError(400, f"{param}: {why}", param=param, code="unsupported_parameter")


def invalid(param: str | None, why: str) -> ApiError:
    return ApiError(400, why, param=param, code="invalid_value")


def missing(param: str, what: str = "") -> ApiError:
    text = f"missing required parameter: {param!r}{what}"
    return ApiError(400, text, param=param, code="missing_required_parameter")


def unknown(place: str, known: Iterable[str]) -> ApiError:
    text = f"unknown parameter: {place[:200]!r}; {hint_for(place, known)}"
    return ApiError(400, text, param=place[:200] or None, code="unknown_parameter")


def hint_for(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that may have been meant."""
    near = difflib.get_close_matches(name[:100], sorted(known), n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else "see /docs"


# Errors of the library: status, code, parameter. The first that fits counts.
_TABLE: tuple[tuple[type[errors.KeepsightError], int, str, str | None], ...] = (
    (errors.Busy, 429, "queue_full", None),
    (errors.PromptTooLong, 400, "context_length_exceeded", "messages"),
    (errors.PinsFull, 400, "pins_full", None),
    (errors.ImageError, 400, "invalid_image", "messages"),
    (errors.FileError, 400, "invalid_package", "messages"),
    (errors.UnsupportedInput, 400, "unsupported_input", None),
    (errors.UnknownOption, 400, "unknown_parameter", None),
    (errors.InputError, 400, "invalid_value", None),
    (errors.Closed, 503, "shutting_down", None),
    (errors.MissingExtra, 400, "unsupported_input", None),
)


def from_error(error: BaseException) -> ApiError | None:
    """The refusal for an error; None if it is the server's own fault."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code, param in _TABLE:
        if isinstance(error, kind):
            text, after = str(error), getattr(error, "retry_after", None)
            if isinstance(error, errors.GrammarError):
                param = error.place
            elif isinstance(error, errors.Closed):
                text, after = "the server is shutting down", 5
            elif isinstance(error, errors.MissingExtra):
                text = f"this server lacks a library: {text}"
            return ApiError(status, text, param=param, code=code, retry_after=after)
    return None


_NO_OBJECT = ("model_type", "model_attributes_type", "dict_type")


def from_validation(found: Sequence[Mapping[str, Any]], known: Iterable[str] = ()) -> ApiError:
    """The first error of a body or of a query, in OpenAI's words; `known` are its fields."""
    first = found[0]
    kind, place, why = first["type"], place_of(first["loc"])[:200], first["msg"]
    if kind == "extra_forbidden":
        return unknown(place, known if len(first["loc"]) == 1 else ())
    if kind == "missing":
        return missing(place)
    if not place:
        text = "the body is not a JSON object; is it sent with Content-Type: application/json?"
        return ApiError(400, text, code="invalid_json")
    if kind == "union_tag_invalid":
        about = first["ctx"]
        expected = about["expected_tags"].replace("'as ", "'")
        why = f"its type is {about['tag'].removeprefix('as ')[:100]!r}, expected one of {expected}"
    elif kind == "union_tag_not_found":
        why = "it has no type"
    elif kind in _NO_OBJECT:
        why = "Input should be an object"
    return invalid(place, f"invalid value for {place!r}: {why}")


def place_of(location: Sequence[int | str]) -> str:
    """A location as in `messages[0].content`, without the tags of unions: those that begin with
    `as`, and the type of a part, which follows its number."""
    text = ""
    for number, part in enumerate(location):
        if isinstance(part, int):
            text += f"[{part}]"
        elif not (part.startswith("as ") or _is_tag(*location[max(0, number - 3) : number])):
            text += f".{part}" if text else part
    return text


def _is_tag(*above: object) -> bool:
    """Whether this is what stands above a name in a place: a list of parts, and a number in it."""
    listed = above[1:2] == ("as parts",) or above[:2] == ("as parts", "content")
    return listed and isinstance(above[-1], int)
