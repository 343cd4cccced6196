"""Where in a body something is wrong, in the words of its client, and what is valid there.

A validator's own location also has the labels of the branches that a value might have taken; which
parts of it are labels is read off the types.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Tag

from keepsight.kinds import Record


def place_in(body: object, location: Sequence[object]) -> tuple[str, set[str]]:
    """`messages[0].content`, and the names of the fields there. `body` is the type of all of it;
    where that is not known, each part of the location counts."""
    text, kind = "", body
    for part in location:
        branches = _branches(kind)
        if len(branches) > 1:
            kind = next((branch for branch in branches if part in _labels(branch)), None)
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
        kind = _inside(branches[0] if branches else None, part)
    fields = (_fields(branch) for branch in _branches(kind))
    return text, {name for names in fields for name in names}


def _branches(kind: object) -> list[object]:
    """The types that a value may have; null is none of them."""
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
    """What a location calls a branch: by its tag, by the types it is for, or by its class."""
    if tag := _tag(branch):
        return {tag}
    fields = _fields(branch)
    own = get_args(fields["type"]) if "type" in fields and _is_literal(fields["type"]) else ()
    return {*own, getattr(branch, "__name__", "")}


def _is_literal(kind: object) -> bool:
    return get_origin(kind) is Literal


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
