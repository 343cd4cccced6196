"""Check and repair: do files match their names, and does the catalogue match the files?

Both directions are compared: every file is in the catalogue with its true size, every row has a
file, and totals are right. Every byte is read, and nothing may depend on an absent entry. Each
problem is one line that names the entry.
"""

from __future__ import annotations

import contextlib
import stat
import time

from keepsight.errors import FileError, WrongFormatVersion
from keepsight.store import entryfile, layout
from keepsight.store.contract import Entry
from keepsight.store.folders.catalogue_guard import CatalogueGuard
from keepsight.store.folders.folder import DAMAGED, PART, Folder, left_over
from keepsight.store.folders.rows import as_found, name_of, pin_name, pins
from keepsight.store.layout import EntryName


class Audit:
    """One check of the entries of some tenants."""

    def __init__(
        self, folder: Folder, guard: CatalogueGuard, tenants: list[str], repair: bool
    ) -> None:
        self.folder, self.guard, self.tenants, self.repair = folder, guard, tenants, repair
        self.found: list[str] = []
        self._missing: list[EntryName] = []  # entries with a row but without an intact file

    def run(self) -> list[str]:
        """Return one line per problem."""
        if not self.guard.is_sound():
            self.found.append(f"{self.folder.root}: the catalogue is damaged")
            if not self.repair:
                return self.found
            self.guard.make_anew()
        self.guard.complete()
        for tenant in self.tenants:
            for kind in layout.KINDS:
                self._kind(tenant, kind)
            self._rows(tenant)
        self._bases()
        self._pins()
        self._totals()
        if self.repair:
            self._tidy()
        return self.found

    def _say(self, name: str, what: object) -> None:
        self.found.append(f"{self.folder.path(name)}: {what}")

    # -- files -----------------------------------------------------------------------------------

    def _kind(self, tenant: str, kind: str) -> None:
        above = f"{layout.tenant_prefix(tenant)}{kind}"
        if not self._is_folder(above):
            return
        for shard in self.folder.names(above):
            if not self._is_folder(f"{above}/{shard}"):
                continue
            for last in self.folder.names(f"{above}/{shard}"):
                if not last.startswith(PART) and not last.endswith(DAMAGED):
                    self._file(f"{above}/{shard}/{last}")

    def _is_folder(self, name: str) -> bool:
        status = self.folder.status(name)
        if status is None or stat.S_ISDIR(status.st_mode):
            return status is not None
        self._say(name, "a link or a file where a folder should be; nothing in it is used")
        return False

    def _file(self, name: str) -> None:
        place, status = layout.parse(name), self.folder.status(name)
        if place is None:
            self._say(name, "no store wrote this file")
        elif status is None:
            return  # it was removed meanwhile
        elif not stat.S_ISREG(status.st_mode):
            self._say(name, "a link or a folder where a file should be")
            self._put_aside(place)
        elif self._is_sound(place, status.st_size):
            self._compare(place, status.st_size)

    def _is_sound(self, place: EntryName, size: int) -> bool:
        path = self.folder.path(name_of(place))
        try:
            entryfile.verify(path, place.kind, place.key)
        except FileNotFoundError:
            return False
        except WrongFormatVersion as error:
            self.found.append(str(error))
        except FileError as error:
            self.found.append(str(error))
            self._put_aside(place)
            return False
        except OSError as error:
            self._say(name_of(place), error)
            return False
        return True

    def _put_aside(self, place: EntryName) -> None:
        self._missing.append(place)
        if self.repair:
            self.folder.set_aside(name_of(place))
            self.guard.change(lambda catalogue: catalogue.drop([place]))

    def _compare(self, place: EntryName, size: int) -> None:
        state, row = self.guard.act(lambda c: (c.state(place), c.row(place)))
        if row is None and state is None:
            self._say(name_of(place), "not in the catalogue")
            entry = as_found(self.folder, place) if self.repair else None
            if entry is not None:
                self.guard.change(lambda catalogue: catalogue.put([entry]))
        elif row is not None and row.nbytes != size:
            self._say(name_of(place), f"{size} bytes, the catalogue says {row.nbytes}")
            if self.repair:
                self.guard.change(lambda catalogue: catalogue.resize(place, size))
        elif row is not None:
            self._compare_metadata(place, row)

    def _compare_metadata(self, place: EntryName, row: Entry) -> None:
        """Compare a row with its file, which is right. A wrong row could cause intact entries to be
        removed."""
        true = as_found(self.folder, place)
        if true is None:
            return
        same = (row.depends_on, sorted(row.media)) == (true.depends_on, sorted(true.media))
        if not same or (row.expires is None) != (true.expires is None):
            self._say(name_of(place), "the catalogue says something else of what it belongs to")
            if self.repair:
                self.guard.change(lambda catalogue: catalogue.drop([place]))
                self.guard.change(lambda catalogue: catalogue.put([true]))

    # -- the catalogue -----------------------------------------------------------------------------

    def _rows(self, tenant: str) -> None:
        for entry in self.guard.pages(tenant):
            place = EntryName.of(entry)
            if self.folder.status(name_of(place)) is not None:
                continue
            if self.guard.act(lambda catalogue, p=place: catalogue.row(p)) is None:  # type: ignore[misc]
                continue  # it was removed meanwhile
            self._missing.append(place)
            self._say(name_of(place), "in the catalogue, but there is no such file")
            if self.repair:
                self.guard.change(lambda catalogue, p=place: catalogue.drop([p]))  # type: ignore[misc]

    def _bases(self) -> None:
        """Find entries without their base. Repair removes them, then their dependents."""
        loose = dict(self.guard.act(lambda catalogue: catalogue.without_base()))
        for gone in self._missing:
            upon = self.guard.act(lambda catalogue, g=gone: catalogue.upon(g))  # type: ignore[misc]
            loose |= dict.fromkeys(upon, (gone.kind, gone.key))
        loose = {place: base for place, base in loose.items() if place.tenant in self.tenants}
        for place, base in loose.items():
            self._say(name_of(place), f"depends on {base[0]}/{base[1]}, which is absent")
        if self.repair and loose:
            self.guard.remove(self.guard.act(lambda catalogue: catalogue.tower(loose)))

    def _totals(self) -> None:
        totals, counted = self.guard.act(lambda catalogue: catalogue.sums())
        wrong = {name for name in {*totals, *counted} if totals.get(name) != counted.get(name)}
        for tenant, kind in sorted(name for name in wrong if name[0] in self.tenants):
            where = f"{layout.tenant_prefix(tenant)}{kind}"
            total, true = totals.get((tenant, kind)), counted.get((tenant, kind))
            self._say(where, f"the totals say {total} (entries, bytes), the rows {true}")
        if self.repair and wrong:
            self.guard.change(lambda catalogue: catalogue.add_up())

    def _pins(self) -> None:
        """Find pins that the catalogue lost: each pin is also a small file beside the entries."""
        for place in pins(self.folder):
            row = self.guard.act(lambda c, p=place: c.row(p))  # type: ignore[misc]
            if place.tenant in self.tenants and row is not None and not row.pinned:
                self._say(pin_name(place), "pinned, and the catalogue does not know")
                if self.repair:
                    self.guard.change(lambda c, p=place: c.pin(p, True))  # type: ignore[misc]

    def _tidy(self) -> None:
        for place in pins(self.folder):
            if place.tenant in self.tenants and self.folder.status(name_of(place)) is None:
                self.folder.remove(pin_name(place))
        for tenant in self.tenants:
            sweep(self.folder, tenant, 7 * 86400.0)


def sweep(folder: Folder, tenant: str, age: float) -> None:
    """Remove what was set aside at least this long ago, and what killed writers left."""
    now = time.time()
    for kind in layout.KINDS:
        for name, status in folder.scan(f"{layout.tenant_prefix(tenant)}{kind}"):
            last = name.rsplit("/", 1)[1]
            old = last.endswith(DAMAGED) and status.st_mtime <= now - age
            if old or (last.startswith(PART) and left_over(status)):
                with contextlib.suppress(OSError):
                    folder.remove(name)
