"""What the tree holds in each tier of memory, for which tenant, and what goes first.

Edges are split at any token when a prompt parts there; each half then has its rows in memory of its
own. No node is in a nearer tier than the one before it, and whoever uses a node uses all before it.
So the first in order of last use is a leaf, and it goes first: from the device to the host if that
has a budget, else it is dropped; a store has had it since it was inserted. Copies are made after a
turn only, so that no first token waits for them; until then the device may exceed its budget by an
eighth. What has gone stays as a record of its path, so that a report can say `evicted`.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from keepsight.errors import InputError, PinsFull
from keepsight.formats.package import storage_bytes
from keepsight.prefix.match import Match
from keepsight.prefix.node import (
    DEVICE,
    HOST,
    NOWHERE,
    Home,
    Key,
    Node,
    Received,
    Stored,
    Tensors,
    cut,
)
from keepsight.prefix.prompt import Prompt
from keepsight.store import Store

MAX_BARRED = 10_000  # images deleted while turns of one namespace are in flight
MAX_RECORDS = 4096  # paths without tensors that are remembered, to say `evicted`
SLACK = 8  # share by which the device may exceed its budget during a turn


class Tier:
    """One tier of memory: its bytes, in total, per tenant, and per account for quotas; and those of
    its nodes that nothing holds, in order of last use."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nbytes = self.held = self.snapshots = 0
        self.bytes_of, self.owned = Counter[str](), Counter[str]()
        self.order: OrderedDict[Node, None] = OrderedDict()

    def count(self, node: Node, sign: int) -> None:
        nbytes, home = sign * node.nbytes, node.home
        self.nbytes += nbytes
        self.snapshots += sign
        self.held += nbytes if node.holds else 0
        for table, name in ((self.bytes_of, home.tenant), (self.owned, home.account)):
            table[name] += nbytes
            if not table[name]:  # the number of tenants is unbounded
                del table[name]

    def least(self) -> Node | None:
        """The node that goes next: nothing in this tier depends on it."""
        return next(iter(self.order), None)

    def stats(self, budget: int) -> dict[str, int]:
        return {
            "bytes": self.nbytes,
            "budget": budget,
            "held_bytes": self.held,
            "evictable_bytes": self.nbytes - self.held,
            "snapshots": self.snapshots,
        }


class Residency:
    """All namespaces of one model, with one budget of bytes per tier of memory."""

    def __init__(
        self,
        budget: int,
        has_fixed: bool,
        store: Store | None = None,
        *,
        reuse: str = "prefix",
        host_budget: int = 0,
        quota: int | None = None,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget, self.host_budget, self.quota, self.ttl = budget, host_budget, quota, ttl
        self.has_fixed, self.store, self.reuse = has_fixed, store, reuse
        self.roots: dict[str, Node] = {}
        self._homes: dict[str, Home] = {}  # whose each namespace is, cleared or not
        self.device, self.host = Tier(DEVICE), Tier(HOST)
        self._tiers = {DEVICE: self.device, HOST: self.host}
        self.evictions = self.demotions = self.promotions = 0
        self.late = False  # whether a budget is exceeded until the turn has ended
        self.detached: set[Node] = set()  # forgotten, but held still
        self.records: dict[Node, None] = {}  # leaves without tensors, the oldest first
        # Moves tensors from a file to the model's devices; None if they do not fit the model.
        self.receive: Callable[[Tensors, Tensors | None], Received | None] = lambda r, f: (r, f)
        # The engine's idle lanes hold copies of what is here, within the same budget. True: all of
        # them must go; False: those that lie on what is gone.
        self.on_forget: Callable[[bool], None] = lambda everything: None
        self.beside: Callable[[], int] = lambda: 0
        self._now, self._count = clock, itertools.count(1)
        self.tick = 0
        self._touched: set[str] = set()  # accounts that may exceed their quota
        self._expiring: list[tuple[float, int, Node]] = []

    # -- namespaces --------------------------------------------------------------------------------

    def root(
        self,
        namespace: str,
        tenant: str | None = None,
        store: Store | None = None,
        private: bool = False,
    ) -> Node:
        """The root of all paths of a namespace; it belongs to one tenant and one store, or to this
        process alone if it is private."""
        home = self._homes.get(namespace)
        if home is None:
            home = self._homes[namespace] = Home(namespace, tenant or "")
            own = self.store is not None and home.tenant
            home.store = self.store.tenant(home.tenant) if own and self.store else self.store
        if tenant not in (None, home.tenant):
            raise InputError("this namespace belongs to another tenant; each has its own")
        home.store = None if private else store or home.store
        if namespace not in self.roots:
            self.roots[namespace] = root = Node(None, home=home)
            root.entry = Stored(namespace, 0, 0)
        return self.roots[namespace]

    def namespaces(self, tenant: str = "") -> list[str]:
        return [name for name, root in self.roots.items() if root.home.tenant == tenant]

    def nodes(self, tenant: str | None = None) -> Iterator[Node]:
        """Every reachable node, of all tenants or of one, without roots."""
        for root in list(self.roots.values()):
            if tenant in (None, root.home.tenant):
                yield from (node for node in root.below() if node is not root)

    # -- edges -------------------------------------------------------------------------------------

    def key(self, node: Node, prompt: Prompt) -> Key:
        """The key of the child of a node that a prompt goes on with. Where what comes later changes
        the rows before it, prompts that differ in it share nothing."""
        key = prompt.key(node.end)
        if node.parent is None and self.reuse != "prefix":
            key += (prompt.spans,) if self.reuse == "same media" else (prompt.spans, prompt.code)
        return key

    def edge(self, node: Node, prompt: Prompt, end: int) -> Node:
        """The next edge of a prompt's path, no longer than to `end`: split or made if needed."""
        key = self.key(node, prompt)
        child = node.children.get(key)
        if child is not None:
            return self.split(child, min(end, node.end + child.shared(prompt)))
        new = Node(node, node.end, prompt.ids[node.end : end].copy(), prompt.clip(node.end, end))
        new.key, node.children[key] = key, new
        self._will_expire(new, None if self.ttl is None else self._now() + self.ttl)
        return new

    def split(self, node: Node, at: int) -> Node:
        """The node that ends at a token of an edge. The end of the edge stays the node it is."""
        if at == node.end or node.parent is None:
            return node
        size, start, ids, spans = at - node.start, node.start, node.ids, node.spans
        node.settled()
        halves = [cut(node.rows, *its, len(ids)) for its in ((0, size), (size, len(ids)))]
        before = tuple(s.clip(start, at) for s in spans if s.start < at)
        upper = Node(node.parent, start, ids[:size].copy(), before)
        upper.key, upper.entry, upper.leased = node.key, node.entry, node.leased
        upper.holds, upper.was_here = int(node.holds > 0), node.was_here
        node.parent.children[node.key] = upper
        node.take(at, ids[size:].copy(), tuple(s.clip(at, node.end) for s in spans if s.end > at))
        node.parent, node.key = upper, node.first_key()
        upper.children[node.key] = node
        if node.tier:
            upper.way = node.way
            tier, ends = self._tiers[node.tier], node.ends
            self._put(node, halves[1], ends, tier)
            self._put(upper, halves[0], {}, tier)
            self._touch(upper)
        self._will_expire(upper, node.expires)
        return upper

    # -- holding -----------------------------------------------------------------------------------

    def hold(self, match: Match) -> Node:
        """Keep a match and all that it depends on until `release`; the node ends where it ends."""
        return self.hold_node(self.split(match.node, match.length))

    def hold_node(self, node: Node) -> Node:
        """Keep a node and everything it depends on until `release`."""
        self.tick = node.home.used = next(self._count)
        node.home.holds += 1
        held: Node | None = node
        while held is not None:
            held.holds += 1
            if held.holds > 1:  # then all before it is held too
                break
            if held.tier:
                self._tiers[held.tier].held += held.nbytes
                del self._tiers[held.tier].order[held]
            held = held.parent
        return node

    def release(self, node: Node) -> None:
        """Undo one `hold`. If others still hold the node, a turn may be running: make no copies."""
        self._let(node)
        if node.holds or (node.parent is None and node.home.holds):
            self.fit()
        else:
            self.settle()

    def keep(self, node: Node) -> None:
        """Hold a node until `let_go`, or until it is forgotten."""
        self.hold_node(node)
        node.kept += 1

    def let_go(self, node: Node) -> None:
        """Undo one `keep`, unless the node was forgotten since."""
        if node.kept:
            node.kept -= 1
            self.release(node)

    def _let(self, node: Node) -> None:
        self._touched.add(node.home.account)
        held: Node | None = node
        while held is not None:
            held.holds -= 1
            if held.holds:
                break
            if held.tier:
                self._tiers[held.tier].held -= held.nbytes
            self._set_free(held)
            held = held.parent
        node.home.holds -= 1
        if not node.home.holds:
            node.home.barred.clear()

    def _set_free(self, node: Node) -> None:
        if node.gone:
            self.detached.discard(node)
            self._drop(node)
        elif node.tier:
            self._tiers[node.tier].order[node] = None
        if not node.children:
            self._note(node)

    def _touch(self, node: Node) -> None:
        """Make the free end of a path the last in order, each node before the one before it."""
        at: Node | None = node
        while at is not None and not at.holds:
            if at.tier:
                self._tiers[at.tier].order.move_to_end(at)
            at = at.parent

    def pin(self, node: Node, on: bool = True) -> None:
        """Pin or unpin a node and everything it depends on in memory. Pins count against quota and
        budget. Forgetting and clearing override them. The store keeps its own pins."""
        if on == node.pinned or node.gone:
            return
        if on:
            self._check_room(node)
        node.pinned = on
        node.home.pins += 1 if on else -1
        (self.hold_node if on else self.release)(node)

    def _check_room(self, node: Node) -> None:
        roots = [root for root in self.roots.values() if root.home.pins]
        held = {n for root in roots for one in root.below() if one.pinned for n in one.chain()}
        held.update(node.chain())
        own = sum(n.nbytes for n in held if n.home.account == node.home.account)
        if self.quota is not None and own > self.quota:
            raise PinsFull.over("prompts", own, self.quota, "tenant_quota")
        if sum(n.nbytes for n in held) > self.budget:
            raise PinsFull.no_room("prompts", "cache_budget", self.budget)

    def pinning(self) -> set[str]:
        return {root.home.tenant for root in self.roots.values() if root.home.pins}

    # -- tiers -------------------------------------------------------------------------------------

    def place(self, node: Node, rows: Tensors | None = None, ends: Tensors | None = None) -> None:
        """Put rows or ends of a node on the device, beside or in place of what is there."""
        rows = node.rows if rows is None else rows
        self._put(node, rows, {**node.ends, **(ends or {})}, self.device)

    def _put(self, node: Node, rows: Tensors, ends: Tensors, tier: Tier) -> None:
        there = node.tier == tier.name
        self._remove(node, keeps_place=there)
        node.rows, node.ends, node.tier, node.was_here = rows, ends, tier.name, True
        node.nbytes = storage_bytes(node.tensors())
        if tier is self.device:
            node.way = None
        tier.count(node, 1)
        if not node.holds and not there:
            tier.order[node] = None
        self._touched.add(node.home.account)

    def _remove(self, node: Node, keeps_place: bool = False) -> None:
        if node.tier:
            tier = self._tiers[node.tier]
            tier.count(node, -1)
            if not keeps_place:
                tier.order.pop(node, None)
            node.rows, node.ends, node.tier, node.nbytes = {}, {}, NOWHERE, 0

    def promote(self, node: Node) -> None:
        """Move a node back to the device, where all before it already is."""
        if node.tier == HOST:
            self._put(node, *node.to_device(), self.device)
            self.promotions += 1

    def _demote(self, node: Node) -> None:
        room = self.host_budget if self.quota is None else min(self.host_budget, self.quota)
        if node.nbytes > room:
            self._drop(node)
            return
        self._put(node, *node.to_host(), self.host)
        self.demotions += 1

    def _drop(self, node: Node) -> None:
        """Drop what a node has in memory, after everything that depends on it."""
        dependent = [node] if node.tier else []
        for n in dependent:
            dependent += [child for child in n.children.values() if child.tier]
        for n in reversed(dependent):
            self._remove(n)
            n.way = None
            self.evictions += 1
            self._note(n)

    @property
    def room(self) -> int:
        """The part of the budget that idle lanes leave."""
        return self.budget - self.beside()

    def fit(self) -> None:
        """Enforce the budgets: now if that needs no copy, otherwise after the turn."""
        self.late = True
        slack = self.budget // SLACK if self.host_budget else 0
        if self.device.nbytes > self.room + slack or not self.host_budget:
            self.settle()

    def settle(self) -> None:
        """Enforce budgets, quotas and times to live: the least recently used leaves move a tier
        down or are dropped; idle lanes go if what is held needs their room."""
        self.expire()
        self.late = False
        down = self._demote if self.host_budget else self._drop
        for tier, away in ((self.device, down), (self.host, self._drop)):
            budget = self.room if tier is self.device else self.host_budget
            while tier.nbytes > budget and (node := tier.least()) is not None:
                away(node)
            if tier is self.device and tier.nbytes > budget:
                self.on_forget(True)
            for account in self._touched if self.quota is not None else ():
                self._fit_quota(tier, account, away)
        self._touched.clear()
        self._prune()

    def _fit_quota(self, tier: Tier, account: str, away: Callable[[Node], None]) -> None:
        quota = self.quota or 0
        if tier.owned.get(account, 0) > quota:
            for node in [n for n in tier.order if n.home.account == account]:
                away(node)
                if tier.owned.get(account, 0) <= quota:
                    break

    def evict(self, nbytes: int) -> int:
        """Free at least this many bytes of memory, if evictable; return the bytes freed."""
        start = self.device.nbytes + self.host.nbytes
        for tier in (self.host, self.device):
            while start - self.device.nbytes - self.host.nbytes < nbytes:
                if (node := tier.least()) is None:
                    break
                self._drop(node)
        self._prune()
        return start - self.device.nbytes - self.host.nbytes

    # -- records of what has gone ------------------------------------------------------------------

    def _note(self, node: Node) -> None:
        """Keep a node without tensors as the youngest record."""
        if node.is_record:
            self.records.pop(node, None)
            self.records[node] = None

    def _prune(self) -> None:
        """Drop the oldest records until the rest is within bounds. What was filled again stays."""
        while len(self.records) > MAX_RECORDS:
            node = next(iter(self.records))
            del self.records[node]
            if node.is_record and node.parent is not None:
                node.gone = True
                del node.parent.children[node.key]
                self._note(node.parent)

    # -- forgetting --------------------------------------------------------------------------------

    def forget(self, node: Node, fit: bool = True) -> int:
        """Remove a node and everything that depends on it; return the bytes freed.

        Nodes held by a turn in flight become unreachable, and their bytes are freed on release.
        Nothing is remembered after them.
        """
        if node.parent is None or node.gone:
            return 0
        start = self.device.nbytes + self.host.nbytes
        del node.parent.children[node.key]
        below, let = list(node.below()), False
        for n in below:
            n.gone = True
            self.records.pop(n, None)
        for n in reversed(below):
            for _ in range(n.kept + n.pinned):
                self._let(n)
                let = True
            n.kept, n.home.pins, n.pinned = 0, n.home.pins - n.pinned, False
            if n.holds:
                self.detached.add(n)
                continue
            self._drop(n)
        self._note(node.parent)
        self.on_forget(False)
        if let and fit:  # what was protected besides them counts again
            self.fit()
        return start - self.device.nbytes - self.host.nbytes

    def forget_media(self, image_key: str, tenant: str = "") -> int:
        """Forget everything that depends on an image, for one tenant; return the bytes freed in
        memory. A turn that began before remembers nothing of it either."""
        for name in self.namespaces(tenant):
            home = self.roots[name].home
            if home.holds:
                home.barred[image_key] = self.tick
            if len(home.barred) > MAX_BARRED:  # then its turns in flight remember nothing
                home.cleared, home.barred = self.tick, {}
        found = [n for n in self.nodes(tenant) if any(s.key == image_key for s in n.spans)]
        freed = sum(self.forget(node) for node in found)
        self.on_forget(True)
        return freed

    def clear(self, tenant: str | None = None) -> None:
        """Forget everything, pinned or not, of all tenants or of one. A turn that began before
        remembers nothing either."""
        for name, root in list(self.roots.items()):
            if tenant in (None, root.home.tenant):
                for node in list(root.children.values()):
                    self.forget(node)
                root.home.cleared = self.tick
                if not root.home.holds:
                    del self.roots[name]
        self._expiring = [entry for entry in self._expiring if not entry[2].gone]
        heapq.heapify(self._expiring)
        self.on_forget(True)

    def drop_empty(self, spare: str) -> set[str]:
        """Drop every other namespace that is empty and has no turn in flight; return them."""
        used = {spare} | {name for name, root in self.roots.items() if root.children}
        empty = {name for name, home in self._homes.items() if not home.holds} - used
        for name in empty:
            del self._homes[name]
            self.roots.pop(name, None)
        return empty

    def let_go_of(self, tenant: str) -> None:
        """Clear a tenant and drop its record too, unless it has a turn in flight."""
        self.clear(tenant)
        homes, roots = self._homes.items(), self.roots
        self._homes = {n: home for n, home in homes if n in roots or home.tenant != tenant}

    def expire(self) -> None:
        """Forget what exceeded its time to live. The clock may jump: that can only shorten it."""
        while self._expiring and self._expiring[0][0] <= self._now():
            self.forget(heapq.heappop(self._expiring)[2])

    def _will_expire(self, node: Node, expires: float | None) -> None:
        node.expires = expires
        if expires is not None:
            heapq.heappush(self._expiring, (expires, next(self._count), node))

    # -- counters ----------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return self.device.nbytes

    def bytes_of(self, tenant: str = "") -> int:
        return sum(tier.bytes_of.get(tenant, 0) for tier in (self.device, self.host))

    def held_bytes(self) -> int:
        """Bytes that a `hold` or a pin protects."""
        return self.device.held + self.host.held

    def stats(self) -> dict[str, dict[str, int]]:
        budgets = ((self.device, self.budget), (self.host, self.host_budget))
        return {tier.name: tier.stats(budget) for tier, budget in budgets}
