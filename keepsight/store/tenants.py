"""A store as one tenant sees it, and as the administrator of its disk does.

Tenants share no entries. A tenant is known to its store by a digest alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from keepsight.errors import InputError
from keepsight.kinds import Record
from keepsight.store import layout
from keepsight.store.contract import (
    NOTHING,
    About,
    Below,
    Content,
    Entry,
    EntryName,
    Keeper,
    Tensors,
)
from keepsight.system.exits import when_dropped

_LEAST = 8  # characters of a digest


class Store:
    """Tensors and small JSON notes under a kind and a key, for one tenant: the default one, unless
    `tenant` chose another."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self._tenant = self._account = ""
        self._whole: Store | None = None  # that of which this is a tenant's part
        when_dropped(self, keeper.retire)

    def tenant(self, name: str | None) -> Store:
        """The store as another tenant sees it."""
        return self._part(layout.tenant_digest(name), layout.account_digest(name))

    def of_digest(self, digest: str) -> Store:
        """Like `tenant`, by a digest from `tenants`; for looking and removing."""
        return self._part(digest, digest)

    def _part(self, tenant: str, account: str) -> Store:
        part = object.__new__(Store)
        part.keeper, part._whole = self.keeper, self._whole or self
        part._tenant, part._account = tenant, account
        return part

    def tenants(self) -> list[str]:
        """The digests of all tenants that may have entries here; empty for the default tenant."""
        return self.keeper.tenants()

    @property
    def root(self) -> Path | None:
        """Its folder, the nearest one; None for an address."""
        return self.keeper.root

    @property
    def budget(self) -> int | None:
        """The bytes that it may have."""
        return self.keeper.budget

    @property
    def quota(self) -> int | None:
        """The bytes that each tenant may have in it, with all its salts."""
        return self.keeper.quota

    # -- entries ---------------------------------------------------------------------------------

    def has(self, kind: str, key: str) -> bool:
        """Whether reading this entry should work."""
        return self.keeper.has(self._name(kind, key))

    def tier(self, kind: str, key: str) -> str | None:
        """Where a read would find it: "disk", "remote", or None."""
        return self.keeper.tier(self._name(kind, key))

    def get(self, kind: str, key: str) -> tuple[Tensors, Record] | None:
        """Tensors and record, or None if absent, expired or damaged."""
        return self.get_all(kind, [key]).get(key)

    def get_all(self, kind: str, keys: Iterable[str]) -> dict[str, tuple[Tensors, Record]]:
        """Those entries that exist and are intact, by key; read together."""
        found = self.keeper.read([self._name(kind, key) for key in keys])
        return {
            name.key: (tensors, record)
            for name, ((tensors, record), _) in found.items()
            if tensors is not None
        }

    def note(self, kind: str, key: str) -> Record | None:
        """A small JSON record, or None if absent, expired or damaged."""
        name = self._name(kind, key)
        found = self.keeper.read([name]).get(name)
        return None if found is None else found[0][1]

    def put(
        self, kind: str, key: str, tensors: Tensors, record: Record, about: About = NOTHING
    ) -> None:
        """Hand over an entry; the tensors must not change afterwards. It is readable at once.

        Tensors may lie on a device. `Keeper.put` says what may be refused.
        """
        self._put(kind, key, (tensors, record), about)

    def put_note(self, kind: str, key: str, body: Record, about: About = NOTHING) -> None:
        """Hand over a small JSON record."""
        self._put(kind, key, (None, body), about)

    def _put(self, kind: str, key: str, content: Content, about: About) -> None:
        name = self._name(kind, key)
        if (content[0] is None) != (kind in layout.NOTES):
            expected = "a note: use put_note" if kind in layout.NOTES else "tensors: use put"
            raise InputError(f"the kind {kind!r} is for {expected}")
        layout.checked_about(about)
        self.keeper.put(name, content, about, self._account)

    def entry(self, kind: str, key: str) -> Entry | None:
        """The listing's data on one entry, without reading it; None if absent or expired."""
        return self.keeper.entry(self._name(kind, key))

    def entries(self) -> Iterator[Entry]:
        """All entries of this tenant, in no order."""
        return self.keeper.entries(self._tenant)

    def below(self, kind: str, base: str | None, count: int) -> Below:
        """The latest dependents of an entry, of its own kind: see `Keeper.below`."""
        return self.keeper.below(self._tenant, kind, base, count)

    def reject(self, kind: str, key: str, why: str) -> None:
        """Set aside an entry whose content does not match its key."""
        self.keeper.reject(self._name(kind, key), why)

    def pin(self, kind: str, key: str, pinned: bool = True) -> bool:
        """Pin an entry and what it depends on, whatever the budget; False if absent."""
        return self.keeper.pin(self._name(kind, key), pinned)

    def delete(self, kind: str, key: str) -> int:
        """Remove an entry and all its dependents, in every tier; return the bytes freed."""
        return self.keeper.remove(self._tenant, [self._name(kind, key)])

    def delete_media(self, image_key: str) -> int:
        """Remove everything that depends on this image, in every tier; return the bytes freed."""
        return self.keeper.remove(self._tenant, image=image_key)

    def _name(self, kind: str, key: str) -> EntryName:
        layout.checked(kind, key)
        return EntryName(kind, key, self._tenant)

    # -- all of them -----------------------------------------------------------------------------

    def clear(self, everybody: bool = False) -> int:
        """Remove every entry of this tenant, or of all tenants; return the bytes freed."""
        return self.keeper.remove(None if everybody else self._tenant)

    def gc(self, budget: int, everybody: bool = False) -> int:
        """Remove the least recently used entries of this tenant, or of all tenants together, until
        the rest fits; return the bytes freed."""
        return self.keeper.gc(None if everybody else self._tenant, budget)

    def stats(self, wait: float = 5.0) -> Record:
        """At least entries, bytes, kinds (entries and bytes of each), counted (when they were, in
        seconds since the epoch, or None), hits, misses, evictions, written, refused (since it was
        opened; of all tenants, unless `tenant` chose one), budget, quota, state ("ok", or the
        problem), since (when) and broken (why). Waits at most `wait` seconds for a count."""
        return self.keeper.stats(self._tenant, self._whose, wait)

    def check(self, repair: bool = False) -> list[str]:
        """Read everything in full, of this tenant, or of all if none was chosen; return one line
        per problem. `repair` fixes all of them."""
        return self.keeper.check(self._whose, repair)

    def flush(self) -> None:
        """Return when everything handed over before is safe, of this tenant, or of all if none was
        chosen; raise `NotStored` with each loss and its reason."""
        self.keeper.flush(self._whose)

    def close(self) -> None:
        """Finish writing and release everything; a tenant's part only finishes writing."""
        if self._whole is None:
            self.keeper.close()
        else:
            self.keeper.drain()

    @property
    def _whose(self) -> str | None:
        return None if self._whole is None else self._tenant


class AllTenants:
    """All tenants of a store, or only one: by name, or by the start of its digest."""

    def __init__(self, store: Store, only: str | None = None) -> None:
        self._store, self._keeper, self._digests = store, store.keeper, store.tenants()
        self._tenant = None if only is None else _meant(only, self._digests)
        if self._tenant is not None:
            self._digests = [self._tenant]

    def view(self, entry: Entry) -> Store:
        """The store as the tenant of an entry sees it."""
        return self._store.of_digest(entry.tenant)

    def entries(self) -> Iterator[Entry]:
        """All entries."""
        return self._keeper.entries(self._tenant)

    def stats(self) -> Record:
        """Statistics as of a store, added up; entries and bytes of each tenant under `tenants`."""
        each = {digest: self._store.of_digest(digest).stats() for digest in self._digests}
        kinds: dict[str, Counter[str]] = {}
        tenants: dict[str, Record] = {}
        sums, ever = Counter[str](entries=0, bytes=0), Counter[str]()
        for digest, stats in each.items():
            size = {"entries": stats["entries"], "bytes": stats["bytes"]}
            sums.update(size)
            ever.update(stats["ever"])
            for kind, counted in stats["kinds"].items():
                kinds.setdefault(kind, Counter()).update(counted)
            if stats["entries"]:
                tenants[digest] = size
        return {**self._store.stats(), **sums, "kinds": kinds, "ever": ever, "tenants": tenants}

    def gc(self, budget: int) -> int:
        """Remove the least recently used entries until the rest fits; return the bytes freed."""
        return self._keeper.gc(self._tenant, budget)

    def delete_media(self, image_key: str) -> int:
        """Remove everything that depends on this image; return the bytes freed."""
        return sum(self._keeper.remove(digest, image=image_key) for digest in self._digests)

    def clear(self) -> int:
        """Remove all entries; return the bytes freed."""
        return self._keeper.remove(self._tenant)

    def check(self, repair: bool = False) -> list[str]:
        """Read everything in full; return one line per problem."""
        return self._keeper.check(self._tenant, repair)


def _meant(name: str, digests: list[str]) -> str:
    """Tenant with this name; if nothing is stored under it, the one whose digest begins with it."""
    named = layout.tenant_digest(name)
    found = [digest for digest in digests if digest and digest.startswith(name)]
    if named in digests or len(name) < _LEAST or not found:
        return named
    if len(found) > 1:
        raise InputError(f"--tenant {name}: the digests of {len(found)} tenants begin with it")
    return found[0]
