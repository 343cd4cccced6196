"""One stretch of a path between two boundaries, what is remembered of it, and indexes of nodes.

A node compares ids and spans in full, never digests alone. It knows its parent and its children,
and has two parts: the rows of its stretch and the state at its end. What is kept, in which tier,
and what is evicted is decided by the tree.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from keepsight.prefix.prompt import RUN, Prompt, Span, common, shift
from keepsight.store import Store
from keepsight.system.accounts import account_of
from keepsight.system.devices import Fence

Tensors = dict[str, torch.Tensor]
Received = tuple[Tensors, Tensors | None]  # rows, and states of fixed size
DEVICE, HOST, NOWHERE = "memory", "host", ""  # tiers of memory, as reports name them
_LOOKED = 64  # children on each side of a place, of which the usable ones are found
LOGITS = "logits"  # among the rows of a whole prompt


@dataclass(eq=False)
class Home:
    """What all nodes of one namespace have in common."""

    tenant: str = ""
    store: Store | None = None
    name: str = ""  # of the namespace
    holds: int = 0  # turns in flight
    barred: dict[str, int] = field(default_factory=dict)  # image key -> tick when it was forgotten
    cleared: int = -1  # tick when everything was
    pins: int = 0  # nodes of it that are pinned
    any_cut: bool = False  # its paths can be continued anywhere
    states: bool = False  # but only from states of fixed size that were captured

    def __post_init__(self) -> None:
        self.account = account_of(self.tenant)


@dataclass(frozen=True)
class Way:
    """How tensors came to the host, and how they get back."""

    devices: dict[str, torch.device]  # where each of them lived
    fence: Fence  # when the copies are complete


@dataclass(eq=False, repr=False, slots=True)
class Part:
    """Tensors that come and go together, in one tier of memory or in none.

    A state depends on the rows of its own node, and rows depend on the rows of the parent.
    """

    node: Node
    tensors: Tensors | None = None
    tier: str = NOWHERE
    nbytes: int = 0
    way: Way | None = None
    on_device: int = 0  # how many parts depend on this one there
    on_host: int = 0

    def bears(self, tier: str, more: int = 0) -> int:
        """How many parts in a tier depend on this one, counted up by `more`."""
        if tier == DEVICE:
            self.on_device += more
            return self.on_device
        self.on_host += more
        return self.on_host

    @property
    def base(self) -> Part | None:
        """What this depends on; rows at the beginning of a prompt depend on nothing."""
        if self is self.node.state:
            return self.node.rows
        parent = self.node.parent
        return None if parent is None or parent.parent is None else parent.rows

    def dependents(self) -> Iterator[Part]:
        """The parts that would be of no use without this one."""
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
    terminal: bool = False
    children: dict[str, Node] = field(default_factory=dict)
    order: list[Node] = field(default_factory=list)  # the children sorted by `code`
    holds: int = 0
    pinned: bool = False
    gone: bool = False  # forgotten: unreachable, and nothing may be remembered behind it
    was_full: bool = False  # it held a snapshot once: absence now means eviction
    on_disk: bool = False  # a read from the store can be tried
    unreadable: bool = False  # such a read has failed
    leased: bool = False  # from a store, which knows when its time is over
    in_memory_only: bool = False  # decoded, not prefilled: no store takes it
    expires: float | None = None
    cost: float = 0.0  # milliseconds that computing the stretch took; 0 where it was not measured
    uses: int = 0
    used: int = 0
    floors: tuple[float, float] = (0.0, 0.0)  # those of all and of its tenant, at the last use
    path: str = ""  # the digest of its path without the namespace
    looked_up: bool = False  # the store was asked what depends on it
    version: int = 0  # counts up when a child comes, goes, or can be used again
    ends: Counter[int] = field(default_factory=Counter)  # how many children end where

    def __post_init__(self) -> None:
        self.home: Home = Home() if self.parent is None else self.parent.home
        self.rows, self.state = Part(self), Part(self)

    def __repr__(self) -> str:
        return (
            f"Node({self.start} to {self.end}, {self.rows.tier or 'nowhere'}, {self.digest[:12]})"
        )

    @property
    def kv(self) -> Tensors | None:
        """Keys and values of the stretch, where they are on the model's device."""
        if self.rows.tier != DEVICE or self.rows.tensors is None:
            return None
        return {name: tensor for name, tensor in self.rows.tensors.items() if name != LOGITS}

    @property
    def logits(self) -> torch.Tensor | None:
        """The last logits of a whole prompt, where they are on the model's device."""
        return (self.rows.tensors or {}).get(LOGITS) if self.rows.tier == DEVICE else None

    @property
    def fixed(self) -> Tensors | None:
        """The fixed-size states at the end, where they are on the model's device."""
        return self.state.tensors if self.state.tier == DEVICE else None

    @property
    def parts(self) -> tuple[Part, Part]:
        """What depends on the other comes first."""
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
        """Whether it holds nothing and nothing is behind it. A root is never one."""
        held = self.holds or self.children or self.gone or self.parent is None
        return not held and not any(part.tier for part in self.parts)

    def chain(self) -> list[Node]:
        """From the first stretch to this one, the root left out."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def below(self) -> Iterator[Node]:
        """This node and all behind it; each comes before its children."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def code(self) -> bytes:
        """The stretch spelled so that neighbours in sorted order share the longest prefix.

        For finding the closest child among many, never for identity.
        """
        return _code(self.ids, self.spans)

    def adopt(self, child: Node) -> None:
        """Take a child in."""
        self.children[child.digest] = child
        self.ends[child.end] += 1
        self.version += 1
        bisect.insort(self.order, child, key=Node.code)

    def disown(self, child: Node) -> None:
        """Let a child go."""
        del self.children[child.digest]
        self.ends -= Counter((child.end,))  # which drops what comes to nothing
        self.version += 1
        spot = bisect.bisect_left(self.order, child.code(), key=Node.code)
        while self.order[spot] is not child:  # several may be spelled alike
            spot += 1
        del self.order[spot]

    def closest(
        self, prompt: Prompt, usable: Callable[[Node], bool] | None = None
    ) -> tuple[Node | None, int]:
        """The child that shares most with the prompt from here on, and how many tokens; of those
        that are `usable`, where that is asked."""
        end = min(len(prompt), self.end + 2 * RUN)
        ids, spans = prompt.ids[self.end : end], shift(prompt.clip(self.end, end), -self.end)
        spot = bisect.bisect_left(self.order, _code(ids, spans), key=Node.code)
        best, rank = None, (-1, False, False)
        for child in self._around(spot, usable):
            shared = common(child.ids, child.spans, ids, spans)
            # Of equals: first one that agrees in full and may go on, then one that goes on
            # differently, last one that only ends.
            whole = shared == len(child.ids)
            mine = (shared, whole and not child.terminal, not whole)
            if mine > rank:
                best, rank = child, mine
        return best, rank[0]

    def within(self, prompt: Prompt) -> Iterator[Node]:
        """The children that the prompt goes all the way through, the longest first."""
        ids, spans = prompt.ids[self.end :], shift(prompt.clip(self.end, len(prompt)), -self.end)
        code = _code(ids, spans)
        while code:
            spot = bisect.bisect_right(self.order, code, key=Node.code)
            if spot == 0:
                return
            # Whatever else the prompt goes through shares no more with it than this one does.
            last = self.order[spot - 1]
            shared = common(last.ids, last.spans, ids, spans)
            if shared == len(last.ids):
                first = bisect.bisect_left(self.order, last.code(), key=Node.code)
                yield from self.order[first:spot]
                shared -= 1
            code = code[: 8 * shared]

    def _around(self, spot: int, usable: Callable[[Node], bool] | None) -> Iterator[Node]:
        """The two children on each side of a place in their order, of the usable ones."""
        if usable is None:
            yield from self.order[max(0, spot - 2) : spot + 2]
            return
        before = (child for child in reversed(self.order[max(0, spot - _LOOKED) : spot]))
        for side in (before, self.order[spot : spot + _LOOKED]):
            yield from itertools.islice(filter(usable, side), 2)

    def same_as(self, prompt: Prompt) -> bool:
        """The hit compared in full: ids and feature ids, not digests."""
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


_LATEST = 4  # of the namespaces that know a path; one is enough for a reason


class Paths:
    """Nodes by tenant and by the digest of their path, whatever their namespace. A root has the
    empty path. So a report can name other weights as the reason for a miss without a walk through
    all namespaces: a training leaves one with every step."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, str], dict[Node, None]] = {}

    def add(self, node: Node) -> None:
        """Enter a node that can be reached from now on."""
        self._nodes.setdefault((node.home.tenant, node.path), {})[node] = None

    def discard(self, node: Node) -> None:
        """Remove a node, if it is here."""
        place = (node.home.tenant, node.path)
        nodes = self._nodes.get(place, {})
        nodes.pop(node, None)
        if not nodes:
            self._nodes.pop(place, None)

    def elsewhere(self, path: str, home: Home) -> list[Node]:
        """The latest nodes on a path in other namespaces of the same tenant."""
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
_OVERHEAD = 1024  # bytes of a node beside its ids


class Tombstones:
    """Nodes without content, the oldest first, so that a report can say `evicted` and not `new`.
    Their number and bytes are bounded; `forget` is called with each that is dropped."""

    def __init__(self, forget: Callable[[Node], None]) -> None:
        self._forget = forget
        self._sizes: dict[Node, int] = {}
        self.nbytes = 0

    def note(self, node: Node) -> None:
        """Take a node in as the youngest, if there is nothing else to it."""
        if node.is_ghost:
            self.discard(node)
            self._sizes[node] = size = node.ids.nbytes + _OVERHEAD
            self.nbytes += size

    def discard(self, node: Node) -> None:
        """Remove a node, if it is here."""
        self.nbytes -= self._sizes.pop(node, 0)

    def prune(self) -> None:
        """Forget the oldest until the rest is within bounds. One that was filled again stays."""
        while len(self._sizes) > MAX_NODES or self.nbytes > MAX_BYTES:
            node = next(iter(self._sizes))
            self.discard(node)
            if node.is_ghost:
                self._forget(node)

    def __len__(self) -> int:
        return len(self._sizes)

    def check(self) -> None:
        """The sum must be that of what is here."""
        true = sum(node.ids.nbytes + _OVERHEAD for node in self._sizes)
        if not self.nbytes == sum(self._sizes.values()) == true:
            raise AssertionError(f"tombstones: counted {self.nbytes}, there are {true}")
