"""What the tree holds in each tier of memory, for which tenant, and what is evicted first.

A snapshot depends on those before it, and its state on its rows. No part is in a nearer tier than
what it depends on: after rows on the host there are none on the device, and after rows in no memory
there are none at all. So the deepest parts go first, and a path loaded from its start is complete
at each step. A store keeps the same rule for itself.

Parts evicted from the device go to the host if it has a budget; otherwise they are dropped, because
the store has had them since they were inserted. Copies are made only after a turn, so that no first
token waits for them; until then the device may exceed its budget by an eighth.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from keepsight.errors import InputError
from keepsight.formats.package import storage_bytes
from keepsight.prefix.invariants import audit
from keepsight.prefix.node import (
    DEVICE,
    HOST,
    NOWHERE,
    NamespaceState,
    Node,
    Part,
    Paths,
    Received,
    Tensors,
    Tombstones,
)
from keepsight.prefix.pins import check_room, set_pinned
from keepsight.prefix.tier import Tier, copy_back, copy_out
from keepsight.store import Store, usefulness

MAX_BARRED = 10_000  # images deleted while turns of one namespace are in flight
SLACK = 8  # share by which the device may exceed its budget during a turn


class Residency:
    """All namespaces of one model, in two tiers of memory."""

    def __init__(
        self,
        budget: int,
        has_fixed: bool,
        store: Store | None = None,
        *,
        host_budget: int = 0,
        quota: int | None = None,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget, self.host_budget, self.quota, self.ttl = budget, host_budget, quota, ttl
        self.has_fixed, self.store = has_fixed, store
        self.roots: dict[str, Node] = {}
        self._homes: dict[str, NamespaceState] = {}  # tenant of each namespace, cleared or not
        self.device, self.host = Tier(DEVICE), Tier(HOST)
        self.evictions = self.demotions = self.promotions = 0
        self.measured = (0.0, 0)  # milliseconds of prefill, and the tokens computed in them
        self.late = False  # whether a budget is exceeded until the turn has ended
        self.detached: set[Node] = set()  # forgotten, but held still
        # Moves tensors from a file to the model's devices; None if they do not fit the model.
        self.receive: Callable[[Tensors, Tensors | None], Received | None] = lambda r, f: (r, f)
        # The engine's idle lanes hold copies of what is forgotten here, within the same budget.
        self.on_forget: Callable[[], None] = lambda: None
        self.beside: Callable[[], int] = lambda: 0
        self._now = clock
        self._clock, self._number = itertools.count(1), itertools.count()
        self.tick = 0
        self._floor = 0.0
        self._floors: dict[str, float] = defaultdict(float)  # by tenant
        self._touched: set[str] = set()  # tenants that may exceed their quota
        self.paths, self.tombstones = Paths(), Tombstones(self._forget_tombstone)
        self._expiring: list[tuple[float, int, Node]] = []

    # -- namespaces ------------------------------------------------------------------------------

    def root(self, namespace: str, tenant: str | None = None, store: Store | None = None) -> Node:
        """The root of all paths of a namespace; it belongs to one tenant and one store."""
        if namespace not in self._homes:
            owner = tenant or ""
            store = store or self._store_of(owner)
            self._homes[namespace] = NamespaceState(owner, store, namespace)
        home = self._homes[namespace]
        if tenant not in (None, home.tenant):
            raise InputError("this namespace belongs to another tenant; each has its own")
        home.store = store or home.store
        if namespace not in self.roots:
            self.roots[namespace] = Node(None, 0, 0, namespace)
            self.roots[namespace].home = home
            self.paths.add(self.roots[namespace])
        return self.roots[namespace]

    def _store_of(self, tenant: str) -> Store | None:
        return self.store.tenant(tenant) if self.store is not None and tenant else self.store

    def namespaces(self, tenant: str = "") -> list[str]:
        """The namespaces of one tenant."""
        return [name for name, root in self.roots.items() if root.home.tenant == tenant]

    def nodes(self, tenant: str | None = None) -> Iterator[Node]:
        """Every reachable node, of all tenants or of one, without roots."""
        for root in list(self.roots.values()):
            if tenant in (None, root.home.tenant):
                yield from (node for node in root.below() if node is not root)

    # -- holding ---------------------------------------------------------------------------------

    def hold(self, node: Node) -> None:
        """Keep a node and everything it depends on until `release`."""
        for n in self._hold(node):
            n.uses += 1

    def _hold(self, node: Node) -> list[Node]:
        self.tick = next(self._clock)
        floors, chain = (self._floor, self._floors[node.home.account]), node.chain()
        for n in chain:
            if not n.holds:
                self._guard(n, 1)
            n.holds += 1
            n.used, n.floors = self.tick, floors
        node.home.holds += 1
        return chain

    def release(self, node: Node) -> None:
        """Undo one `hold`. If others still hold the node, a turn may be running: make no copies."""
        self._let(node)
        if node.holds or (node.parent is None and node.home.holds):
            self.fit()
        else:
            self.settle()

    def keep(self, node: Node) -> None:
        """Hold a node until `let_go`, or until it is forgotten."""
        self.hold(node)
        node.kept += 1

    def let_go(self, node: Node) -> None:
        """Undo one `keep`, unless the node was forgotten since."""
        if node.kept:
            node.kept -= 1
            self.release(node)

    def _let(self, node: Node) -> None:
        self._touched.add(node.home.account)
        for n in reversed(node.chain()):
            n.holds -= 1
            if not n.holds:
                self._guard(n, -1)
                self._set_free(n)
        node.home.holds -= 1
        if not node.home.holds:
            node.home.barred.clear()

    def _guard(self, node: Node, sign: int) -> None:
        for part in (node.state, node.rows):  # each turn passes every node of its path twice here
            if part.tier:
                (self.device if part.tier == DEVICE else self.host).held += sign * part.nbytes

    def _set_free(self, node: Node) -> None:
        if node.gone:
            self.detached.discard(node)
            for part in node.parts:
                self._drop(part)
            return
        for part in (node.state, node.rows):
            if part.tier and not part.bears(part.tier):
                self._tier(part).offer(part)
        self.tombstones.note(node)

    def pin(self, node: Node, on: bool = True) -> None:
        """Pin or unpin a node and everything it depends on in memory. Forgetting and clearing
        override pins. The store keeps its own pins."""
        if on != node.pinned and not node.gone:
            if on:
                check_room(self, node)
            set_pinned(node, on)
            (self._hold if on else self.release)(node)

    # -- tiers -----------------------------------------------------------------------------------

    def _tier(self, part: Part) -> Tier:
        return self.device if part.tier == DEVICE else self.host

    def place(self, part: Part, tensors: Tensors, tier: Tier | None = None) -> None:
        """Put tensors into a tier; drop the part's earlier tensors."""
        tier = tier or self.device
        self._remove(part)
        part.tensors, part.tier, part.nbytes = tensors, tier.name, storage_bytes(tensors.values())
        if tier is self.device:
            part.way = None
        tier.put(part)
        part.node.was_full = True
        self._touched.add(part.node.home.account)

    def _remove(self, part: Part) -> None:
        if part.tier:
            self._tier(part).take(part)
            part.tensors, part.tier, part.nbytes = None, NOWHERE, 0

    def promote(self, part: Part) -> None:
        """Move a part back to the device, where everything it depends on already is."""
        if part.tier == HOST:
            self.place(part, copy_back(part))
            self.promotions += 1

    def _demote(self, part: Part) -> None:
        room = self.host_budget if self.quota is None else min(self.host_budget, self.quota)
        if part.nbytes > room:
            self._drop(part)
            return
        self.place(part, copy_out(part), self.host)
        self.demotions += 1

    def _drop(self, part: Part) -> None:
        """Drop a part, after everything that depends on it."""
        if not part.tier:
            return
        if part.on_device or part.on_host:
            for other in part.dependents():
                self._drop(other)
        self._remove(part)
        self.evictions += 1
        self.tombstones.note(part.node)

    def _lower(self, part: Part, away: Callable[[Part], None], whose: str | None = None) -> None:
        """Remove one part from its tier; with a state, also rows that served only it."""
        node, tier = part.node, self._tier(part)
        value = usefulness(node.floors[whose is not None], node.uses, node.cost, part.nbytes)
        if whose is None:
            self._floor = max(self._floor, value)
        else:
            self._floors[whose] = max(self._floors[whose], value)
        away(part)
        if part is node.state and tier.may_go(node.rows):
            away(node.rows)

    # -- eviction --------------------------------------------------------------------------------

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
        """Enforce budgets, quotas and times to live: the least useful parts move a tier down or are
        dropped; idle lanes go if what is held needs their room."""
        self.expire()
        self.late = False
        down = self._demote if self.host_budget else self._drop
        for tier, budget, away in (
            (self.device, self.room, down),
            (self.host, self.host_budget, self._drop),
        ):
            while tier.nbytes > budget and (part := tier.least()) is not None:
                self._lower(part, away)
            if tier is self.device and tier.nbytes > budget:
                self.on_forget()
            for account in list(self._touched) if self.quota is not None else ():
                self._keep_quota(tier, account, away)
        self._touched.clear()
        self.tombstones.prune()

    def _keep_quota(self, tier: Tier, account: str, away: Callable[[Part], None]) -> None:
        while tier.owned.get(account, 0) > (self.quota or 0):
            part = tier.least(account)
            if part is None:
                return
            self._lower(part, away, account)

    def evict(self, nbytes: int) -> int:
        """Free at least this many bytes of memory, if evictable; return the bytes freed."""
        start = self.device.nbytes + self.host.nbytes
        for tier in (self.host, self.device):
            while start - self.device.nbytes - self.host.nbytes < nbytes:
                part = tier.least()
                if part is None:
                    break
                self._lower(part, self._drop)
        self.tombstones.prune()
        return start - self.device.nbytes - self.host.nbytes

    def clear(self, tenant: str | None = None) -> None:
        """Forget everything, pinned or not, of all tenants or of one.

        A turn that began before remembers nothing either.
        """
        for name, root in list(self.roots.items()):
            if tenant in (None, root.home.tenant):
                for node in list(root.children.values()):
                    self.forget(node)
                root.home.cleared = self.tick
                if not root.home.holds:
                    self.paths.discard(self.roots.pop(name))
        alive = set(self.nodes())
        self._expiring = [entry for entry in self._expiring if entry[2] in alive]
        heapq.heapify(self._expiring)

    def drop_empty(self, spare: str) -> set[str]:
        """Drop every other namespace that is empty and has no turn in flight; return them."""
        homes, roots = self._homes, self.roots
        used = {spare} | {name for name, root in roots.items() if root.children}
        empty = {name for name, home in homes.items() if not home.holds} - used
        for name in empty:
            del homes[name]
            if name in roots:
                self.paths.discard(roots.pop(name))
        return empty

    def let_go_of(self, tenant: str) -> None:
        """Clear a tenant and drop its record too, unless it has a turn in flight."""
        self.clear(tenant)
        homes, roots = self._homes.items(), self.roots
        self._homes = {n: home for n, home in homes if n in roots or home.tenant != tenant}
        self._floors.pop(tenant, None)

    # -- forgetting ------------------------------------------------------------------------------

    def forget(self, node: Node, fit: bool = True) -> int:
        """Remove a node and everything that depends on it; return the bytes freed.

        Nodes held by a turn in flight become unreachable, and their bytes are freed on release.
        Nothing is remembered after them.
        """
        if node.parent is None or node.gone:
            return 0
        start = self.device.nbytes + self.host.nbytes
        node.parent.disown(node)
        below, let = list(node.below()), False
        for n in below:
            n.gone = True
            self.tombstones.discard(n)
            self.paths.discard(n)
        for n in reversed(below):
            for _ in range(n.kept + n.pinned):
                self._let(n)
                let = True
            n.kept = 0
            if n.pinned:
                set_pinned(n, False)
            if n.holds:
                self.detached.add(n)
                continue
            for part in n.parts:
                self._drop(part)
        self.tombstones.note(node.parent)
        self.on_forget()
        if let and fit:  # what was protected besides them counts again
            self.fit()
        return start - self.device.nbytes - self.host.nbytes

    def forget_media(self, image_key: str, tenant: str = "") -> int:
        """Forget everything that depends on an image, for one tenant; return the bytes freed in
        memory.

        A turn that began before remembers nothing of it either.
        """
        for name in self.namespaces(tenant):
            home = self.roots[name].home
            if home.holds:
                home.barred[image_key] = self.tick
            if len(home.barred) > MAX_BARRED:  # then its turns in flight remember nothing
                home.cleared, home.barred = self.tick, {}
        found = [n for n in self.nodes(tenant) if any(s.key == image_key for s in n.spans)]
        freed = sum(self.forget(node) for node in found)
        self.on_forget()
        return freed

    def expire(self) -> None:
        """Forget what exceeded its time to live. The clock may jump: that can only shorten it."""
        while self._expiring and self._expiring[0][0] <= self._now():
            self.forget(heapq.heappop(self._expiring)[2])

    def _will_expire(self, node: Node) -> None:
        if self.ttl is not None:
            node.expires = self._now() + self.ttl
            heapq.heappush(self._expiring, (node.expires, next(self._number), node))

    def _forget_tombstone(self, node: Node) -> None:
        if node.parent is not None:
            node.gone = True
            node.parent.disown(node)
            self.paths.discard(node)
            self.tombstones.note(node.parent)

    # -- counters --------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes on the model's device."""
        return self.device.nbytes

    def bytes_of(self, tenant: str = "") -> int:
        """Bytes of one tenant in all tiers of memory."""
        return sum(tier.bytes_of.get(tenant, 0) for tier in (self.device, self.host))

    def held_bytes(self) -> int:
        """Bytes that a `hold` or a pin protects."""
        return self.device.held + self.host.held

    def stats(self) -> dict[str, dict[str, int]]:
        """Bytes and snapshots per tier."""
        budgets = ((self.device, self.budget), (self.host, self.host_budget))
        return {tier.name: tier.stats(budget) for tier, budget in budgets}

    def check(self) -> None:
        """Raise AssertionError if counters or invariants are wrong."""
        audit(self)
