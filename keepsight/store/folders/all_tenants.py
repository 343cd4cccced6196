"""A store as an administrator of its disk sees it: the entries of all tenants together.

Only for looking and removing. Tenants are named by their digests, like their folders.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from keepsight.errors import InputError
from keepsight.kinds import Record
from keepsight.store import ranking
from keepsight.store.contract import Entry, Name, Store, delete_all
from keepsight.store.folders.disk import DiskStore
from keepsight.store.layout import tenant_digest, tenant_prefix

_LEAST = 8  # characters of a digest
_ADDED = ("hits", "misses", "evictions", "written", "refused")


class AllTenants:
    """All tenants of a store, or only one. `views`: the store of each tenant, by digest."""

    def __init__(self, store: Store, only: str | None = None) -> None:
        """`only`: a tenant's name, or the start of its digest."""
        self.store, self._is_whole = store, only is None
        digests = store.tenants()
        if only is not None:
            digests = [_meant(only, digests)]
        self.views = {digest: store.of_digest(digest) for digest in digests}

    def view(self, entry: Entry) -> Store:
        """The store as the tenant of an entry sees it."""
        return self.views[entry.tenant]

    def entries(self) -> Iterator[Entry]:
        """All entries."""
        for view in self.views.values():
            yield from view.entries()

    def stats(self) -> Record:
        """Statistics as of a store, added up; entries and bytes of each tenant under `tenants`."""
        whole = self.store.stats()
        each = {digest: view.stats() for digest, view in self.views.items()}
        kinds: dict[str, dict[str, int]] = {}
        ever: dict[str, int] = {}
        for stats in each.values():
            for kind, counted in stats["kinds"].items():
                _add(kinds.setdefault(kind, {}), counted)
            _add(ever, stats.get("ever") or {name: stats[name] for name in _ADDED})
        tenants = {
            digest: {"entries": stats["entries"], "bytes": stats["bytes"]}
            for digest, stats in each.items()
            if stats["entries"]
        }
        counts = {
            what: sum(t[what] for t in each.values()) for what in ("entries", "bytes", *_ADDED)
        }
        return whole | counts | {"kinds": kinds, "ever": ever, "tenants": tenants}

    def gc(self, budget: int) -> int:
        """Remove the least useful of all entries until the rest fits; return the bytes freed."""
        if isinstance(self.store, DiskStore) and self._is_whole:
            return self.store.gc_all(budget)
        if not self._is_whole:
            return sum(view.gc(budget) for view in self.views.values())
        table: dict[Name, Entry] = {}
        for entry in self.entries():
            spelled = tenant_prefix(entry.tenant)
            base = entry.depends_on
            base = None if base is None else (spelled + base[0], base[1])
            table[spelled + entry.kind, entry.key] = replace(entry, depends_on=base)
        going: dict[str, list[Name]] = {}
        for spelled, key in ranking.least_useful(table, budget, time.time()):
            tenant = table[spelled, key].tenant
            going.setdefault(tenant, []).append((spelled.rpartition("/")[2], key))
        return sum(delete_all(self.views[tenant], names) for tenant, names in going.items())

    def delete_media(self, image_key: str) -> int:
        """Remove everything that depends on this image; return the bytes freed."""
        return sum(view.delete_media(image_key) for view in self.views.values())

    def clear(self) -> int:
        """Remove every entry; return the bytes freed."""
        if self._is_whole:
            return self.store.clear(everybody=True)
        return sum(view.clear() for view in self.views.values())

    def check(self, repair: bool = False) -> list[str]:
        """Read everything in full; return one line per problem."""
        if isinstance(self.store, DiskStore) and self._is_whole:
            return self.store.check(repair)
        return [line for view in self.views.values() for line in view.check(repair)]


def _meant(name: str, digests: list[str]) -> str:
    """Tenant with this name; if nothing is stored under it, the one whose digest begins with it."""
    named = tenant_digest(name)
    found = [digest for digest in digests if digest and digest.startswith(name)]
    if named in digests or len(name) < _LEAST or not found:
        return named
    if len(found) > 1:
        raise InputError(f"--tenant {name}: the digests of {len(found)} tenants begin with it")
    return found[0]


def _add(sums: dict[str, int], more: dict[str, int]) -> None:
    for name, number in more.items():
        sums[name] = sums.get(name, 0) + number
