"""The formula for how useful an entry is for its bytes, and a bound for growing tables.

Nothing here knows what is kept.
"""

from __future__ import annotations

from typing import TypeVar

_PLACE = 4096  # what even the smallest entry takes: a block of a disk, a row of a catalogue
MOST_TENANTS = 10_000  # of which counts are kept in memory
K = TypeVar("K")
V = TypeVar("V")


def usefulness(floor: float, uses: int, cost: float, nbytes: int) -> float:
    """How useful an entry is; the least useful goes first (GreedyDual-Size-Frequency).

    An entry is worth the milliseconds that it has saved for each byte that it takes: how often it
    was used, times what making it again would cost, over its size. To that comes the floor, which
    is the usefulness of the last entry that was evicted: it only rises, so what was useful long ago
    sinks, against what is used now, without any clock. It is computed again at each use.
    """
    return floor + uses * (cost or likely_cost(nbytes)) / (nbytes + _PLACE)


def likely_cost(nbytes: int) -> float:
    """Milliseconds that making an entry again may take, where it was not measured."""
    return 1.0 + nbytes / (64 << 10)


def trim(table: dict[K, V], most: int = MOST_TENANTS) -> None:
    """Drop the oldest of a table of small things that any caller may add to."""
    while len(table) > most:
        table.pop(next(iter(table)), None)
