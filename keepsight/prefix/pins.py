"""Limits how much of a tree may be pinned: pins count against quota and budget.

A pin holds a node and everything it depends on; each node counts once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepsight.errors import PinsFull
from keepsight.prefix.node import Node

if TYPE_CHECKING:
    from keepsight.prefix.residency import Residency


def check_room(residency: Residency, node: Node) -> None:
    """Refuse a pin that exceeds quota or budget."""
    roots = [root for root in residency.roots.values() if root.home.pins]
    held = {n for root in roots for one in root.below() if one.pinned for n in one.chain()}
    held.update(node.chain())
    own = sum(n.nbytes for n in held if n.home.account == node.home.account)
    if residency.quota is not None and own > residency.quota:
        raise PinsFull.over("prompts", own, residency.quota, "tenant_quota")
    if sum(n.nbytes for n in held) > residency.budget:
        raise PinsFull.no_room("prompts", "cache_budget", residency.budget)


def set_pinned(node: Node, on: bool) -> None:
    """Mark a node as pinned or not, and count its tenant's pins."""
    node.pinned = on
    node.home.pins += 1 if on else -1


def pinning(residency: Residency) -> set[str]:
    """The tenants that have pins."""
    return {root.home.tenant for root in residency.roots.values() if root.home.pins}
