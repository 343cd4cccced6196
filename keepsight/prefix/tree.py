"""The tree of all snapshots of one model, keyed by path; one root for each namespace.

A node is the stretch between two boundaries. It may hold the rows of that stretch (keys, values)
and the fixed-size states at its end; the two can be let go of separately, and a node may be only a
memory of having been there, so that a report can say `evicted` and not `new`. Terminal nodes hold
the end of one whole prompt, with its last logits, and serve only that identical prompt.

`match` makes and loses no snapshot, and copies none. `hold` keeps a path alive, `load` brings it to
the device, `insert` fills what is there. Which snapshots are kept, and in which tier, is decided in
`residency.py`; the laws that this keeps to are in `invariants.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from keepsight.prefix import Residency, archive
from keepsight.prefix.match import Known, Match
from keepsight.prefix.node import DEVICE, HOST, LOGITS, NOWHERE, Node, Part, Tensors
from keepsight.prefix.prompt import Prompt, Rule, shift


class Tree(Residency):
    """All namespaces of one model under one budget of bytes for each tier of memory."""

    # -- looking ---------------------------------------------------------------------------------

    def match(
        self,
        namespace: str,
        prompt: Prompt,
        next_cut: Callable[[int], int | None],
        loose: bool = False,
    ) -> Match:
        """The deepest usable snapshot strictly before the prompt's end, or its terminal entry.

        `next_cut` gives the boundary behind a position, or None when there is none. `loose` looks
        also for snapshots that are stored elsewhere (decoded state, `exact=False`).
        """
        self.expire()
        best = node = self.root(namespace)
        while True:
            cut = next_cut(node.end)
            # A whole prompt depends on its last boundary: above that no store need be asked for it.
            stored = loose or cut is None or cut >= len(prompt)
            terminal = self._child(node, prompt, len(prompt), "terminal", stored)
            if terminal is not None and self._usable(terminal):
                return Match(terminal, self._farthest(terminal), self.tick)
            child = self._longest(node, prompt, cut, loose)
            if child is None or not (child.rows.tier or child.on_disk):
                return Match(best, self._farthest(best), self.tick)
            node = child
            if self._usable(node):
                best = node

    def match_tokens(self, namespace: str, prompt: Prompt, rule: Rule) -> Match:
        """The longest remembered prefix, to its last token, where any cut gives the same bits."""
        self.expire()
        if rule.states:
            return self._match_states(self.root(namespace), prompt, rule)
        node, last = self.root(namespace), len(prompt) - 1
        while node.end < last:
            child, shared = self._most_shared(node, prompt, rule)
            end = prompt.before_medium(node.end + shared, rule)
            if child is None or end <= node.end:
                break
            if end == child.end == len(prompt):
                return Match(child, self._farthest(child), self.tick, None, True)
            if end < child.end or end > last:
                end = prompt.before_medium(min(end, last), rule)
                return Match(child, self._farthest(child), self.tick, end)
            node = child
        return Match(node, self._farthest(node), self.tick)

    def _match_states(self, root: Node, prompt: Prompt, rule: Rule) -> Match:
        """The deepest place with a state of fixed size that a prompt goes through."""
        best, waiting, root.home.states = root, [root], True
        while waiting:
            node = waiting.pop()
            if node.end > best.end or (node.end == best.end and node.logits is not None):
                best = node if self._usable(node) else best
            if node.end < len(prompt):
                self._look_up(node)
                self._look_for_ends(node, prompt, rule)
                waiting += [n for n in list(node.within(prompt)) if self._is_here(n, prompt)]
        whole = best.end == len(prompt)
        return Match(best, self._farthest(best), self.tick, None, whole, states=True)

    def _is_here(self, node: Node, prompt: Prompt) -> bool:
        """Whether the rows of a stretch can be had; one whose time is over is forgotten."""
        if not node.same_as(prompt):
            return False
        if node.leased and not self._stored(node):
            self.forget(node, fit=False)
            return False
        return bool(node.rows.tier or node.on_disk)

    def _look_for_ends(self, node: Node, prompt: Prompt, rule: Rule) -> None:
        """Take in what the store has of this prompt upon a node since it was looked up."""
        for cut in (*prompt.boundaries(rule, node.end)[:1], len(prompt)):
            for kind in ("terminal", "segment"):
                self._child(node, prompt, cut, kind, ends=False)

    def _most_shared(self, node: Node, prompt: Prompt, rule: Rule) -> tuple[Node | None, int]:
        """The usable child that shares most with a prompt from here on, and how many tokens."""
        self._look_up(node)
        best, most = node.closest(prompt, usable=self._usable)
        while best is not None and best.leased and not self._stored(best):
            self.forget(best, fit=False)  # its time is over
            best, most = node.closest(prompt, usable=self._usable)
        for cut in (*prompt.boundaries(rule, node.end)[:1], len(prompt)):
            for kind in ("terminal", "segment") if cut - node.end > most else ():
                child = self._child(node, prompt, cut, kind, ends=False)
                if child is not None and self._usable(child):
                    best, most = child, cut - node.end
                    break
        whole = self._child(node, prompt, len(prompt), "terminal", ends=False)
        if whole is not None and self._usable(whole):  # of two that agree, the one with logits
            return whole, len(prompt) - node.end
        return best, most

    def _look_up(self, node: Node) -> None:
        """Take in, once, what the store has upon a node; what is used of it is read then."""
        store, node.home.any_cut = node.home.store, True
        if store is None or node.looked_up:
            return
        node.looked_up = True
        for child in archive.nodes_upon(store, node):
            child.leased, child.on_disk = self.ttl is not None, True
            self._adopt(child)
            self.tombstones.note(child)

    def _longest(self, node: Node, prompt: Prompt, cut: int | None, loose: bool) -> Node | None:
        """The child at the next boundary, or (where decoded state is kept) beyond it."""
        best = None if cut is None else self._child(node, prompt, cut, "segment")
        if not loose:
            return best
        for child in node.children.values():
            if child.terminal or child.end >= len(prompt) or (best and child.end <= best.end):
                continue
            if child.end != cut and child.rows.tier and child.same_as(prompt):
                best = child
        return best

    def _child(
        self,
        node: Node,
        prompt: Prompt,
        end: int,
        kind: str,
        stored: bool = True,
        ends: bool = True,
    ) -> Node | None:
        """The node at `end`. One that is in no memory may be in the store, unless not `stored`.
        One with logits ends its path, unless not `ends`."""
        digest = prompt.segment_digest(node.digest, node.end, end, kind)
        child, store = node.children.get(digest), node.home.store
        if child is not None and child.leased and not self._stored(child):
            self.forget(child, fit=False)  # a match under way is not held yet
            child = None
        asked = child is not None and (child.rows.tier or child.on_disk or child.unreadable)
        if stored and not asked and store is not None and store.has(archive.SNAPSHOT, digest):
            if child is None:
                child = self._new_node(node, prompt, end, digest, kind == "terminal" and ends)
                child.leased = self.ttl is not None
                self.tombstones.note(child)
            child.on_disk = True
        return child if child is not None and child.same_as(prompt) else None

    def _needs(self, node: Node) -> list[Part]:
        """What a prompt that goes on from here needs of the node itself."""
        has_fixed = self.has_fixed and (node.home.states or not node.home.any_cut)
        return [node.rows, node.state] if has_fixed else [node.rows]

    def _usable(self, node: Node) -> bool:
        """Whether a prompt can be continued from here: the intersection over all layers."""
        return node.on_disk or all(part.tier for part in self._needs(node))

    def _farthest(self, node: Node) -> str:
        """The tier that is waited for. A part is never in a nearer tier than what it depends on."""
        if node.parent is None:
            return DEVICE
        tiers = {part.tier for part in self._needs(node)}
        if NOWHERE not in tiers:
            return HOST if HOST in tiers else DEVICE
        store = node.home.store
        return (store and store.tier(archive.SNAPSHOT, node.digest)) or "disk"

    def _stored(self, node: Node) -> bool:
        store = node.home.store
        return store is not None and store.has(archive.SNAPSHOT, node.digest)

    def known(self, namespace: str, prompt: Prompt) -> Known:
        """How far the prompt agrees with anything ever seen, for the report's reasons."""
        self.expire()
        root = self.roots.get(namespace)
        return Known(0, False) if root is None else self._known_from(root, prompt)

    def elsewhere(self, namespace: str, prompt: Prompt, cuts: list[int]) -> tuple[int, str]:
        """How far other namespaces of the same tenant know the prompt, and which of them does.

        `cuts` are the prompt's boundaries. The deepest nodes are found by the path, however many
        namespaces there are, and only the latest are followed further.
        """
        home, path, at = self.root(namespace).home, "", 0
        found = self.paths.elsewhere(path, home)
        for cut in [*cuts, len(prompt)] if found else ():
            kind = "segment" if cut < len(prompt) else "terminal"
            path, at = prompt.segment_digest(path, at, cut, kind), cut
            deeper = self.paths.elsewhere(path, home)
            if not deeper:
                break
            found = deeper
        known = ((self._known_from(node, prompt).until, node.home.name) for node in found)
        return max(known, default=(0, ""), key=lambda one: one[0])

    def _known_from(self, node: Node, prompt: Prompt) -> Known:
        evicted = None
        while True:
            best, length = node.closest(prompt)
            if best is None:
                return Known(node.end, False, evicted)
            if evicted is None and length == len(best.ids) and self._is_evicted(best):
                evicted = node.end
            if length < len(best.ids) or best.terminal:
                until = node.end + length
                diverged = length < len(best.ids) and until < len(prompt)
                return Known(until, diverged, evicted, _made_elsewhere(best, prompt, until))
            node = best

    def _is_evicted(self, node: Node) -> bool:
        """Whether it was here once and is nowhere now, not in the store either."""
        if not node.was_full or all(part.tier for part in self._needs(node)):
            return False
        return not (node.on_disk and self._stored(node))

    # -- loading ---------------------------------------------------------------------------------

    def load(self, node: Node, prompt: Prompt) -> bool:
        """Bring a held path to the device, from the host or from the store. False when an entry is
        damaged or lies."""
        for n in node.chain():
            needs = self._needs(n) if n is node else [n.rows]
            for part in needs:
                self.promote(part)
            if not all(part.tier for part in needs) and not self._read(n, needs):
                n.on_disk, n.unreadable = False, True
                return False
        self.fit()
        return True

    def _read(self, node: Node, needs: list[Part]) -> bool:
        """What is missing of a node, from the store; all of it or nothing."""
        store = node.home.store
        if store is None:
            return False
        rows = archive.read_rows(store, node) if not node.rows.tier else node.rows.tensors
        state = node.state.tensors if node.state in needs else None
        if state is None and node.state in needs:
            state = archive.read_state(store, node)
        if rows is None or (state is None and node.state in needs):
            return False
        received = self.receive(rows, state)
        if received is None:
            wrong = archive.STATE if node.rows.tier else archive.SNAPSHOT
            store.reject(wrong, node.digest, "its tensors are not of this model's shape")
            return False
        if not node.cost and self.measured[1]:
            node.cost = len(node.ids) * self.measured[0] / self.measured[1]
        for part, tensors in zip((node.rows, node.state), received, strict=True):
            if not part.tier and tensors is not None:
                self.place(part, tensors)
        return True

    # -- remembering -----------------------------------------------------------------------------

    def insert(
        self,
        parent: Node,
        prompt: Prompt,
        end: int,
        kv: Tensors,
        fixed: Tensors | None,
        logits: torch.Tensor | None = None,
        keep_on_disk: bool = True,
        cost: float = 0.0,
        since: int | None = None,
        ends: bool = True,
    ) -> Node:
        """Remember a snapshot behind `parent`; what exists is filled. It comes back held.

        `cost` is the milliseconds that computing it took. `since` says when the prompt was matched:
        what has been forgotten after that comes back `gone`, held but not remembered. One with
        logits ends its path, unless not `ends`: then others may go on from it.
        """
        kind = "segment" if logits is None else "terminal"
        digest = prompt.segment_digest(parent.digest, parent.end, end, kind)
        for n in parent.chain() if parent.rows.tier == HOST else ():
            self.promote(n.rows)
        node = parent.children.get(digest)
        nowhere = parent.parent is not None and parent.rows.tier != DEVICE
        late = since is not None and self._barred(parent, prompt, parent.end, end, since)
        gone = parent.gone or nowhere or late  # even where a later turn made the same node anew
        if node is None or gone:
            node = self._new_node(parent, prompt, end, digest, logits is not None and ends, gone)
        self._hold(node)
        node.uses += 1
        if node.gone:
            return node
        if cost:
            node.cost = cost
            self.measured = (self.measured[0] + cost, self.measured[1] + len(node.ids))
        if node.rows.tier != DEVICE:
            self.place(node.rows, kv if logits is None else {**kv, LOGITS: logits})
        if self.has_fixed and fixed is not None and node.state.tier != DEVICE:
            self.place(node.state, fixed)
        node.in_memory_only |= not keep_on_disk
        if node.home.store is not None and keep_on_disk and not node.on_disk:
            archive.write(node.home.store, node, self.ttl)
        self.fit()
        return node

    def is_forgotten(self, node: Node, prompt: Prompt, since: int) -> bool:
        """Whether anything on the way of a turn was forgotten after the turn had begun."""
        return node.gone or self._barred(node, prompt, 0, len(prompt), since)

    def is_barred(self, node: Node, image_key: str, since: int) -> bool:
        """Whether an image was forgotten after `since`, for the tenant of a path that is held."""
        home = node.home
        return home.cleared > since or home.barred.get(image_key, -1) > since

    def _barred(self, node: Node, prompt: Prompt, start: int, end: int, since: int) -> bool:
        """Whether a stretch, or an image that it shows, was forgotten after `since`."""
        if node.home.cleared > since:
            return True
        return bool(node.home.barred) and any(
            self.is_barred(node, span.key, since) for span in prompt.clip(start, end)
        )

    def _new_node(
        self,
        parent: Node,
        prompt: Prompt,
        end: int,
        digest: str,
        terminal: bool,
        gone: bool = False,
    ) -> Node:
        start = parent.end
        spans = shift(prompt.clip(start, end), -start)
        node = Node(parent, start, end, digest, prompt.ids[start:end].copy(), spans, terminal)
        node.gone = gone
        if gone:
            self.detached.add(node)
        else:
            kind = "terminal" if terminal else "segment"
            node.path = prompt.segment_digest(parent.path, start, end, kind)
            self._adopt(node)
        return node

    def _adopt(self, node: Node) -> None:
        if node.parent is not None:
            node.parent.adopt(node)
        self.paths.add(node)
        self._will_expire(node)


def _made_elsewhere(node: Node, prompt: Prompt, until: int) -> bool:
    """Whether the paths part only because the same image was encoded in another way."""
    here = next((s for s in prompt.spans if s.start <= until < s.end), None)
    there = next((s for s in shift(node.spans, node.start) if s.start <= until < s.end), None)
    if here is None or there is None:
        return False
    return here.identity == there.identity and here.feature_id != there.feature_id
