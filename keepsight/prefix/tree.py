"""The tree of all that one model remembers: a radix tree of paths, one root for each namespace.

`match` and `known` look: they compute, copy and drop nothing, and note entries of a store without
reading them. `hold` keeps a match alive, `load` moves it to the device, `insert` adds what was
computed after it. `residency.py` decides what is kept in which tier.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import torch

from keepsight.kinds import Record
from keepsight.prefix import archive
from keepsight.prefix.match import Known, Match
from keepsight.prefix.node import DEVICE, HOST, LOGITS, Node, Stored, Tensors, cut
from keepsight.prefix.prompt import Prompt, Rule
from keepsight.prefix.residency import Residency

_LATEST = 4  # other namespaces that are asked for a reason


class Tree(Residency):
    """All namespaces of one model: lookups in them, and what is added to them."""

    # -- what is usable ----------------------------------------------------------------------------

    def match(self, namespace: str, prompt: Prompt, rule: Rule) -> Match:
        """The longest remembered prefix, to its last token; with states, to the last of them."""
        self.expire()
        root = self.root(namespace)
        path = self._usable_path(root, prompt, rule)
        node, length = path[-1] if path else (root, 0)
        if length == len(prompt) == node.end and self._has_end(node, prompt):
            return Match(node, length, self._farthest(node, prompt), self.tick, True, rule.states)
        first, last = prompt.first_cut(rule), len(prompt) - 1
        for node, until in reversed(path):
            if rule.states:
                usable = until == node.end <= last and self._has_end(node, None)
            else:
                until = prompt.before_medium(min(until, last), rule)
                usable = until > node.start
            if usable and until >= first:
                tier = self._farthest(node, None)
                return Match(node, until, tier, self.tick, False, rule.states)
        return Match(root, since=self.tick, states=rule.states)

    def _usable_path(self, root: Node, prompt: Prompt, rule: Rule) -> list[tuple[Node, int]]:
        """The edges whose rows are available along a prompt, each with how far it agrees."""
        node, usable = root, list[tuple[Node, int]]()
        steps = self._walk(root, prompt)
        while True:
            part = None
            for child, until in steps:
                if child.leased and not self._stored(child):
                    self.forget(child, fit=False)  # it has expired; the match is not held yet
                    break
                if not (child.tier or child.entry):
                    break
                usable.append((child, until))
                if until < child.end:
                    part = child
                    break
                node = child
            until = usable[-1][1] if usable else 0
            if until == len(prompt) or not self._find_more(node, part, until, prompt, rule):
                return usable
            if part is not None:
                usable.pop()
            steps = self._walk(node, prompt)

    def _walk(self, node: Node, prompt: Prompt) -> list[tuple[Node, int]]:
        """The edges along a prompt from a node on, each with how far it agrees."""
        path, length = list[tuple[Node, int]](), len(prompt)
        while node.end < length:
            child = node.children.get(self.key(node, prompt))
            if child is None:
                break
            until = child.start + child.shared(prompt)
            path.append((child, until))
            if until < child.end:
                break
            node = child
        return path

    def _find_more(
        self, node: Node, child: Node | None, until: int, prompt: Prompt, rule: Rule
    ) -> bool:
        """Add what a store has of this prompt beyond `until`; whether that is more than before. It
        may go on from the node, or from inside the edge that is shared in part."""
        store, found = node.home.store, False
        if store is None:
            return False
        for one, at in ((node, node.end), (child, until)):
            if one is None or one.entry is None or one.entry.end < at:
                continue
            found |= self._list(one, one.entry)
            for end in {next(prompt.ends(rule, at), len(prompt)), len(prompt)}:
                if end <= until:
                    continue
                name = prompt.segment_digest(one.entry.name, at, end)
                if store.has(archive.SNAPSHOT, name):
                    known = Stored(name, at, end)
                    found |= self._adopt(one, known, prompt) is not None
        return found

    def _list(self, node: Node, entry: Stored) -> bool:
        """Add, once, what a store has that goes on from an entry; whether there is anything."""
        store, found = node.home.store, False
        if entry.listed or store is None:
            return False
        entry.listed = True
        upon, todo = archive.below(store, node, entry), [(node, entry)]
        while todo:
            base, its = todo.pop()
            for name, record in upon.pop(its.name, ()):
                new = self._adopt_described(base, its, name, record)
                if new is not None and new.entry is not None:
                    found, new.entry.listed = True, name in upon
                    todo.append((new, new.entry))
        return found

    def _adopt_described(self, base: Node, its: Stored, name: str, record: Record) -> Node | None:
        path = archive.described(name, record)
        if path is None or record["parent"] != its.name:
            return None
        start = int(record["start"])
        inside = its.start < start <= its.end if base.parent is not None else start == 0
        return self._adopt(base, Stored(name, start, len(path)), path) if inside else None

    def _adopt(self, base: Node, new: Stored, prompt: Prompt) -> Node | None:
        """A node for an entry that goes on from inside the entry of another; None if all of it was
        known."""
        while base.parent is not None and base.start >= new.start:
            base = base.parent
        if base.end < new.start:
            return None
        node, adopted = self.split(base, new.start), False
        while node.end < new.end:
            node = self.edge(node, prompt, new.end)
            if node.entry is None and not node.unreadable:
                node.entry, adopted = new, True
                node.leased = self.ttl is not None and not node.tier
            self._note(node)
        return node if adopted else None

    def _has_end(self, node: Node, whole: Prompt | None) -> bool:
        """Whether what is needed at the end of a node is available: states if the model has them,
        and the logits of a whole prompt."""
        entry, store = node.own_entry, node.home.store
        states, logits = self._ends_in_memory(node, whole)
        if states and logits:
            return True
        if entry is None or store is None:
            return False
        states = states or store.has(archive.STATE, entry.name)
        return states and (logits or store.has(archive.STATE, entry.ending))

    def _ends_in_memory(self, node: Node, whole: Prompt | None) -> tuple[bool, bool]:
        """Whether the states and the logits that are needed at the end of a node are there."""
        return not self.has_fixed or bool(node.states), whole is None or LOGITS in node.ends

    def _farthest(self, node: Node, whole: Prompt | None) -> str:
        """The farthest tier needed. No part is in a nearer tier than what it depends on."""
        if node.tier and all(self._ends_in_memory(node, whole)):
            return node.tier
        store, entry = node.home.store, node.entry
        told = store.tier(archive.SNAPSHOT, entry.name) if store and entry else None
        return told or "disk"

    def _stored(self, node: Node) -> bool:
        return node.home.store is not None and archive.is_there(node.home.store, node)

    # -- what is known -----------------------------------------------------------------------------

    def known(self, namespace: str, prompt: Prompt) -> Known:
        """How far the prompt agrees with anything ever seen; gives the report its reasons."""
        self.expire()
        root = self.roots.get(namespace)
        return Known(0, False) if root is None else self._known_from(root, prompt)

    def elsewhere(self, namespace: str, prompt: Prompt) -> tuple[int, str]:
        """How far other namespaces of the same tenant know the prompt, and which one does. Only the
        latest are asked: training makes a new one with every step."""
        home = self.root(namespace).home
        others = [r for r in self.roots.values() if r.home is not home and r.children]
        others = [root for root in others if root.home.tenant == home.tenant]
        latest = heapq.nlargest(_LATEST, others, key=lambda root: root.home.used)
        known = ((self._known_from(root, prompt).until, root.home.name) for root in latest)
        return max(known, default=(0, ""), key=lambda one: one[0])

    def _known_from(self, root: Node, prompt: Prompt) -> Known:
        if self.reuse == "prefix" or not len(prompt):
            return self._known_along(root, self._walk(root, prompt), prompt)
        key = prompt.key(0)  # what follows differs by all that changes it
        found = [self._known_along(root, [], prompt)]
        for its, child in root.children.items():
            if its[: len(key)] == key:
                until = child.shared(prompt)
                rest = self._walk(child, prompt) if until == child.end else []
                found.append(self._known_along(root, [(child, until), *rest], prompt))
        return max(found, key=lambda one: one.until)

    def _known_along(self, root: Node, path: list[tuple[Node, int]], prompt: Prompt) -> Known:
        evicted = next((n.start for n, until in path if self._is_evicted(n)), None)
        node, until = path[-1] if path else (root, 0)
        on = [node] if until < node.end else node.children.values()
        diverged = bool(on) and until < len(prompt)
        return Known(until, diverged, evicted, diverged and _made_elsewhere(on, prompt, until))

    def _is_evicted(self, node: Node) -> bool:
        """Whether something of it existed once and is in no tier now, including the store."""
        return node.was_here and not node.tier and not self._stored(node)

    # -- loading and remembering -------------------------------------------------------------------

    def load(self, node: Node, prompt: Prompt) -> bool:
        """Move a held path to the device, from the host or the store. False if an entry is damaged
        or does not match its name."""
        chain, store = node.chain(), node.home.store
        for n in chain:
            self.promote(n)
        missing = [n for n in chain if not n.tier]
        for n, rows in archive.rows_of(store, missing) if store is not None else ():
            received = None if rows is None else self.receive(rows, None)
            if received is None:
                return self._cannot_read(n, rows)
            self.place(n, received[0])
        if not all(n.tier for n in chain) or not self._load_end(node, prompt):
            return False
        self.fit()
        return True

    def _load_end(self, node: Node, prompt: Prompt) -> bool:
        """Read what is missing at the end of a path; logits only for a whole prompt."""
        entry, store = node.own_entry, node.home.store
        wants_state = self.has_fixed and node.parent is not None and not node.states
        wants_logits = node.end == len(prompt) and LOGITS not in node.ends
        if not (wants_state or wants_logits):
            return True
        if entry is None or store is None or not node.tier:
            return not wants_state
        fixed = None
        if wants_state:
            fixed = archive.read_end(store, node, entry.name)
            if fixed is None:
                return self._cannot_read(node, None)
        logits = archive.read_end(store, node, entry.ending) if wants_logits else None
        received = self.receive({**node.rows, **(logits or {})}, fixed)
        if received is None:
            return self._cannot_read(node, fixed)
        last = {LOGITS: received[0][LOGITS]} if LOGITS in received[0] else {}
        self.place(node, ends={**last, **(received[1] or {})})
        return True

    def _cannot_read(self, node: Node, read: Tensors | None) -> bool:
        """Note that a node has no entry that can be used; False."""
        if read is not None and node.entry is not None and node.home.store is not None:
            kind = archive.STATE if node.tier else archive.SNAPSHOT
            why = "its tensors do not have this model's shape"
            node.home.store.reject(kind, node.entry.name, why)
        node.entry, node.unreadable = None, True
        return False

    def insert(
        self,
        parent: Node,
        prompt: Prompt,
        end: int,
        kv: Tensors,
        fixed: Tensors | None,
        logits: torch.Tensor | None = None,
        cost: float = 0.0,
        since: int | None = None,
    ) -> Node:
        """Remember what follows `parent`, up to `end`. The node is returned held.

        `cost` is the milliseconds of its computation. `since` is when the prompt was matched: what
        was forgotten later is returned `gone`, held but not remembered.
        """
        for n in parent.chain() if parent.tier == HOST else ():
            self.promote(n)
        nowhere = parent.parent is not None and parent.tier != DEVICE
        late = since is not None and self._barred(parent, prompt, parent.end, end, since)
        if parent.gone or nowhere or late:  # even if a later turn made the same node again
            node = Node(parent, parent.end, prompt.ids[parent.end : end].copy())
            node.gone = True
            self.detached.add(node)
            return self.hold_node(node)
        node, begin = parent, parent.end
        while node.end < end:
            node = self.edge(node, prompt, end)
            self.promote(node)
            if not node.tier:
                self.place(node, cut(kv, node.start - begin, node.end - begin, end - begin))
        self.hold_node(node)
        new = {LOGITS: logits} if logits is not None and LOGITS not in node.ends else {}
        if self.has_fixed and fixed and not node.states:
            new |= fixed
        if new:
            self.place(node, ends=new)
        store = node.home.store
        if store is not None and (new or not archive.is_there(store, node)):
            archive.write(store, node, self.ttl, cost)
        self.fit()
        return node

    def is_forgotten(self, node: Node, prompt: Prompt, since: int) -> bool:
        """Whether anything on a turn's path was forgotten after the turn began."""
        return node.gone or self._barred(node, prompt, 0, len(prompt), since)

    def is_barred(self, node: Node, image_key: str, since: int) -> bool:
        """Whether an image was forgotten after `since`, for the tenant of a held path."""
        home = node.home
        return home.cleared > since or home.barred.get(image_key, -1) > since

    def _barred(self, node: Node, prompt: Prompt, start: int, end: int, since: int) -> bool:
        """Whether a stretch, or an image in it, was forgotten after `since`."""
        if node.home.cleared > since:
            return True
        return bool(node.home.barred) and any(
            self.is_barred(node, span.key, since) for span in prompt.clip(start, end)
        )


def _made_elsewhere(nodes: Iterable[Node], prompt: Prompt, until: int) -> bool:
    """Whether the paths differ only because the same image was encoded in another way."""
    here = next(iter(prompt.clip(until, until + 1)), None)
    if here is None:
        return False
    for node in nodes:
        there = next((s for s in node.spans if s.start <= until < s.end), None)
        if there is not None and there.identity == here.identity:
            return there.feature_id != here.feature_id
    return False
