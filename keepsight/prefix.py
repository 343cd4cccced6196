"""The tree of all snapshots of one model, keyed by path; one root for each namespace.

A node is the stretch between two boundaries. It may hold the keys and values of that stretch (`kv`)
and the fixed-size states at its end (`fixed`); the two can be let go of separately, and a node may
be only a memory of having been there, so that a report can say `evicted` and not `new`. Terminal
nodes hold the end of one whole prompt, with its last logits, and serve only that identical prompt.

`match` makes and loses no snapshot. `hold` keeps a path alive. `insert` fills what is there.
`check` states the laws: held + evictable = total, and no snapshot without what it stands on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from keepsight.node import Node, Tensors
from keepsight.package import storage_bytes
from keepsight.prompt import Prompt, shift
from keepsight.store import DiskStore

_MAX_GHOSTS = 20_000  # nodes that hold nothing but the memory of having been there


@dataclass(frozen=True)
class Match:
    """The deepest usable snapshot for a prompt."""

    node: Node
    tier: str = "memory"

    @property
    def length(self) -> int:
        """Tokens that need not be computed."""
        return self.node.end

    @property
    def logits(self) -> torch.Tensor | None:
        """Set when the whole prompt is remembered."""
        return self.node.logits if self.node.terminal else None


@dataclass(frozen=True)
class Known:
    """How far a prompt agrees with anything ever seen, and why that was not all usable."""

    until: int  # tokens shared with the closest remembered path
    diverged: bool  # the closest path goes on differently (else it just ends)
    evicted_from: int | None = None
    elsewhere: bool = False  # it differs only in who made the features


class Tree:
    """All namespaces of one model under one budget of bytes."""

    def __init__(self, budget: int, has_fixed: bool, store: DiskStore | None = None) -> None:
        self.budget, self._has_fixed, self.store = budget, has_fixed, store
        self.roots: dict[str, Node] = {}
        self.nbytes = 0
        self.evictions = 0
        # Whether tensors from a file are of this model's making; the engine knows.
        self.fits: Callable[[Tensors, Tensors | None], bool] = lambda kv, fixed: True
        self._clock = itertools.count(1)

    def root(self, namespace: str) -> Node:
        """Where every path of a namespace begins."""
        if namespace not in self.roots:
            self.roots[namespace] = Node(None, 0, 0, namespace)
        return self.roots[namespace]

    # -- looking ---------------------------------------------------------------------------------

    def match(
        self,
        namespace: str,
        prompt: Prompt,
        next_cut: Callable[[int], int | None],
        loose: bool = False,
    ) -> Match:
        """The deepest usable snapshot strictly before the prompt's end, or its terminal entry.

        `next_cut` gives the boundary behind a position, or None when there is none. `loose` looks
        also for snapshots that stand elsewhere (decoded state, `exact=False`).
        """
        best = node = self.root(namespace)
        while True:
            terminal = self._child(node, prompt, len(prompt), "terminal")
            if terminal is not None and self._usable(terminal):
                return Match(terminal, self._tier(terminal))
            child = self._longest(node, prompt, next_cut(node.end), loose)
            if child is None or not (child.kv is not None or child.on_disk):
                break
            node = child
            if self._usable(node):
                best = node
        disk = best.parent is not None and self._tier(best) == "disk"
        return Match(best, "disk" if disk else "memory")

    def _longest(self, node: Node, prompt: Prompt, cut: int | None, loose: bool) -> Node | None:
        """The child at the next boundary, or (where decoded state is kept) beyond it."""
        best = None if cut is None else self._child(node, prompt, cut, "segment")
        if not loose:
            return best
        for child in node.children.values():
            if child.terminal or child.end >= len(prompt) or (best and child.end <= best.end):
                continue
            if child.end != cut and child.kv is not None and child.same_as(prompt):
                best = child
        return best

    def _child(self, node: Node, prompt: Prompt, end: int, kind: str) -> Node | None:
        digest = prompt.segment_digest(node.digest, node.end, end, kind)
        child = node.children.get(digest)
        if child is None and self.store is not None and self.store.has("snapshot", digest):
            child = self._new_node(node, prompt, end, digest, kind == "terminal")
            child.on_disk = True
        return child if child is not None and child.same_as(prompt) else None

    def _usable(self, node: Node) -> bool:
        """Whether a prompt can be continued from here: the intersection over all layers."""
        if node.on_disk:
            return True
        if node.kv is None or (self._has_fixed and node.fixed is None):
            return False
        return not node.terminal or node.logits is not None

    def _tier(self, node: Node) -> str:
        held = all(n.kv is not None for n in node.chain())
        states = node.fixed is not None or not self._has_fixed
        ends = node.logits is not None or not node.terminal
        return "memory" if held and states and ends else "disk"

    def known(self, namespace: str, prompt: Prompt) -> Known:
        """How far the prompt agrees with anything ever seen, for the report's reasons."""
        node = self.root(namespace)
        evicted: int | None = None
        while True:
            best, length = node.closest(prompt)
            if best is None:
                return Known(node.end, False, evicted)
            missing = best.kv is None or (self._has_fixed and best.fixed is None)
            gone = best.was_full and missing and not best.on_disk
            if evicted is None and gone and length == len(best.ids):
                evicted = node.end
            if length < len(best.ids) or best.terminal:
                until = node.end + length
                diverged = length < len(best.ids) and until < len(prompt)
                return Known(until, diverged, evicted, _made_elsewhere(best, prompt, until))
            node = best

    # -- holding ---------------------------------------------------------------------------------

    def hold(self, node: Node) -> None:
        """Keep a node and all it stands on until `release`."""
        tick = next(self._clock)
        for n in node.chain():
            n.holds += 1
            n.used = tick

    def release(self, node: Node) -> None:
        """Undo one `hold`."""
        for n in node.chain():
            n.holds -= 1
        self.fit()

    def load(self, node: Node, prompt: Prompt) -> bool:
        """Bring a held path from disk to memory. False when an entry is damaged or lies."""
        for n in node.chain():
            needs_fixed = n is node and self._has_fixed
            missing = n.kv is None or (needs_fixed and n.fixed is None)
            if missing and not self._load_one(n, needs_fixed):
                n.on_disk = False
                return False
        self.fit()
        return True

    def _load_one(self, node: Node, needs_fixed: bool) -> bool:
        found = self.store.get("snapshot", node.digest) if self.store is not None else None
        if self.store is None or found is None:
            return False
        tensors, record = found
        if not _belongs(node, tensors, record):
            self.store.reject("snapshot", node.digest, "it belongs to another path")
            return False
        state = self.store.get("state", node.digest) if needs_fixed else None
        if needs_fixed and (state is None or state[1].get("end") != node.end):
            return False
        kv = {name[3:]: t for name, t in tensors.items() if name.startswith("kv/")}
        if not self.fits(kv, None if state is None else state[0]):
            self.store.reject("snapshot", node.digest, "its tensors are not of this model's shape")
            return False
        before = node.nbytes
        node.logits, node.kv = tensors.get("logits"), kv
        if state is not None:
            node.fixed = state[0]
        node.was_full = True
        self.nbytes += node.nbytes - before
        return True

    # -- remembering -----------------------------------------------------------------------------

    def insert(
        self,
        parent: Node,
        prompt: Prompt,
        end: int,
        kv: Tensors,
        fixed: Tensors | None,
        logits: torch.Tensor | None = None,
        keep_on_disk: bool = True,
    ) -> Node:
        """Remember a snapshot behind `parent`; what exists is filled. It comes back held."""
        kind = "segment" if logits is None else "terminal"
        digest = prompt.segment_digest(parent.digest, parent.end, end, kind)
        node = parent.children.get(digest)
        if node is None:
            node = self._new_node(parent, prompt, end, digest, logits is not None)
        before = node.nbytes
        if node.kv is None:
            node.kv = kv
        if node.fixed is None and self._has_fixed:
            node.fixed = fixed
        node.logits = logits if node.logits is None else node.logits
        self.nbytes += node.nbytes - before
        node.was_full = True
        self.hold(node)
        if self.store is not None and keep_on_disk and not node.on_disk:
            self._write(node)
        self.fit()
        return node

    def _new_node(
        self, parent: Node, prompt: Prompt, end: int, digest: str, terminal: bool
    ) -> Node:
        start = parent.end
        spans = shift(prompt.clip(start, end), -start)
        node = Node(parent, start, end, digest, prompt.ids[start:end].copy(), spans, terminal)
        parent.adopt(node)
        return node

    def _write(self, node: Node) -> None:
        tensors = {f"kv/{name}": tensor for name, tensor in (node.kv or {}).items()}
        tensors["ids"] = torch.from_numpy(node.ids)
        if node.logits is not None:
            tensors["logits"] = node.logits
        if self.store is not None:
            if node.fixed:
                # The state first: a snapshot that is there has all that it needs.
                self.store.put("state", node.digest, node.fixed, {"end": node.end})
            self.store.put("snapshot", node.digest, tensors, _path_of(node))
        node.on_disk = True

    # -- letting go ------------------------------------------------------------------------------

    def fit(self) -> None:
        """Let go of the least recently used until the budget holds; what is held stays."""
        if self.nbytes <= self.budget:
            return
        self.evict(self.nbytes - self.budget)

    def evict(self, nbytes: int) -> int:
        """Free at least `nbytes` if that much is evictable; the bytes freed."""
        goal = self.nbytes - nbytes
        start = self.nbytes
        while self.nbytes > goal:
            candidates = sorted(self._evictable(), key=lambda node: node.used)
            if not candidates:
                break
            for node in candidates:
                self._drop(node)
                if self.nbytes <= goal:
                    break
        self._prune_ghosts()
        return start - self.nbytes

    def _evictable(self) -> Iterator[Node]:
        """Nodes that nothing holds and nothing stands on, and inner nodes' fixed states."""
        for node in self.nodes():
            last = not any(child.kv is not None for child in node.children.values())
            if not node.holds and ((last and node.kv is not None) or node.fixed is not None):
                yield node

    def _drop(self, node: Node) -> None:
        before = node.nbytes
        node.fixed = None
        if not any(child.kv is not None for child in node.children.values()):
            node.kv = node.logits = None
        self.nbytes -= before - node.nbytes
        self.evictions += 1

    def _prune_ghosts(self) -> None:
        ghosts = [n for n in self.nodes() if n.kv is None and not n.children and not n.holds]
        if len(ghosts) > _MAX_GHOSTS:
            for node in sorted(ghosts, key=lambda n: n.used)[: len(ghosts) - _MAX_GHOSTS]:
                if node.parent is not None:
                    node.parent.disown(node)

    def clear(self) -> None:
        """Forget everything that nobody holds."""
        self.evict(self.nbytes)
        self.roots = {name: root for name, root in self.roots.items() if _held(root)}

    # -- the books -------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node of every namespace, roots left out."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def held_bytes(self) -> int:
        """Bytes that a `hold` protects."""
        return storage_bytes(t for n in self.nodes() if n.holds for t in n.tensors())

    def evictable_bytes(self) -> int:
        """Bytes that could be freed now, all standing on what is freed first."""
        return storage_bytes(t for n in self.nodes() if not n.holds for t in n.tensors())

    def check(self) -> None:
        """Raise AssertionError where the books or the laws are broken."""
        total = storage_bytes(t for n in self.nodes() for t in n.tensors())
        held, evictable = self.held_bytes(), self.evictable_bytes()
        if not total == held + evictable == self.nbytes:
            raise AssertionError(f"held {held} + evictable {evictable} != {self.nbytes} ({total})")
        for node in self.nodes():
            parent = node.parent
            if parent is None or parent.children.get(node.digest) is not node:
                raise AssertionError("a node is not where its parent says")
            if node.start != parent.end or len(node.ids) != node.end - node.start:
                raise AssertionError("a node does not begin where its parent ends")
            if node.kv is not None and parent.parent is not None and parent.kv is None:
                raise AssertionError("a snapshot is kept without what it stands on")
            if node.holds < 0:
                raise AssertionError("a node was released more often than held")
        if self.nbytes > self.budget and evictable:
            raise AssertionError(f"{self.nbytes} bytes over a budget of {self.budget}")


def _held(root: Node) -> bool:
    stack: list[Node] = [root]
    while stack:
        node = stack.pop()
        if node.holds:
            return True
        stack.extend(node.children.values())
    return False


def _path_of(node: Node) -> dict[str, Any]:
    """What a snapshot on disk says of its place, to be compared when it is read."""
    return {
        "parent": node.parent.digest if node.parent is not None else "",
        "start": node.start,
        "end": node.end,
        "spans": [span.plain()[:4] for span in node.spans],
    }


def _belongs(node: Node, tensors: Tensors, record: dict[str, Any]) -> bool:
    """Whether what was read is what stands at this node: its path, and a row for every token."""
    ids, path = tensors.get("ids"), _path_of(node)
    if ids is None or not np.array_equal(ids.numpy(), node.ids):
        return False
    if any(record.get(name) != value for name, value in path.items()):
        return False
    # What stands beside the sequence ("cross") has as many rows as the media have.
    kv = [t for n, t in tensors.items() if n.startswith("kv/") and not n.startswith("kv/cross.")]
    rows = [tensor.shape[-2] if tensor.dim() > 1 else -1 for tensor in kv]
    ends = "logits" in tensors or not node.terminal
    return ends and all(count == len(node.ids) for count in rows)


def _made_elsewhere(node: Node, prompt: Prompt, until: int) -> bool:
    """Whether the paths part only because the same image was encoded in another way."""
    here = next((s for s in prompt.spans if s.start <= until < s.end), None)
    there = next((s for s in shift(node.spans, node.start) if s.start <= until < s.end), None)
    if here is None or there is None:
        return False
    return here.identity == there.identity and here.feature_id != there.feature_id


def longest_known(tree: Tree, namespaces: Iterable[str], prompt: Prompt) -> int:
    """The longest prefix that any of some other namespaces has seen."""
    return max((tree.known(name, prompt).until for name in namespaces), default=0)
