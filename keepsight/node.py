"""One stretch of a path between two boundaries, and what is remembered of it.

A node compares: ids and spans in full, never digests alone, so that a hit is a hit. It knows its
parent and its children; what is kept, what is let go and what is on a disk is the tree's business.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from keepsight.package import storage_bytes
from keepsight.prompt import RUN, Prompt, Span, common, shift

Tensors = dict[str, torch.Tensor]


@dataclass(eq=False)
class Node:
    """One stretch of a path, and what is remembered of it."""

    parent: Node | None
    start: int
    end: int
    digest: str
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    spans: tuple[Span, ...] = ()  # relative to `start`
    terminal: bool = False
    kv: Tensors | None = None
    fixed: Tensors | None = None
    logits: torch.Tensor | None = None
    children: dict[str, Node] = field(default_factory=dict)
    order: list[Node] = field(default_factory=list)  # the children sorted by `code`
    used: int = 0
    holds: int = 0
    was_full: bool = False  # it held a snapshot once: absence now means eviction
    on_disk: bool = False

    @property
    def nbytes(self) -> int:
        """Unique storage bytes of its tensors."""
        return storage_bytes(self.tensors())

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that takes memory here."""
        for held in (self.kv, self.fixed):
            yield from (held or {}).values()
        if self.logits is not None:
            yield self.logits

    def chain(self) -> list[Node]:
        """From the first stretch to this one, the root left out."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def code(self) -> bytes:
        """The stretch spelled so that neighbours in sorted order share the longest prefix.

        For finding the closest child among many, never for identity.
        """
        return _code(self.ids, self.spans)

    def adopt(self, child: Node) -> None:
        """Take a child in."""
        self.children[child.digest] = child
        bisect.insort(self.order, child, key=Node.code)

    def disown(self, child: Node) -> None:
        """Let a child go."""
        del self.children[child.digest]
        self.order = [other for other in self.order if other is not child]

    def closest(self, prompt: Prompt) -> tuple[Node | None, int]:
        """The child that shares most with the prompt from here on, and how many tokens."""
        end = min(len(prompt), self.end + 2 * RUN)
        ids, spans = prompt.ids[self.end : end], shift(prompt.clip(self.end, end), -self.end)
        spot = bisect.bisect_left(self.order, _code(ids, spans), key=Node.code)
        best, rank = None, (-1, False, False)
        for child in self.order[max(0, spot - 2) : spot + 2]:
            shared = common(child.ids, child.spans, ids, spans)
            # Of equals: first one that agrees in full and may go on, then one that goes on
            # differently, last one that only ends.
            whole = shared == len(child.ids)
            mine = (shared, whole and not child.terminal, not whole)
            if mine > rank:
                best, rank = child, mine
        return best, rank[0]

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
