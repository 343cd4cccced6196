"""One tier of memory: how many bytes lie in it, whose they are, and what is least useful of them.

Finding the least useful must not walk through everything. A queue is a heap in which a part that
can go stands once, at the worth it had when it came in; worth only rises by use, so what comes out
on top is looked at again and goes back down if it was used meanwhile.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable

from keepsight.prefix.node import Part
from keepsight.store import worth

Order = tuple[float, int]  # worth; of equals the one that was used longest ago goes first


class Queue:
    """Parts by their worth, the least first."""

    def __init__(self, order: Callable[[Part], Order]) -> None:
        self._order = order
        self._heap: list[tuple[float, int, int, Part]] = []
        self._entry: dict[Part, tuple[float, int, int]] = {}  # the one that counts
        self._number = itertools.count()

    def add(self, part: Part) -> None:
        """Let it wait for its turn; nothing happens if it does already, at this worth or less."""
        order = self._order(part)
        waiting = self._entry.get(part)
        if waiting is None or order < waiting[:2]:
            self._push(part, order)

    def discard(self, part: Part) -> None:
        """Forget it. Its place in the heap goes when many are empty."""
        self._entry.pop(part, None)
        if len(self._heap) > 64 + 2 * len(self._entry):
            self._heap = [(*entry, part) for part, entry in self._entry.items()]
            heapq.heapify(self._heap)

    def pop(self, may_go: Callable[[Part], bool]) -> Part | None:
        """The least useful that may go. One that may not leaves the queue until it is added."""
        while self._heap:
            *entry, part = heapq.heappop(self._heap)
            if self._entry.get(part) != tuple(entry):
                continue
            if not may_go(part):
                del self._entry[part]
                continue
            order = self._order(part)
            if order > (entry[0], entry[1]):
                self._push(part, order)
                continue
            del self._entry[part]
            return part
        return None

    def _push(self, part: Part, order: Order) -> None:
        entry = (*order, next(self._number))
        self._entry[part] = entry
        heapq.heappush(self._heap, (*entry, part))

    def __contains__(self, part: Part) -> bool:
        return part in self._entry

    def __len__(self) -> int:
        return len(self._entry)


class Tier:
    """The books of one tier, over all tenants and for each account."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nbytes = self.held = self.snapshots = 0
        self.bytes_of: dict[str, int] = defaultdict(int)
        self.owned: dict[str, int] = defaultdict(int)  # by account, which quotas are for
        self._all = Queue(lambda part: _order(part, 0))
        self._own: dict[str, Queue] = {}

    def put(self, part: Part) -> None:
        """Count a part in."""
        self._count(part, 1)
        if part.base is not None:
            part.base.bears(self.name, 1)
        self.offer(part)

    def take(self, part: Part) -> None:
        """Count a part out; what it stood on may be able to go now."""
        self._count(part, -1)
        tenant, account = part.node.home.tenant, part.node.home.account
        self._all.discard(part)
        own = self._own.get(account)
        if own is not None:  # what was held from its first moment on has never waited
            own.discard(part)
            if not len(own):  # there may be any number of tenants
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
        """Whether nothing holds it and nothing in this tier stands on it."""
        return part.tier == self.name and not part.node.holds and not part.bears(self.name)

    def offer(self, part: Part) -> None:
        """Let a part wait to be let go of, if it may go."""
        if self.may_go(part):
            self._all.add(part)
            account = part.node.home.account
            if account not in self._own:
                self._own[account] = Queue(lambda part: _order(part, 1))
            self._own[account].add(part)

    def waits(self, part: Part) -> bool:
        """Whether it stands where the least useful are looked for."""
        own = self._own.get(part.node.home.account)
        return part in self._all and own is not None and part in own

    def least(self, account: str | None = None) -> Part | None:
        """The least useful part that may go, of all or of one account. It leaves that queue."""
        queue = self._all if account is None else self._own.get(account)
        return queue.pop(self.may_go) if queue is not None else None


def _order(part: Part, whose: int) -> Order:
    node = part.node
    return worth(node.floors[whose], node.uses, node.cost, part.nbytes), node.used
