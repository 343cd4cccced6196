"""Which entries go first, and which go together: a table in, names out.

For stores without a catalogue, whose table is a listing. What depends on another is always named
before it, so an interruption never leaves an entry without the one it depends on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from keepsight.store.contract import Entry, Name
from keepsight.store.sizes import usefulness

_HOUR = 3600.0
Table = Mapping[Name, Entry]


def together(table: Table, names: Iterable[Name]) -> list[list[Name]]:
    """These and all that depends on them, in layers: each layer depends on the ones behind it."""
    above = _above(table)
    depth: dict[Name, int] = {}
    layer, level = [name for name in names if name in table or name in above], 0
    while layer and level <= len(table) + 1:  # a table that lies may hold a circle
        for name in layer:
            depth[name] = level
        layer = [one for name in layer for one in above.get(name, []) if one not in depth]
        level += 1
    layers: list[list[Name]] = [[] for _ in range(level)]
    for name, level in depth.items():
        if name in table:
            layers[level].append(name)
    return [layer for layer in reversed(layers) if layer]


def held(table: Table) -> set[Name]:
    """What is pinned, and what that depends on."""
    fixed: set[Name] = set()
    for name, entry in table.items():
        one: Name | None = name if entry.pinned else None
        while one is not None and one in table and one not in fixed:
            fixed.add(one)
            one = table[one].depends_on
    return fixed


def adrift(table: Table) -> list[Name]:
    """What depends on something that is not there."""
    bare = [
        name for name, entry in table.items() if entry.depends_on and entry.depends_on not in table
    ]
    return [name for layer in together(table, bare) for name in layer]


def least_useful(table: Table, budget: int, now: float) -> list[Name]:
    """What has to go so that the rest fits, in its order; an entry goes after all that depends on
    it. What it saves for each byte counts, over the hours since it was written or last read."""
    fixed = held(table)
    above = {name: len(ones) for name, ones in _above(table).items()}
    total, gone = sum(entry.nbytes for entry in table.values()), []
    ready = [(_value(e, now), n) for n, e in table.items() if n not in fixed and not above.get(n)]
    heapq.heapify(ready)
    while total > budget and ready:
        _, name = heapq.heappop(ready)
        entry = table[name]
        gone.append(name)
        total -= entry.nbytes
        base = entry.depends_on
        if base is not None and base in table:
            above[base] -= 1
            if not above[base] and base not in fixed:
                heapq.heappush(ready, (_value(table[base], now), base))
    return gone


def _value(entry: Entry, now: float) -> float:
    age = max(0.0, now - entry.used)  # an entry from the future is a new one
    return usefulness(0.0, entry.uses + 1, entry.cost, entry.nbytes) / (age + _HOUR)


def _above(table: Table) -> dict[Name, list[Name]]:
    """What depends on each."""
    above: dict[Name, list[Name]] = {}
    for name, entry in table.items():
        if entry.depends_on is not None:
            above.setdefault(entry.depends_on, []).append(name)
    return above
