"""What every store promises: a folder, an address, or several stores in a row.

A key names its content, so all writers of a key write equal bytes and need no lock. A store may
lose entries and then reports them absent; it never returns other content. Reads never wait for
writers. `flush` is the acknowledgement: everything handed over before it is safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from keepsight.kinds import Record

Tensors = dict[str, torch.Tensor]
Name = tuple[str, str]  # kind and key
Below = dict[str | None, list[tuple[str, Record]]]  # by key of their base: key, record


@dataclass(frozen=True)
class About:
    """What a store must know about an entry to rank it; none of it is in the content."""

    cost: float = 0.0  # milliseconds to compute it again
    depends_on: Name | None = None  # the entry it depends on; it is never kept without that one
    media: tuple[str, ...] = ()  # image keys of everything it depends on
    ttl: float | None = None  # seconds until it expires


NOTHING = About()


@dataclass(frozen=True)
class Entry:
    """One entry as the catalogue has it."""

    kind: str
    key: str
    nbytes: int
    used: float  # seconds since the epoch
    created: float = 0.0
    uses: int = 0
    cost: float = 0.0
    depends_on: Name | None = None
    media: tuple[str, ...] = ()
    pinned: bool = False
    expires: float | None = None
    tenant: str = ""  # digest of the tenant's name; empty for the default tenant
    usefulness: float = 0.0  # see `priority.usefulness`: the least is evicted first

    def merged(self, far: Entry) -> Entry:
        """The combined entry, for one in two stores."""
        return replace(
            self,
            used=max(self.used, far.used),
            uses=self.uses + far.uses,
            cost=self.cost or far.cost,
            created=min(self.created, far.created),
            pinned=self.pinned or far.pinned,
        )


class Store(Protocol):
    """Tensors and small JSON notes under a kind and a key, for one tenant."""

    def tenant(self, name: str | None) -> Store:
        """The store as another tenant sees it; tenants share no entries."""

    def of_digest(self, digest: str) -> Store:
        """Like `tenant`, by a digest from `tenants`; for looking and removing."""

    def tenants(self) -> list[str]:
        """The digests of all tenants that may have entries here; empty for the default tenant."""

    def has(self, kind: str, key: str) -> bool:
        """Whether reading this entry should work."""

    def get(self, kind: str, key: str) -> tuple[Tensors, Record] | None:
        """Tensors and record, or None if absent, expired or damaged."""

    def note(self, kind: str, key: str) -> Record | None:
        """A small JSON record, or None if absent, expired or damaged."""

    def entry(self, kind: str, key: str) -> Entry | None:
        """The catalogue's data on one entry, without reading it; None if absent or expired."""

    def put(
        self,
        kind: str,
        key: str,
        tensors: Tensors,
        record: Record,
        about: About = NOTHING,
    ) -> None:
        """Hand over an entry; the tensors must not change afterwards. It is readable at once.

        A store may refuse it, and counts refusals: if too much waits to be written, if the entry
        alone exceeds the budget (then `flush` says so), or if its base is absent. Only an entry
        that depends on its own key may come before its base. Tensors may lie on a device
        (`devices.py`).
        """

    def put_note(self, kind: str, key: str, body: Record, about: About = NOTHING) -> None:
        """Hand over a small JSON record."""

    def reject(self, kind: str, key: str, why: str) -> None:
        """Set aside an entry whose content does not match its key."""

    def tier(self, kind: str, key: str) -> str | None:
        """Where a read would find it: "disk", "remote", or None."""

    def pin(self, kind: str, key: str, pinned: bool = True) -> bool:
        """Pin an entry and what it depends on, whatever the budget; False if absent."""

    def delete(self, kind: str, key: str) -> int:
        """Remove an entry and all its dependents, in every tier; return the bytes freed."""

    def delete_media(self, image_key: str) -> int:
        """Remove everything that depends on this image; return the bytes freed."""

    def flush(self) -> None:
        """Return when everything handed over before is safe; raise `NotStored` with each loss and
        its reason. Later evictions are no losses; `stats` counts them."""

    def close(self) -> None:
        """Finish writing and release everything."""

    def entries(self) -> Iterator[Entry]:
        """All entries of this tenant, in no order."""

    def stats(self, wait: float = 5.0) -> Record:
        """At least entries, bytes, kinds (entries and bytes of each), counted (when they were, in
        seconds since the epoch, or None), hits, misses, evictions, written, refused (all since it
        was opened), budget, quota, state ("ok", or the problem), since (when) and broken (why).

        Waits at most `wait` seconds; what cannot be counted in time has its last count.
        """

    def clear(self, everybody: bool = False) -> int:
        """Remove every entry of this tenant, or of all tenants; return the bytes freed."""

    def gc(self, budget: int) -> int:
        """Remove this tenant's least useful entries until the rest fits; return bytes freed."""

    def check(self, repair: bool = False) -> list[str]:
        """Read everything in full; return one line per problem. `repair` fixes all of them."""


@runtime_checkable
class Listing(Protocol):
    """A store that can list the dependents of an entry. Others are asked by key only."""

    def below(self, kind: str, base: str | None, count: int) -> Below:
        """The `count` most recently used direct dependents of an entry, of its own kind; for None,
        entries without a base. The result is by key of the base, may include further levels, and is
        complete for each of its keys. Each dependent comes with its record."""


@runtime_checkable
class BulkRead(Protocol):
    """A store that reads several entries together faster than one by one."""

    def get_all(self, kind: str, keys: Iterable[str]) -> dict[str, tuple[Tensors, Record]]:
        """Those entries that exist and are intact, by key."""


def read_all(store: Store, kind: str, keys: Iterable[str]) -> dict[str, tuple[Tensors, Record]]:
    """Several entries, from any store."""
    if isinstance(store, BulkRead):
        return store.get_all(kind, keys)
    return {key: found for key in keys if (found := store.get(kind, key)) is not None}


def delete_all(store: Store, names: Iterable[Name]) -> int:
    """Delete many entries, with one shared listing where a store can."""
    many = getattr(store, "delete_all", None)
    if many is not None:
        return int(many(names))
    return sum(store.delete(*name) for name in names)
