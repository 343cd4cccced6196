"""Fields of a request that have no effect here: accepted, and named in a header, the log and the
report, so that no option is ignored in silence.

A server with `--unknown-fields refuse` refuses the first of them instead, with a hint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, JsonValue

from keepsight.server.errors import hint_for, invalid, refused, unknown

HEADER = "x-keepsight-unused"
_MOST = 24  # names that are listed; the others are counted
_LONGEST = 120  # characters of a name
_STRANGE = re.compile(r"[^A-Za-z0-9_.\[\]:/@$+-]")  # not for a header, nor for a list in one


class Strict(BaseModel):
    """A record without unknown fields and without guesses about types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Open(Strict):
    """A record of an API that has many dialects: what is unknown in it is taken, and named."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    # Unknown names that change what an answer may be: they are refused whatever the server's mode.
    CONSTRAINING: ClassVar[dict[str, str]] = {}
    # Known names that are never suggested.
    NOT_HONOURED: ClassVar[frozenset[str]] = frozenset()

    def echoes(self) -> bool:
        """Whether this is a part of an earlier answer, to which clients add what they like."""
        return False


def is_empty(value: object) -> bool:
    """Whether a value says nothing: null, false, or an empty text, list or record."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


class Unused:
    """What of one request is not used."""

    def __init__(self, refuse: bool = False) -> None:
        self.refuse = refuse
        self._why: dict[str, str] = {}  # by name, in the order they were met
        self._more = 0

    def add(self, place: str, why: str) -> None:
        """Name a known field that has no effect here, or refuse it."""
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
            raise invalid(place, f"{place} is no number that JSON knows")
        if (why := record.CONSTRAINING.get(name)) is not None:
            if (name, value) not in _NEUTRAL:
                raise refused(place, why)
            return
        known = {field.alias or own for own, field in type(record).model_fields.items()}
        known -= record.NOT_HONOURED
        if self.refuse:
            raise unknown(place, known)
        if len(self._why) < _MOST:  # a hint takes a while to find
            self._note(place, f"unknown; {hint_for(place, known)}")
        else:
            self._more += 1

    def _note(self, place: str, why: str) -> None:
        if place in self._why or len(self._why) < _MOST:
            self._why.setdefault(place, why)
        else:
            self._more += 1

    def names(self) -> list[str]:
        """The names, fit for a header and a log: without spaces, commas and strange characters."""
        named = [_STRANGE.sub("?", place)[:_LONGEST] for place in self._why]
        return [*named, f"+{self._more}"] if self._more else named

    def header(self) -> str:
        """The names on one line; empty where everything was used."""
        return ", ".join(self.names())

    def notes(self) -> tuple[str, ...]:
        """The names with their reasons, as a report has them."""
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
    """Every record of a body with the way to it, and whether it is a part of an earlier answer."""
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
    """`messages[0].content`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
