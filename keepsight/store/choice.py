"""Which entries go when a budget is exceeded: the least useful by the catalogue, from the top down.

What something depends on comes after all that depends on it, and what is pinned stays.
"""

from __future__ import annotations

import heapq

from keepsight.store.catalogue import Catalogue, Scope
from keepsight.store.layout import EntryName

AT_ONCE = 256  # removed in one transaction
_KNOTS = 64  # entries looked at for a circle


def choose(catalogue: Catalogue, scope: Scope, excess: int) -> tuple[float, list[EntryName]]:
    """The least useful entries that make up so many bytes, and the usefulness of the best of them.

    What something depends on comes after all that depends on it.
    """
    leaves = catalogue.leaves(scope, AT_ONCE)
    limit = leaves[-1][0] if len(leaves) == AT_ONCE else float("inf")
    heap = [(value, e.used, EntryName(e.tenant, e.kind, e.key), e) for value, e in leaves]
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


def knot(catalogue: Catalogue, scope: Scope) -> list[EntryName]:
    """Entries that depend on each other in a circle, so that none is the last: no store writes
    that, but files may say it. They go together, unless one of them is pinned."""
    for place in catalogue.worst(scope, _KNOTS):
        tower = catalogue.tower([place])
        if all(catalogue.usefulness_of(other) is not None for other in tower):
            return tower
    return []


def left_alone(catalogue: Catalogue, gone: list[EntryName]) -> list[EntryName]:
    """What was written, while these were removed, to depend on them. What has the key of its base
    waits for it to be written too."""
    left = [up for place in gone for up in catalogue.upon(place) if up.key != place.key]
    return [place for place in catalogue.tower(left) if place not in gone] if left else []


def raise_floor(catalogue: Catalogue, worst: float) -> None:
    catalogue.set_fact("floor", max(worst, catalogue.fact("floor")))
