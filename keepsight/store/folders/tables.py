"""The tables of the catalogue, and one connection to them.

Triggers add up the bytes, so no query walks through all rows. `account` names, for a tenant that is
part of another, the tenant whose quota it counts against. Older stores lack this table and get an
empty one; older versions of Keepsight ignore it.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

from keepsight.store import health
from keepsight.store.priority import usefulness
from keepsight.system import private_files

_JOURNAL = 128  # pages of 4 KiB; a larger journal would hurt a nearly full disk
_PATIENCE = 5.0  # seconds to wait for another process to finish its transaction

_TABLES = """
CREATE TABLE IF NOT EXISTS entry (
    id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL,
    bytes INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL, uses INTEGER NOT NULL,
    cost REAL NOT NULL, base_kind TEXT, base_key TEXT, media TEXT NOT NULL,
    pinned INTEGER NOT NULL, expires REAL, worth REAL NOT NULL, state INTEGER NOT NULL,
    UNIQUE (tenant, kind, key));
CREATE INDEX IF NOT EXISTS by_worth ON entry (worth, used) WHERE state = 0 AND pinned = 0;
CREATE INDEX IF NOT EXISTS by_tenant ON entry (tenant, worth, used) WHERE state = 0 AND pinned = 0;
CREATE INDEX IF NOT EXISTS by_base ON entry (tenant, base_key, base_kind)
    WHERE base_key IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_end ON entry (expires) WHERE expires IS NOT NULL;
CREATE INDEX IF NOT EXISTS unsettled ON entry (state) WHERE state <> 0;
CREATE TABLE IF NOT EXISTS medium (tenant TEXT, image TEXT, id INTEGER,
    PRIMARY KEY (tenant, image, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS medium_of ON medium (id);
CREATE TABLE IF NOT EXISTS total (tenant TEXT, kind TEXT, entries INTEGER, bytes INTEGER,
    PRIMARY KEY (tenant, kind)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, value REAL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON entry BEGIN
    INSERT OR IGNORE INTO total VALUES (NEW.tenant, NEW.kind, 0, 0);
    UPDATE total SET entries = entries + (NEW.state = 0),
        bytes = bytes + NEW.bytes * (NEW.state = 0)
        WHERE tenant = NEW.tenant AND kind = NEW.kind; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON entry BEGIN
    UPDATE total SET entries = entries - (OLD.state = 0),
        bytes = bytes - OLD.bytes * (OLD.state = 0)
        WHERE tenant = OLD.tenant AND kind = OLD.kind;
    DELETE FROM medium WHERE id = OLD.id; END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF bytes, state ON entry BEGIN
    UPDATE total SET entries = entries + (NEW.state = 0) - (OLD.state = 0),
        bytes = bytes + NEW.bytes * (NEW.state = 0) - OLD.bytes * (OLD.state = 0)
        WHERE tenant = NEW.tenant AND kind = NEW.kind; END;
"""

_ACCOUNTS = """
CREATE TABLE IF NOT EXISTS account (tenant TEXT PRIMARY KEY, account TEXT) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_account ON account (account);
"""
_ACCOUNTS_FOR_NOW = "CREATE TEMP TABLE account (tenant TEXT PRIMARY KEY, account TEXT)"


def connect(path: Path | None, to_read: str = "") -> sqlite3.Connection:
    """Open the database and create its tables; in memory without a path. `to_read` is a read-only
    mode of SQLite, such as `mode=ro`."""
    address: Path | str = ":memory:" if path is None else path
    if path is not None and not to_read:
        private_files.reserve(path)  # files beside it inherit its mode
    if path is not None and to_read:
        address = f"file:{quote(os.fsencode(path.absolute()))}?{to_read}"
    base = sqlite3.connect(
        address,
        timeout=_PATIENCE,
        isolation_level=None,
        check_same_thread=False,
        uri=bool(to_read),
    )
    try:
        base.row_factory = sqlite3.Row
        base.create_function("worth", 4, usefulness, deterministic=True)
        if to_read:
            base.execute("SELECT 1 FROM fact, entry LIMIT 0")
            if not _has(base, "by_account"):
                base.execute(_ACCOUNTS_FOR_NOW)
            return base
        base.execute("PRAGMA journal_mode = WAL")
        # A file whose row was lost in a power cut would be found by key, but by no deletion.
        base.execute("PRAGMA synchronous = FULL")
        base.execute(f"PRAGMA wal_autocheckpoint = {_JOURNAL}")
        if not _has(base, "changed"):
            base.executescript(f"BEGIN IMMEDIATE; {_TABLES} {_ACCOUNTS} COMMIT;")
        elif not _has(base, "by_account"):
            _add_accounts(base)
    except BaseException:
        base.close()
        raise
    return base


def _has(base: sqlite3.Connection, name: str) -> bool:
    query = "SELECT 1 FROM sqlite_master WHERE name = ?"
    return base.execute(query, (name,)).fetchone() is not None


def _add_accounts(base: sqlite3.Connection) -> None:
    """Add the table to an older catalogue. A full disk has no room for it, but entries can still be
    removed."""
    try:
        base.executescript(f"BEGIN IMMEDIATE; {_ACCOUNTS} COMMIT;")
    except sqlite3.Error as error:
        if base.in_transaction:
            base.execute("ROLLBACK")
        if health.named(error) != health.FULL:
            raise
        base.execute(_ACCOUNTS_FOR_NOW)
