"""What every store promises, wherever its bytes lie: a folder, an address, or several in a row.

A key names its content, so whoever writes the same key writes the same bytes and no writer needs a
lock. A store may lose what it has, and then says that it is absent; it never gives back something
else. Reading never waits for a writer. `flush` is the acknowledgement: what was handed over before
it survives whatever comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from keepsight.kinds import Record

Tensors = dict[str, torch.Tensor]
Name = tuple[str, str]  # kind and key
Below = dict[str | None, list[tuple[str, Record]]]  # by key of what they depend on: key, record


@dataclass(frozen=True)
class About:
    """What a store must know of an entry to keep the right ones; none of it is in the content."""

    cost: float = 0.0  # milliseconds that computing it again would take
    depends_on: Name | None = None  # of no use without that entry, and never kept without it
    media: tuple[str, ...] = ()  # the image keys of all that it holds anything of
    ttl: float | None = None  # seconds until it may no longer be used


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
    usefulness: float = 0.0  # see `priority.usefulness`: the least goes first

    def merged(self, far: Entry) -> Entry:
        """The same entry in two stores, as one."""
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
        """The same store as another tenant sees it: nothing of it is shared with this one."""

    def of_digest(self, digest: str) -> Store:
        """The same as `tenant`, by the digest that `tenants` gives; for looking and removing."""

    def tenants(self) -> list[str]:
        """The digests of all tenants that may have anything here; empty for the default tenant."""

    def has(self, kind: str, key: str) -> bool:
        """Whether a read of this entry can be expected to work."""

    def get(self, kind: str, key: str) -> tuple[Tensors, Record] | None:
        """Tensors and record, or None when absent, expired or damaged."""

    def note(self, kind: str, key: str) -> Record | None:
        """A small JSON record, or None when absent, expired or damaged."""

    def entry(self, kind: str, key: str) -> Entry | None:
        """One entry as the catalogue has it, without reading it; None when absent or expired."""

    def put(
        self,
        kind: str,
        key: str,
        tensors: Tensors,
        record: Record,
        about: About = NOTHING,
    ) -> None:
        """Hand an entry over; the tensors must not change afterwards. It is readable at once.

        A store may refuse it, and counts that: when too much waits to be written, or when it alone
        is over the budget, and then `flush` says so; or when what it depends on is absent. Only
        what depends on its own key may come before its base. Tensors may lie on a device
        (`devices.py`).
        """

    def put_note(self, kind: str, key: str, body: Record, about: About = NOTHING) -> None:
        """Hand a small JSON record over."""

    def reject(self, kind: str, key: str, why: str) -> None:
        """Set aside an entry whose content turned out not to be what its key says."""

    def tier(self, kind: str, key: str) -> str | None:
        """Where a read would find it: "disk", "remote", or None."""

    def pin(self, kind: str, key: str, pinned: bool = True) -> bool:
        """Keep an entry, and what it depends on, whatever the budget; False when absent."""

    def delete(self, kind: str, key: str) -> int:
        """Remove an entry and all that depends on it, here and everywhere; the bytes freed."""

    def delete_media(self, image_key: str) -> int:
        """Remove all that holds anything of this image; the bytes freed."""

    def flush(self) -> None:
        """Return when all that was handed over before is safe, or raise `NotStored` with what is
        not and why. What a budget evicts later is no loss in this sense; `stats` counts it."""

    def close(self) -> None:
        """Finish writing and release everything."""

    def entries(self) -> Iterator[Entry]:
        """All entries of this tenant, in no order."""

    def stats(self, wait: float = 5.0) -> Record:
        """At least entries, bytes, kinds (entries and bytes of each), counted (when they were, in
        seconds since the epoch, or None), hits, misses, evictions, written, refused (all since it
        was opened), budget, quota, state ("ok", or what is wrong), since (when) and broken (why).

        It waits no longer than so many seconds, whatever the store does: what cannot be counted
        within them is as it was counted last."""

    def clear(self, everybody: bool = False) -> int:
        """Remove every entry of this tenant, or of all tenants; the bytes freed."""

    def gc(self, budget: int) -> int:
        """Remove the least useful entries of this tenant until the rest fits; the bytes freed."""

    def check(self, repair: bool = False) -> list[str]:
        """Read everything in full; what is wrong, one line each. `repair` puts it right, so that
        nothing is wrong afterwards."""


@runtime_checkable
class Listing(Protocol):
    """A store that can say what depends on an entry. One that cannot is asked by key only."""

    def below(self, kind: str, base: str | None, count: int) -> Below:
        """What depends directly on an entry of its own kind, or on nothing (None): so many of the
        latest used, each with its record; and, as the store likes, what depends on those in turn.
        By key of what they depend on: a key that is there has all that depends on it."""


@runtime_checkable
class BulkRead(Protocol):
    """A store that reads several entries faster together than one after the other."""

    def get_all(self, kind: str, keys: Iterable[str]) -> dict[str, tuple[Tensors, Record]]:
        """Those that are there and sound, by key."""


def read_all(store: Store, kind: str, keys: Iterable[str]) -> dict[str, tuple[Tensors, Record]]:
    """Several entries, from any store."""
    if isinstance(store, BulkRead):
        return store.get_all(kind, keys)
    return {key: found for key in keys if (found := store.get(kind, key)) is not None}


def delete_all(store: Store, names: Iterable[Name]) -> int:
    """Many at once where a store can: one listing then serves them all."""
    many = getattr(store, "delete_all", None)
    if many is not None:
        return int(many(names))
    return sum(store.delete(*name) for name in names)
