"""One tier of memory: its bytes, their owners, a ranking by usefulness; and copies between tiers.

A part is evictable once nothing holds it and nothing in the tier depends on it.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from keepsight.prefix.node import HostCopy, Part, Tensors
from keepsight.store import EvictionQueue, Order, usefulness
from keepsight.system.devices import to_devices, to_host


class Tier:
    """The counters of one tier, in total and per account."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nbytes = self.held = self.snapshots = 0
        self.bytes_of: dict[str, int] = defaultdict(int)
        self.owned: dict[str, int] = defaultdict(int)  # by account, which quotas are for
        self._all: EvictionQueue[Part] = EvictionQueue(lambda part: _order(part, 0))
        self._own: dict[str, EvictionQueue[Part]] = {}

    def put(self, part: Part) -> None:
        """Add a part to the counts."""
        self._count(part, 1)
        if part.base is not None:
            part.base.bears(self.name, 1)
        if part.node.parent is not None:  # it may be used from now on
            part.node.parent.version += 1
        self.offer(part)

    def take(self, part: Part) -> None:
        """Remove a part from the counts; what it depended on may become evictable."""
        self._count(part, -1)
        tenant, account = part.node.home.tenant, part.node.home.account
        self._all.discard(part)
        own = self._own.get(account)
        if own is not None:  # a part held since its creation was never queued
            own.discard(part)
            if not len(own):  # the number of tenants is unbounded
                del self._own[account]
        if not self.bytes_of[tenant]:
            del self.bytes_of[tenant]
        if not self.owned[account]:
            del self.owned[account]
        if part.base is not None:
            part.base.bears(self.name, -1)
            self.offer(part.base)

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
        return part.tier == self.name and not part.node.holds and not part.bears(self.name)

    def offer(self, part: Part) -> None:
        """Queue a part for eviction if it is evictable."""
        if self.may_go(part):
            self._all.add(part)
            account = part.node.home.account
            if account not in self._own:
                self._own[account] = EvictionQueue(lambda part: _order(part, 1))
            self._own[account].add(part)

    def waits(self, part: Part) -> bool:
        """Whether it is in the eviction queue."""
        own = self._own.get(part.node.home.account)
        return part in self._all and own is not None and part in own

    def least(self, account: str | None = None) -> Part | None:
        """Take the least useful evictable part from the queue, of all or of one account."""
        queue = self._all if account is None else self._own.get(account)
        return queue.pop(self.may_go) if queue is not None else None


def _order(part: Part, whose: int) -> Order:
    node = part.node
    return usefulness(node.floors[whose], node.uses, node.cost, part.nbytes), node.used


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
