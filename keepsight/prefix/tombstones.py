"""Nodes that hold nothing any more but the memory of having been there.

They let a report say `evicted` and not `new`. Their ids take memory that no tier counts, so both
their number and their bytes are bounded; the oldest go first.
"""

from __future__ import annotations

from collections.abc import Callable

from keepsight.prefix.node import Node

MAX_NODES, MAX_BYTES = 20_000, 32 << 20
_OVERHEAD = 1024  # bytes of a node beside its ids


class Tombstones:
    """Tombstones, the oldest first. `forget` is called with each that has to go."""

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
