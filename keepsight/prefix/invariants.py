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
    held = Counter(node.parent for node in nodes if node.holds)
    for node in [*nodes, *residency.roots.values()]:
        _require(node.holds >= held[node], "a node was released more often than held")
        _require(not node.holds or node.home.holds > 0, "a turn in flight is not counted")
    for node in nodes:
        _require(
            node.gone == (node in residency.detached) and (bool(node.holds) or not node.gone),
            "a forgotten node can be reached, or stays in memory though nothing holds it",
        )
        for part in node.parts:
            _check_order(part)
    for root in residency.roots.values():
        pins = sum(node.pinned for node in root.below())
        _require(root.home.pins == pins, f"the pins of {root.home.tenant!r} are miscounted")
    _within_budgets(residency, nodes)
    lost = [n for n in residency.nodes() if n.is_record and n not in residency.records]
    _require(not lost, "a leaf without tensors would stay for ever")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _conserved(tier: Tier, parts: list[Part]) -> None:
    """Held plus evictable bytes are all bytes, and equal the unique bytes of storages."""
    total = storage_bytes(t for part in parts for t in (part.tensors or {}).values())
    held = storage_bytes(t for p in parts if p.node.holds for t in (p.tensors or {}).values())
    free = storage_bytes(t for p in parts if not p.node.holds for t in (p.tensors or {}).values())
    _require(
        total == held + free == tier.nbytes and held == tier.held,
        f"{tier.name}: held {held} + evictable {free} != {total}; counted {tier.nbytes}, of which "
        f"{tier.held} held",
    )
    whose, owned = Counter[str](), Counter[str]()
    for part in parts:
        whose[part.node.home.tenant] += part.nbytes
        owned[part.node.home.account] += part.nbytes
    for true, counted in ((whose, tier.bytes_of), (owned, tier.owned)):
        _require(+true == +Counter(counted), f"{tier.name}: they have {true}, not {counted}")
    rows = sum(part is part.node.rows for part in parts)
    _require(tier.snapshots == rows, f"{tier.name}: snapshots are miscounted")
    waiting = all(tier.waits(part) for part in parts if tier.may_go(part))
    _require(waiting, f"{tier.name}: a part can be evicted and is not queued")


def _in_its_place(node: Node) -> None:
    parent = node.parent
    if parent is None or parent.children.get(node.key) is not node:
        raise AssertionError("a node is not where its parent says")
    begins = node.first_key() == node.key[: len(node.first_key())]
    _require(begins, "a node is not found by its first token")
    right = node.start == parent.end and len(node.ids) == node.end - node.start > 0
    _require(right and node.code == node.ids.tobytes(), "a node is not where its parent ends")
    inside = all(node.start <= span.start < span.end <= node.end for span in node.spans)
    _require(inside, "media of a node lie beside it")


def _check_order(part: Part) -> None:
    """No part is in a nearer tier than what it depends on, and dependents are counted correctly."""
    _require((part.tensors is None) == (not part.tier), "tensors without a tier, or the reverse")
    ordered = part.base is None or _DEPTH[part.base.tier] <= _DEPTH[part.tier]
    _require(ordered, "a snapshot is kept without what it depends on")
    rows = [t for n, t in (part.tensors or {}).items() if n[:6] != "cross."]
    count = len(part.node.ids)
    whole = part is part.node.state or all(t.dim() < 2 or t.shape[-2] == count for t in rows)
    _require(whole, "a node has rows of other tokens")
    for tier in (DEVICE, HOST):
        dependents = sum(other.tier == tier for other in part.dependents())
        # Forgotten nodes are no longer among the children.
        counted = part.on[tier]
        right = counted == dependents or (counted > dependents and part.node.holds > 0)
        _require(right, "dependents of a part are miscounted")


def _within_budgets(residency: Residency, nodes: list[Node]) -> None:
    slack = residency.budget // 8 if residency.late else 0
    for tier, budget in (
        (residency.device, residency.room + slack),
        (residency.host, residency.host_budget),
    ):
        within = tier.nbytes <= budget or tier.nbytes <= tier.held
        _require(within, f"{tier.name}: {tier.nbytes} bytes over a budget of {budget}")
        for account, nbytes in tier.owned.items():
            if residency.quota is None or residency.late:
                break
            parts = [p for n in nodes if n.holds and n.home.account == account for p in n.parts]
            held = sum(part.nbytes for part in parts if part.tier == tier.name)
            within = nbytes <= residency.quota or nbytes <= held
            _require(within, f"{tier.name}: {account!r} has {nbytes} of {residency.quota}")
