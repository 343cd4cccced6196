"""Numbers for objects that only this process knows: hooks, a user's functions, compiled code.

Each is constant while its object lives, and means nothing to any other process.
"""

from __future__ import annotations

import itertools
import secrets
import weakref

PROCESS = secrets.token_hex(16)  # which no other process has
_count = itertools.count(1)
_known: dict[int, tuple[object, int]] = {}


def number_of(thing: object) -> str:
    """The number of an object, which no other object of this process ever has."""
    held, number = _known.get(id(thing), (None, 0))
    if not number or (held() if isinstance(held, weakref.ReferenceType) else held) is not thing:
        number = next(_count)
        try:
            _known[id(thing)] = weakref.ref(thing), number
        except TypeError:
            _known[id(thing)] = thing, number  # its end cannot be noticed
    return str(number)
