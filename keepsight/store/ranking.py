"""Chooses which entries are evicted, and in which order, from a listing or a catalogue.

Dependents are always removed before their base, so an interruption never leaves an entry without
the one it depends on. Pinned entries stay.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from keepsight.store.contract import Entry, Name
from keepsight.store.folders.catalogue import Catalogue, Scope
from keepsight.store.layout import EntryName
from keepsight.store.priority import usefulness

_HOUR = 3600.0
Table = Mapping[Name, Entry]


def together(table: Table, names: Iterable[Name]) -> list[list[Name]]:
    """These entries and all their dependents, in layers: each layer depends on later ones."""
    above = _above(table)
    depth: dict[Name, int] = {}
    layer, level = [name for name in names if name in table or name in above], 0
    while layer and level <= len(table) + 1:  # a wrong table may hold a circle
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
    """Pinned entries and everything they depend on."""
    fixed: set[Name] = set()
    for name, entry in table.items():
        one: Name | None = name if entry.pinned else None
        while one is not None and one in table and one not in fixed:
            fixed.add(one)
            one = table[one].depends_on
    return fixed


def orphaned(table: Table) -> list[Name]:
    """Entries whose base is absent."""
    bare = [
        name for name, entry in table.items() if entry.depends_on and entry.depends_on not in table
    ]
    return [name for layer in together(table, bare) for name in layer]


def least_useful(table: Table, budget: int, now: float) -> list[Name]:
    """The entries to evict so that the rest fits, dependents first. The rank is the time saved per
    byte, over the hours since the entry was written or last read."""
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
    age = max(0.0, now - entry.used)  # an entry from the future counts as new
    return usefulness(0.0, entry.uses + 1, entry.cost, entry.nbytes) / (age + _HOUR)


def _above(table: Table) -> dict[Name, list[Name]]:
    """The dependents of each entry."""
    above: dict[Name, list[Name]] = {}
    for name, entry in table.items():
        if entry.depends_on is not None:
            above.setdefault(entry.depends_on, []).append(name)
    return above


AT_ONCE = 256  # removed in one transaction
_CYCLES = 64  # entries examined for a circle


def choose(catalogue: Catalogue, scope: Scope, excess: int) -> tuple[float, list[EntryName]]:
    """The least useful entries that add up to this many bytes, and the highest usefulness among
    them.

    An entry comes after all its dependents.
    """
    leaves = catalogue.leaves(scope, AT_ONCE)
    limit = leaves[-1][0] if len(leaves) == AT_ONCE else float("inf")
    heap = [(value, e.used, EntryName.of(e), e) for value, e in leaves]
    heapq.heapify(heap)
    chosen: dict[EntryName, None] = {}
    worst = total = 0.0
    while heap and total < excess and heap[0][0] <= limit:
        value, _, place, entry = heapq.heappop(heap)
        chosen[place] = None
        worst, total = max(worst, value), total + entry.nbytes
        if entry.depends_on is None:
            continue
        base = EntryName(entry.tenant, *entry.depends_on)
        found = catalogue.usefulness_of(base)
        if found is not None and all(other in chosen for other in catalogue.upon(base)):
            heapq.heappush(heap, (found[0], found[1].used, base, found[1]))
    return worst, list(chosen)


def cycle(catalogue: Catalogue, scope: Scope) -> list[EntryName]:
    """Entries that depend on each other in a circle, so that none is last. No store writes that,
    but files may claim it. They are removed together, unless one is pinned."""
    for place in catalogue.worst(scope, _CYCLES):
        tower = catalogue.tower([place])
        if all(catalogue.usefulness_of(other) is not None for other in tower):
            return tower
    return []


def orphaned_meanwhile(catalogue: Catalogue, gone: list[EntryName]) -> list[EntryName]:
    """Entries written during these removals that depend on a removed one. A dependent with its
    base's key waits for the base to be written again."""
    left = [up for place in gone for up in catalogue.upon(place) if up.key != place.key]
    return [place for place in catalogue.tower(left) if place not in gone] if left else []


def raise_floor(catalogue: Catalogue, worst: float) -> None:
    catalogue.set_fact("floor", max(worst, catalogue.fact("floor")))
