"""A folder that outlives the process: the `contract` implemented with files.

A key names its content, so writers need no locks: all writers of a key write equal bytes. Reads use
only the file, so no reader waits for a writer or for the catalogue. One background thread writes
(`writer`), so no answer waits for a disk; `flush()` returns when everything handed over before is
on the disk. A damaged entry is named in a warning, moved aside and reported absent, so it is
computed again.

"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from keepsight.errors import DamagedFile, InputError, PinsFull, StoreError
from keepsight.kinds import Record
from keepsight.store import entryfile, layout
from keepsight.store.contract import NOTHING, About, Below, Entry, Tensors
from keepsight.store.entryfile import FORMAT
from keepsight.store.folders import check, descent
from keepsight.store.folders.catalogue import ALL_TENANTS, Scope
from keepsight.store.folders.catalogue_guard import CatalogueGuard
from keepsight.store.folders.entry_files import EntryFiles
from keepsight.store.folders.folder import Folder
from keepsight.store.folders.leftovers import remove_empty
from keepsight.store.folders.rows import as_found, pin_name
from keepsight.store.folders.writer import Writer
from keepsight.store.health import OK, Health
from keepsight.store.layout import EntryName
from keepsight.store.pending import PendingWrite
from keepsight.store.tally import StoredCounts
from keepsight.store.timeout import DiskCalls, TimedCall
from keepsight.system.devices import COMPLETE, to_host
from keepsight.system.exits import when_dropped

__all__ = ["FORMAT", "DiskStore"]

logger = logging.getLogger(__name__)


class DiskStore:
    """A folder of tensor files and small JSON notes, each under a kind and a key.

    `budget` limits the bytes of the whole folder, `quota` those of each tenant together with all
    its salts, and `waiting` those that may wait in memory to be written.
    """

    def __init__(
        self,
        root: str | Path,
        budget: int | None = None,
        *,
        quota: int | None = None,
        waiting: int = 1 << 30,
    ) -> None:
        if "://" in str(root):
            raise StoreError(f"{root}: only local folders can be a store here; see open_store")
        self._folder = Folder(root)
        self._disk = Health(f"the store {self._folder.root} cannot be written")
        self._guard = CatalogueGuard(self._folder, self._disk)
        self._writer = Writer(self._folder, self._guard, budget, quota, waiting)
        self._reach, self._reads = self._writer.reach, self._writer.reach.health
        self._listing = DiskCalls(Health(f"the catalogue of {self._folder.root} is slow"))
        self._files = EntryFiles(self._folder, self._writer)
        self._tenant = ""
        self._account: str | None = ""  # account for the quota; None: unknown
        self._whole = self  # the store of which this is a view
        self._refuse_other_formats()
        when_dropped(self, self._writer.retire)

    @property
    def root(self) -> Path:
        """The folder."""
        return self._folder.root

    @property
    def budget(self) -> int | None:
        """The byte limit of the whole folder."""
        return self._writer.budget

    @property
    def quota(self) -> int | None:
        """The byte limit of one tenant in it."""
        return self._writer.quota

    @property
    def broken(self) -> str | None:
        """Why nothing can currently be written, or None."""
        return self._disk.why if self._disk.state != OK else None

    def tenant(self, name: str | None) -> DiskStore:
        """The store as another tenant sees it; tenants share no entries."""
        return self._as(layout.tenant_digest(name), layout.account_digest(name))

    def of_digest(self, digest: str) -> DiskStore:
        """Like `tenant`, by a digest from `tenants`."""
        return self._as(digest)

    def _as(self, tenant: str, account: str | None = None) -> DiskStore:
        view = object.__new__(DiskStore)
        view.__dict__.update(self._whole.__dict__)
        view._tenant, view._account = tenant, account
        return view

    def tenants(self) -> list[str]:
        """The digests of all tenants with entries here; empty for the default tenant."""
        self._catch_up()
        return self._guard.act(lambda catalogue: catalogue.tenants())

    def _refuse_other_formats(self) -> None:
        def look(call: TimedCall[bytes]) -> bytes:
            self._folder.look()
            return self._folder.read_file(layout.MARKER)

        try:
            data = self._reach.ask(look, b"")
            if data:
                layout.check_marker(data, str(self.root))
        except DamagedFile as error:
            logger.warning("%s; written anew", error)
        except OSError:
            pass  # a folder older than markers, or a new one

    # -- reading ---------------------------------------------------------------------------------

    def has(self, kind: str, key: str) -> bool:
        """Whether reading this entry should work."""
        place = self._place(kind, key)
        if place in self._writer.pending.jobs:
            return True
        return self._reach.ask(lambda call: self._writer.is_there(place), False)

    def tier(self, kind: str, key: str) -> str | None:
        """Where a read would find it: "disk", or None."""
        return "disk" if self.has(kind, key) else None

    def get(self, kind: str, key: str) -> tuple[Tensors, Record] | None:
        """Tensors and record, or None if absent, expired or damaged."""
        return self.get_all(kind, [key]).get(key)

    def get_all(self, kind: str, keys: Iterable[str]) -> dict[str, tuple[Tensors, Record]]:
        """Those entries that exist and are intact, by key; read in parallel."""
        jobs = {place: self._waiting(place) for place in (self._place(kind, key) for key in keys)}
        read = self._files.read_all(entryfile.read, [place for place in jobs if not jobs[place]])
        found = {}
        for place, job in jobs.items():
            if job is not None:
                job.ready.wait()
                if job.tensors is not None:
                    found[place.key] = (job.tensors, job.record)
            elif place not in read or self._is_over(place, read[place][1].get("kept")):
                self._writer.tally.count(place.tenant, "misses")
            else:
                self._writer.used(place)
                found[place.key] = read[place]
        return found

    def note(self, kind: str, key: str) -> Record | None:
        """A small JSON record, or None if absent, expired or damaged."""
        place = self._place(kind, key)
        job = self._waiting(place)
        if job is not None:
            return job.record
        found = self._files.read(entryfile.read_note, place)
        if found is None or self._is_over(place, found[1]):
            self._writer.tally.count(place.tenant, "misses")
            return None
        self._writer.used(place)
        return found[0]

    def below(self, kind: str, base: str | None, count: int) -> Below:
        """Dependents of an entry, of its kind, level by level; for None, entries without a base."""

        wanted, none = (self._tenant, kind, base, count), descent.Listed()

        def look(call: TimedCall[descent.Listed]) -> descent.Listed:
            return self._guard.try_to(lambda book: descent.latest_below(book, *wanted), none)

        listed = self._listing.ask(look, none)  # a slow catalogue does not delay a read
        places = [place for below in listed.values() for place in below]
        return descent.with_records(listed, self._files.read_all(entryfile.read_record, places))

    def reject(self, kind: str, key: str, why: str) -> None:
        """Set aside an entry whose content does not match its key."""
        place = self._place(kind, key)
        self._reach.ask(lambda call: self._files.set_aside(place, why), None)

    def _place(self, kind: str, key: str) -> EntryName:
        layout.checked(kind, key)
        return EntryName(self._tenant, kind, key)

    def _waiting(self, place: EntryName) -> PendingWrite | None:
        """The entry among those not yet on the disk, if it has not expired."""
        job = self._writer.pending.jobs.get(place)
        if job is None or layout.expired(job.metadata):
            return None
        self._writer.tally.count(place.tenant, "hits")
        return job

    def _is_over(self, place: EntryName, metadata: object) -> bool:
        if not layout.expired(metadata):
            return False
        self._writer.over(place)
        return True

    # -- writing ---------------------------------------------------------------------------------

    def put(
        self,
        kind: str,
        key: str,
        tensors: Tensors,
        record: Record,
        about: About = NOTHING,
    ) -> None:
        """Hand over an entry to the writer; the tensors must not change afterwards."""
        self._hand_over(self._place(kind, key), record, tensors, about)

    def put_note(self, kind: str, key: str, body: Record, about: About = NOTHING) -> None:
        """Hand over a small JSON record to the writer."""
        self._hand_over(self._place(kind, key), body, None, about)

    def _hand_over(
        self, place: EntryName, record: Record, tensors: Tensors | None, about: About
    ) -> None:
        if (tensors is None) != (place.kind in layout.NOTES):
            expected = "a note: use put_note" if tensors is not None else "tensors: use put"
            raise InputError(f"the kind {place.kind!r} is for {expected}")
        layout.checked_about(about)
        # The writer checks whether it exists and has its base: nothing waits here.
        if place in self._writer.pending.jobs:
            return
        ready = COMPLETE
        if tensors is not None:
            tensors, ready = to_host(tensors)
        self._writer.hand_over(
            PendingWrite(
                place,
                record,
                tensors,
                about,
                layout.metadata_of(about),
                account=self._account,
                ready=ready,
            )
        )

    def flush(self) -> None:
        """Return when everything handed over before is on the disk, or raise: for this tenant, or
        for all."""
        self._writer.flush(None if self is self._whole else self._tenant)

    def close(self) -> None:
        """Finish writing and stop the writer; a tenant's view only finishes."""
        if self is self._whole:
            self._writer.close()
        else:
            self._writer.pending.drain()

    # -- entries and budgets ---------------------------------------------------------------------

    def _catch_up(self) -> None:
        """The current catalogue, with every file in it."""
        self._writer.catch_up()
        if self._guard.in_memory:
            self._guard.close()  # others may have written what a catalogue in memory cannot know
        self._guard.complete()

    def entry(self, kind: str, key: str) -> Entry | None:
        """The catalogue's data on one entry, without reading it; None if absent or expired."""
        place = self._place(kind, key)
        self._writer.catch_up()
        if not self._writer.is_there(place):
            return None
        found = self._guard.try_to(lambda catalogue: catalogue.row(place), None)
        return found or as_found(self._folder, place)

    def entries(self) -> Iterator[Entry]:
        """All entries of this tenant."""
        self._catch_up()
        yield from self._guard.pages(self._tenant)

    def stats(self, wait: float = 5.0) -> Record:
        """Entries and bytes per kind; counts since it was opened, and `ever`.

        Waits at most `wait` seconds for a disk. `counted` says when entries and bytes were
        counted (None: not yet); `complete` whether the catalogue knew every file. `state` names
        what the disk currently refuses, and `since` when that began.
        """
        known = self._writer.counted(self._tenant, wait) or StoredCounts({}, {}, None, False)
        whose = None if self is self._whole else self._tenant
        healths = [self._disk, self._reads]
        if whose is None or whose in self._writer.crowded:
            healths.append(self._writer.pins)
        disk = next((health for health in healths if health.state != OK), self._disk)
        return {
            "root": str(self.root),
            "tier": "disk",
            "entries": sum(counted["entries"] for counted in known.kinds.values()),
            "bytes": sum(counted["bytes"] for counted in known.kinds.values()),
            "kinds": known.kinds,
            **self._writer.tally.counts.of(whose),
            "ever": known.ever,
            "counted": known.at,
            "complete": known.is_complete,
            **self._writer.pending.stats(whose),
            "budget": self._writer.budget,
            "quota": self._writer.quota,
            "state": disk.state,
            "since": disk.since,
            "broken": disk.why or None,
        }

    def pin(self, kind: str, key: str, pinned: bool = True) -> bool:
        """Pin an entry and what it depends on, whatever the budget; False if absent."""
        place = self._place(kind, key)
        self._catch_up()
        if not self._writer.is_there(place):
            return False
        try:
            if pinned:
                self._folder.write(pin_name(place), [b"{}"], None)
            else:
                self._folder.remove(pin_name(place))
                remove_empty(self._folder, [pin_name(place)])
                self._writer.pins.worked()
        except OSError as error:
            raise StoreError(f"{self.root}: no pin can be set or removed: {error}") from error
        try:
            return self._writer.pin(place, pinned)
        except PinsFull:
            self._folder.remove(pin_name(place))
            raise

    def delete(self, kind: str, key: str) -> int:
        """Remove an entry and all its dependents; return the bytes freed."""
        place = self._place(kind, key)
        self._catch_up()
        return self._remove([place])

    def delete_media(self, image_key: str) -> int:
        """Remove everything that depends on this image, including dependents."""
        self._catch_up()

        def holders() -> list[EntryName]:
            found = self._guard.act(lambda c: c.with_media(self._tenant, [image_key]))
            # Older snapshots name the features of an image, not the image.
            features = [place.key for place in found if place.kind == "package"]
            return found + self._guard.act(lambda c: c.with_media(self._tenant, features))

        return self._remove(holders())

    def clear(self, everybody: bool = False) -> int:
        """Remove every entry of this tenant, or of all tenants; return the bytes freed."""
        self._catch_up()
        if everybody:
            tenants = ["", *filter(layout.is_tenant, self._folder.names("tenants"))]
            return sum(self._as(tenant).clear() for tenant in tenants)
        freed = self._remove([EntryName.of(entry) for entry in self.entries()])
        check.sweep(self._folder, self._tenant, 0.0)
        return freed

    def gc(self, budget: int) -> int:
        """Remove this tenant's least useful entries until the rest fits; return the bytes freed."""
        freed = self._fit(Scope.tenant(self._tenant), budget)
        check.sweep(self._folder, self._tenant, 7 * 86400.0)
        return freed

    def gc_all(self, budget: int) -> int:
        """Remove the least useful entries of all tenants until the rest fits."""
        freed = self._fit(ALL_TENANTS, budget)
        for tenant in ["", *self._folder.names("tenants")]:
            check.sweep(self._folder, tenant, 7 * 86400.0)
        return freed

    def _fit(self, scope: Scope, budget: int) -> int:
        self._catch_up()
        gone, freed = self._guard.fit(scope, budget)
        self._writer.tally.evicted(gone)
        return freed

    def _remove(self, places: list[EntryName]) -> int:
        tower = self._guard.act(lambda catalogue: catalogue.tower(places))
        freed = self._guard.remove(tower)
        self._writer.pins.worked()
        pinned = [pin_name(place) for place in tower if self._folder.status(pin_name(place))]
        for name in pinned:
            self._folder.remove(name)
        remove_empty(self._folder, pinned)
        return freed

    def check(self, repair: bool = False) -> list[str]:
        """Read everything in full; return one line per problem. `repair` fixes them.

        Without a tenant, all tenants are checked. Files that no store wrote and entries of other
        versions are named, but not repaired.
        """
        self._writer.catch_up()
        tenants = [self._tenant] if self._tenant else ["", *self._folder.names("tenants")]
        return check.Audit(self._folder, self._guard, tenants, repair).run()
