"""The catalogue of a store, in SQLite: which entries exist, with size, usefulness and expiry.

Reading an entry never needs it, and it can be deleted at any time: the files contain everything
except use counts and costs. Each row has one of three states, so that a crash leaves a trace:
`WRITING` before its file is written, `THERE`, and `GOING` before its file is removed. The next
process to open the catalogue settles rows in the first and last state, and no others.

`tables.py` defines its tables and opens it.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from keepsight.store.contract import Entry, Name
from keepsight.store.folders import tables
from keepsight.store.layout import EntryName, is_name, is_tenant
from keepsight.store.priority import usefulness

NAME = "catalogue-1.sqlite"  # the version of the tables; other versions use other files
THERE, WRITING, GOING = 0, 1, 2
_PAGE = 1000

_INSERT = """
INSERT INTO entry (tenant, kind, key, bytes, created, used, uses, cost, base_kind, base_key, media,
                   pinned, expires, worth, state)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_AGAIN = """
ON CONFLICT (tenant, kind, key) DO UPDATE SET bytes = excluded.bytes, created = excluded.created,
    used = excluded.used, cost = max(cost, excluded.cost), base_kind = excluded.base_kind,
    base_key = excluded.base_key, media = excluded.media, expires = excluded.expires,
    worth = CASE state WHEN 1 THEN excluded.worth ELSE max(worth, excluded.worth) END,
    state = excluded.state
"""
_HERE = "tenant = ? AND kind = ? AND key = ?"
_LEAVES = """
SELECT * FROM entry AS e WHERE state = 0 AND pinned = 0 AND {where} AND NOT EXISTS (
    SELECT 1 FROM entry AS d
    WHERE d.tenant = e.tenant AND d.base_key = e.key AND d.base_kind = e.kind)
ORDER BY worth, used LIMIT :count
"""
_HELD = """
WITH RECURSIVE held (id) AS (
    SELECT id FROM entry WHERE pinned AND state = 0 AND {where}
    UNION SELECT b.id FROM held JOIN entry AS e USING (id) JOIN entry AS b
        ON b.tenant = e.tenant AND b.kind = e.base_kind AND b.key = e.base_key)
SELECT coalesce(sum(bytes), 0) FROM held JOIN entry USING (id) WHERE state = 0
"""


class Scope(NamedTuple):
    """Which tenants' rows are meant: an SQL condition, and its tenant."""

    where: str
    whose: str = ""

    @classmethod
    def tenant(cls, tenant: str) -> Scope:
        """The rows of one tenant."""
        return cls("tenant = :whose", tenant)

    @classmethod
    def account(cls, account: str) -> Scope:
        """The rows that share a quota: a tenant's, and those of all its parts."""
        parts = "SELECT tenant FROM account WHERE account = :whose"
        return cls(f"tenant IN (SELECT :whose UNION ALL {parts})", account)


ALL_TENANTS = Scope("TRUE")


class Catalogue:
    """One connection to the catalogue; `CatalogueGuard` is its only caller."""

    def __init__(self, path: Path | None, to_read: str = "") -> None:
        """In memory without a path. `to_read` is a read-only mode of SQLite: `mode=ro`, or
        `immutable=1` if no process can write."""
        self._base = tables.connect(path, to_read)

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def __enter__(self) -> Catalogue:
        """Begin one transaction, the only writer until its end."""
        self._base.execute("BEGIN IMMEDIATE")
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        try:
            if kind is None and self._base.in_transaction:
                self._base.execute("COMMIT")
        finally:  # a COMMIT refused by a full disk may leave the transaction open
            if self._base.in_transaction:
                with contextlib.suppress(sqlite3.Error):  # report the first error
                    self._base.execute("ROLLBACK")

    def checkpoint(self) -> bool:
        """Write the journal back, which frees disk space; False if the disk has no room for it."""
        try:
            self._base.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error:
            return False
        return True

    # -- facts -----------------------------------------------------------------------------------

    def fact(self, name: str) -> float:
        """A number: `complete` (every file has a row), `floor`, or a count as `hits TENANT`."""
        row = self._base.execute("SELECT value FROM fact WHERE name = ?", (name,)).fetchone()
        return float(row[0]) if row else 0.0

    def set_fact(self, name: str, value: float) -> None:
        """Store such a number."""
        self._base.execute("INSERT OR REPLACE INTO fact VALUES (?, ?)", (name, value))

    def add_facts(self, numbers: dict[str, int]) -> None:
        """Add to counts."""
        for name, number in numbers.items():
            self.set_fact(name, self.fact(name) + number)

    def totals(self, tenant: str) -> dict[str, dict[str, int]]:
        """Entries and bytes per kind of one tenant."""
        rows = self._base.execute("SELECT * FROM total WHERE tenant = ? AND entries > 0", (tenant,))
        return {r["kind"]: {"entries": r["entries"], "bytes": r["bytes"]} for r in rows}

    def nbytes(self, scope: Scope = ALL_TENANTS) -> int:
        """Bytes of a tenant, of those that count together, or of all."""
        query = f"SELECT coalesce(sum(bytes), 0) FROM total WHERE {scope.where}"
        return int(self._base.execute(query, {"whose": scope.whose}).fetchone()[0])

    def held(self, scope: Scope = ALL_TENANTS) -> int:
        """Bytes of pinned entries and of what they depend on; reads every row."""
        query = _HELD.format(where=scope.where)
        return int(self._base.execute(query, {"whose": scope.whose}).fetchone()[0])

    def tenants(self) -> list[str]:
        """All tenants with entries here."""
        found = self._base.execute("SELECT DISTINCT tenant FROM total WHERE entries > 0")
        return sorted(row[0] for row in found)

    # -- accounts --------------------------------------------------------------------------------

    def account(self, tenant: str) -> str:
        """The tenant whose quota this one counts against; usually itself."""
        query = "SELECT account FROM account WHERE tenant = ?"
        row = self._base.execute(query, (tenant,)).fetchone()
        if row is not None and not is_tenant(row[0]):
            raise sqlite3.DatabaseError("a row names an impossible account")
        return tenant if row is None else str(row[0])

    def set_accounts(self, accounts: dict[str, str]) -> None:
        """Store the accounts whose quota tenants count against."""
        for tenant, account in accounts.items():
            if self.account(tenant) == account:
                continue
            self._base.execute("DELETE FROM account WHERE tenant = ?", (tenant,))
            if tenant != account:
                self._base.execute("INSERT INTO account VALUES (?, ?)", (tenant, account))

    def has_rows(self, tenant: str) -> bool:
        """Whether a tenant has rows in any state."""
        query = "SELECT 1 FROM entry WHERE tenant = ? LIMIT 1"
        return self._base.execute(query, (tenant,)).fetchone() is not None

    def forget(self, tenant: str) -> None:
        """Drop the record of a tenant without rows."""
        for table in ("account", "total"):
            self._base.execute(f"DELETE FROM {table} WHERE tenant = ?", (tenant,))

    # -- rows ------------------------------------------------------------------------------------

    def put(self, entries: Iterable[Entry], state: int = THERE) -> None:
        """Write rows; existing ones keep their use counts and pins."""
        floor = self.fact("floor")
        for e in entries:
            base_kind, base_key = e.depends_on or (None, None)
            value = usefulness(floor, max(1, e.uses), e.cost, e.nbytes)
            row = (e.tenant, e.kind, e.key, e.nbytes, e.created, e.used, max(1, e.uses), e.cost)
            more = (base_kind, base_key, json.dumps(e.media), e.pinned, e.expires, value, state)
            self._base.execute(_INSERT + _AGAIN, (*row, *more))
            if e.media:
                (number,) = self._base.execute(
                    f"SELECT id FROM entry WHERE {_HERE}", (e.tenant, e.kind, e.key)
                ).fetchone()
                names = [(e.tenant, image, number) for image in e.media]
                self._base.executemany("INSERT OR IGNORE INTO medium VALUES (?, ?, ?)", names)

    def row(self, place: EntryName) -> Entry | None:
        """One existing entry."""
        query = f"SELECT * FROM entry WHERE {_HERE} AND state = 0"
        row = self._base.execute(query, place).fetchone()
        return None if row is None else _entry(row)

    def state(self, place: EntryName) -> int | None:
        """The state of a row, or None if there is none."""
        row = self._base.execute(f"SELECT state FROM entry WHERE {_HERE}", place).fetchone()
        if row is not None and row[0] not in (THERE, WRITING, GOING):
            raise sqlite3.DatabaseError("a row has an unknown state")
        return None if row is None else int(row[0])

    def is_sound(self) -> bool:
        """Whether tables and indexes are intact and consistent, and every row names an entry."""
        if self._base.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
            return False
        for row in self._base.execute("SELECT * FROM entry"):
            _entry(row)
            if row["state"] not in (THERE, WRITING, GOING):
                return False
        return True

    def mark(self, places: Iterable[EntryName], state: int) -> None:
        """Set the state of rows."""
        values = [(state, *place) for place in places]
        self._base.executemany(f"UPDATE entry SET state = ? WHERE {_HERE}", values)

    def drop(self, places: Iterable[EntryName]) -> None:
        """Remove rows."""
        self._base.executemany(f"DELETE FROM entry WHERE {_HERE}", list(places))

    def resize(self, place: EntryName, nbytes: int) -> None:
        """Correct a row's size."""
        self._base.execute(f"UPDATE entry SET bytes = ? WHERE {_HERE}", (nbytes, *place))

    def pin(self, place: EntryName, pinned: bool) -> bool:
        """Pin or unpin a row; return whether it exists."""
        values = (pinned, *place)
        return self._base.execute(f"UPDATE entry SET pinned = ? WHERE {_HERE}", values).rowcount > 0

    def use(self, uses: dict[EntryName, int], now: float) -> list[EntryName]:
        """Add uses and compute usefulness again; return the entries without a row."""
        floor, unknown = self.fact("floor"), []
        for place, count in uses.items():
            changed = self._base.execute(
                "UPDATE entry SET uses = uses + ?, used = ?,"
                f" worth = worth(?, uses + ?, cost, bytes) WHERE {_HERE}",
                (count, now, floor, count, *place),
            ).rowcount
            if not changed:
                unknown.append(place)
        return unknown

    def unsettled(self) -> list[tuple[EntryName, int, float]]:
        """Rows whose file was being written or removed: place, state, and since when."""
        rows = self._base.execute("SELECT * FROM entry WHERE state <> 0").fetchall()
        return [(_place(row), row["state"], float(row["created"])) for row in rows]

    def page(self, tenant: str, after: int) -> tuple[list[Entry], int]:
        """Some rows of a tenant, and where the next page begins; no writer waits long."""
        rows = self._base.execute(
            "SELECT * FROM entry WHERE id > ? AND state = 0 AND tenant = ? ORDER BY id LIMIT ?",
            (after, tenant, _PAGE),
        ).fetchall()
        return [_entry(row) for row in rows], rows[-1]["id"] if rows else after

    # -- selections ------------------------------------------------------------------------------

    def leaves(self, scope: Scope, count: int) -> list[tuple[float, Entry]]:
        """The least useful entries without dependents and pins, with their usefulness."""
        query, values = _LEAVES.format(where=scope.where), {"whose": scope.whose, "count": count}
        rows = self._base.execute(query, values).fetchall()
        return [(row["worth"], _entry(row)) for row in rows]

    def usefulness_of(self, place: EntryName) -> tuple[float, Entry] | None:
        """The usefulness of a row that is not pinned."""
        row = self._base.execute(
            f"SELECT * FROM entry WHERE {_HERE} AND state = 0 AND pinned = 0", place
        ).fetchone()
        return None if row is None else (row["worth"], _entry(row))

    def worst(self, scope: Scope, count: int) -> list[EntryName]:
        """The least useful entries without pins, whatever depends on them."""
        rows = self._base.execute(
            f"SELECT * FROM entry WHERE state = 0 AND pinned = 0 AND {scope.where}"
            " ORDER BY worth LIMIT :count",
            {"whose": scope.whose, "count": count},
        )
        return [_place(row) for row in rows]

    def upon(self, place: EntryName) -> list[EntryName]:
        """The direct dependents of an entry."""
        rows = self._base.execute(
            "SELECT * FROM entry WHERE tenant = ? AND base_kind = ? AND base_key = ?", place
        )
        return [_place(row) for row in rows]

    def latest_upon(self, tenant: str, kind: str, base: str | None, count: int) -> list[EntryName]:
        """The most recently used entries of one kind that depend directly on an entry of that kind,
        or on nothing."""
        where = "base_key IS NULL" if base is None else "base_key = ? AND base_kind = kind"
        where = f"tenant = ? AND kind = ? AND state = 0 AND {where} ORDER BY used DESC LIMIT ?"
        values = (tenant, kind, *filter(None, [base]), count)
        rows = self._base.execute(f"SELECT * FROM entry WHERE {where}", values)
        return [_place(row) for row in rows]

    def tower(self, places: Iterable[EntryName]) -> list[EntryName]:
        """These entries and all their dependents, the deepest dependents first."""
        found = dict.fromkeys(places)
        open_ = list(found)
        for place in open_:  # grows while it is iterated
            new = [other for other in self.upon(place) if other not in found]
            found.update(dict.fromkeys(new))
            open_ += new
        return list(reversed(found))

    def with_media(self, tenant: str, images: Iterable[str]) -> list[EntryName]:
        """Entries that depend on any of these images."""
        found: list[EntryName] = []
        for image in images:
            rows = self._base.execute(
                "SELECT e.* FROM medium AS m JOIN entry AS e ON e.id = m.id"
                " WHERE m.tenant = ? AND m.image = ?",
                (tenant, image),
            )
            found += [_place(row) for row in rows]
        return list(dict.fromkeys(found))

    def ended(self, now: float, slack: float) -> list[EntryName]:
        """Expired entries, and those dated in the future, which would live too long."""
        rows = self._base.execute(
            "SELECT * FROM entry WHERE expires IS NOT NULL AND state = 0"
            " AND (expires <= ? OR created > ?)",
            (now, now + slack),
        )
        return [_place(row) for row in rows]

    def next_end(self) -> float | None:
        """When the first entry expires, if any does."""
        query = "SELECT min(expires) FROM entry WHERE expires IS NOT NULL"
        row = self._base.execute(query).fetchone()
        return None if row[0] is None else float(row[0])

    def without_base(self) -> list[tuple[EntryName, Name]]:
        """Entries whose base has no row."""
        rows = self._base.execute(
            "SELECT * FROM entry AS e WHERE state = 0 AND base_key IS NOT NULL AND NOT EXISTS ("
            " SELECT 1 FROM entry AS b"
            " WHERE b.tenant = e.tenant AND b.kind = e.base_kind AND b.key = e.base_key)"
        )
        return [(_place(row), (row["base_kind"], row["base_key"])) for row in rows]

    def sums(self) -> tuple[dict[tuple[str, str], tuple[int, int]], ...]:
        """The totals as stored and as recounted, for `check`."""
        stored = self._base.execute("SELECT * FROM total WHERE entries <> 0 OR bytes <> 0")
        counted = self._base.execute(
            "SELECT tenant, kind, count(*) AS entries, sum(bytes) AS bytes FROM entry"
            " WHERE state = 0 GROUP BY tenant, kind"
        )
        return tuple(
            {(r["tenant"], r["kind"]): (r["entries"], r["bytes"]) for r in rows}
            for rows in (stored.fetchall(), counted.fetchall())
        )

    def add_up(self) -> None:
        """Recount the totals."""
        self._base.execute("DELETE FROM total")
        self._base.execute(
            "INSERT INTO total SELECT tenant, kind, count(*), sum(bytes) FROM entry"
            " WHERE state = 0 GROUP BY tenant, kind"
        )


def _place(row: sqlite3.Row) -> EntryName:
    """The place that a row names. SQLite has no checksums; a flipped bit is only detected here."""
    place = EntryName(row["tenant"], row["kind"], row["key"])
    if not (is_name(place.kind, place.key) and is_tenant(place.tenant)):
        raise sqlite3.DatabaseError("a row names an impossible entry")
    return place


def _entry(row: sqlite3.Row) -> Entry:
    place, base = _place(row), (row["base_kind"], row["base_key"])
    try:
        media = tuple(json.loads(row["media"]))
    except (TypeError, ValueError):
        raise sqlite3.DatabaseError("a row has media that cannot be read") from None
    numbers = (row["bytes"], row["used"], row["created"], row["uses"], row["cost"], row["worth"])
    if not all(isinstance(number, int | float) for number in numbers):
        raise sqlite3.DatabaseError("a row has text where numbers should be")
    return Entry(
        kind=place.kind,
        key=place.key,
        nbytes=row["bytes"],
        used=row["used"],
        created=row["created"],
        uses=row["uses"],
        cost=row["cost"],
        depends_on=None if base[1] is None else base,
        media=media,
        pinned=bool(row["pinned"]),
        expires=row["expires"],
        tenant=place.tenant,
        usefulness=row["worth"],
    )
