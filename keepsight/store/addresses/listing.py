"""Lists a remote address and reads headers, because there is no catalogue.

A listing takes one request per folder (at most 256 per kind) and one more per thousand objects. An
entry's base and images are in its header: one small read for each entry new to this process. Names
that no store writes are skipped.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from keepsight.errors import DamagedFile, FileError
from keepsight.formats import tensorfile
from keepsight.kinds import Record
from keepsight.store import entryfile, layout
from keepsight.store.addresses.address import Address, RemoteObject
from keepsight.store.contract import Below, Entry, Name
from keepsight.system.lock import Mutex

_HEAD = 64 << 10  # bytes within which the record of a file usually ends
_MOST = 200_000  # names kept in memory
_SURE, _DOUBTFUL = 600.0, 5.0  # seconds for which "present" and "absent" are believed
_PINS = "pins"


class EntryHeader(NamedTuple):
    """What a file says about itself."""

    metadata: Record
    cost: float = 0.0  # only known to its maker


def head(link: Address, name: str, kind: str, key: str) -> EntryHeader:
    """Read the start of an entry; its tensors are neither read nor checked."""
    where = f"{link.shown}/{name}"
    if kind in layout.NOTES:
        return EntryHeader(note_in(kind, key, link.read(name), where)[1])
    return EntryHeader(metadata_in(kind, key, record_at(link, name, kind, key)))


def record_at(link: Address, name: str, kind: str, key: str) -> Record:
    """The record of an entry; its tensors are neither read nor checked."""
    where = f"{link.shown}/{name}"
    data = link.read(name, 0, _HEAD)
    size = len(data) if len(data) < _HEAD else 1 << 62  # a shorter answer is the whole object
    record = tensorfile.parse_record(data, size, where)
    if isinstance(record, int):
        record = tensorfile.parse_record(link.read(name, 0, record), size, where)
    if isinstance(record, int) or record.get("entry") != key or record.get("kind") != kind:
        raise DamagedFile(f"{where}: it is not the entry that its name says")
    return record


def metadata_in(kind: str, key: str, record: Record) -> Record:
    """The metadata of an entry in its record."""
    metadata = record.get("kept")
    return metadata if isinstance(metadata, dict) else entryfile.older(kind, key, record)


def note_in(kind: str, key: str, data: bytes, where: str) -> tuple[Record, Record]:
    """Body and metadata of a note from its bytes."""
    body, metadata = layout.read_note(kind, key, data, where)
    if not metadata and "kept" not in json.loads(data):
        metadata = entryfile.older(kind, key, body)
    return body, metadata


class RecentNames:
    """What this process recently learned about names: present, absent, how often read."""

    def __init__(self) -> None:
        self._lock = Mutex()
        self._heads: OrderedDict[str, tuple[EntryHeader | None, float]] = OrderedDict()
        self._foreign: set[str] = set()
        self.removals = 0
        self._uses: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def find(self, name: str) -> tuple[bool, EntryHeader | None]:
        """Whether anything is known about it, and its header if it is present."""
        found, until = self._heads.get(name, (None, -1.0))
        if time.monotonic() >= until:
            return False, None
        if found is not None and layout.expired(found.metadata):
            return True, None
        return True, found

    def there(self, name: str, found: EntryHeader, since: int | None = None) -> None:
        """Record that it is present: written, or seen by a read that began at this count of
        removals. A later removal may concern it."""
        if since is None or since == self.removals:
            self._put(name, found, _SURE)

    def absent(self, name: str) -> None:
        """Record that it was absent; another process may write it at any time."""
        self._put(name, None, _DOUBTFUL)

    def removed(self, name: str) -> None:
        """Record that it was removed."""
        self.removals += 1
        self.absent(name)

    def rejected(self, name: str) -> None:
        """Record that the entry is unusable, whatever the address says, until it is written
        again."""
        self._put(name, None, float("inf"))

    def foreign(self, name: str) -> None:
        """Record an intact entry of another version: unusable here, and not to be replaced."""
        if len(self._foreign) >= _MOST:  # the next header read will tell again
            self._foreign.clear()
        self._foreign.add(name)
        self._put(name, None, float("inf"))

    def is_foreign(self, name: str) -> bool:
        """Whether another version's entry is there."""
        return name in self._foreign

    def touch(self, name: str) -> None:
        """Record a read."""
        with self._lock:
            self._uses[name] = (self._uses.pop(name, (0, 0.0))[0] + 1, time.time())
            if len(self._uses) > _MOST:
                self._uses.popitem(last=False)

    def uses(self, name: str) -> tuple[int, float]:
        """How often this process read it, and when last."""
        return self._uses.get(name, (0, 0.0))

    def old_head(self, name: str) -> EntryHeader | None:
        """Its header, however old: a file never changes under its name."""
        return self._heads.get(name, (None, 0.0))[0]

    def _put(self, name: str, found: EntryHeader | None, seconds: float) -> None:
        with self._lock:
            self._heads.pop(name, None)
            self._heads[name] = (found, time.monotonic() + seconds)
            if len(self._heads) > _MOST:
                self._heads.popitem(last=False)


class Survey:
    """The entries of one tenant in a listing."""

    def __init__(self, link: Address, seen: RecentNames, tenant: str) -> None:
        self._link, self._seen, self._tenant = link, seen, tenant
        self._prefix = layout.tenant_prefix(tenant)

    def path(self, name: Name) -> str:
        """The place of an entry."""
        return layout.place(*name, self._tenant)

    def found(self) -> Iterator[tuple[Name, RemoteObject]]:
        """Name and listing of each entry; no file is opened."""
        for one in self._link.listed(self._folders()):
            place = layout.parse(one.name)
            if place is not None and place.tenant == self._tenant:
                yield (place.kind, place.key), one

    def leftovers(self, age: float) -> list[str]:
        """Leftovers of killed writers, at least this old."""
        before = time.time() - age
        listed = self._link.listed(self._folders())
        return [one.name for one in listed if one.is_part and one.written <= before]

    def _folders(self) -> list[str]:
        kinds = [f"{self._prefix}{kind}" for kind in layout.KINDS]
        return [folder for found in self._link.each(self._link.folders, kinds) for folder in found]

    def table(self) -> dict[Name, Entry]:
        """Every entry with the contents of its header, including expired and damaged ones."""
        pins = self.pins()
        listed = list(self.found())
        heads = self._link.each(self._head, listed)
        pairs = zip(listed, heads, strict=True)
        return {name: self._entry(name, one, header, name in pins) for (name, one), header in pairs}

    def entry(self, name: Name, header: EntryHeader) -> Entry:
        """One entry with a known header, with its size and pin."""
        info = self._link.info(self.path(name))
        return self._entry(name, info, header, self._link.exists(self.pin_name(name)))

    def _head(self, item: tuple[Name, RemoteObject]) -> EntryHeader:
        (kind, key), one = item
        header, since = self._seen.old_head(one.name), self._seen.removals
        if header is None:
            try:
                header = head(self._link, one.name, kind, key)
            except (FileError, FileNotFoundError):
                return EntryHeader({})  # `check` reports it; here it only counts
            self._seen.there(one.name, header, since)
        return header

    def _entry(self, name: Name, one: RemoteObject, known: EntryHeader, pinned: bool) -> Entry:
        about = layout.about_of(known.metadata, known.cost)
        uses, last = self._seen.uses(one.name)
        written = min(one.written, time.time())  # a time in the future is wrong
        return Entry(
            *name,
            nbytes=one.nbytes,
            used=max(written, last),
            created=written,
            uses=uses,
            cost=known.cost,
            depends_on=about.depends_on,
            media=about.media,
            pinned=pinned,
            expires=layout.expiry(known.metadata),
            tenant=self._tenant,
        )

    # -- dependents --------------------------------------------------------------------------------

    def below(self, kind: str, base: str | None, count: int) -> Below:
        """The `count` newest direct dependents of an entry; for None, entries without a base."""
        there = self._link.listed([layout.dependents_folder(kind, base, self._tenant)])
        signed = ((one.written, layout.marked_dependent(one.name, base)) for one in there)
        keys = [key for _, key in sorted((at, key) for at, key in signed if key)[-count:]]
        records = self._link.each(lambda key: self._record(kind, key), keys)
        return {base: [(k, r) for k, r in zip(keys, records, strict=True) if r is not None]}

    def _record(self, kind: str, key: str) -> Record | None:
        name, since = self.path((kind, key)), self._seen.removals
        try:
            record = record_at(self._link, name, kind, key)
        except (FileError, FileNotFoundError):
            return None
        metadata = metadata_in(kind, key, record)
        self._seen.there(name, EntryHeader(metadata), since)
        return None if layout.expired(metadata) else record

    # -- pins ------------------------------------------------------------------------------------

    def pins(self) -> set[Name]:
        """The pinned entries: a pin is a small separate object, as in a folder."""
        names = self._link.listed([f"{self._prefix}{_PINS}/{kind}" for kind in layout.KINDS])
        places = (one.name.removesuffix(".json").split("/")[-2:] for one in names)
        return {(kind, key) for kind, key in places if layout.is_name(kind, key)}

    def pin_name(self, name: Name) -> str:
        """The name of an entry's pin."""
        return f"{self._prefix}{_PINS}/{name[0]}/{name[1]}.json"


def tenants_at(link: Address) -> list[str]:
    """The digests of all tenants that may have entries there; empty for the default tenant."""
    return ["", *(folder.rpartition("/")[2] for folder in link.folders("tenants"))]


def whole_table(link: Address, seen: RecentNames) -> dict[Name, Entry]:
    """The entries of all tenants; kinds contain the tenant, so that none collide."""
    table: dict[Name, Entry] = {}
    for tenant in tenants_at(link):
        prefix = layout.tenant_prefix(tenant)
        for (kind, key), entry in Survey(link, seen, tenant).table().items():
            base = entry.depends_on
            spelled = None if base is None else (prefix + base[0], base[1])
            table[prefix + kind, key] = dataclasses.replace(entry, depends_on=spelled)
    return table
