"""The work after each batch of writes: count uses, remove expired entries, enforce budgets.

All of it uses the catalogue, and none walks through the folder. Rows that a locked catalogue
refused are kept and added with the next ones.
"""

from __future__ import annotations

import contextlib
import time

from keepsight.errors import PinsFull
from keepsight.store import entryfile, layout
from keepsight.store.contract import Entry
from keepsight.store.folders.catalogue import ALL_TENANTS, WRITING, Catalogue, Scope
from keepsight.store.folders.catalogue_guard import CatalogueGuard
from keepsight.store.folders.folder import Folder
from keepsight.store.folders.rows import as_found, name_of
from keepsight.store.layout import EntryName
from keepsight.store.tally import COUNTED, StoredCounts
from keepsight.system.lock import Mutex

SWEEP = 1.0  # seconds between two searches for expired entries
_OWED = 10_000  # rows kept while the catalogue is locked; `check` finds the files of any others


class CatalogueUpdater:
    """Updates the catalogue around writes."""

    def __init__(
        self, folder: Folder, guard: CatalogueGuard, budget: int | None, quota: int | None
    ) -> None:
        self.folder, self.guard = folder, guard
        self.budget, self.quota = budget, quota
        self.sweep_at = 0.0
        self._entering = Mutex()
        self._owed: list[Entry] = []
        self._accounts: dict[str, str] = {}  # by tenant, of what is written now or owed
        self._adopting = False

    # -- around a write --------------------------------------------------------------------------

    def announce(self, rows: list[Entry], accounts: dict[str, str]) -> bool:
        """Record what will be written, and against whose quotas, so that a crash leaves a trace.
        False if the disk refuses even that. A locked catalogue stops no write."""

        def enter(catalogue: Catalogue) -> None:
            catalogue.set_accounts(accounts)
            catalogue.put(rows, WRITING)

        with self._entering:
            self._accounts |= accounts
        self.guard.try_to_change(enter, None)
        return not self.guard.disk.is_aside

    def enter(self, written: list[Entry], failed: list[EntryName]) -> None:
        """Record what was written, and what was announced but not written."""

        def settle(catalogue: Catalogue) -> bool:
            # Another process may have removed a file since it was written.
            catalogue.set_accounts(self._accounts)
            catalogue.put([e for e in self._owed if self._is_there(EntryName.of(e))])
            catalogue.drop([p for p in failed if catalogue.state(p) == WRITING])
            return True

        with self._entering:
            self._owed += written
            if not (self._owed or failed):
                return
            if self.guard.try_to_change(settle, False) or len(self._owed) > _OWED:
                self._owed, self._accounts = [], {}

    def pay(self, at_once: bool = False) -> float | None:
        """Add rows that a locked catalogue refused, if it may be tried again or `at_once`. Returns
        the seconds until it may, or None if no rows wait."""
        if at_once:
            self.guard.health.try_now()
        self.enter([], [])
        return self.guard.health.wait if self._owed else None

    def enter_file(self, place: EntryName) -> None:
        """Add an existing file that the catalogue does not have."""

        def enter(catalogue: Catalogue) -> None:
            # Looked at in the transaction, as others remove files in theirs.
            entry = as_found(self.folder, place) if catalogue.state(place) is None else None
            catalogue.put([entry] if entry else [])

        if self.guard.try_to(lambda catalogue: catalogue.state(place) is None, False):
            self.guard.try_to_change(enter, None)

    # -- after a write ---------------------------------------------------------------------------

    def count(self, uses: dict[EntryName, int], events: dict[str, int]) -> bool:
        """Record how often entries were read, and other counts; return whether that worked."""

        def enter(catalogue: Catalogue) -> bool:
            catalogue.add_facts(events)
            for place in catalogue.use(uses, time.time()):
                entry = as_found(self.folder, place)  # a file that the catalogue does not have
                catalogue.put([entry] if entry else [])
            return True

        return not (uses or events) or self.guard.try_to_change(enter, False)

    def sweep(self, ended: list[EntryName]) -> None:
        """Remove expired entries, as reported by readers or found in the catalogue."""
        now = time.time()
        absent = [place for place in ended if not self._is_there(place)]
        if absent:  # set aside: its dependents wait for a new copy
            self.guard.try_to_change(lambda catalogue: catalogue.drop(absent), None)
        places = [place for place in ended if self._is_over(place, now)]
        if time.monotonic() >= self.sweep_at:
            self.sweep_at = time.monotonic() + SWEEP
            slack = layout.CLOCK_SLACK
            places += self.guard.try_to(lambda catalogue: catalogue.ended(now, slack), [])
        if places:
            self.guard.remove(self.guard.act(lambda catalogue: catalogue.tower(places)))

    def let_fall(self, refused: list[EntryName]) -> None:
        """Remove the dependents of refused entries, which were written before them."""
        refused = [p for p in refused if not self._is_there(p)]
        if refused:
            tower = self.guard.act(lambda catalogue: catalogue.tower(refused))
            self.guard.remove([place for place in tower if place not in refused])

    def _is_there(self, place: EntryName) -> bool:
        return self.folder.status(name_of(place)) is not None

    def _is_over(self, place: EntryName, now: float) -> bool:
        """Check expiry in the file again: another process may have rewritten it."""
        path = self.folder.path(name_of(place))
        with contextlib.suppress(OSError, ValueError):
            return layout.expired(entryfile.read_metadata(path, place.kind, place.key), now)
        return False

    def fit(self, tenants: set[str]) -> list[EntryName]:
        """Evict the least useful entries if a budget or a quota is exceeded."""
        gone: list[EntryName] = []
        if self.quota is not None:
            for account in {self._account(tenant) for tenant in tenants}:
                gone += self.guard.fit(Scope.account(account), self.quota)[0]
        if self.budget is not None:
            gone += self.guard.fit(ALL_TENANTS, self.budget)[0]
        return gone

    def _account(self, tenant: str) -> str:
        return self.guard.act(lambda catalogue: catalogue.account(tenant))

    def crowded_out(self, sizes: dict[EntryName, int]) -> dict[EntryName, str]:
        """Of entries evicted right after they were written: those for which pins leave no room,
        with the reason."""
        found: dict[EntryName, str] = {}
        accounts: dict[str, list[EntryName]] = {}
        for place in sizes if self.quota is not None else ():
            accounts.setdefault(self._account(place.tenant), []).append(place)
        limits = [(self.budget, "budget of the store", ALL_TENANTS, list(sizes))]
        limits += [
            (self.quota, "quota of a tenant", Scope.account(account), own)
            for account, own in accounts.items()
        ]
        for limit, what, scope, own in limits:
            if limit is not None and own:
                pins = self.guard.act(lambda catalogue, s=scope: catalogue.held(s))  # type: ignore[misc]
                why = f"pins take too much of the {what}, {limit:,}; unpin something"
                found.update({place: why for place in own if sizes[place] > limit - pins})
        return found

    def pin(self, place: EntryName, pinned: bool) -> bool:
        """Pin or unpin an entry, if budget and quota have room for all pinned entries."""

        def enter(catalogue: Catalogue) -> bool:
            row = catalogue.row(place)
            found = catalogue.pin(place, pinned)
            if pinned and row is not None and not row.pinned:
                own = Scope.account(catalogue.account(place.tenant))
                if self.quota is not None and (held := catalogue.held(own)) > self.quota:
                    raise PinsFull.over("entries of the store", held, self.quota, "the quota")
                if self.budget is not None and catalogue.held() > self.budget:
                    raise PinsFull.no_room("entries of the store", "its budget", self.budget)
            return found

        return self.guard.change(enter)

    # -- statistics ------------------------------------------------------------------------------

    def counted(self, tenant: str) -> StoredCounts:
        """A tenant's entries and bytes, from the catalogue."""

        def look(catalogue: Catalogue) -> StoredCounts:
            ever = {name: int(catalogue.fact(f"{name} {tenant}")) for name in COUNTED}
            complete = bool(catalogue.fact("complete"))
            return StoredCounts(catalogue.totals(tenant), ever, time.time(), complete)

        return self.guard.act(look)

    # -- in idle time ----------------------------------------------------------------------------

    def adopt_some(self) -> tuple[bool, list[EntryName]]:
        """Add some files that the catalogue does not have. Returns whether more remain; at the end,
        what exceeded the budget and was evicted."""
        before, self._adopting = self._adopting, self.guard.adopt_some()
        if before and not self._adopting:
            return False, self.fit(set(self.guard.act(lambda catalogue: catalogue.tenants())))
        return self._adopting, []

    def pause(self) -> float | None:
        """Seconds until the next expiry or catalogue retry, up to a maximum."""
        first = self.guard.try_to(lambda catalogue: catalogue.next_end(), None)
        owed = self.pay()
        end = None if first is None else min(60.0, max(SWEEP, first - time.time()))
        return end if owed is None else owed if end is None else min(end, owed)
