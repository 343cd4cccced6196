"""The index of a folder, in SQLite: which entries exist, with size, last use and expiry.

Reading an entry never needs it. A row is committed before its file is put in place, and removed
after the file is gone, so whatever is there can be found and deleted; a crash may leave a row too
many. A damaged or lost index is deleted and filled again from the files when it is opened.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

from keepsight.errors import StoreError
from keepsight.store import health, layout
from keepsight.store.contract import CLOCK_SLACK, Entry, EntryName
from keepsight.store.files import Folder
from keepsight.system import forks, private_files

NAME = "index.sqlite"
AT_ONCE = 256  # entries removed in one transaction
_VERSION = 1
_JOURNAL = 128  # pages of 4 KiB; a larger journal would hurt a nearly full disk
_FILLING = 16  # such pages while it is filled, perhaps because a full disk has no room for more
_PATIENCE = 5.0  # seconds to wait for another process to finish its transaction
_PAGE = 1000
_TROUBLE = sqlite3.Error, UnicodeDecodeError  # the latter if SQLite's message is damaged
_LEFT: list[sqlite3.Connection | None] = []  # connections of a parent, in use when it forked
T = TypeVar("T")
Base = sqlite3.Connection

_TABLES = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS entry (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT NULL, tenant TEXT NOT NULL,
    account TEXT NOT NULL, bytes INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL,
    uses INTEGER NOT NULL, cost REAL NOT NULL, base_kind TEXT, base_key TEXT,
    media TEXT NOT NULL, pinned INTEGER NOT NULL DEFAULT 0, expires REAL,
    UNIQUE (tenant, kind, key));
CREATE INDEX IF NOT EXISTS by_use ON entry (used);
CREATE INDEX IF NOT EXISTS by_account ON entry (account, used);
CREATE INDEX IF NOT EXISTS by_base ON entry (tenant, base_key, kind, used);
CREATE INDEX IF NOT EXISTS by_end ON entry (expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS medium (tenant TEXT, image TEXT, id INTEGER,
    PRIMARY KEY (tenant, image, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS medium_of ON medium (id);
CREATE TABLE IF NOT EXISTS total (tenant TEXT, kind TEXT, account TEXT, entries INTEGER,
    bytes INTEGER, PRIMARY KEY (tenant, kind, account)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON entry BEGIN
    INSERT INTO total VALUES (NEW.tenant, NEW.kind, NEW.account, 1, NEW.bytes)
    ON CONFLICT DO UPDATE SET entries = entries + 1, bytes = bytes + excluded.bytes; END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF bytes ON entry BEGIN
    UPDATE total SET bytes = bytes + NEW.bytes - OLD.bytes
    WHERE tenant = OLD.tenant AND kind = OLD.kind AND account = OLD.account; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON entry BEGIN
    UPDATE total SET entries = entries - 1, bytes = bytes - OLD.bytes
    WHERE tenant = OLD.tenant AND kind = OLD.kind AND account = OLD.account;
    DELETE FROM total WHERE entries = 0 AND tenant = OLD.tenant AND kind = OLD.kind;
    DELETE FROM medium WHERE id = OLD.id; END;
PRAGMA user_version = {_VERSION};
COMMIT;
"""

_INSERT = """
INSERT INTO entry (kind, key, tenant, account, bytes, created, used, uses, cost, base_kind,
                   base_key, media, expires)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (tenant, kind, key) DO UPDATE SET bytes = excluded.bytes, created = excluded.created,
    used = excluded.used, cost = max(cost, excluded.cost), base_kind = excluded.base_kind,
    base_key = excluded.base_key, media = excluded.media, expires = excluded.expires
RETURNING id
"""
_HERE = "kind = ? AND key = ? AND tenant = ?"
_LEAVES = """
SELECT * FROM entry AS e WHERE (pinned = 0 OR :pins) AND {where} AND NOT EXISTS (
    SELECT 1 FROM entry AS d
    WHERE d.tenant = e.tenant AND d.base_key = e.key AND d.base_kind = e.kind)
ORDER BY used LIMIT :count
"""
_HELD = """
WITH RECURSIVE held (id) AS (
    SELECT id FROM entry WHERE pinned AND {where}
    UNION SELECT b.id FROM held JOIN entry AS e USING (id) JOIN entry AS b
        ON b.tenant = e.tenant AND b.kind = e.base_kind AND b.key = e.base_key)
SELECT coalesce(sum(bytes), 0) FROM held JOIN entry USING (id)
"""


class Scope(NamedTuple):
    """Which tenants' rows are meant: an SQL condition, and its value."""

    where: str = "TRUE"
    value: str = ""

    @classmethod
    def tenant(cls, tenant: str | None) -> Scope:
        """The rows of one tenant, or of all."""
        return cls() if tenant is None else cls("tenant = :value", tenant)

    @classmethod
    def account(cls, account: str) -> Scope:
        """The rows that share a quota: a tenant's, and those under all its salts."""
        return cls("account = :value", account)


# -- rows ------------------------------------------------------------------------------------------


def put(base: Base, entries: Iterable[Entry]) -> None:
    """Write rows; existing ones keep their use counts and pins."""
    for e in entries:
        base_kind, base_key = e.depends_on or (None, None)
        if (base_kind, base_key) == (e.kind, e.key):
            base_kind = base_key = None
        row = (e.kind, e.key, e.tenant, e.account, e.nbytes, e.created, e.used, max(1, e.uses))
        more = (e.cost, base_kind, base_key, json.dumps(e.media), e.expires)
        (number,) = base.execute(_INSERT, (*row, *more)).fetchone()
        names = [(e.tenant, image, number) for image in e.media]
        base.executemany("INSERT OR IGNORE INTO medium VALUES (?, ?, ?)", names)


def row(base: Base, name: EntryName) -> Entry | None:
    """One entry."""
    found = base.execute(f"SELECT * FROM entry WHERE {_HERE}", name).fetchone()
    return None if found is None else _entry(found)


def drop(base: Base, names: Iterable[EntryName]) -> None:
    """Remove rows."""
    base.executemany(f"DELETE FROM entry WHERE {_HERE}", list(names))


def pin(base: Base, name: EntryName, pinned: bool) -> bool:
    """Pin or unpin a row; return whether it exists."""
    query = f"UPDATE entry SET pinned = ? WHERE {_HERE}"
    return base.execute(query, (pinned, *name)).rowcount > 0


def use(base: Base, uses: dict[EntryName, int], now: float) -> None:
    """Add uses."""
    values = [(count, now, *name) for name, count in uses.items()]
    base.executemany(f"UPDATE entry SET uses = uses + ?, used = ? WHERE {_HERE}", values)


def upon(base: Base, name: EntryName) -> list[EntryName]:
    """The direct dependents of an entry."""
    query = "SELECT * FROM entry WHERE base_kind = ? AND base_key = ? AND tenant = ?"
    return [_name(found) for found in base.execute(query, name)]


def tower(base: Base, names: Iterable[EntryName]) -> list[EntryName]:
    """These entries and all their dependents, the deepest dependents first."""
    found = dict.fromkeys(names)
    open_ = list(found)
    for name in open_:  # grows while it is iterated
        new = [other for other in upon(base, name) if other not in found]
        found.update(dict.fromkeys(new))
        open_ += new
    return list(reversed(found))


def with_image(base: Base, tenant: str, image: str) -> list[EntryName]:
    """A tenant's entries that depend on an image."""
    query = (
        "SELECT e.* FROM medium AS m JOIN entry AS e USING (id) WHERE m.tenant = ? AND image = ?"
    )
    return [_name(found) for found in base.execute(query, (tenant, image))]


def expired(base: Base, now: float) -> list[EntryName]:
    """Expired entries, and those dated in the future, which would live too long."""
    found = base.execute(
        "SELECT * FROM entry WHERE expires IS NOT NULL AND (expires <= ? OR created > ?)",
        (now, now + CLOCK_SLACK),
    )
    return [_name(one) for one in found]


def next_end(base: Base) -> float | None:
    """When the first entry expires, if any does."""
    query = "SELECT min(expires) FROM entry WHERE expires IS NOT NULL"
    return base.execute(query).fetchone()[0]  # type: ignore[no-any-return]


def latest_upon(base: Base, tenant: str, kind: str, on: str | None, count: int) -> list[EntryName]:
    """The most recently used entries of one kind that depend directly on an entry of that kind, or
    on nothing."""
    found = base.execute(
        "SELECT * FROM entry WHERE tenant = ? AND kind = ? AND base_key IS ?"
        " AND (base_kind IS NULL OR base_kind = kind) ORDER BY used DESC LIMIT ?",
        (tenant, kind, on, count),
    )
    return [_name(one) for one in found]


def without_base(base: Base) -> list[Entry]:
    """Entries whose base has no row."""
    found = base.execute(
        "SELECT * FROM entry AS e WHERE base_key IS NOT NULL AND NOT EXISTS ("
        " SELECT 1 FROM entry AS b"
        " WHERE b.tenant = e.tenant AND b.kind = e.base_kind AND b.key = e.base_key)"
    )
    return [_entry(one) for one in found]


# -- sums ------------------------------------------------------------------------------------------


def totals(base: Base, tenant: str) -> dict[str, dict[str, int]]:
    """Entries and bytes per kind of one tenant."""
    query = "SELECT kind, sum(entries), sum(bytes) FROM total WHERE tenant = ? GROUP BY kind"
    return {
        kind: {"entries": entries, "bytes": nbytes}
        for kind, entries, nbytes in base.execute(query, (tenant,))
    }


def nbytes(base: Base, scope: Scope) -> int:
    """Bytes of what a scope means."""
    query = f"SELECT coalesce(sum(bytes), 0) FROM total WHERE {scope.where}"
    return int(base.execute(query, {"value": scope.value}).fetchone()[0])


def held(base: Base, scope: Scope) -> int:
    """Bytes of pinned entries and of what they depend on; reads every row."""
    query = _HELD.format(where=scope.where)
    return int(base.execute(query, {"value": scope.value}).fetchone()[0])


def tenants(base: Base) -> list[str]:
    """All tenants with entries here."""
    return sorted(found[0] for found in base.execute("SELECT DISTINCT tenant FROM total"))


def fact(base: Base, name: str) -> int:
    """A number: `complete` (every file has a row), or a count as `hits TENANT`."""
    found = base.execute("SELECT value FROM fact WHERE name = ?", (name,)).fetchone()
    return int(found[0]) if found else 0


def add_facts(base: Base, numbers: dict[str, int]) -> None:
    """Add to counts."""
    base.executemany(
        "INSERT INTO fact VALUES (?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
        list(numbers.items()),
    )


def _name(found: sqlite3.Row) -> EntryName:
    """The entry that a row names. SQLite has no checksums; a flipped bit is only detected here."""
    name = EntryName(found["kind"], found["key"], found["tenant"])
    if not (layout.is_name(name.kind, name.key) and layout.is_tenant(name.tenant)):
        raise sqlite3.DatabaseError("a row names an impossible entry")
    return name


def _entry(found: sqlite3.Row) -> Entry:
    name, on = _name(found), (found["base_kind"], found["base_key"])
    try:
        return Entry(
            name.kind,
            name.key,
            nbytes=int(found["bytes"]),
            used=float(found["used"]),
            created=float(found["created"]),
            uses=int(found["uses"]),
            cost=float(found["cost"]),
            depends_on=None if on[1] is None else on,
            media=tuple(json.loads(found["media"])),
            pinned=bool(found["pinned"]),
            expires=found["expires"],
            tenant=name.tenant,
            account=found["account"],
        )
    except (TypeError, ValueError):
        raise sqlite3.DatabaseError("a row cannot be read") from None


# -- the file --------------------------------------------------------------------------------------


class Index:
    """One connection to the index of a folder: opened when needed, filled again when damaged."""

    def __init__(self, files: Folder) -> None:
        self.files = files
        self._lock = threading.RLock()
        self._base: Base | None = None
        self.file: tuple[int, int] | None = None  # device and inode of what is open
        self._is_read_only = False
        self._is_lost = False  # in a child of a process that forked while it was in use
        forks.hold(self)

    def look(self, work: Callable[[Base], T], otherwise: T, wait: bool = True) -> T:
        """What `work` finds; `otherwise` in a folder that is no store, or, unless it may wait,
        while another thread uses the index. StoreError if it fails."""
        if not self._lock.acquire(blocking=wait):
            return otherwise
        try:
            return self._run(work) if self.is_store() else otherwise
        finally:
            self._lock.release()

    def change(self, work: Callable[[Base], T]) -> T:
        """Call `work` in one transaction, the only writer of all processes until its end."""

        def whole(base: Base) -> T:
            with _transaction(base):
                return work(base)

        with self._lock:
            return self._run(whole)

    def _run(self, work: Callable[[Base], T]) -> T:
        for is_last in (False, True):
            try:
                return work(self._opened())
            except _TROUBLE as error:
                state = health.named(error)
                if state == health.DAMAGED:
                    self.delete()
                elif state != health.LOCKED:
                    self.close()  # this connection may stay broken
                if is_last or state != health.DAMAGED:
                    raise StoreError(f"{self.files.path(NAME)}: {error}") from error
        raise StoreError(f"{self.files.path(NAME)}: not usable")

    def entries(self, scope: Scope) -> Iterator[Entry]:
        """All rows of a scope, even if they change meanwhile; no writer waits long."""
        query = f"SELECT * FROM entry WHERE id > :after AND {scope.where} ORDER BY id LIMIT {_PAGE}"
        none: list[sqlite3.Row] = []
        after = 0
        while True:
            values = {"value": scope.value, "after": after}
            rows = self.look(lambda base, v=values: base.execute(query, v).fetchall(), none)  # type: ignore[misc]
            if not rows:
                return
            try:
                yield from map(_entry, rows)
            except sqlite3.DatabaseError as error:
                self.delete()
                raise StoreError(f"{self.files.path(NAME)}: {error}; it is filled anew") from error
            after = rows[-1]["id"]

    def is_sound(self) -> bool:
        """Whether its tables and indexes are intact, and every row names an entry."""
        try:
            check = "PRAGMA integrity_check(1)"
            found = self.look(lambda base: base.execute(check).fetchone()[0], "ok")
            return found == "ok" and all(True for _ in self.entries(Scope()))
        except StoreError:
            return False

    def close(self) -> None:
        """Close it; it opens again when needed."""
        with self._lock:
            if self._base is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._base.close()
            self._base = None

    def delete(self) -> None:
        """Delete it; it is filled from the files when it is opened again."""
        with self._lock:
            self.close()
            for suffix in ("", "-wal", "-shm"):
                status = self.files.status(NAME + suffix)
                if status is not None and stat.S_ISDIR(status.st_mode):
                    self.files.set_aside(NAME + suffix)
                else:
                    self.files.remove(NAME + suffix)

    # -- opening ---------------------------------------------------------------------------------

    def _opened(self) -> Base:
        if self._is_lost:
            raise StoreError(f"{self.files.root}: its process forked while it was in use")
        may_write = self._is_read_only and os.access(self.files.root, os.W_OK)
        if self._base is not None and self._identity() == self.file and not may_write:
            return self._base
        self.close()
        status = self.files.status(NAME)
        if status is not None and not stat.S_ISREG(status.st_mode):
            self.delete()  # a link would lead outside the store
        base = self._connect()
        try:
            if base.execute("PRAGMA user_version").fetchone()[0] not in (0, _VERSION):
                raise sqlite3.DatabaseError("it is of another version")
            self._is_read_only = bool(base.execute("PRAGMA query_only").fetchone()[0])
            if not self._is_read_only:
                self._fill(base)
        except BaseException:
            base.close()
            raise
        self._base, self.file = base, self._identity()
        return base

    def _connect(self) -> Base:
        path = self.files.path(NAME)
        private_files.reserve(path)  # files beside it inherit its mode
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                return _written(path)
            except sqlite3.OperationalError as error:
                if health.named(error) != health.LOCKED:
                    break
                # Of two that open it for the first time one is told at once that it is locked.
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)
        wal = self.files.status(f"{NAME}-wal")
        if os.access(self.files.root, os.W_OK) or (wal is not None and wal.st_size):
            return _written(path)
        # Nobody writes here, and all of it is in its one file.
        base = _connected(f"file:{quote(os.fsencode(path.absolute()))}?immutable=1")
        base.execute("PRAGMA query_only = 1")
        return base

    def _fill(self, base: Base) -> None:
        """Add every file that has no row yet, one folder in one transaction: who removes files
        does it in another."""
        if fact(base, "complete"):
            return
        base.execute(f"PRAGMA wal_autocheckpoint = {_FILLING}")
        try:
            for tenant in self.files.tenants():
                for shard in self.files.shards(tenant):
                    with _transaction(base):
                        found = self.files.in_shard(shard)
                        put(base, [one for one in found if row(base, one.name) is None])
        except OSError as error:  # half a walk is not taken for all
            raise StoreError(f"{self.files.root} cannot be read: {error}") from error
        with _transaction(base):
            for name in self.pins():
                pin(base, name, True)
            base.execute("INSERT OR REPLACE INTO fact VALUES ('complete', 1)")
        base.execute(f"PRAGMA wal_autocheckpoint = {_JOURNAL}")

    def pins(self) -> Iterator[EntryName]:
        """Every pin. It is a small file, so that it outlives the index."""
        for tenant in self.files.tenants():
            for kind in layout.KINDS:
                for last in self.files.names(f"{layout.tenant_prefix(tenant)}pins/{kind}"):
                    key = os.path.splitext(last)[0]
                    if layout.is_name(kind, key):
                        yield EntryName(kind, key, tenant)

    def _identity(self) -> tuple[int, int] | None:
        status = self.files.status(NAME)
        return None if status is None else (status.st_dev, status.st_ino)

    def is_store(self) -> bool:
        """Whether the folder is a store. Looking must not make one of it."""
        if any(self.files.status(name) for name in (NAME, layout.MARKER)):
            return True
        return any(name in layout.KINDS or name == "tenants" for name in self.files.names(""))

    # -- forks -----------------------------------------------------------------------------------

    def before_fork(self, seconds: float) -> bool:
        """Close it until `after_fork`: SQLite records its locks in the process, and a child would
        trust the copied records."""
        if not self._lock.acquire(timeout=seconds):
            return False
        self.close()
        return True

    def after_fork(self) -> None:
        """Allow it to be opened again."""
        self._lock.release()

    def in_child(self, taken: bool) -> None:
        """Refuse to work over a connection that could not be closed."""
        self._lock = threading.RLock()
        if not taken:
            _LEFT.append(self._base)
            self._base, self._is_lost = None, True

    # -- removing --------------------------------------------------------------------------------

    def remove(self, choose: Callable[[Base], Iterable[EntryName]]) -> tuple[list[EntryName], int]:
        """Remove what `choose` names, with all dependents; return their names and the bytes
        freed."""
        gone: list[EntryName] = []
        freed = 0
        while True:

            def some(base: Base) -> list[tuple[EntryName, int]]:
                doomed = tower(base, choose(base))
                there = [name for name in doomed if row(base, name) or self._status(name)]
                return [(name, self._remove(base, name)) for name in there[:AT_ONCE]]

            removed = self._removing(some)
            gone += [name for name, _ in removed]
            freed += sum(size for _, size in removed)
            if len(removed) < AT_ONCE:
                return gone, freed

    def fit(self, scope: Scope, budget: int, pins: bool = False) -> tuple[list[EntryName], int]:
        """Remove the least recently used entries, leaves first, until the rest fits; `pins`:
        pinned ones as well. Returns their names and the bytes freed."""
        gone: list[EntryName] = []
        freed = 0
        values = {"value": scope.value, "pins": pins, "count": AT_ONCE}

        def some(base: Base) -> list[tuple[EntryName, int]]:
            over, removed = nbytes(base, scope) - budget, list[tuple[EntryName, int]]()
            found = base.execute(_LEAVES.format(where=scope.where), values) if over > 0 else ()
            leaves = [(one["used"], _name(one)) for one in found]
            heapq.heapify(leaves)
            while leaves and over > 0:
                _, name = heapq.heappop(leaves)
                entry = row(base, name)
                removed.append((name, self._remove(base, name)))
                over -= entry.nbytes if entry is not None else 0
                on = entry and entry.depends_on and EntryName(*entry.depends_on, name.tenant)
                below = row(base, on) if on else None
                if below is not None and (pins or not below.pinned) and not upon(base, below.name):
                    heapq.heappush(leaves, (below.used, below.name))
            return removed

        while removed := self._removing(some):
            gone += [name for name, _ in removed]
            freed += sum(size for _, size in removed)
        return gone, freed

    def _removing(
        self, some: Callable[[Base], list[tuple[EntryName, int]]]
    ) -> list[tuple[EntryName, int]]:
        if not self.is_store():
            return []
        removed: dict[EntryName, int] = {}  # their files are gone, whatever becomes of the rows

        def noted(base: Base) -> None:
            removed.update(some(base))

        for attempt in range(3):
            try:
                self.change(noted)
                break
            except StoreError as error:
                if attempt == 2 or health.named(error) != health.FULL:
                    raise
                if attempt:  # its journal is the larger part, and finds no room to be written back
                    self.delete()
                # Otherwise the files that are gone by now may have made room for the rows.
            except OSError as error:
                where = self.files.root
                raise StoreError(f"{where}: entries cannot be removed: {error}") from error
        self.files.remove_empty(layout.place(*name) for name in removed)
        return list(removed.items())

    def _remove(self, base: Base, name: EntryName) -> int:
        """Remove an entry's file, its pin and its row; return the bytes freed."""
        status, known = self._status(name), row(base, name)
        self.files.remove(layout.place(*name))
        if known is not None and known.pinned:
            self.files.remove(pin_name(name))
            self.files.remove_empty([pin_name(name)])
        drop(base, [name])
        return known.nbytes if known is not None else status.st_size if status is not None else 0

    def _status(self, name: EntryName) -> os.stat_result | None:
        return self.files.status(layout.place(*name))


def pin_name(name: EntryName) -> str:
    """The file that is an entry's pin."""
    return f"{layout.tenant_prefix(name.tenant)}pins/{name.kind}/{name.key}.json"


def _connected(address: Path | str) -> Base:
    base = sqlite3.connect(
        address,
        timeout=_PATIENCE,
        isolation_level=None,
        check_same_thread=False,
        uri=isinstance(address, str),
    )
    base.row_factory = sqlite3.Row
    return base


def _written(path: Path) -> Base:
    """A connection to an index that can be written; its tables are there."""
    base = _connected(path)
    try:
        base.execute("PRAGMA journal_mode = WAL")
        # A file whose row was lost in a power cut would be found by key, but by no deletion.
        base.execute("PRAGMA synchronous = FULL")
        base.execute(f"PRAGMA wal_autocheckpoint = {_JOURNAL}")
        if not base.execute("PRAGMA user_version").fetchone()[0]:
            base.executescript(_TABLES)
    except BaseException:
        base.close()
        raise
    return base


@contextlib.contextmanager
def _transaction(base: Base) -> Iterator[None]:
    base.execute("BEGIN IMMEDIATE")
    try:
        yield
        base.execute("COMMIT")
    finally:  # also a COMMIT refused by a full disk leaves the transaction open
        if base.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # report the first error
                base.execute("ROLLBACK")
