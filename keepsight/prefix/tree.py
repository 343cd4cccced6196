"""The tree of all snapshots of one model, keyed by path; one root for each namespace.

A node is the stretch between two snapshots. It may hold the rows of that stretch (keys, values)
and the fixed-size states at its end; the two are evicted separately. A node without content remains
for a while, so that a report can say `evicted` instead of `new`. The node at the end of a whole
prompt also holds its last logits.

`match` creates, drops and copies no snapshot. `hold` keeps a path alive, `load` moves it to the
device, `insert` adds snapshots. `residency.py` decides what is kept in which tier; `invariants.py`
checks it.
"""

from __future__ import annotations

import torch

from keepsight.prefix import archive
from keepsight.prefix.node import DEVICE, HOST, LOGITS, Node, Part, Tensors
from keepsight.prefix.prompt import Prompt
from keepsight.prefix.search import Search


class Tree(Search):
    """All namespaces of one model, with one budget of bytes per tier of memory."""

    # -- loading ---------------------------------------------------------------------------------

    def load(self, node: Node, prompt: Prompt) -> bool:
        """Move a held path to the device, from the host or the store. False if an entry is damaged
        or does not match its name."""
        chain = node.chain()
        parts = [*(n.rows for n in chain), *self._needs(node)]
        if all(part.tier == DEVICE for part in parts):
            return True
        for part in parts:
            self.promote(part)
        for n, found in archive.fetched(node.home.store, chain):
            needs = self._needs(n) if n is node else [n.rows]
            if not all(part.tier for part in needs) and not self._read(n, needs, found):
                n.on_disk, n.unreadable = False, True
                return False
        self.fit()
        return True

    def _read(self, node: Node, needs: list[Part], found: archive.StoredEntry | None) -> bool:
        """Read the missing parts of a node from the store; all or nothing."""
        store = node.home.store
        if store is None:
            return False
        rows = archive.rows_in(store, node, found) if not node.rows.tier else node.rows.tensors
        state = node.state.tensors if node.state in needs else None
        if state is None and node.state in needs:
            state = archive.read_state(store, node)
        if rows is None or (state is None and node.state in needs):
            return False
        received = self.receive(rows, state)
        if received is None:
            wrong = archive.STATE if node.rows.tier else archive.SNAPSHOT
            store.reject(wrong, node.digest, "its tensors do not have this model's shape")
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
        cost: float = 0.0,
        since: int | None = None,
    ) -> Node:
        """Remember a snapshot after `parent`, filling an existing node. The node is returned held.

        `cost` is the milliseconds of its computation. `since` is when the prompt was matched: what
        was forgotten later is returned `gone`, held but not remembered.
        """
        kind = "segment" if logits is None else "terminal"
        digest = prompt.segment_digest(parent.digest, parent.end, end, kind)
        for n in parent.chain() if parent.rows.tier == HOST else ():
            self.promote(n.rows)
        node = parent.children.get(digest)
        nowhere = parent.parent is not None and parent.rows.tier != DEVICE
        late = since is not None and self._barred(parent, prompt, parent.end, end, since)
        gone = parent.gone or nowhere or late  # even if a later turn made the same node again
        if node is None or gone:
            node = self._new_node(parent, prompt, end, digest, kind, gone)
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
        if node.home.store is not None and not node.on_disk:
            archive.write(node.home.store, node, self.ttl)
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
