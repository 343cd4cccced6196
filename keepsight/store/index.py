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
from itertools import islice
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from keepsight.errors import StoreError
from keepsight.store import health, layout
from keepsight.store.contract import CLOCK_SLACK, Entry, EntryName, layers
from keepsight.store.files import Folder
from keepsight.system import forks, private_files

NAME = "index.sqlite"
_AT_ONCE = 256  # entries removed in one transaction
_PARTIAL, _COMPLETE = 2, 3  # versions: of an index that is being filled, and of one with all files
_JOURNAL = 128  # pages of 4 KiB; a larger journal would hurt a nearly full disk
_FILLING = 16  # such pages while it is filled, perhaps because a full disk has no room for more
_PATIENCE = 5.0  # seconds to wait for another process to finish its transaction
_PAGE = 1000
_TROUBLE = sqlite3.Error, UnicodeDecodeError  # the latter if SQLite's message is damaged
_LEFT: list[sqlite3.Connection | None] = []  # connections of a parent, in use when it forked
T = TypeVar("T")
Base = sqlite3.Connection
Scope = tuple[str, tuple[object, ...]]  # which rows are meant: an SQL condition and its values
Gone = dict[EntryName, int]  # what was removed, with its bytes
EVERYTHING: Scope = ("TRUE", ())

# An entry's name is that of its file.
_TABLES = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS entry (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, kind TEXT NOT NULL,
    account TEXT NOT NULL, bytes INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL,
    uses INTEGER NOT NULL, cost REAL NOT NULL, base TEXT, media TEXT NOT NULL, expires REAL,
    pinned INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS by_use ON entry (used);
CREATE INDEX IF NOT EXISTS by_account ON entry (account, used);
CREATE INDEX IF NOT EXISTS by_base ON entry (base, tenant, kind, used);
CREATE INDEX IF NOT EXISTS by_end ON entry (expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS medium (image TEXT, id INTEGER, PRIMARY KEY (image, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS medium_of ON medium (id);
CREATE TABLE IF NOT EXISTS total (tenant TEXT, kind TEXT, account TEXT, entries INTEGER,
    bytes INTEGER, PRIMARY KEY (tenant, kind, account)) WITHOUT ROWID;
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
PRAGMA user_version = {_PARTIAL};
COMMIT;
"""
_INSERT = """
INSERT INTO entry (name, tenant, kind, account, bytes, created, used, uses, cost, base, media,
                   expires)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET bytes = excluded.bytes, created = excluded.created,
    used = excluded.used, cost = max(cost, excluded.cost), base = excluded.base,
    media = excluded.media, expires = excluded.expires
RETURNING id
"""
_LEAVES = """
SELECT used, name, bytes, base FROM entry AS e WHERE pinned = 0 AND {}
    AND NOT EXISTS (SELECT 1 FROM entry AS d WHERE d.base = e.name) ORDER BY used LIMIT ?
"""
_HELD = """
WITH RECURSIVE held (name) AS (
    SELECT name FROM entry WHERE pinned AND {}
    UNION SELECT base FROM held JOIN entry USING (name) WHERE base IS NOT NULL)
SELECT coalesce(sum(bytes), 0) FROM held JOIN entry USING (name)
"""
LOST_BASE: Scope = (
    "base IS NOT NULL AND NOT EXISTS (SELECT 1 FROM entry AS b WHERE b.name = entry.base)",
    (),
)


# -- rows ------------------------------------------------------------------------------------------


def of_tenant(tenant: str | None) -> Scope:
    """The rows of one tenant, or of all."""
    return EVERYTHING if tenant is None else ("tenant = ?", (tenant,))


def of_account(account: str) -> Scope:
    """The rows that share a quota: a tenant's, and those under all its salts."""
    return "account = ?", (account,)


def of_image(tenant: str | None, image: str) -> Scope:
    """The rows of a tenant, or of all, that depend on an image."""
    where, values = of_tenant(tenant)
    return f"id IN (SELECT id FROM medium WHERE image = ?) AND {where}", (image, *values)


def over(now: float) -> Scope:
    """What is expired, or dated in the future, so that it would live too long."""
    return "expires IS NOT NULL AND (expires <= ? OR created > ?)", (now, now + CLOCK_SLACK)


def put(base: Base, entries: Iterable[Entry]) -> None:
    """Write rows; existing ones keep their use counts and pins."""
    for e in entries:
        on = None if e.base is None or e.base == e.name else layout.place(*e.base)
        row = (layout.place(*e.name), e.tenant, e.kind, e.account, e.nbytes, e.created, e.used)
        more = (max(1, e.uses), e.cost, on, json.dumps(e.media), e.expires)
        (number,) = base.execute(_INSERT, (*row, *more)).fetchone()
        media = [(image, number) for image in e.media]
        base.executemany("INSERT OR IGNORE INTO medium VALUES (?, ?)", media)


def row(base: Base, name: EntryName) -> Entry | None:
    """One entry."""
    query = "SELECT * FROM entry WHERE name = ?"
    found = base.execute(query, (layout.place(*name),)).fetchone()
    return None if found is None else _entry(found)


def names(base: Base, scope: Scope, more: str = "") -> list[EntryName]:
    """The names of what a scope means."""
    found = base.execute(f"SELECT name FROM entry WHERE {scope[0]} {more}", scope[1])
    return [_name(text) for (text,) in found]


def latest_upon(base: Base, tenant: str, kind: str, on: str | None, count: int) -> list[EntryName]:
    """The most recently used entries of one kind that depend directly on an entry of that kind, or
    on nothing."""
    upon = None if on is None else layout.place(kind, on, tenant)
    scope = "tenant = ? AND kind = ? AND base IS ?", (tenant, kind, upon)
    return names(base, scope, f"ORDER BY used DESC LIMIT {count}")


def drop(base: Base, gone: Iterable[EntryName]) -> None:
    """Remove rows."""
    base.executemany("DELETE FROM entry WHERE name = ?", [(layout.place(*n),) for n in gone])


def pin(base: Base, name: EntryName, pinned: bool) -> None:
    """Pin or unpin a row."""
    base.execute("UPDATE entry SET pinned = ? WHERE name = ?", (pinned, layout.place(*name)))


def use(base: Base, uses: dict[EntryName, int]) -> None:
    """Add uses."""
    values = [(count, time.time(), layout.place(*name)) for name, count in uses.items()]
    base.executemany("UPDATE entry SET uses = uses + ?, used = ? WHERE name = ?", values)


def totals(base: Base, scope: Scope) -> list[tuple[str, str, int, int]]:
    """Tenants and kinds, with their entries and bytes."""
    query = (
        "SELECT tenant, kind, sum(entries), sum(bytes) FROM total WHERE {} GROUP BY tenant, kind"
    )
    return [tuple(found) for found in base.execute(query.format(scope[0]), scope[1])]


def nbytes(base: Base, scope: Scope) -> int:
    """Bytes of what a scope means."""
    query = f"SELECT coalesce(sum(bytes), 0) FROM total WHERE {scope[0]}"
    return int(base.execute(query, scope[1]).fetchone()[0])


def held(base: Base, scope: Scope) -> int:
    """Bytes of pinned entries and of what they depend on; reads every row."""
    return int(base.execute(_HELD.format(scope[0]), scope[1]).fetchone()[0])


def _leaves(base: Base, scope: Scope) -> list[tuple[float, str, int, str | None]]:
    """Last use, name, bytes and base of the least recently used entries on which none depends."""
    found = base.execute(_LEAVES.format(scope[0]), (*scope[1], _AT_ONCE))
    return [tuple(one) for one in found]


def _name(text: object) -> EntryName:
    """The entry that a row names. SQLite has no checksums; a flipped bit is only detected here."""
    name = layout.parse(text) if isinstance(text, str) else None
    if name is None:
        raise sqlite3.DatabaseError("a row names an impossible entry")
    return name


def _entry(found: sqlite3.Row) -> Entry:
    name, on = _name(found["name"]), found["base"]
    try:
        if (found["kind"], found["tenant"]) != (name.kind, name.tenant):
            raise ValueError("a row contradicts its name")
        return Entry(
            name.kind,
            name.key,
            nbytes=int(found["bytes"]),
            used=float(found["used"]),
            created=float(found["created"]),
            uses=int(found["uses"]),
            cost=float(found["cost"]),
            depends_on=None if on is None else _name(on)[:2],
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
        self._is_alone = False  # for as long as the disk has no room for what processes share
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
                    raise self._refused(error) from error
            finally:
                if self._is_alone:
                    self.close()
                    self._is_alone = False
        raise StoreError(f"{self.files.path(NAME)}: not usable")

    def entries(self, scope: Scope) -> Iterator[Entry]:
        """All rows of a scope, even if they change meanwhile; no writer waits long."""
        query = f"SELECT * FROM entry WHERE name > ? AND {scope[0]} ORDER BY name LIMIT {_PAGE}"
        after = ""
        while found := self.look(
            lambda base: [_entry(one) for one in base.execute(query, (after, *scope[1]))],  # noqa: B023
            list[Entry](),
        ):
            yield from found
            after = layout.place(*found[-1].name)

    def is_sound(self) -> bool:
        """Whether its tables and indexes are intact, and every row names an entry."""

        def look(base: Base) -> bool:
            found = base.execute("PRAGMA integrity_check(1)").fetchone()[0]
            every = (_entry(one) for one in base.execute("SELECT * FROM entry"))
            return bool(found == "ok") and all(True for _ in every)

        with self._lock:
            try:
                return not self.is_store() or look(self._opened())
            except _TROUBLE as error:
                if health.named(error) != health.DAMAGED:
                    raise self._refused(error) from error
                return False

    def _unreadable(self, error: OSError) -> StoreError:
        return StoreError(f"{self.files.root} cannot be read: {error}")

    def _refused(self, error: Exception) -> StoreError:
        return StoreError(f"{self.files.path(NAME)}: {error}")

    def is_store(self) -> bool:
        """Whether the folder is a store, which may have lost its index."""
        try:
            return self.files.status(NAME) is not None or self.files.is_store()
        except OSError as error:
            raise self._unreadable(error) from error

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
            version = base.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _PARTIAL, _COMPLETE):
                raise sqlite3.DatabaseError("it is of another version")
            if version != _COMPLETE and not self._is_read_only:
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
        self._is_read_only = False
        while not self._is_read_only:
            try:
                return _prepared(_connected(path), self._is_alone)
            except sqlite3.OperationalError as error:
                problem = health.named(error)
                if problem == health.LOCKED and time.monotonic() < until:
                    # Of two that open it for the first time one is told at once that it is locked.
                    time.sleep(0.02)
                    continue
                if problem == health.FULL and not self._is_alone:
                    self._is_alone = True
                    continue
                wal = self.files.status(f"{NAME}-wal")
                if os.access(self.files.root, os.W_OK) or (wal is not None and wal.st_size):
                    raise
                self._is_read_only = True  # nobody writes here, and all of it is in its one file
        return _connected(f"file:{quote(os.fsencode(path.absolute()))}?mode=ro&immutable=1")

    def _fill(self, base: Base) -> None:
        """Add every file that has no row yet, one folder in one transaction: who removes files
        does it in another."""
        base.execute(f"PRAGMA wal_autocheckpoint = {_FILLING}")
        try:
            for shard in self.files.shards(None):
                with _transaction(base):
                    there = [layout.parse(f"{shard}/{n}") for n in self.files.names(shard)]
                    new = [name for name in there if name and row(base, name) is None]
                    put(base, filter(None, map(self.files.entry, new)))
        except OSError as error:  # half a walk is not taken for all
            raise self._unreadable(error) from error
        with _transaction(base):
            for name in self.files.pins():
                pin(base, name, True)
            base.execute(f"PRAGMA user_version = {_COMPLETE}")
        base.execute(f"PRAGMA wal_autocheckpoint = {_JOURNAL}")

    def _identity(self) -> tuple[int, int] | None:
        status = self.files.status(NAME)
        return None if status is None else (status.st_dev, status.st_ino)

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

    def remove(self, chosen: Scope | list[EntryName]) -> Gone:
        """Remove some entries with all their dependents, these first."""

        def doomed(base: Base) -> Iterator[EntryName]:
            def upon(name: EntryName) -> list[EntryName]:
                return names(base, ("base = ?", (layout.place(*name),)))

            some = chosen if isinstance(chosen, list) else names(base, chosen, f"LIMIT {_AT_ONCE}")
            for layer in reversed(layers(some, upon)):
                for name in layer:
                    if row(base, name) or self.files.status(layout.place(*name)):
                        yield name

        return self._remove_all(doomed)

    def fit(self, scope: Scope, budget: int) -> Gone:
        """Remove the least recently used entries, leaves first, until the rest fits."""

        def doomed(base: Base) -> Iterator[EntryName]:
            over = nbytes(base, scope) - budget
            leaves = _leaves(base, scope) if over > 0 else []
            while leaves and over > 0:
                _, text, size, on = heapq.heappop(leaves)
                yield _name(text)
                over -= size
                for leaf in _leaves(base, ("name = ?", (on,))):  # now that it is removed
                    heapq.heappush(leaves, leaf)

        return self._remove_all(doomed)

    def _remove_all(self, doomed: Callable[[Base], Iterator[EntryName]]) -> Gone:
        """Remove entries one by one, some in each transaction, as long as there are any."""
        gone: Gone = {}
        some: Gone = {}  # their files are gone, whatever becomes of the rows

        def remove_some(base: Base) -> None:
            for name in islice(doomed(base), _AT_ONCE):
                some[name] = self._remove(base, name)

        while self.is_store():
            some.clear()
            self._change_though_full(remove_some)
            self.files.remove_empty(layout.place(*name) for name in some)
            gone |= some
            if not some:
                break
        return gone

    def _change_though_full(self, work: Callable[[Base], None]) -> None:
        for attempt in range(3):
            try:
                return self.change(work)
            except StoreError as error:
                if attempt == 2 or health.named(error) != health.FULL:
                    raise
                if attempt:  # its journal is the larger part, and finds no room to be written back
                    self.delete()
                    self._is_alone = True
                # Otherwise the files that are gone by now may have made room for the rows.
            except OSError as error:
                where = self.files.root
                raise StoreError(f"{where}: entries cannot be removed: {error}") from error
        return None

    def _remove(self, base: Base, name: EntryName) -> int:
        """Remove an entry's file, its pin and its row; return the bytes freed."""
        known, status = row(base, name), self.files.status(layout.place(*name))
        self.files.remove(layout.place(*name))
        if known is not None and known.pinned:
            self.files.remove(layout.pin_place(name))
            self.files.remove_empty([layout.pin_place(name)])
        drop(base, [name])
        return known.nbytes if known is not None else status.st_size if status is not None else 0


def _connected(address: Path | str) -> Base:
    is_uri = isinstance(address, str)
    base = sqlite3.connect(
        address, _PATIENCE, isolation_level=None, check_same_thread=False, uri=is_uri
    )
    base.row_factory = sqlite3.Row
    return base


def _prepared(base: Base, alone: bool) -> Base:
    """A connection that may write, with its tables in place; `alone`: the only one, which needs
    neither a journal nor shared memory on the disk."""
    try:
        if alone:
            base.execute("PRAGMA locking_mode = EXCLUSIVE")
        base.execute(f"PRAGMA journal_mode = {'MEMORY' if alone else 'WAL'}")
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
