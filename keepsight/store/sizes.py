"""The one formula for what is worth its bytes, and a bound for tables that anybody may add to.

Nothing here knows what is kept.
"""

from __future__ import annotations

from typing import TypeVar

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


def trim(table: dict[K, V], most: int = MOST_TENANTS) -> None:
    """Let go of what stands longest in a table of small things that anybody may add to."""
    while len(table) > most:
        table.pop(next(iter(table)), None)
