"""A store at any fsspec address: s3, gcs, a shared folder, sftp, memory.

Files and names are the same as in a folder, so a bucket can be copied to a disk and back. Reads and
writes never wait for each other, and need no lock. An address that does not answer is named in one
warning and left alone for growing pauses; meanwhile the store seems empty, and `flush` tells what
was not written. There is no catalogue: whatever needs all entries lists the address (listing.py
names the cost).
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, TypeVar

from keepsight import digests
from keepsight.errors import FileError, StoreError, WrongFormatVersion
from keepsight.kinds import Options, Record
from keepsight.store import entryfile, layout, ranking
from keepsight.store.addresses import claims
from keepsight.store.addresses.address import Address, Breaker
from keepsight.store.addresses.counting import Counting, Kinds
from keepsight.store.addresses.listing import EntryHeader, RecentNames, head, tenants_at
from keepsight.store.addresses.reader import Reader
from keepsight.store.addresses.remote_upkeep import Allowance, Housekeeping, named_errors
from keepsight.store.addresses.write_queue import ROOM, Outbox, RemoteWrite
from keepsight.store.contract import NOTHING, About, Below, Entry, Name, Tensors
from keepsight.store.health import OK, UNREACHABLE
from keepsight.store.losses import larger_than
from keepsight.store.tally import TenantCounts
from keepsight.system.exits import begin, when_dropped

logger = logging.getLogger(__name__)

_SWEPT = 300.0  # seconds between two searches for expired entries
_HOUR = 3600.0
T = TypeVar("T")
_Table = dict[Name, Entry]


class RemoteStore:
    """Tensor files and small JSON notes at an address, for one tenant.

    `options` go to the file system (credentials, an endpoint); `timeout` limits one read or write
    in seconds.
    """

    def __init__(
        self,
        address: str,
        budget: int | None = None,
        *,
        quota: int | None = None,
        options: Options | None = None,
        timeout: float = 30.0,
        waiting: int = ROOM,
    ) -> None:
        self._link = Address(address, options, timeout)
        self.address, self.budget, self.quota = self._link.shown, budget, quota
        self._seen = RecentNames()
        self._writing = Breaker(f"the store {self.address} cannot be written")
        self._tenant, self._is_view = "", False
        self._counts = TenantCounts()
        self._allowance = Allowance(self._link, self._seen, budget, quota)
        self._marked: list[bool] = []
        self._swept: dict[str, float] = {}  # tenants with expired entries; time of the last sweep
        inner: Any = copy.copy(self)  # shared with threads, so that this object can be dropped
        self._reader = inner._reader = Reader(self._link, self._seen, inner._sweep_soon)
        self._counting = inner._counting = Counting(inner._count_all)
        self._outbox = inner._outbox = Outbox(inner._write, waiting)
        when_dropped(self, self._outbox.retire)
        if self._reader.is_marked(self.address):
            self._marked.append(True)

    def tenant(self, name: str | None) -> RemoteStore:
        """The store as another tenant sees it; tenants share no entries."""
        return self.of_digest(layout.tenant_digest(name))

    def of_digest(self, digest: str) -> RemoteStore:
        """Like `tenant`, by a digest from `tenants`."""
        view = copy.copy(self)
        view._tenant, view._is_view = digest, True
        return view

    def tenants(self) -> list[str]:
        """The digests of all tenants that may have entries here; empty for the default tenant."""
        self._outbox.settle()
        with named_errors(self.address, "listed"):
            return tenants_at(self._link)

    # -- reading ---------------------------------------------------------------------------------

    def has(self, kind: str, key: str) -> bool:
        """Whether reading this entry should work."""
        name = self._name(kind, key)
        return self._waiting(name) is not None or self._reader.look(name, kind, key) is not None

    def get(self, kind: str, key: str) -> tuple[Tensors, Record] | None:
        """Tensors and record, or None if absent, expired or damaged."""
        name = self._name(kind, key)
        job = self._waiting(name)
        if job is not None and (tensors := job.tensors) is not None:
            job.ready.wait()
            return self._counted((tensors, job.record))
        return self._counted(self._reader.tensors(name, kind, key))

    def note(self, kind: str, key: str) -> Record | None:
        """A small JSON record, or None if absent, expired or damaged."""
        name = self._name(kind, key)
        job = self._waiting(name)
        if job is not None:
            return self._counted(job.record)
        return self._counted(self._reader.note(name, kind, key))

    def entry(self, kind: str, key: str) -> Entry | None:
        """An entry from its file's header; None if absent or expired."""
        name = self._name(kind, key)
        job = self._waiting(name)
        if job is not None:
            return job.entry()
        known = self._reader.look(name, kind, key)
        if known is None:
            return None
        return self._reader.asked(name, lambda: self._upkeep().entry((kind, key), known))

    def below(self, kind: str, base: str | None, count: int) -> Below:
        """The dependents of an entry, of its own kind; for None, entries without a base."""
        return self._reader.asked("", lambda: self._upkeep().below(kind, base, count)) or {}

    def tier(self, kind: str, key: str) -> str | None:
        """Where a read would find it: "remote", or None."""
        return "remote" if self.has(kind, key) else None

    def reject(self, kind: str, key: str, why: str) -> None:
        """Remove an entry whose content does not match its key."""
        name = self._name(kind, key)
        logger.warning("damaged entry set aside: %s/%s (%s)", self.address, name, why)
        self._outbox.withdraw(lambda job: job.name == name)
        self._reader.discard(name)
        self._counting.doubt(self._tenant)

    def _name(self, kind: str, key: str) -> str:
        return layout.place(kind, key, self._tenant)

    def _waiting(self, name: str) -> RemoteWrite | None:
        job = self._outbox.find(name)
        return None if job is None or layout.expired(job.metadata) else job

    def _counted(self, found: T | None) -> T | None:
        self._counts.count(self._tenant, "misses" if found is None else "hits")
        return found

    # -- writing ---------------------------------------------------------------------------------

    def put(
        self,
        kind: str,
        key: str,
        tensors: Tensors,
        record: Record,
        about: About = NOTHING,
    ) -> None:
        """Hand over an entry; the tensors must not change afterwards. It is readable at once."""
        nbytes = sum(tensor.nbytes for tensor in tensors.values()) + 1024
        self._hand_over(kind, key, tensors, record, about, nbytes)

    def put_note(self, kind: str, key: str, body: Record, about: About = NOTHING) -> None:
        """Hand over a small JSON record."""
        self._hand_over(kind, key, None, body, about, len(digests.canonical_json(body)))

    def _hand_over(
        self,
        kind: str,
        key: str,
        tensors: Tensors | None,
        record: Record,
        about: About,
        nbytes: int,
    ) -> None:
        layout.checked_about(about)
        name = self._name(kind, key)
        if self._waiting(name) is not None or self._seen.find(name)[1] is not None:
            return
        base, too_large = about.depends_on, larger_than(nbytes, self.budget, self.quota)
        if too_large is not None:
            self._outbox.losses.add(self._tenant, (kind, key), too_large)
            self._counts.count(self._tenant, "refused")
            return
        meta = layout.metadata_of(about)
        on = None if base is None or base[1] == key else self._name(*base)
        job = RemoteWrite(name, kind, key, tensors, record, about, on, meta, nbytes, self._tenant)
        job.leave_device()
        if not self._outbox.offer(job):
            self._counts.count(self._tenant, "refused")

    def _write(self, job: RemoteWrite) -> None:
        """Write in the background. An entry that cannot be serialised is its own fault."""
        parts = list(entryfile.spelled(job.kind, job.key, job.tensors, job.record, job.metadata))
        if not self._writing.allows(self._link.timeout):
            raise StoreError(f"{self.address} cannot be written: {self._writing.why}")
        try:
            if job.base is not None and not self._is_there(job.base, ask=True):
                self._refuse(job)
            elif not self._is_there(job.name):
                self._put_in_place(job, parts)
        except Exception as error:
            self._writing.failed(error)
            raise StoreError(f"{self.address} cannot be written: {error}") from error
        self._writing.worked()

    def _refuse(self, job: RemoteWrite) -> None:
        """Refuse an entry without its base, and remove its dependents that were written earlier."""
        self._counts.count(job.tenant, "refused")
        for kind in layout.KINDS:
            name = layout.place(kind, job.key, job.tenant)
            found = self._seen.find(name)[1]
            if found is not None and found.metadata.get("stands_on") == [job.kind, job.key]:
                self._link.remove(name)
                self._seen.removed(name)

    def _put_in_place(self, job: RemoteWrite, parts: list[bytes | memoryview]) -> None:
        if not self._marked:
            if not self._link.exists(layout.MARKER):
                self._link.write(layout.MARKER, [layout.marker_bytes()], lambda: False)
            self._marked.append(True)
        was_over = job.tenant in self._swept or self._seen.old_head(job.name) is not None
        careful = "ttl" in job.metadata or was_over
        if sign := layout.dependent_marker(job.kind, job.key, job.about, job.tenant):
            self._link.write(sign, [b"{}"], lambda: job.unwanted)
        claims.write(self._link, job.name, parts, lambda: job.unwanted, careful)
        if job.unwanted:
            return
        self._seen.there(job.name, EntryHeader(job.metadata, job.about.cost))
        nbytes = sum(len(part) for part in parts)
        self._counts.count(job.tenant, "written")
        self._outbox.losses.found(job.tenant, (job.kind, job.key))
        self._counting.grew(job.tenant, job.kind, nbytes)
        removed = self._allowance.grown(job.tenant, nbytes)
        if removed:
            for tenant, count in removed.items():
                self._counting.doubt(tenant)
                self._counts.count(tenant, "evictions", count)

    def _is_there(self, name: str, ask: bool = False) -> bool:
        """Whether it exists and need not be written. `ask`: others may have removed it."""
        if ask and self._seen.find(name)[1] is not None and not self._link.exists(name):
            self._seen.removed(name)
        known, found = self._seen.find(name)
        if known or (place := layout.parse(name)) is None:
            return found is not None or self._seen.is_foreign(name)
        since = self._seen.removals
        try:
            found = head(self._link, name, place.kind, place.key)
        except WrongFormatVersion:
            return True  # intact, of another version
        except (FileError, FileNotFoundError, NotADirectoryError):
            return False
        self._seen.there(name, found, since)
        return not layout.expired(found.metadata)

    def flush(self) -> None:
        """Return when everything handed over is at the address; raise with what is not."""
        self._outbox.settle()
        whose = self._tenant if self._is_view else None  # without a tenant, for all of them
        self._outbox.losses.report(self.address, whose, self._writing.why)

    def close(self) -> None:
        """Finish writing and release everything; a tenant's view only finishes writing."""
        if self._is_view:
            self._outbox.settle()
        else:
            self._outbox.close()

    # -- housekeeping ----------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        """All entries of this tenant, in no order."""
        self._outbox.settle()
        with named_errors(self.address, "listed"):
            table = self._upkeep().table()
        over = [name for name, entry in table.items() if self._is_over(entry)]
        gone = set(chain(*ranking.together(table, over)))
        yield from (entry for name, entry in table.items() if name not in gone)

    def _is_over(self, entry: Entry) -> bool:
        """Whether it is expired, or set aside where nothing can be removed."""
        known, found = self._seen.find(self._name(entry.kind, entry.key))
        return (known and found is None) or (
            entry.expires is not None and (entry.expires <= time.time())
        )

    def stats(self, wait: float = 10.0) -> Record:
        """Entries and bytes from a recent count (`counted` says when), and counts since it was
        opened. Counting lists the address; no call waits longer than `wait` for it."""
        kinds, at, _ = self._counting.of(self._tenant, wait)
        why = self._reader.broken or self._writing.why
        whose = self._tenant if self._is_view else None
        return {
            "root": self.address,
            "tier": "remote",
            "entries": sum(entries for entries, _ in kinds.values()),
            "bytes": sum(nbytes for _, nbytes in kinds.values()),
            "kinds": {kind: {"entries": n, "bytes": size} for kind, (n, size) in kinds.items()},
            **self._counts.of(whose),
            "counted": at,
            **self._outbox.stats(whose),
            "budget": self.budget,
            "quota": self.quota,
            "state": OK if why is None else UNREACHABLE,
            "since": self._reader.since or self._writing.since,
            "broken": why,
        }

    def _count_all(self, tenant: str) -> Kinds | None:
        return self._reader.asked("", Housekeeping(self._link, self._seen, tenant).count)

    def pin(self, kind: str, key: str, pinned: bool = True) -> bool:
        """Pin an entry and what it depends on, whatever the budget; False if absent."""
        layout.checked(kind, key)
        self._outbox.settle()
        with named_errors(self.address, "pinned"):
            if not self._link.exists(self._name(kind, key)):  # ask the address, not memory
                return False
            self._upkeep().pin((kind, key), pinned)
        return True

    def delete(self, kind: str, key: str) -> int:
        """Remove an entry and all its dependents; return the bytes freed."""
        layout.checked(kind, key)
        return self.delete_all([(kind, key)])

    def delete_all(self, names: Iterable[Name]) -> int:
        """Delete many entries with one shared listing."""
        doomed = list(names)
        return self._remove(lambda table: doomed)

    def delete_media(self, image_key: str) -> int:
        """Remove everything that depends on this image; return the bytes freed."""
        freed = self._remove(lambda table: [n for n, e in table.items() if image_key in e.media])
        self._outbox.withdraw(lambda j: j.tenant == self._tenant and image_key in j.about.media)
        return freed

    def clear(self, everybody: bool = False) -> int:
        """Remove every entry of this tenant, or of all tenants; return the bytes freed."""
        if everybody:
            return sum(self.of_digest(tenant).clear() for tenant in self.tenants())
        freed = self._remove(list)
        self._outbox.withdraw(lambda job: job.tenant == self._tenant)
        with named_errors(self.address, "removed"):
            self._upkeep().clear_rest()
        return freed

    def gc(self, budget: int) -> int:
        """Remove this tenant's least useful entries until the rest fits; return the bytes freed."""
        freed = self._remove(lambda t: ranking.least_useful(t, budget, time.time()), counted=True)
        with named_errors(self.address, "removed"):
            self._upkeep().sweep(_HOUR)
        return freed

    def check(self, repair: bool = False) -> list[str]:
        """Read everything in full; return one line per problem. `repair` fixes them."""
        self._outbox.settle()
        self._counting.doubt(self._tenant)
        try:
            return self._upkeep().check(repair)
        except Exception as error:
            return [f"{self.address} cannot be checked: {error}"]

    def _remove(self, choose: Callable[[_Table], list[Name]], counted: bool = False) -> int:
        """Remove the chosen entries, and cancel those that wait to be written."""
        self._outbox.settle()
        with named_errors(self.address, "removed"):
            table = self._upkeep().table()
            names = choose(table)
            layers = ranking.together(table, names)
            gone = {self._name(*name) for name in chain(names, *layers)}
            self._outbox.withdraw(lambda job: job.name in gone)
            freed = self._upkeep().remove(table, layers)
        self._counting.doubt(self._tenant)
        self._counts.count(self._tenant, "evictions", sum(map(len, layers)) if counted else 0)
        return freed

    def _sweep_soon(self, name: str) -> None:
        """Remove all expired entries after one was met, in the background and seldom."""
        place, now = layout.parse(name), time.monotonic()
        if place is None or now < self._swept.get(place.tenant, -_SWEPT) + _SWEPT:
            return
        self._swept[place.tenant] = now
        work = Housekeeping(self._link, self._seen, place.tenant).sweep_ended
        begin(work, "keepsight-sweep")

    def _upkeep(self) -> Housekeeping:
        return Housekeeping(self._link, self._seen, self._tenant)
