"""A store as one tenant sees it: the keeper of all tenants' entries, and a tenant.

Tenants share no entries. A tenant is known to its store by a digest alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from keepsight.errors import InputError
from keepsight.kinds import Record
from keepsight.store import layout
from keepsight.store.contract import NOTHING, About, Below, Entry, EntryName, Keeper, Tensors
from keepsight.system.exits import when_dropped


class Store:
    """Tensors and small JSON notes under a kind and a key, for one tenant: the default one, unless
    `tenant` chose another. `root` is its folder (None for an address); `budget` and `quota` are the
    bytes that it, and each tenant with all its salts, may have."""

    def __init__(
        self,
        keeper: Keeper,
        tenant: str | None = "",
        account: str = "",
        whole: Store | None = None,  # that of which this is a tenant's part
    ) -> None:
        self.keeper, self._tenant, self._account, self._whole = keeper, tenant, account, whole
        self.root, self.budget, self.quota = keeper.root, keeper.budget, keeper.quota
        if whole is None:
            when_dropped(self, keeper.retire)

    def tenant(self, name: str | None) -> Store:
        """The store as another tenant sees it."""
        return self.of(layout.tenant_digest(name), layout.account_digest(name))

    def of(self, tenant: str | None, account: str = "") -> Store:
        """The store of a tenant by its digest, or, for those who look after it, of all (None)."""
        return Store(self.keeper, tenant, account, self._whole or self)

    def tenants(self) -> list[str]:
        """The digests of all tenants that have entries here; empty for the default tenant."""
        return sorted(self.of(None).stats()["tenants"])

    # -- entries ---------------------------------------------------------------------------------

    def has(self, kind: str, key: str) -> bool:
        """Whether reading this entry should work."""
        return self.tier(kind, key) is not None

    def tier(self, kind: str, key: str) -> str | None:
        """Where a read should find it: "disk", "remote", or None."""
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
        """Hand over an entry; its tensors may lie on a device, and must not change afterwards. It
        is readable at once.

        It may be refused, which is counted: if too much waits to be written, if it alone exceeds
        the budget (then `flush` says so), or if its base is absent.
        """
        self._put(kind, key, tensors, record, about)

    def put_note(self, kind: str, key: str, body: Record, about: About = NOTHING) -> None:
        """Hand over a small JSON record."""
        self._put(kind, key, None, body, about)

    def _put(
        self, kind: str, key: str, tensors: Tensors | None, record: Record, about: About
    ) -> None:
        name = self._name(kind, key)
        if (tensors is None) != (kind in layout.NOTES):
            expected = "a note: use put_note" if kind in layout.NOTES else "tensors: use put"
            raise InputError(f"the kind {kind!r} is for {expected}")
        layout.checked_about(about)
        self.keeper.put(name, (tensors, record), about, self._account)

    def entry(self, kind: str, key: str) -> Entry | None:
        """The listing's data on one entry, without reading it; None if absent or expired."""
        return self.keeper.entry(self._name(kind, key))

    def entries(self) -> Iterator[Entry]:
        """All entries, in no order."""
        return self.keeper.entries(self._tenant)

    def below(self, kind: str, key: str | None, count: int) -> Below:
        """The `count` most recently used entries that depend directly on an entry, of its kind; for
        None, those without a base; each with its record. The result is by key of the base, may
        include further levels, and is complete for each of its keys."""
        if key is not None:
            layout.checked(kind, key)
        return self.keeper.below(self._tenant or "", kind, key, count)

    def reject(self, kind: str, key: str, why: str) -> None:
        """Set aside an entry whose content does not match its key; it can be written again."""
        self.keeper.reject(self._name(kind, key), why)

    def pin(self, kind: str, key: str, pinned: bool = True) -> bool:
        """Keep an entry and what it depends on, whatever the budget; False if absent."""
        return self.keeper.pin(self._name(kind, key), pinned)

    def delete(self, kind: str, key: str) -> int:
        """Remove an entry and all its dependents, in every tier; return the bytes freed."""
        return self.keeper.remove(self._tenant, [self._name(kind, key)])

    def delete_media(self, image_key: str) -> int:
        """Remove everything that depends on this image, in every tier; return the bytes freed."""
        return self.keeper.remove(self._tenant, image=image_key)

    def _name(self, kind: str, key: str) -> EntryName:
        layout.checked(kind, key)
        return EntryName(kind, key, self._tenant or "")

    # -- all of them -----------------------------------------------------------------------------

    def clear(self) -> int:
        """Remove every entry; return the bytes freed."""
        return self.keeper.remove(self._tenant)

    def gc(self, budget: int) -> int:
        """Remove the least recently used entries until the rest fits; return the bytes freed."""
        return self.keeper.gc(self._tenant, budget)

    def stats(self, wait: float = 5.0) -> Record:
        """What `Writer.stats` tells, with budget and quota: events are of all tenants, unless
        `tenant` chose one. Waits at most `wait` seconds for a count."""
        return self.keeper.stats(self._tenant, self._whose, wait)

    def check(self, repair: bool = False) -> list[str]:
        """Read everything in full, of this tenant, or of all if none was chosen; return one line
        per problem. `repair` fixes all of them."""
        return self.keeper.check(self._whose, repair)

    def flush(self) -> None:
        """Return when everything handed over before is safe, of this tenant, or of all if none was
        chosen; raise `NotStored` with each loss and its reason. Later evictions are no losses."""
        self.keeper.flush(self._whose)

    def close(self) -> None:
        """Finish writing and release everything; it may be used again. Nothing belongs to a
        tenant's part alone."""
        if self._whole is None:
            self.keeper.close()

    @property
    def _whose(self) -> str | None:
        return None if self._whole is None else self._tenant
