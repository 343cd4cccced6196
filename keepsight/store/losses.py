"""Entries that were handed over to a store and lost, kept until a caller asks for them.

Bounded, because nobody may ask for days. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import Counter

from keepsight.errors import NotStored
from keepsight.store.contract import Name

TOO_MUCH = "too much waits to be written"
_NAMED = 1000  # entries that are named; of others only the number is known


def larger_than(nbytes: int, budget: int | None, quota: int | None) -> str | None:
    """Why an entry can never be accepted, or None if it can."""
    for limit, what in ((budget, "budget of the store"), (quota, "quota of a tenant")):
        if limit is not None and nbytes > limit:
            return f"its {nbytes:,} bytes are more than the {what}, {limit:,}"
    return None


class Losses:
    """The entries of all tenants that were lost or refused since the last report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._named: dict[tuple[str, str, str], str] = {}
        self._more: Counter[str] = Counter()

    def add(self, tenant: str, name: Name, why: str) -> None:
        """Record that this entry will not be written."""
        with self._lock:
            if len(self._named) < _NAMED or (tenant, *name) in self._named:
                self._named[tenant, *name] = why
            else:
                self._more[tenant] += 1

    def found(self, tenant: str, name: Name) -> None:
        """Record that this entry was written after all."""
        if self._named:
            with self._lock:
                self._named.pop((tenant, *name), None)

    def report(self, where: str, tenant: str | None, broken: str | None = None) -> None:
        """Raise an error that names them, for one tenant or all, and forget them.

        `broken` is the current problem of the store.
        """
        with self._lock:
            mine = {place: why for place, why in self._named.items() if tenant in (None, place[0])}
            self._named = {place: w for place, w in self._named.items() if place not in mine}
            more = self._more.total() if tenant is None else self._more[tenant]
            self._more = Counter() if tenant is None else self._more - Counter({tenant: more})
        if mine or more:
            reasons = {(kind, key): why for (_, kind, key), why in mine.items()}
            raise NotStored.of(where, reasons, len(mine) + more, broken)
