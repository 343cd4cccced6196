"""Request fields without effect here: accepted, and reported in a header, the log and the report,
so that no option is silently ignored.

With `--unknown-fields refuse` the server refuses the first of them instead, with a hint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, JsonValue

from keepsight.server.errors import hint_for, invalid, refused, unknown

HEADER = "x-keepsight-unused"
_MOST = 24  # names that are listed; the rest is counted
_LONGEST = 120  # characters per name
_STRANGE = re.compile(r"[^A-Za-z0-9_.\[\]:/@$+-]")  # not allowed in a header, or in a list in one


class Strict(BaseModel):
    """A record without unknown fields and without type coercion."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Open(Strict):
    """A record of an API with many dialects: unknown fields are accepted and reported."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    # Unknown names that may change an answer: always refused.
    CONSTRAINING: ClassVar[dict[str, str]] = {}
    # Known names that are never suggested.
    NOT_HONOURED: ClassVar[frozenset[str]] = frozenset()

    def echoes(self) -> bool:
        """Whether this is part of an earlier answer, to which clients add fields."""
        return False


def is_empty(value: object) -> bool:
    """Whether a value says nothing: null, false, or an empty text, list or record."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


class Unused:
    """The unused fields of one request."""

    def __init__(self, refuse: bool = False) -> None:
        self.refuse = refuse
        self._why: dict[str, str] = {}  # by name, in order of appearance
        self._more = 0

    def add(self, place: str, why: str) -> None:
        """Report a known field without effect, or refuse it."""
        if self.refuse:
            raise refused(place, why)
        self._note(place, why)

    def sift(self, body: BaseModel) -> None:
        """Remove unknown fields from a body at every depth, and note their names."""
        for record, path, quiet in _records(body, (), False):
            extra = record.__pydantic_extra__
            if not extra:
                continue
            for name, value in extra.items():
                if not (quiet or is_empty(value)):
                    self._unknown(record, place_of((*path, name[:_LONGEST])), name, value)
            extra.clear()

    def _unknown(self, record: Open, place: str, name: str, value: JsonValue) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(place, f"{place} is not a valid JSON number")
        if (why := record.CONSTRAINING.get(name)) is not None:
            if (name, value) not in _NEUTRAL:
                raise refused(place, why)
            return
        known = {field.alias or own for own, field in type(record).model_fields.items()}
        known -= record.NOT_HONOURED
        if self.refuse:
            raise unknown(place, known)
        if len(self._why) < _MOST:  # finding a hint takes time
            self._note(place, f"unknown; {hint_for(place, known)}")
        else:
            self._more += 1

    def _note(self, place: str, why: str) -> None:
        if place in self._why or len(self._why) < _MOST:
            self._why.setdefault(place, why)
        else:
            self._more += 1

    def names(self) -> list[str]:
        """The names, safe for a header and a log: without spaces, commas and unusual characters."""
        named = [_STRANGE.sub("?", place)[:_LONGEST] for place in self._why]
        return [*named, f"+{self._more}"] if self._more else named

    def header(self) -> str:
        """The names on one line; empty if everything was used."""
        return ", ".join(self.names())

    def notes(self) -> tuple[str, ...]:
        """The names with their reasons, as in a report."""
        notes = [f"not used: {place}: {why}" for place, why in self._why.items()]
        return (*notes, f"not used: {self._more} more") if self._more else tuple(notes)


_NEUTRAL: tuple[tuple[str, object], ...] = (
    ("best_of", 1),
    ("truncate_prompt_tokens", -1),
    ("prompt_logprobs", 0),
)


def _records(
    value: object, path: tuple[object, ...], quiet: bool
) -> Iterator[tuple[Open, tuple[object, ...], bool]]:
    """Every record of a body with the path to it, and whether it is part of an earlier answer."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            if isinstance(item, BaseModel):
                yield from _records(item, (*path, number), quiet)
    elif isinstance(value, BaseModel):
        if isinstance(value, Open):
            quiet = quiet or value.echoes()
            yield value, path, quiet
        for name, inside in value.__dict__.items():
            if isinstance(inside, list | BaseModel):
                yield from _records(inside, (*path, name), quiet)


def place_of(path: tuple[object, ...]) -> str:
    """The path as in `messages[0].content`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
