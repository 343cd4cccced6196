"""The ways that prompts lately took through the tree, so that the next one need not search them.

A conversation sends its whole history with each turn. As far as its ids and spans are those of an
earlier prompt, compared in full, and as nothing was put beside the nodes on that prompt's way, the
search would choose the same nodes again; so it goes on behind them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from keepsight.prefix.node import Node
from keepsight.prefix.prompt import Prompt, Span

MOST = 32  # prompts, of all namespaces together


@dataclass(eq=False)
class Trail:
    """One prompt, and the nodes that a search went all the way through, each with the version of
    its parent."""

    root: Node
    ids: np.ndarray
    spans: tuple[Span, ...]
    nodes: list[Node] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def end(self) -> Node:
        """The node that a search goes on from."""
        return self.nodes[-1] if self.nodes else self.root

    def note(self, parent: Node, child: Node) -> None:
        """Count a node in."""
        self.nodes.append(child)
        self.versions.append(parent.version)

    def shares(self, other: Trail, more_than: int) -> int:
        """How many leading tokens two prompts share, in ids and spans; 0 where certainly not more
        than so many."""
        n = min(len(self.ids), len(other.ids))
        if n <= more_than or self.ids[more_than] != other.ids[more_than]:
            return 0
        different = self.ids[:n] != other.ids[:n]
        first = int(different.argmax())
        return self._spans_shared(other, first if different[first] else n)

    def _spans_shared(self, other: Trail, limit: int) -> int:
        """The beginning of the first span that only one of them has, or `limit`."""
        pairs = itertools.zip_longest(self.spans, other.spans)
        for one, two in pairs:
            start = min(span.start for span in (one, two) if span is not None)
            if start >= limit:
                break
            if one != two:
                return start
        return limit


class Trails:
    """The latest trails, the most recent last."""

    def __init__(self) -> None:
        self._latest: list[Trail] = []

    def begin(self, root: Node, prompt: Prompt, stands: Callable[[Node], bool]) -> Trail:
        """A trail for a prompt, along the one that shares most with it as far as that holds still:
        as long as a node `stands`. It is remembered, and grows by what is noted."""
        made, best, most = Trail(root, prompt.ids, prompt.spans), None, 0
        for trail in reversed(self._latest):
            if trail.root is root and (shared := trail.shares(made, most)) > most:
                best, most = trail, shared
        if best is not None:
            count = _standing(best, most, stands)
            made.nodes, made.versions = best.nodes[:count], best.versions[:count]
            if most == len(best.ids):  # it goes on from there
                self._latest.remove(best)
        self._latest.append(made)
        del self._latest[:-MOST]
        return made

    def clear(self) -> None:
        """Forget all: what was deleted must not be found here."""
        self._latest.clear()

    def __len__(self) -> int:
        return len(self._latest)


def _standing(trail: Trail, shared: int, stands: Callable[[Node], bool]) -> int:
    """How many nodes of a trail another prompt goes through too, of which it shares so much."""
    parent = trail.root
    for count, (node, version) in enumerate(zip(trail.nodes, trail.versions, strict=True)):
        # What ends where the prompts part may not be the closest any more.
        if parent.version != version or node.end >= shared or not stands(node):
            return count
        parent = node
    return len(trail.nodes)
