"""Which nodes of a tenant have which path, whatever their namespace.

A report says of a miss that other weights or settings know the prompt. Weights that change with
every step of a training leave a namespace each, so that is looked up by the path and never by a
walk through all namespaces.
"""

from __future__ import annotations

from keepsight.prefix.node import Home, Node

_LATEST = 4  # of the namespaces that know a path; one is enough for a reason


class Paths:
    """Nodes by tenant and by the digest of their path. A root has the empty path."""

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
