"""What depends on an entry, and what depends on that, as the catalogue has it.

A conversation lies in a store as a chain of entries. One question asks for many of them: a
question for each would take longer than reading what it finds.
"""

from __future__ import annotations

from keepsight.kinds import Record
from keepsight.store import layout
from keepsight.store.catalogue import Catalogue
from keepsight.store.contract import Below
from keepsight.store.layout import EntryName

DEEPER = 64  # entries after which no further level is looked up
Listed = dict[str | None, list[EntryName]]  # by key of what they depend on


def latest_below(
    catalogue: Catalogue, tenant: str, kind: str, base: str | None, count: int
) -> Listed:
    """By key of what they depend on: the entries upon a base (None: those that depend on nothing),
    so many of the latest used, and level by level those upon them. Whoever is no key of the result
    was not looked at."""
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
    """The same with the records of those that could be read and may be used."""
    sound = {p: record for p, record in read.items() if not layout.expired(record.get("kept"))}
    return {
        key: [(place.key, sound[place]) for place in places if place in sound]
        for key, places in listed.items()
    }
