"""Checks the invariants of the tree by walking through all of it, independent of its counters.

Tests call it after every operation, as `tree.check()` and `runtime.check()`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from keepsight.core.runtime import Runtime
from keepsight.formats.package import storage_bytes
from keepsight.prefix.node import DEVICE, HOST, NOWHERE, Node
from keepsight.prefix.residency import Residency, Tier
from keepsight.store import MemoryCache
from keepsight.system.accounts import account_of

_DEPTH = {DEVICE: 0, HOST: 1, NOWHERE: 2}


def audit(residency: Residency) -> None:
    """Raise AssertionError if an invariant is broken."""
    reachable = list(residency.nodes())
    nodes = [*reachable, *residency.detached]
    for tier in (residency.device, residency.host):
        _conserved(tier, [node for node in nodes if node.tier == tier.name])
    for node in reachable:
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
        _has_its_rows(node)
    for root in residency.roots.values():
        pins = sum(node.pinned for node in root.below())
        _require(root.home.pins == pins, f"the pins of {root.home.tenant!r} are miscounted")
    _within_budgets(residency, nodes)
    lost = [n for n in reachable if n.is_record and n not in residency.records]
    _require(not lost, "a leaf without tensors would stay for ever")


def _audit_all(runtime: Runtime) -> None:
    audit(runtime.tree)
    caches = runtime.caches
    for cache in (caches.pixels, caches.packages, caches.aliases, caches.downloads, caches.given):
        audit_cache(cache)


def audit_cache(cache: MemoryCache[Any]) -> None:
    """Each count of a cache is that of what it holds, and budget and quota hold."""
    of, owned = Counter[str](), Counter[str]()
    for (tenant, _), held in cache._held.items():
        _require(held.nbytes == cache._size(held.item), "a thing changed its size in memory")
        of[tenant] += held.nbytes
        owned[account_of(tenant)] += held.nbytes
    counts = [(cache._of, of), (cache._owned, owned)]
    _require(cache._pins <= cache._held.keys(), "a pin is left of what is gone")
    _require(all(+told == +true for told, true in counts), f"counted {counts}")
    _require(cache.nbytes == of.total() <= cache.budget, f"{cache.nbytes} bytes, not {of}")
    _require(all(n <= (cache.quota or n) for n in owned.values()), f"over quota: {owned}")


Residency.check = audit  # type: ignore[attr-defined]
Runtime.check = _audit_all  # type: ignore[attr-defined]


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _conserved(tier: Tier, nodes: list[Node]) -> None:
    """Held plus evictable bytes are all bytes, and equal the unique bytes of storages; and what
    nothing holds is in order, each node before the one that it depends on."""
    total = storage_bytes(t for node in nodes for t in node.tensors())
    held = storage_bytes(t for node in nodes if node.holds for t in node.tensors())
    free = storage_bytes(t for node in nodes if not node.holds for t in node.tensors())
    _require(
        total == held + free == tier.nbytes and held == tier.held,
        f"{tier.name}: held {held} + evictable {free} != {total}; counted {tier.nbytes}, of which "
        f"{tier.held} held",
    )
    whose, owned = Counter[str](), Counter[str]()
    for node in nodes:
        whose[node.home.tenant] += node.nbytes
        owned[node.home.account] += node.nbytes
    for true, counted in ((whose, tier.bytes_of), (owned, tier.owned)):
        _require(+true == +counted, f"{tier.name}: they have {true}, not {counted}")
    _require(tier.snapshots == len(nodes), f"{tier.name}: snapshots are miscounted")
    order = {node: place for place, node in enumerate(tier.order)}
    _require(set(order) == {n for n in nodes if not n.holds}, f"{tier.name}: the order is wrong")
    for node, place in order.items():
        above = order.get(node.parent, place + 1) if node.parent is not None else place + 1
        _require(place < above, f"{tier.name}: a node would go before what depends on it")


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
    nearer = parent.parent is None or _DEPTH[parent.tier] <= _DEPTH[node.tier]
    _require(nearer, "a node is kept without what it depends on")


def _has_its_rows(node: Node) -> None:
    there = bool(node.rows) or bool(node.ends)
    _require(bool(node.tier) or not there, "tensors without a tier")
    rows = [t for name, t in node.rows.items() if not name.startswith("cross.")]
    whole = all(t.dim() < 2 or t.shape[-2] == len(node.ids) for t in rows)
    _require(whole, "a node has rows of other tokens")


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
            mine = [n for n in nodes if n.holds and n.home.account == account]
            held = sum(node.nbytes for node in mine if node.tier == tier.name)
            within = nbytes <= residency.quota or nbytes <= held
            _require(within, f"{tier.name}: {account!r} has {nbytes} of {residency.quota}")
