"""Gives objects other attributes for a while, as tracers and huge pictures need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NONE = object()


@contextmanager
def exchanged(*changes: tuple[Any, str, object]) -> Iterator[None]:
    """Set attributes (of what, name, value); at the end each object has what it had of its own."""
    before = [vars(thing).get(name, _NONE) for thing, name, _ in changes]
    try:
        for thing, name, value in changes:
            setattr(thing, name, value)
        yield
    finally:
        for (thing, name, _), own in zip(changes, before, strict=True):
            vars(thing).pop(name, None) if own is _NONE else setattr(thing, name, own)
