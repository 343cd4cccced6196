"""Idle lanes, and how remembered states are restored into one.

A conversation that continues finds most of its keys and values still in its lane.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from keepsight.core.decoding.state import Lane, Shape
from keepsight.prefix.node import Node

MAX_LANES = 4  # idle lanes kept; each saves its conversation a copy of the whole cache
SHARE = 4  # the part of the budget that they may take from the snapshots


class Lanes:
    """A few idle lanes, so that a conversation finds its keys and values in place.

    `variant` names everything that decides shapes and bits of a lane's tensors: weights and
    environment, but not the tenant. A lane serves only turns with the same `variant`: after a cast,
    or inside autocast, its buffers would have another dtype or device.
    """

    def __init__(self, model: PreTrainedModel, shape: Shape, budget: int) -> None:
        self._model, self._shape, self._budget = model, shape, budget
        self._idle: list[Lane] = []  # least recently used first
        self.nbytes = 0  # of the idle lanes
        self.variant = ""
        self.waiting = 0  # sequences that will take one

    def take(self, node: Node) -> Lane:
        """Take the lane that already holds most of the path to `node`."""
        best, most = None, 0
        fitting = [lane for lane in self._idle if lane.variant == self.variant]
        for lane in fitting:
            end = shared(lane, node)
            if end > most:
                best, most = lane, end
        # A lane with much of another conversation after the shared part is left to that one.
        crowded = best is not None and best.node is not None and most * 2 < best.node.end
        if (best is None or crowded) and len(self._idle) < MAX_LANES:
            return self.fresh()
        if best is None and not fitting:
            self._drop(self._idle[0])
            return self.fresh()
        lane = best if best is not None else fitting[0]
        self._drop(lane)
        return lane

    def fresh(self) -> Lane:
        return Lane(self._model, self._shape, self.variant)

    def give_back(self, lane: Lane) -> None:
        """Keep an unused lane while the budget allows; the snapshots then have less of it."""
        self._idle.append(lane)
        self.nbytes += lane.nbytes
        while len(self._idle) > max(MAX_LANES, self.waiting) or self.nbytes > self._budget // SHARE:
            self._drop(self._idle[0])

    def _drop(self, lane: Lane) -> None:
        self._idle.remove(lane)
        self.nbytes -= lane.nbytes

    def clear(self) -> None:
        self.forget(True)

    def forget(self, everything: bool) -> None:
        """Drop the idle lanes that lie on what was forgotten, or all of them."""
        for lane in list(self._idle):
            if everything or lane.node is None or lane.node.gone:
                self._drop(lane)


def shared(lane: Lane, node: Node) -> int:
    """How many tokens of the path to a node lie on a lane."""
    mine = set(lane.node.chain()) if lane.node is not None else set()
    return next((n.end for n in reversed(node.chain()) if n in mine), 0)


def restore(lane: Lane, node: Node, length: int) -> None:
    """Restore what a loaded path remembers after its first `length` tokens into a lane."""
    lane.restore_full([(n.start, n.kv or {}) for n in node.chain() if n.end > length])
    if node.end:
        lane.restore_fixed(node.end, node.fixed or {})
        lane.node = node
