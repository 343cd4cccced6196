"""Housekeeping at a remote address: remove, make room, check. Everything here lists first.

Removal starts with the last dependents and handles several at once, so an interruption never leaves
an entry without its base. An address that does not answer raises an error here: a caller must not
believe that something was removed.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from keepsight.errors import FileError, StoreError, WrongFormatVersion
from keepsight.formats import tensorfile
from keepsight.store import entryfile, layout, ranking
from keepsight.store.addresses.address import Address, RemoteObject
from keepsight.store.addresses.claims import claim
from keepsight.store.addresses.listing import RecentNames, Survey, whole_table
from keepsight.store.addresses.listing import head as read_head
from keepsight.store.contract import About, Entry, Name
from keepsight.store.priority import MOST_TENANTS
from keepsight.system.lock import Mutex

Table = dict[Name, Entry]
_HOUR = 3600.0


@contextlib.contextmanager
def named_errors(address: str, what: str) -> Iterator[None]:
    """Raise an error for a failed operation at the address."""
    try:
        yield
    except Exception as error:
        raise StoreError(f"{address}: entries cannot be {what}: {error}") from error


class Housekeeping(Survey):
    """Operations on many entries of one tenant."""

    def remove(self, table: Table, layers: list[list[Name]]) -> int:
        """Remove entries layer by layer; return the bytes freed."""
        freed = 0
        for layer in layers:
            gone = self._link.each(lambda name: self.remove_one(name, table[name]), layer)
            freed += sum(table[n].nbytes for n, was in zip(layer, gone, strict=True) if was)
        return freed

    def remove_one(self, name: Name, entry: Entry) -> bool:
        """Remove an entry; False if it was already absent."""
        path = self.path(name)
        gone = self._link.remove(path)
        self._seen.removed(path)
        sign = layout.dependent_marker(*name, About(depends_on=entry.depends_on), self._tenant)
        if sign is not None:
            self._link.remove(sign)
        return gone

    def clear_rest(self) -> None:
        """Remove other objects: pins, markers of dependents, and leftovers of killed writers."""
        signs = self._link.listed(self._link.folders(f"{self._prefix}{layout.UPON}/snapshot"))
        rest = [self.pin_name(name) for name in self.pins()] + [one.name for one in signs]
        self._remove_objects(rest)
        self.sweep(0.0)

    def sweep(self, age: float) -> None:
        """Remove leftovers of killed writers that are this old."""
        self._remove_objects(self.leftovers(age))

    def _remove_objects(self, names: list[str]) -> None:
        for _ in self._link.each(self._link.remove, names):
            pass

    def sweep_ended(self) -> None:
        """Remove expired entries with their dependents; failures wait for the next time."""
        with contextlib.suppress(Exception):
            table = self.table()
            now = time.time()
            ended = [n for n, e in table.items() if e.expires is not None and e.expires <= now]
            for layer in ranking.together(table, ended):
                for _ in self._link.each(self._remove_ended, [(n, table[n]) for n in layer]):
                    pass

    def _remove_ended(self, item: tuple[Name, Entry]) -> None:
        name, entry = item
        with claim(self._link, self.path(name)):
            # It may have been rewritten since it was listed.
            if entry.expires is None or self._still_over(name):
                self.remove_one(name, entry)

    def _still_over(self, name: Name) -> bool:
        try:
            return layout.expired(read_head(self._link, self.path(name), *name).metadata)
        except (FileError, FileNotFoundError):  # removed by others, or of another version
            return False

    def pin(self, name: Name, pinned: bool) -> None:
        """Create or remove the small object that is a pin."""
        path = self.pin_name(name)
        if pinned:
            self._link.write(path, [b"{}"], lambda: False)
        else:
            self._link.remove(path)

    def count(self) -> dict[str, list[int]]:
        """Entries and bytes of each kind, from the listing alone."""
        kinds: dict[str, list[int]] = {}
        for (kind, _), one in self.found():
            known, head = self._seen.find(one.name)
            if known and head is None:
                continue  # expired, or set aside where nothing can be removed
            counted = kinds.setdefault(kind, [0, 0])
            counted[0] += 1
            counted[1] += one.nbytes
        return kinds

    # -- check -----------------------------------------------------------------------------------

    def check(self, repair: bool) -> list[str]:
        """Read everything; return one line per damaged entry or entry without its base."""
        table = self.table()
        read = list(self._link.each(self._wrong, list(self.found())))
        damaged = {name: why for name, why in read if why is not None}
        orphaned = [name for name in ranking.orphaned(table) if name not in damaged]
        lines = list(damaged.values())
        for kind, key in orphaned:
            base = table[kind, key].depends_on
            lines.append(f"{kind}/{key}: what it depends on is absent ({base})")
        if repair:
            self.remove(table, ranking.together(table, [*damaged, *orphaned]))
            self.sweep(_HOUR)
        return lines

    def _wrong(self, item: tuple[Name, RemoteObject]) -> tuple[Name, str | None]:
        (kind, key), one = item
        where = f"{self._link.shown}/{one.name}"
        try:
            data = self._link.read(one.name)
            if kind in layout.NOTES:
                layout.read_note(kind, key, data, where)
                return (kind, key), None
            _, record = tensorfile.parse(data, where, kind, entryfile.FORMAT)
            if record.get("entry") != key:
                return (kind, key), f"{where}: this is the entry {record.get('entry')!r}"
        except (WrongFormatVersion, FileNotFoundError):
            pass  # intact, of another version; or removed just now
        except FileError as error:
            return (kind, key), str(error)
        return (kind, key), None


def make_room(link: Address, seen: RecentNames, budget: int, tenant: str | None) -> Counter[str]:
    """Evict the least useful entries until the rest fits, of one tenant or (None) of all; return
    how many of each tenant."""
    table = whole_table(link, seen) if tenant is None else Housekeeping(link, seen, tenant).table()
    names = ranking.least_useful(table, budget, time.time())
    keepers = {entry.tenant: Housekeeping(link, seen, entry.tenant) for entry in table.values()}

    def remove(name: Name) -> bool:
        entry = table[name]
        base = entry.depends_on and (entry.depends_on[0].rpartition("/")[2], entry.depends_on[1])
        entry = replace(entry, depends_on=base)  # without its tenant in the kind
        return keepers[entry.tenant].remove_one((entry.kind, entry.key), entry)

    removed: Counter[str] = Counter()
    for layer in ranking.together(table, names):
        gone = link.each(remove, layer)
        removed.update(table[n].tenant for n, was in zip(layer, gone, strict=True) if was)
    for keeper in keepers.values():
        keeper.sweep(_HOUR)
    return removed


class Allowance:
    """Budget and quota. Listing everything takes time, so it happens at the first write and then
    after each sixteenth of the limit."""

    def __init__(
        self, link: Address, seen: RecentNames, budget: int | None, quota: int | None
    ) -> None:
        self._link, self._seen, self._budget, self._quota = link, seen, budget, quota
        self._grown: dict[str | None, int] = {}
        self._lock = Mutex()

    def grown(self, tenant: str, nbytes: int) -> Counter[str]:
        """Add written bytes; return how many entries of each tenant were evicted for them."""
        removed: Counter[str] = Counter()
        for limit, whose in ((self._budget, None), (self._quota, tenant)):
            if limit is None:
                continue
            with self._lock:
                grown = self._grown.get(whose, limit) + nbytes
                is_due = grown > limit // 16
                self._grown[whose] = 0 if is_due else grown
                if len(self._grown) > MOST_TENANTS:  # list at once for an unknown tenant
                    self._grown = {None: self._grown.get(None, 0)}
            if is_due:
                # Leave room for what comes before the next listing.
                removed += make_room(self._link, self._seen, limit - limit // 16, whose)
        return removed
