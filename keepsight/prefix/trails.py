"""The paths that recent prompts took through the tree, so that the next lookup can skip them.

A conversation sends its whole history with each turn. While its ids and spans equal those of an
earlier prompt, compared in full, and no nodes were added beside that prompt's path, a search would
choose the same nodes again; so it starts after them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from keepsight.prefix.node import Node
from keepsight.prefix.prompt import Prompt, Span

MOST = 32  # prompts, in all namespaces together


@dataclass(eq=False)
class Trail:
    """One prompt, and the nodes that a search passed completely, each with its parent's version."""

    root: Node
    ids: np.ndarray
    spans: tuple[Span, ...]
    nodes: list[Node] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def end(self) -> Node:
        """The node from which a search continues."""
        return self.nodes[-1] if self.nodes else self.root

    def note(self, parent: Node, child: Node) -> None:
        """Append a node."""
        self.nodes.append(child)
        self.versions.append(parent.version)

    def shares(self, other: Trail, more_than: int) -> int:
        """The number of leading tokens two prompts share, in ids and spans; 0 if surely not more
        than `more_than`."""
        n = min(len(self.ids), len(other.ids))
        if n <= more_than or self.ids[more_than] != other.ids[more_than]:
            return 0
        different = self.ids[:n] != other.ids[:n]
        first = int(different.argmax())
        return self._spans_shared(other, first if different[first] else n)

    def _spans_shared(self, other: Trail, limit: int) -> int:
        """The start of the first span that only one of them has, or `limit`."""
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
        """A trail for a prompt, copied from the one that shares the most, up to the first node that
        no longer `stands`. It is remembered, and grows with each noted node."""
        made, best, most = Trail(root, prompt.ids, prompt.spans), None, 0
        for trail in reversed(self._latest):
            if trail.root is root and (shared := trail.shares(made, most)) > most:
                best, most = trail, shared
        if best is not None:
            count = _valid_length(best, most, stands)
            made.nodes, made.versions = best.nodes[:count], best.versions[:count]
            if most == len(best.ids):  # the search continues there
                self._latest.remove(best)
        self._latest.append(made)
        del self._latest[:-MOST]
        return made

    def clear(self) -> None:
        """Drop all trails, so that deleted nodes are not found."""
        self._latest.clear()

    def __len__(self) -> int:
        return len(self._latest)


def _valid_length(trail: Trail, shared: int, stands: Callable[[Node], bool]) -> int:
    """Number of nodes of a trail that another prompt passes too, given the tokens they share."""
    parent = trail.root
    for count, (node, version) in enumerate(zip(trail.nodes, trail.versions, strict=True)):
        # Where the prompts diverge, this node may no longer be the closest.
        if parent.version != version or node.end >= shared or not stands(node):
            return count
        parent = node
    return len(trail.nodes)
