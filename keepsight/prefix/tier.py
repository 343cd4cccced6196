"""One tier of memory: its bytes, their owners, and which part goes first; and copies between tiers.

A part can go once nothing holds it and nothing in the tier depends on it; the one that was used
least recently goes first.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from keepsight.prefix.node import HostCopy, Part, Tensors
from keepsight.store import EvictionQueue
from keepsight.system.devices import to_devices, to_host


class Tier:
    """The counters of one tier, in total, per tenant, and per account for quotas."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nbytes = self.held = self.snapshots = 0
        self.bytes_of: dict[str, int] = defaultdict(int)
        self.owned: dict[str, int] = defaultdict(int)
        self._all: EvictionQueue[Part] = EvictionQueue(_order)
        self._own: dict[str, EvictionQueue[Part]] = {}

    def put(self, part: Part) -> None:
        """Add a part to the counts."""
        self._count(part, 1)
        if part.base is not None:
            part.base.on[self.name] += 1
        self.offer(part)

    def take(self, part: Part) -> None:
        """Remove a part from the counts; what it depended on may go next."""
        self._count(part, -1)
        home, base = part.node.home, part.base
        self._all.discard(part)
        own = self._own.get(home.account)
        if own is not None:  # a part held since its creation was never queued
            own.discard(part)
            if not len(own):  # the number of tenants is unbounded
                del self._own[home.account]
        for table, name in ((self.bytes_of, home.tenant), (self.owned, home.account)):
            if not table[name]:
                del table[name]
        if base is not None:
            base.on[self.name] -= 1
            base.node.used = max(base.node.used, part.node.used)
            self.offer(base)

    def _count(self, part: Part, sign: int) -> None:
        nbytes = sign * part.nbytes
        self.nbytes += nbytes
        self.bytes_of[part.node.home.tenant] += nbytes
        self.owned[part.node.home.account] += nbytes
        self.snapshots += sign * (part is part.node.rows)
        if part.node.holds:
            self.held += nbytes

    def stats(self, budget: int) -> dict[str, int]:
        """Its bytes and snapshots, as plain data."""
        return {
            "bytes": self.nbytes,
            "budget": budget,
            "held_bytes": self.held,
            "evictable_bytes": self.nbytes - self.held,
            "snapshots": self.snapshots,
        }

    def may_go(self, part: Part) -> bool:
        """Whether nothing holds it and nothing in this tier depends on it."""
        return part.tier == self.name and not part.node.holds and not part.on[self.name]

    def offer(self, part: Part) -> None:
        """Queue a part if it can go."""
        if self.may_go(part):
            self._all.add(part)
            self._own.setdefault(part.node.home.account, EvictionQueue(_order)).add(part)

    def waits(self, part: Part) -> bool:
        """Whether it is queued."""
        own = self._own.get(part.node.home.account)
        return part in self._all and own is not None and part in own

    def least(self, account: str | None = None) -> Part | None:
        """Take the part that goes next from the queue, of all or of one account."""
        queue = self._all if account is None else self._own.get(account)
        return queue.pop(self.may_go) if queue is not None else None


def _order(part: Part) -> tuple[float, int]:
    return 0.0, part.node.used


@torch.inference_mode()
def copy_out(part: Part) -> Tensors:
    """Copy a part's tensors to host memory, bit for bit; the part remembers their devices. With
    asynchronous copies the device waits, not the program."""
    tensors = part.tensors or {}
    copies, fence = to_host(tensors)
    part.way = HostCopy({name: tensor.device for name, tensor in tensors.items()}, fence)
    return {name: c.clone() if c is tensors[name] else c for name, c in copies.items()}


@torch.inference_mode()
def copy_back(part: Part) -> Tensors:
    """Copy the tensors back to their devices."""
    way, tensors = part.way, part.tensors or {}
    part.way = None
    return tensors if way is None else to_devices(tensors, way.devices.__getitem__, way.fence)
