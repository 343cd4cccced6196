"""Bytes counted: sizes as people write them, and the one formula for what is worth its bytes.

Nothing here knows what is kept.
"""

from __future__ import annotations

import contextlib
from typing import TypeVar

from keepsight.errors import InputError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_PLACE = 4096  # what even the smallest entry takes: a block of a disk, a row of a book
MOST_TENANTS = 10_000  # of which counts are kept in memory
K = TypeVar("K")
V = TypeVar("V")


def worth(floor: float, uses: int, cost: float, nbytes: int) -> float:
    """How useful an entry is; the one of least worth goes first (GreedyDual-Size-Frequency).

    An entry is worth the milliseconds that it has saved for each byte that it takes: how often it
    was used, times what making it again would cost, over its size. To that comes the floor, which
    is the worth of the last entry that was let go: it only ever rises, so what was useful long ago
    sinks, against what is used now, without any clock. Worth is set anew at each use.
    """
    return floor + uses * (cost or likely_cost(nbytes)) / (nbytes + _PLACE)


def likely_cost(nbytes: int) -> float:
    """Milliseconds that making an entry again may take, where nobody measured it."""
    return 1.0 + nbytes / (64 << 10)


def parse_bytes(size: int | str) -> int:
    """`"2GiB"`, `"500 MB"` or a plain number of bytes."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    if isinstance(size, str):
        text = size.strip().lower().replace(" ", "")
        number = text.rstrip("kmgtib")
        unit = text[len(number) :]
        with contextlib.suppress(ValueError, KeyError):
            value = float(number) * _UNITS[unit]
            if 0 <= value < 1 << 62:
                return int(value)
    raise InputError(f"{size!r} is not a size; write bytes as a number, or as in '2GiB'")


def trim(table: dict[K, V], most: int = MOST_TENANTS) -> None:
    """Let go of what stands longest in a table of small things that anybody may add to."""
    while len(table) > most:
        table.pop(next(iter(table)), None)
