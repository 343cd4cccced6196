"""What was handed over to a store and is not in it: named until somebody asks.

Bounded, for it may not be asked for days; safe in several threads.
"""

from __future__ import annotations

import threading
from collections import Counter

from keepsight.errors import NotStored
from keepsight.store.contract import Name

TOO_MUCH = "too much waits to be written"
_NAMED = 1000  # entries that are named; of others only the number is known


def larger_than(nbytes: int, budget: int | None, quota: int | None) -> str | None:
    """Why an entry can never be taken, or None where it can."""
    for limit, what in ((budget, "budget of the store"), (quota, "quota of a tenant")):
        if limit is not None and nbytes > limit:
            return f"its {nbytes:,} bytes are more than the {what}, {limit:,}"
    return None


class Losses:
    """The entries of all tenants that were lost or refused since somebody asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._named: dict[tuple[str, str, str], str] = {}
        self._more: Counter[str] = Counter()

    def add(self, tenant: str, name: Name, why: str) -> None:
        """This one will not be written."""
        with self._lock:
            if len(self._named) < _NAMED or (tenant, *name) in self._named:
                self._named[tenant, *name] = why
            else:
                self._more[tenant] += 1

    def found(self, tenant: str, name: Name) -> None:
        """This one was written after all."""
        if self._named:
            with self._lock:
                self._named.pop((tenant, *name), None)

    def report(self, where: str, tenant: str | None, broken: str | None = None) -> None:
        """Raise an error that names them, those of one tenant or of all, and forget them.

        `broken` is what the store itself suffers from at the moment.
        """
        with self._lock:
            mine = {place: why for place, why in self._named.items() if tenant in (None, place[0])}
            self._named = {place: w for place, w in self._named.items() if place not in mine}
            more = self._more.total() if tenant is None else self._more[tenant]
            self._more = Counter() if tenant is None else self._more - Counter({tenant: more})
        if mine or more:
            reasons = {(kind, key): why for (_, kind, key), why in mine.items()}
            raise NotStored.of(where, reasons, len(mine) + more, broken)
