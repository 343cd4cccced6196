"""The dependents of an entry, level by level, from the catalogue.

A conversation is a chain of entries in a store. One query finds many of them; a query for each
would take longer than reading them.
"""

from __future__ import annotations

from keepsight.kinds import Record
from keepsight.store import layout
from keepsight.store.contract import Below
from keepsight.store.folders.catalogue import Catalogue
from keepsight.store.layout import EntryName

DEEPER = 64  # number of entries after which no further level is looked up
Listed = dict[str | None, list[EntryName]]  # by key of their base


def latest_below(
    catalogue: Catalogue, tenant: str, kind: str, base: str | None, count: int
) -> Listed:
    """By key of the base: the most recently used dependents of a base (None: entries without one),
    and level by level theirs. A key missing in the result was not looked up."""
    found: Listed = {}
    level: list[str | None] = [base]
    entries = 0
    while level and entries < DEEPER:
        here = {key: catalogue.latest_upon(tenant, kind, key, count) for key in level}
        entries += sum(map(len, here.values()))
        found |= here
        level = [
            place.key for places in here.values() for place in places if place.key not in found
        ]
    return found


def with_records(listed: Listed, read: dict[EntryName, Record]) -> Below:
    """The same with the records of those that are readable and not expired."""
    sound = {p: record for p, record in read.items() if not layout.expired(record.get("kept"))}
    return {
        key: [(place.key, sound[place]) for place in places if place in sound]
        for key, places in listed.items()
    }
