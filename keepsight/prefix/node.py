"""A node of the tree: one edge of paths, and what is remembered of it.

An edge is a stretch of ids and media, compared in full. A node has the rows of its stretch, which
can be cut at any token, and what is valid at its end alone: states of fixed size, and the last
logits of a whole prompt. Both are in one tier of memory, or in none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from keepsight.prefix.prompt import Prompt, Span, common, shift
from keepsight.store import Store
from keepsight.system import digests
from keepsight.system.accounts import account_of
from keepsight.system.devices import Fence, to_devices, to_host

Tensors = dict[str, torch.Tensor]
Received = tuple[Tensors, Tensors | None]  # rows, and states of fixed size
Key = tuple[object, ...]  # what the first token of an edge is
# The original device of each tensor, and what is set when the copies are complete.
HostCopy = tuple[dict[str, torch.device], Fence]
DEVICE, HOST, NOWHERE = "memory", "host", ""  # tiers of memory, as reports name them
LOGITS = "logits"  # what the end of a whole prompt has beside its states


@dataclass(eq=False)
class Home:
    """What all nodes of one namespace share."""

    name: str = ""
    tenant: str = ""
    store: Store | None = None
    holds: int = 0  # turns in flight
    barred: dict[str, int] = field(default_factory=dict)  # image key -> tick when it was forgotten
    cleared: int = -1  # tick when everything was forgotten
    used: int = 0
    pins: int = 0  # pinned nodes of it

    def __post_init__(self) -> None:
        self.account = account_of(self.tenant)


@dataclass(eq=False)
class Stored:
    """An entry of a store with rows of a path; several nodes may have their rows in one."""

    name: str
    start: int
    end: int
    listed: bool = False  # the store was asked for what goes on from it

    @property
    def ending(self) -> str:
        """The name of the logits behind it."""
        return digests.digest("whole", self.name)


class Node:
    """One edge of paths, and what is remembered of it and at its end."""

    def __init__(
        self,
        parent: Node | None,
        start: int = 0,
        ids: np.ndarray | None = None,
        spans: tuple[Span, ...] = (),
        home: Home | None = None,
    ) -> None:
        self.parent, self.children = parent, dict[Key, Node]()
        self.home: Home = home or (parent.home if parent is not None else Home())
        self.key: Key = ()  # among the children of its parent
        self.take(start, np.empty(0, dtype=np.int64) if ids is None else ids, spans)
        self.rows: Tensors = {}
        self.ends: Tensors = {}  # what is valid at its end alone
        self.tier, self.nbytes = NOWHERE, 0
        self.way: HostCopy | None = None  # how its tensors came to the host
        self.was_here = False  # absence now means eviction
        self.holds = 0  # its own, and one for each child that is held
        self.kept = 0  # own ones that end when it is forgotten
        self.pinned = False
        self.gone = False  # forgotten: unreachable, and nothing may be remembered after it
        self.entry: Stored | None = None  # has its rows; that of a root has the namespace's name
        self.unreadable = False  # a read of its entry has failed
        self.leased = False  # from a store, which knows when it expires
        self.expires: float | None = None

    def take(self, start: int, ids: np.ndarray, spans: tuple[Span, ...]) -> None:
        """Set its stretch; spans count from the beginning of the path."""
        self.start, self.end = start, start + len(ids)
        self.ids, self.spans, self.code = ids, spans, ids.tobytes()

    def first_key(self) -> Key:
        """What its first token is in a path; see `Prompt.key`."""
        token, span = self.code[:8], self.spans[0] if self.spans else None
        if span is None or span.start > self.start:
            return (token,)
        return token, span.feature_id, span.offset

    def __repr__(self) -> str:
        return f"Node({self.start} to {self.end}, {self.tier or 'nowhere'})"

    @property
    def kv(self) -> Tensors | None:
        """Keys and values of the stretch, if on the model's device."""
        return self.rows if self.tier == DEVICE else None

    @property
    def logits(self) -> torch.Tensor | None:
        """The logits behind a whole prompt that ends here, if on the model's device."""
        return self.ends.get(LOGITS) if self.tier == DEVICE else None

    @property
    def states(self) -> Tensors:
        """The states of fixed size at its end."""
        return {name: tensor for name, tensor in self.ends.items() if name != LOGITS}

    @property
    def fixed(self) -> Tensors | None:
        """The states of fixed size at its end, if on the model's device."""
        return self.states or None if self.tier == DEVICE else None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that takes memory here."""
        yield from self.rows.values()
        yield from self.ends.values()

    @torch.inference_mode()
    def to_host(self) -> tuple[Tensors, Tensors]:
        """Copies of rows and ends in host memory, bit for bit; it remembers where they were. With
        asynchronous copies the device waits, not the program."""
        tensors = {**self.rows, **self.ends}
        copies, fence = to_host(tensors)
        self.way = {name: tensor.device for name, tensor in tensors.items()}, fence
        own = {name: c.clone() if c is tensors[name] else c for name, c in copies.items()}
        return {name: own[name] for name in self.rows}, {name: own[name] for name in self.ends}

    @torch.inference_mode()
    def to_device(self) -> tuple[Tensors, Tensors]:
        """Copies of rows and ends where they came from."""
        way, self.way = self.way, None
        if way is None:
            return self.rows, self.ends
        devices, fence = way
        rows, ends = (to_devices(x, devices.__getitem__, fence) for x in (self.rows, self.ends))
        return rows, ends

    def settled(self) -> None:
        """Wait until copies to the host are complete."""
        if self.way is not None:
            self.way[1].wait()

    @property
    def own_entry(self) -> Stored | None:
        """The entry that ends where it ends."""
        return self.entry if self.entry is not None and self.entry.end == self.end else None

    @property
    def is_record(self) -> bool:
        """Whether nothing is left of it but its path. A root is no record."""
        held = self.holds or self.children or self.gone or self.parent is None
        return not held and not self.tier

    def chain(self) -> list[Node]:
        """The nodes from the first stretch to this one, without the root."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def below(self) -> Iterator[Node]:
        """Yield this node and all below it, parents before children."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def shared(self, prompt: Prompt) -> int:
        """How many tokens of its stretch a prompt shares: ids and feature ids, compared in full."""
        same = prompt.code[8 * self.start : 8 * self.end] == self.code
        if same and prompt.clip(self.start, self.end) == self.spans:
            return len(self.ids)
        stop = min(self.end, len(prompt))
        theirs = shift(prompt.clip(self.start, stop), -self.start)
        mine = shift(self.spans, -self.start)
        return common(self.ids, mine, prompt.ids[self.start : stop], theirs)


@torch.inference_mode()
def cut(rows: Tensors, start: int, end: int, length: int) -> Tensors:
    """Some of `length` rows, in memory of their own. Tensors beside the sequence (`cross`) belong
    to the first ones."""
    if (start, end) == (0, length):
        return rows
    inside = {n: t[..., start:end, :] for n, t in rows.items() if not n.startswith("cross.")}
    beside = {n: t for n, t in rows.items() if n.startswith("cross.") and start == 0}
    return {name: tensor.clone() for name, tensor in (inside | beside).items()}
