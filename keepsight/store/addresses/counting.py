"""Counts the entries and bytes at an address by listing it, in a separate thread; results are
reused for a while.

A statistics call waits briefly for a new count, and otherwise returns the last one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from keepsight.store.priority import trim
from keepsight.system.exits import begin

_BELIEVED = 30.0  # seconds
Kinds = dict[str, list[int]]  # entries and bytes of each kind


class Count(NamedTuple):
    """A tenant's entries and bytes at an address."""

    kinds: Kinds
    at: float | None = None  # time of the count, seconds since the epoch
    until: float = 0.0  # until when it is valid, on the monotonic clock


class Counting:
    """Counts of all tenants at one address. `count` lists a tenant's entries; None: no answer."""

    def __init__(self, count: Callable[[str], Kinds | None]) -> None:
        self._count = count
        self._known: dict[str, Count] = {}
        self._start()

    def _start(self) -> None:
        self._changed = threading.Condition()
        self._asked: dict[str, float] = {}  # by tenant, since when
        self._busy = False
        self._changes = 0
        self._process = os.getpid()

    def of(self, tenant: str, wait: float) -> Count:
        """A tenant's count, if a recent one is available within `wait` seconds. After one call
        waited in vain, the others do not wait."""
        if self._process != os.getpid():
            self._start()  # a forked child has none of its parent's threads
        with self._changed:
            now = time.monotonic()
            if self._known.get(tenant, Count({})).until <= now:
                self._asked.setdefault(tenant, now)
                if now - min(self._asked.values()) >= wait:
                    wait = 0.0
                if not self._busy:
                    self._busy = begin(self._work, "keepsight-count") is not None
                self._changed.wait_for(lambda: tenant not in self._asked, wait)
            return self._known.get(tenant, Count({}))

    def _work(self) -> None:
        while True:
            with self._changed:
                tenant = next(iter(self._asked), None)
                if tenant is None:
                    self._busy = False
                    return
                changes = self._changes
            kinds = None
            try:
                kinds = self._count(tenant)
            finally:
                with self._changed:
                    if kinds is not None:
                        # entries removed meanwhile may be included
                        sure = _BELIEVED if changes == self._changes else 0.0
                        until = time.monotonic() + sure
                        self._known[tenant] = Count(kinds, time.time(), until)
                        trim(self._known)
                    self._asked.pop(tenant, None)
                    self._changed.notify_all()

    def grew(self, tenant: str, kind: str, nbytes: int) -> None:
        """Record that an entry was written."""
        with self._changed:
            counted = self._known.get(tenant, Count({})).kinds.setdefault(kind, [0, 0])
            counted[0], counted[1] = counted[0] + 1, counted[1] + nbytes

    def doubt(self, tenant: str | None = None) -> None:
        """Record that entries of one tenant, or of any, were removed: recount when asked."""
        with self._changed:
            self._changes += 1
            for name in list(self._known) if tenant is None else [tenant]:
                if name in self._known:
                    self._known[name] = self._known[name]._replace(until=0.0)
