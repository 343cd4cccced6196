"""What every store promises: a folder, an address, or several stores in a row.

A key names its content, so all writers of a key write equal bytes and need no lock. A store may
lose entries and then reports them absent; it never returns other content. `flush` is the
acknowledgement: everything handed over before it is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from keepsight.kinds import Record

if TYPE_CHECKING:  # commands look into a store without PyTorch
    import torch

Tensors: TypeAlias = "dict[str, torch.Tensor]"
Content: TypeAlias = "tuple[Tensors | None, Record]"  # without tensors: a note
Found = tuple[Content, Record]  # with the metadata in its file
Name = tuple[str, str]  # kind and key
CLOCK_SLACK = 300.0  # seconds by which the clocks of two machines may differ
Below = dict[str | None, list[tuple[str, Record]]]  # by key of their base: key, record


class EntryName(NamedTuple):
    """The whole name of an entry. The tenant is a digest; empty for the default tenant."""

    kind: str
    key: str
    tenant: str = ""

    def on(self, base: Name | None) -> EntryName | None:
        """The name of this entry's base, which has the same tenant."""
        return None if base is None else EntryName(*base, self.tenant)


@dataclass(frozen=True)
class About:
    """What a store must know about an entry; none of it is in the content."""

    cost: float = 0.0  # milliseconds to compute it again; for people who look at a store
    depends_on: Name | None = None  # the entry it depends on; it is never kept without that one
    media: tuple[str, ...] = ()  # image keys of everything it depends on
    ttl: float | None = None  # seconds until it expires


NOTHING = About()


@dataclass(frozen=True)
class Entry:
    """One entry as a listing has it."""

    kind: str
    key: str
    nbytes: int
    used: float  # seconds since the epoch; the least recently used goes first
    created: float = 0.0
    uses: int = 0
    cost: float = 0.0
    depends_on: Name | None = None
    media: tuple[str, ...] = ()
    pinned: bool = False
    expires: float | None = None
    tenant: str = ""
    account: str = ""  # the tenant whose quota it counts against

    @property
    def name(self) -> EntryName:
        """Its whole name."""
        return EntryName(self.kind, self.key, self.tenant)

    @property
    def base(self) -> EntryName | None:
        """The whole name of what it depends on."""
        return self.name.on(self.depends_on)

    def is_over(self, now: float) -> bool:
        """Whether it is expired, or dated in the future, so that it would live too long."""
        end = self.expires
        return end is not None and (end <= now or self.created > now + CLOCK_SLACK)


class Keeper(Protocol):
    """Keeps the entries of all tenants; `Store` is how one tenant sees it, and says what each
    method promises. A `tenant` of None means all of them, `whose` those whose events count.

    `label` is how people name it, `root` its folder, if it is one; `budget` and `quota` are the
    bytes that it, and each account in it, may have.
    """

    label: str
    root: Path | None
    budget: int | None
    quota: int | None

    def tier(self, name: EntryName) -> str | None: ...
    def read(self, names: Iterable[EntryName]) -> dict[EntryName, Found]: ...
    def put(self, name: EntryName, content: Content, about: About, account: str) -> None: ...
    def entry(self, name: EntryName) -> Entry | None: ...
    def entries(self, tenant: str | None) -> Iterator[Entry]: ...
    def below(self, tenant: str, kind: str, base: str | None, count: int) -> Below: ...
    def reject(self, name: EntryName, why: str) -> None: ...
    def pin(self, name: EntryName, pinned: bool) -> bool: ...
    def gc(self, tenant: str | None, budget: int) -> int: ...
    def stats(self, tenant: str | None, whose: str | None, wait: float) -> Record: ...
    def check(self, tenant: str | None, repair: bool) -> list[str]: ...
    def flush(self, tenant: str | None) -> None: ...
    def close(self) -> None: ...

    def remove(
        self, tenant: str | None, names: Iterable[EntryName] | None = None, image: str | None = None
    ) -> int:
        """Remove these entries, or what depends on an image, or everything, and all dependents;
        return the bytes freed."""

    def retire(self) -> None:
        """Let the threads end once they are done. This does not wait: the garbage collector calls
        it when nobody uses the store any more."""


def layers(
    names: Iterable[EntryName], upon: Callable[[EntryName], Iterable[EntryName]]
) -> list[list[EntryName]]:
    """These entries and all their dependents (`upon` gives the direct ones), in layers: each
    depends on earlier ones only."""
    depth: dict[EntryName, int] = {}
    level, here = 0, list(dict.fromkeys(names))
    while here:
        for name in here:
            depth.pop(name, None)
            depth[name] = level
        further = dict.fromkeys(other for name in here for other in upon(name))
        level += 1
        # Only damage makes circles; then no way is longer than there are entries.
        here = [name for name in further if level <= len(depth)]
    found: list[list[EntryName]] = [[] for _ in range(level)]
    for name, deep in depth.items():
        found[deep].append(name)
    return found
