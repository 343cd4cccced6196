"""Checks the invariants of the tree by walking through all of it, independent of its counters.

Tests call it after every operation; it is too slow for anything else.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from keepsight.formats.package import storage_bytes
from keepsight.prefix.node import DEVICE, HOST, Node, Part

if TYPE_CHECKING:
    from keepsight.prefix.residency import Residency
    from keepsight.prefix.tier import Tier

_DEPTH = {DEVICE: 0, HOST: 1, "": 2}


def audit(residency: Residency) -> None:
    """Raise AssertionError if an invariant is broken."""
    nodes = [*residency.nodes(), *residency.detached]
    for tier in (residency.device, residency.host):
        _conserved(tier, [part for node in nodes for part in node.parts if part.tier == tier.name])
    for node in residency.nodes():
        _in_its_place(node)
    for node in nodes:
        if node.holds < 0 or node.home.holds < node.holds:
            raise AssertionError("a node was released more often than held")
        if node.gone != (node in residency.detached) or (node.gone and not node.holds):
            raise AssertionError(
                "a forgotten node can still be reached, or stays in memory though nothing holds it"
            )
        for part in node.parts:
            _check_order(part)
    for root in residency.roots.values():
        if root.home.pins != sum(node.pinned for node in root.below()):
            raise AssertionError(f"the pins of {root.home.tenant!r} are miscounted")
    _within_budgets(residency)
    _found_by_path(residency)
    residency.tombstones.check()


def _found_by_path(residency: Residency) -> None:
    """Every reachable node is found by its path, and no other node is."""
    reached = [*residency.nodes(), *residency.roots.values()]
    if len(residency.paths) != len(reached) or not all(node in residency.paths for node in reached):
        raise AssertionError("the index of paths is not that of the nodes")


def _conserved(tier: Tier, parts: list[Part]) -> None:
    """Held plus evictable bytes are all bytes, and equal the unique bytes of storages."""
    total = storage_bytes(t for part in parts for t in (part.tensors or {}).values())
    held = storage_bytes(t for p in parts if p.node.holds for t in (p.tensors or {}).values())
    free = storage_bytes(t for p in parts if not p.node.holds for t in (p.tensors or {}).values())
    if not total == held + free == tier.nbytes or held != tier.held:
        raise AssertionError(
            f"{tier.name}: held {held} + evictable {free} != {total}; counted {tier.nbytes}, "
            f"of which {tier.held} held"
        )
    whose: Counter[str] = Counter()
    for part in parts:
        whose[part.node.home.tenant] += part.nbytes
    if +whose != +Counter(tier.bytes_of):
        raise AssertionError(f"{tier.name}: tenants have {whose}, the counters say {tier.bytes_of}")
    owned: Counter[str] = Counter()
    for part in parts:
        owned[part.node.home.account] += part.nbytes
    if +owned != +Counter(tier.owned):
        raise AssertionError(f"{tier.name}: accounts have {owned}, the counters say {tier.owned}")
    if tier.snapshots != sum(part is part.node.rows for part in parts):
        raise AssertionError(f"{tier.name}: snapshots are miscounted")
    if not all(tier.waits(part) for part in parts if tier.may_go(part)):
        raise AssertionError(f"{tier.name}: a part can be evicted and is not queued")


def _in_its_place(node: Node) -> None:
    parent = node.parent
    if parent is None or parent.children.get(node.digest) is not node:
        raise AssertionError("a node is not where its parent says")
    if node.start != parent.end or len(node.ids) != node.end - node.start:
        raise AssertionError("a node does not start at its parent's end")


def _check_order(part: Part) -> None:
    """No part is in a nearer tier than what it depends on, and dependents are counted correctly."""
    if (part.tensors is None) != (not part.tier):
        raise AssertionError("a part names a tier and has no tensors, or the reverse")
    if part.base is not None and _DEPTH[part.base.tier] > _DEPTH[part.tier]:
        raise AssertionError("a snapshot is kept without what it depends on")
    for tier in (DEVICE, HOST):
        dependents = sum(other.tier == tier for other in part.dependents())
        # Forgotten nodes are no longer among the children.
        counted = part.bears(tier)
        if counted < dependents or (counted > dependents and not part.node.holds):
            raise AssertionError("dependents of a part are miscounted")


def _within_budgets(residency: Residency) -> None:
    slack = residency.budget // 8 if residency.late else 0
    for tier, budget in (
        (residency.device, residency.room + slack),
        (residency.host, residency.host_budget),
    ):
        if tier.nbytes > budget and tier.nbytes > tier.held:
            raise AssertionError(f"{tier.name}: {tier.nbytes} bytes over a budget of {budget}")
        if residency.quota is None or residency.late:
            continue
        for account, nbytes in tier.owned.items():
            held = sum(
                part.nbytes
                for node in [*residency.nodes(), *residency.detached]
                for part in node.parts
                if node.holds and part.tier == tier.name and node.home.account == account
            )
            if nbytes > residency.quota and nbytes > held:
                raise AssertionError(f"{tier.name}: {account!r} has {nbytes} of {residency.quota}")
