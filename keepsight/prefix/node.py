"""A node: one stretch of a path between two boundaries and what is remembered of it; and indexes.

A node compares ids and spans in full, never digests alone. It knows its parent and children, and
has two parts: the rows of its stretch and the state at its end. The tree decides what is kept, in
which tier, and what is evicted.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from keepsight.prefix.prompt import PASS, Prompt, Span, common, shift
from keepsight.store import Store
from keepsight.system.accounts import account_of
from keepsight.system.devices import Fence

Tensors = dict[str, torch.Tensor]
Received = tuple[Tensors, Tensors | None]  # rows, and states of fixed size
DEVICE, HOST, NOWHERE = "memory", "host", ""  # tiers of memory, as reports name them
_LOOKED = 64  # children on each side of a place that are searched for usable ones
LOGITS = "logits"  # what a whole prompt has among its rows


@dataclass(eq=False)
class NamespaceState:
    """What all nodes of one namespace share."""

    tenant: str = ""
    store: Store | None = None
    name: str = ""  # of the namespace
    holds: int = 0  # turns in flight
    barred: dict[str, int] = field(default_factory=dict)  # image key -> tick when it was forgotten
    cleared: int = -1  # tick when everything was forgotten
    pins: int = 0  # pinned nodes of it

    def __post_init__(self) -> None:
        self.account = account_of(self.tenant)


@dataclass(frozen=True)
class HostCopy:
    """How tensors came to the host, and how to return them."""

    devices: dict[str, torch.device]  # the original device of each tensor
    fence: Fence  # set when the copies are complete


@dataclass(eq=False, repr=False, slots=True)
class Part:
    """Tensors that are moved and evicted together, in one tier of memory or in none.

    A state depends on the rows of its own node, and rows depend on the rows of the parent.
    """

    node: Node
    tensors: Tensors | None = None
    tier: str = NOWHERE
    nbytes: int = 0
    way: HostCopy | None = None
    on_device: int = 0  # number of parts that depend on this one, per tier
    on_host: int = 0

    def bears(self, tier: str, more: int = 0) -> int:
        """The number of parts in a tier that depend on this one; first adds `more` to it."""
        if tier == DEVICE:
            self.on_device += more
            return self.on_device
        self.on_host += more
        return self.on_host

    @property
    def base(self) -> Part | None:
        """What this part depends on; the first rows of a prompt depend on nothing."""
        if self is self.node.state:
            return self.node.rows
        parent = self.node.parent
        return None if parent is None or parent.parent is None else parent.rows

    def dependents(self) -> Iterator[Part]:
        """The parts that are useless without this one."""
        if self is self.node.rows:
            yield self.node.state
            yield from (child.rows for child in self.node.children.values())


@dataclass(eq=False, repr=False)
class Node:
    """One stretch of a path, and what is remembered of it."""

    parent: Node | None
    start: int
    end: int
    digest: str
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    spans: tuple[Span, ...] = ()  # relative to `start`
    children: dict[str, Node] = field(default_factory=dict)
    order: list[Node] = field(default_factory=list)  # the children sorted by `code`
    holds: int = 0
    pinned: bool = False
    kept: int = 0  # those of `holds` that end when it is forgotten
    gone: bool = False  # forgotten: unreachable, and nothing may be remembered after it
    was_full: bool = False  # it once held a snapshot: absence now means eviction
    on_disk: bool = False  # a read from the store may work
    unreadable: bool = False  # such a read has failed
    leased: bool = False  # from a store, which tracks its expiry
    expires: float | None = None
    cost: float = 0.0  # milliseconds it took to compute the stretch; 0 if not measured
    uses: int = 0
    used: int = 0
    floors: tuple[float, float] = (0.0, 0.0)  # those of all and of its tenant, at the last use
    path: str = ""  # digest of its path without the namespace
    looked_up: bool = False  # the store was asked for its dependents
    version: int = 0  # incremented when a child appears, disappears or becomes usable again
    ends: Counter[int] = field(default_factory=Counter)  # number of children per end

    def __post_init__(self) -> None:
        self.home: NamespaceState = NamespaceState() if self.parent is None else self.parent.home
        self.rows, self.state = Part(self), Part(self)

    def __repr__(self) -> str:
        return (
            f"Node({self.start} to {self.end}, {self.rows.tier or 'nowhere'}, {self.digest[:12]})"
        )

    @property
    def kv(self) -> Tensors | None:
        """Keys and values of the stretch, if on the model's device."""
        if self.rows.tier != DEVICE or self.rows.tensors is None:
            return None
        return {name: tensor for name, tensor in self.rows.tensors.items() if name != LOGITS}

    @property
    def logits(self) -> torch.Tensor | None:
        """The last logits of a whole prompt, if on the model's device."""
        return (self.rows.tensors or {}).get(LOGITS) if self.rows.tier == DEVICE else None

    @property
    def fixed(self) -> Tensors | None:
        """The fixed-size states at the end, if on the model's device."""
        return self.state.tensors if self.state.tier == DEVICE else None

    @property
    def parts(self) -> tuple[Part, Part]:
        """Both parts, the dependent one first."""
        return self.state, self.rows

    @property
    def nbytes(self) -> int:
        """Unique storage bytes of its tensors, in all tiers of memory."""
        return self.rows.nbytes + self.state.nbytes

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that takes memory here."""
        for part in self.parts:
            yield from (part.tensors or {}).values()

    @property
    def is_ghost(self) -> bool:
        """Whether it holds nothing and has no children. A root is never a ghost."""
        held = self.holds or self.children or self.gone or self.parent is None
        return not held and not any(part.tier for part in self.parts)

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

    def code(self) -> bytes:
        """The stretch encoded so that neighbours in sorted order share the longest prefix.

        Used to find the closest of many children, never for identity.
        """
        return _code(self.ids, self.spans)

    def adopt(self, child: Node) -> None:
        """Add a child."""
        self.children[child.digest] = child
        self.ends[child.end] += 1
        self.version += 1
        bisect.insort(self.order, child, key=Node.code)

    def disown(self, child: Node) -> None:
        """Remove a child."""
        del self.children[child.digest]
        self.ends -= Counter((child.end,))  # drops a count of zero
        self.version += 1
        spot = bisect.bisect_left(self.order, child.code(), key=Node.code)
        while self.order[spot] is not child:  # several may have equal codes
            spot += 1
        del self.order[spot]

    def closest(
        self, prompt: Prompt, usable: Callable[[Node], bool] | None = None
    ) -> tuple[Node | None, int]:
        """The child that shares the most with the prompt from here on, and how many tokens; among
        those that are `usable`, if given."""
        end = min(len(prompt), self.end + 2 * PASS)
        ids, spans = prompt.ids[self.end : end], shift(prompt.clip(self.end, end), -self.end)
        spot = bisect.bisect_left(self.order, _code(ids, spans), key=Node.code)
        best, rank = None, (-1, False)
        for child in self._around(spot, usable):
            shared = common(child.ids, child.spans, ids, spans)
            mine = (shared, shared == len(child.ids))  # among equals one that agrees in full
            if mine > rank:
                best, rank = child, mine
        return best, rank[0]

    def within(self, prompt: Prompt) -> Iterator[Node]:
        """The children that the prompt covers completely, the longest first."""
        ids, spans = prompt.ids[self.end :], shift(prompt.clip(self.end, len(prompt)), -self.end)
        code = _code(ids, spans)
        while code:
            spot = bisect.bisect_right(self.order, code, key=Node.code)
            if spot == 0:
                return
            # Other children covered by the prompt share no more with it than this one.
            last = self.order[spot - 1]
            shared = common(last.ids, last.spans, ids, spans)
            if shared == len(last.ids):
                first = bisect.bisect_left(self.order, last.code(), key=Node.code)
                yield from self.order[first:spot]
                shared -= 1
            code = code[: 8 * shared]

    def _around(self, spot: int, usable: Callable[[Node], bool] | None) -> Iterator[Node]:
        """The two children on each side of a place in sorted order, among the usable ones."""
        if usable is None:
            yield from self.order[max(0, spot - 2) : spot + 2]
            return
        before = (child for child in reversed(self.order[max(0, spot - _LOOKED) : spot]))
        for side in (before, self.order[spot : spot + _LOOKED]):
            yield from itertools.islice(filter(usable, side), 2)

    def same_as(self, prompt: Prompt) -> bool:
        """Compare ids and feature ids in full, not digests."""
        ids = prompt.ids[self.start : self.end]
        if self.end > len(prompt) or not np.array_equal(self.ids, ids):
            return False
        return shift(self.spans, self.start) == prompt.clip(self.start, self.end)


def _code(ids: np.ndarray, spans: Sequence[Span]) -> bytes:
    code = ids.astype(">i8")
    for span in spans:
        base = (1 << 62) | int(span.feature_id[:12], 16) << 12
        end = min(span.end, len(code))
        code[span.start : end] = base + span.offset + np.arange(end - span.start)
    return code.tobytes()


_LATEST = 4  # namespaces that know a path; one is enough for a reason


class Paths:
    """Nodes by tenant and by the digest of their path, in all namespaces. A root has the empty
    path. With it a report can name other weights as the reason for a miss without a walk through
    all namespaces: training makes a new one with every step."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, str], dict[Node, None]] = {}

    def add(self, node: Node) -> None:
        """Add a node that becomes reachable."""
        self._nodes.setdefault((node.home.tenant, node.path), {})[node] = None

    def discard(self, node: Node) -> None:
        """Remove a node, if it is here."""
        place = (node.home.tenant, node.path)
        nodes = self._nodes.get(place, {})
        nodes.pop(node, None)
        if not nodes:
            self._nodes.pop(place, None)

    def elsewhere(self, path: str, home: NamespaceState) -> list[Node]:
        """The most recently used nodes with this path in other namespaces of the same tenant."""
        found: list[Node] = []
        for node in reversed(self._nodes.get((home.tenant, path), {})):
            if node.home is not home:
                found.append(node)
                if len(found) == _LATEST:
                    break
        return found

    def __len__(self) -> int:
        return sum(len(nodes) for nodes in self._nodes.values())

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes.get((node.home.tenant, node.path), {})


MAX_NODES, MAX_BYTES = 20_000, 32 << 20
_OVERHEAD = 1024  # bytes of a node besides its ids


class Tombstones:
    """Nodes without content, the oldest first, so that a report can say `evicted` instead of `new`.
    Their number and bytes are bounded; `forget` is called with each dropped node."""

    def __init__(self, forget: Callable[[Node], None]) -> None:
        self._forget = forget
        self._sizes: dict[Node, int] = {}
        self.nbytes = 0

    def note(self, node: Node) -> None:
        """Add a node as the youngest if it is empty."""
        if node.is_ghost:
            self.discard(node)
            self._sizes[node] = size = node.ids.nbytes + _OVERHEAD
            self.nbytes += size

    def discard(self, node: Node) -> None:
        """Remove a node, if it is here."""
        self.nbytes -= self._sizes.pop(node, 0)

    def prune(self) -> None:
        """Drop the oldest until the rest is within bounds. A node that was filled again stays."""
        while len(self._sizes) > MAX_NODES or self.nbytes > MAX_BYTES:
            node = next(iter(self._sizes))
            self.discard(node)
            if node.is_ghost:
                self._forget(node)

    def __len__(self) -> int:
        return len(self._sizes)

    def check(self) -> None:
        """Require that the counted bytes equal those of the nodes here."""
        true = sum(node.ids.nbytes + _OVERHEAD for node in self._sizes)
        if not self.nbytes == sum(self._sizes.values()) == true:
            raise AssertionError(f"tombstones: counted {self.nbytes}, there are {true}")
