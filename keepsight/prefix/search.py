"""Finds what the tree knows of a prompt: the deepest usable snapshot, and how far anything is
known.

A lookup creates, drops and copies no snapshot. Entries of a store are noted, and read later.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from keepsight.prefix import Residency, archive
from keepsight.prefix.match import Known, Match
from keepsight.prefix.node import DEVICE, HOST, NOWHERE, Node, Part
from keepsight.prefix.prompt import LONGEST, Prompt, Rule, shift
from keepsight.prefix.trails import Trail, Trails


class Search(Residency):
    """All namespaces of one model, and the lookup of prompts in them."""

    @cached_property
    def ways(self) -> Trails:
        """The trails of the latest prompts through usable nodes."""
        return Trails()

    @cached_property
    def seen(self) -> Trails:
        """The trails of the latest prompts through all nodes ever seen."""
        return Trails()

    def forget(self, node: Node, fit: bool = True) -> int:
        """Remove a node and all below it, and the trails."""
        self.ways.clear()
        self.seen.clear()
        return super().forget(node, fit)

    # -- what is usable --------------------------------------------------------------------------

    def match(self, namespace: str, prompt: Prompt, rule: Rule) -> Match:
        """The longest remembered prefix, to its last token."""
        self.expire()
        if rule.states:
            return self._match_states(self.root(namespace), prompt, rule)
        root = self.root(namespace)
        trail = Trail(root, prompt.ids, prompt.spans)
        if rule.reuse == "prefix":  # else what was passed once may not serve this prompt
            trail = self.ways.begin(root, prompt, _rows_in_memory)
        found = self._along(trail, prompt, rule)
        if root.home.store is None or len(prompt) - found.length <= LONGEST:
            return found
        # Much is missing: others may have stored it above a node that was passed.
        again = self._along(Trail(root, prompt.ids, prompt.spans), prompt, rule)
        return again if again.length > found.length else found

    def _along(self, trail: Trail, prompt: Prompt, rule: Rule) -> Match:
        """The longest remembered prefix beyond the end of a trail, which grows."""
        node, last, first = trail.end, len(prompt) - 1, prompt.first_cut(rule)
        while node.end < len(prompt):
            child, shared = self._most_shared(node, prompt, rule)
            end = prompt.before_medium(node.end + shared, rule)
            if child is None or end <= node.end or end < first:
                break
            if end == child.end == len(prompt):
                return Match(child, self._farthest(child), self.tick, None, True)
            if end < child.end or end > last:
                end = prompt.before_medium(min(end, last), rule)
                if end < first or end <= node.end:
                    break
                return Match(child, self._farthest(child), self.tick, end)
            trail.note(node, child)
            node = child
        return Match(node, self._farthest(node), self.tick)

    def _match_states(self, root: Node, prompt: Prompt, rule: Rule) -> Match:
        """The deepest place with a fixed-size state on the prompt's path."""
        best, waiting = root, [root]
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
        """Whether the rows of a stretch are available; an expired one is forgotten."""
        if not node.same_as(prompt):
            return False
        if node.leased and not self._stored(node):
            self.forget(node, fit=False)
            return False
        return bool(node.rows.tier or node.on_disk)

    def _look_for_ends(self, node: Node, prompt: Prompt, rule: Rule) -> None:
        """Add what the store received above a node, for this prompt, since it was last asked."""
        for cut in {next(prompt.ends(rule, node.end), len(prompt)), len(prompt)}:
            for kind in ("terminal", "segment"):
                self._child(node, prompt, cut, kind)

    def _most_shared(self, node: Node, prompt: Prompt, rule: Rule) -> tuple[Node | None, int]:
        """The usable child that shares the most with a prompt from here on, and how many tokens."""
        self._look_up(node)

        def usable(child: Node) -> bool:
            # A later medium changes what is before it: then all media must be the same.
            same = rule.reuse == "prefix" or node.end or child.spans == prompt.spans
            return bool(same) and self._usable(child)

        best, most = node.closest(prompt, usable)
        while best is not None and best.leased and not self._stored(best):
            self.forget(best, fit=False)  # expired
            best, most = node.closest(prompt, usable)
        cut = next(prompt.ends(rule, node.end), len(prompt))
        for kind in ("terminal", "segment") if cut - node.end > most else ():
            child = self._child(node, prompt, cut, kind)
            if child is not None and self._usable(child):
                best, most = child, cut - node.end
                break
        # A whole prompt depends on its last boundary: beyond that no store need be asked for it.
        whole = self._child(node, prompt, len(prompt), "terminal", cut == len(prompt))
        if whole is not None and self._usable(whole):  # of two that agree, the one with logits
            return whole, len(prompt) - node.end
        return best, most

    def _look_up(self, node: Node) -> None:
        """Add, once, what the store has above a node; entries are read when they are used."""
        store = node.home.store
        if store is None or node.looked_up:
            return
        node.looked_up, near = True, {node.digest: node}
        for base, described in archive.below(store, node).items():
            above = near.get(base or "")
            if above is None or (above.looked_up and above is not node):
                continue
            above.looked_up = True
            for child in archive.dependents_of(above, described):
                child.leased, child.on_disk = self.ttl is not None, True
                self._adopt(child)
                self.tombstones.note(child)
            near |= above.children

    def _child(
        self,
        node: Node,
        prompt: Prompt,
        end: int,
        kind: str,
        stored: bool = True,
    ) -> Node | None:
        """The node at `end`. One without memory may be in the store, unless `stored` is false."""
        store = node.home.store if stored else None
        if store is None and not node.ends[end]:
            return None
        digest = prompt.segment_digest(node.digest, node.end, end, kind)
        child = node.children.get(digest)
        if child is not None and child.leased and not self._stored(child):
            self.forget(child, fit=False)  # the current match is not held yet
            child = None
        asked = child is not None and (child.rows.tier or child.on_disk or child.unreadable)
        if not asked and store is not None and store.has(archive.SNAPSHOT, digest):
            if child is None:
                child = self._new_node(node, prompt, end, digest, kind)
                child.leased = self.ttl is not None
                self.tombstones.note(child)
            child.on_disk = True
            node.version += 1
        return child if child is not None and child.same_as(prompt) else None

    def _needs(self, node: Node) -> list[Part]:
        """The parts of the node that are needed to continue the prompt here."""
        return [node.rows, node.state] if self.has_fixed else [node.rows]

    def _usable(self, node: Node) -> bool:
        """Whether a prompt can be continued here: every layer must allow it."""
        return node.on_disk or all(part.tier for part in self._needs(node))

    def _farthest(self, node: Node) -> str:
        """The farthest tier needed. No part is in a nearer tier than what it depends on."""
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

    # -- what is known ---------------------------------------------------------------------------

    def known(self, namespace: str, prompt: Prompt) -> Known:
        """How far the prompt agrees with anything ever seen; gives the report its reasons."""
        self.expire()
        root = self.roots.get(namespace)
        return Known(0, False) if root is None else self._known_from(root, prompt)

    def elsewhere(self, namespace: str, prompt: Prompt, cuts: Iterable[int]) -> tuple[int, str]:
        """How far other namespaces of the same tenant know the prompt, and which one does.

        `cuts` are the prompt's boundaries. The deepest nodes are found by path, however many
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
        states, evicted = len(self._needs(node)) > 1, None
        stands = _fully_in_memory if states else _rows_in_memory
        trail = self.seen.begin(node, prompt, stands)
        node = trail.end
        while True:
            best, length = node.closest(prompt)
            if best is None:
                return Known(node.end, False, evicted)
            if evicted is None and length == len(best.ids) and self._is_evicted(best):
                evicted = node.end
            if length < len(best.ids):
                until = node.end + length
                diverged = length < len(best.ids) and until < len(prompt)
                return Known(until, diverged, evicted, _made_elsewhere(best, prompt, until))
            trail.note(node, best)
            node = best

    def _is_evicted(self, node: Node) -> bool:
        """Whether it existed once and is in no tier now, including the store."""
        if not node.was_full or all(part.tier for part in self._needs(node)):
            return False
        return not (node.on_disk and self._stored(node))

    # -- nodes -----------------------------------------------------------------------------------

    def _new_node(
        self,
        parent: Node,
        prompt: Prompt,
        end: int,
        digest: str,
        kind: str,
        gone: bool = False,
    ) -> Node:
        start = parent.end
        spans = shift(prompt.clip(start, end), -start)
        node = Node(parent, start, end, digest, prompt.ids[start:end].copy(), spans)
        node.gone = gone
        if gone:
            self.detached.add(node)
        else:
            node.path = prompt.segment_digest(parent.path, start, end, kind)
            self._adopt(node)
        return node

    def _adopt(self, node: Node) -> None:
        if node.parent is not None:
            node.parent.adopt(node)
        self.paths.add(node)
        self._will_expire(node)


def _rows_in_memory(node: Node) -> bool:
    """Whether the rows of a node are in memory and never expire."""
    return node.rows.tier != NOWHERE and not node.leased


def _fully_in_memory(node: Node) -> bool:
    """Whether rows and end states of a node are in memory and never expire."""
    return node.state.tier != NOWHERE and _rows_in_memory(node)


def _made_elsewhere(node: Node, prompt: Prompt, until: int) -> bool:
    """Whether the paths differ only because the same image was encoded in another way."""
    here = next((s for s in prompt.spans if s.start <= until < s.end), None)
    there = next((s for s in shift(node.spans, node.start) if s.start <= until < s.end), None)
    if here is None or there is None:
        return False
    return here.identity == there.identity and here.feature_id != there.feature_id
