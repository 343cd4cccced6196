"""Stores on disks that are full, read-only, slow or gone: no damage, and nobody waits for them."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight.errors import StoreError
from keepsight.store import DiskStore, health
from keepsight.store import book as book_module
from keepsight.store.catalogue import NAME, Catalogue
from keepsight.store.folder import Folder
from keepsight.store.health import Health
from keepsight.testing.stores import KEYS

FULL = sqlite3.OperationalError("database or disk is full")


@pytest.fixture(autouse=True)
def _loud(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="keepsight")


@pytest.fixture
def opened() -> Iterator[Callable[..., DiskStore]]:
    made: list[DiskStore] = []

    def make(*arguments: Any, **options: Any) -> DiskStore:
        made.append(DiskStore(*arguments, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()


def put(store: DiskStore, *numbers: int) -> None:
    for number in numbers:
        tensors = {"a": torch.full((100,), float(number))}
        store.put("package", KEYS[number], tensors, {"n": number})


def fill(store: DiskStore, *numbers: int) -> None:
    put(store, *numbers)
    store.flush()


def held(store: DiskStore) -> set[int]:
    """The numbers of all that can be read, and is what was put."""
    found = {n: store.get("package", key) for n, key in enumerate(KEYS)}
    assert all(it is None or (it[0]["a"] == n).all() for n, it in found.items())
    return {n for n, it in found.items() if it is not None}


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refusing(error: BaseException) -> Callable[..., Any]:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise error

    return refuse


# -- what a disk says --------------------------------------------------------------------------


def of_sqlite(path: Path, *statements: str, how: str = "") -> sqlite3.Error:
    """The error that real statements end with."""
    with contextlib.ExitStack() as stack:
        try:
            base = sqlite3.connect(f"file:{path}{how}", uri=True, isolation_level=None)
            stack.callback(base.close)
            for statement in statements:
                base.execute(statement)
        except sqlite3.Error as error:
            return error
    raise AssertionError("nothing went wrong")


def test_what_a_disk_refuses_has_a_name(tmp_path: Path) -> None:
    """Only wrong bytes are damage. Errors of SQLite are told by their codes, whatever they say."""
    for number, state in (
        (errno.ENOSPC, "full"),
        (errno.EDQUOT, "full"),
        (errno.EFBIG, "full"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "denied"),
        (errno.ENOENT, "gone"),
        (errno.ESTALE, "gone"),
        (errno.EIO, "failing"),
        (errno.EMFILE, "failing"),
    ):
        assert health.named(OSError(number, "…")) == state
    small = ("PRAGMA max_page_count = 2", "CREATE TABLE a (b)", "CREATE TABLE c (d)")
    path = tmp_path / "a"
    full = of_sqlite(path, *small)
    assert health.named(full) == "full"
    assert health.named(of_sqlite(path, "CREATE TABLE e (f)", how="?mode=ro")) == "read-only"
    assert health.named(of_sqlite(tmp_path / "no" / "b", "SELECT 1")) == "failing"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        locked = of_sqlite(path, "PRAGMA busy_timeout = 0", "BEGIN IMMEDIATE")
        assert health.named(locked) == "locked"
    assert health.named(of_sqlite(path, "SELECT * FROM nothing")) == "damaged"
    path.write_bytes(b"\xff" * 5000)
    assert health.named(of_sqlite(path, "SELECT * FROM a")) == "damaged"
    assert health.named(FULL) == "full", "also where there is no code"
    with pytest.raises(StoreError) as raised:
        raise StoreError("told") from full
    assert health.named(raised.value) == "full", "and through an error of ours"


def test_a_disk_that_refuses_is_told_once_and_left_alone_longer_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    disk = Health("it cannot be written", lambda: now[0])
    pauses = []
    for _ in range(6):
        for _ in range(10):  # entries that fail together
            disk.failed(OSError(errno.ENOSPC, "No space left on device"))
        assert disk.is_aside and disk.state == "full" and disk.since is not None
        pauses.append(disk.wait)
        now[0] += disk.wait or 0.0
        assert not disk.is_aside and disk.state == "full"
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    disk.worked()
    assert (disk.state, disk.since, disk.wait, disk.is_aside) == ("ok", None, None, False)
    disk.failed(OSError(errno.ENOSPC, "No space left on device"))  # it was the last block
    assert disk.wait == 60.0 and [r.levelname for r in caplog.records] == ["WARNING"]
    disk.failed(OSError(errno.EROFS, "Read-only file system"))
    assert disk.state == "read-only" and len(caplog.records) == 2, "another trouble is news"


# -- a book that cannot be written -------------------------------------------------------------


@pytest.mark.parametrize("where", ["put", "add_facts", "mark", "drop"])
def test_a_book_without_room_is_not_a_damaged_one(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    store = opened(tmp_path)
    fill(store, 0, 1)
    assert held(store) == {0, 1}
    book = (tmp_path / NAME).stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(Catalogue, where, refusing(FULL))
        put(store, 2, 3)
        for act in (store.flush, lambda: store.delete("package", KEYS[1]), store.stats):
            with contextlib.suppress(StoreError):
                act()
        assert held(store) >= {0}
        if where == "put":
            assert store.stats()["broken"] and not store.has("package", KEYS[2])
    store.flush()
    assert (tmp_path / NAME).stat().st_ino == book and not list(tmp_path.glob("*.damaged"))
    fill(store, 1, 2, 3)
    assert held(store) == {0, 1, 2, 3} and store.broken is None
    store.check(repair=True)  # a file that was removed while no row could be
    assert store.check() == [] and len(list(store.entries())) == 4


def test_a_full_disk_can_be_emptied(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing needs a few bytes in the book first, and makes room for them itself."""
    store = opened(tmp_path)
    fill(store, 0, 1, 2)
    mark = Catalogue.mark

    def no_room(catalogue: Catalogue, places: Any, state: int) -> None:
        places = list(places)
        if places and (tmp_path / "package" / KEYS[0][:2] / f"{KEYS[0]}.sight").exists():
            raise FULL
        mark(catalogue, places, state)

    monkeypatch.setattr(Catalogue, "mark", no_room)
    assert store.delete("package", KEYS[0]) > 0
    assert held(store) == {1, 2} and store.check() == []


def test_a_book_that_is_damaged_again_and_again_is_not_rebuilt_without_end(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    fill(store, 0, 1)
    store.close()
    set_aside, gone = Folder.set_aside, []

    def noted(folder: Folder, name: str) -> None:
        gone.append(name)
        set_aside(folder, name)

    monkeypatch.setattr(Folder, "set_aside", noted)
    harmed = sqlite3.DatabaseError("database disk image is malformed")
    monkeypatch.setattr(book_module, "opened", refusing(harmed))
    store = opened(tmp_path)
    for number in range(2, 6):
        fill(store, number)
        assert held(store) == set(range(number + 1))
        assert store.stats()["entries"] == number + 1 and store.check() == []
    assert gone.count(NAME) == 1, "then it is left alone for a time"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_half_a_walk_through_the_files_is_not_taken_for_all(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    fill(store, 0, 1, 2)
    store.close()
    (tmp_path / NAME).unlink()
    names, failed = Folder.names, []

    def torn(folder: Folder, name: str) -> list[str]:
        if name.startswith("package/") and not failed:
            failed.append(name)
            raise OSError(errno.EIO, "Input/output error")
        return names(folder, name)

    monkeypatch.setattr(Folder, "names", torn)
    store = opened(tmp_path)
    with contextlib.suppress(StoreError):
        list(store.entries())
    assert failed and len(list(store.entries())) == 3


def test_a_file_that_says_impossible_times_does_not_stop_the_book(
    tmp_path: Path, opened: Any
) -> None:
    """A row that SQLite refuses would look like damage each time the files are walked through."""
    from keepsight.store import layout

    store = opened(tmp_path)
    store.put_note("alias", KEYS[1], {"a": 1})
    fill(store, 0)
    store.close()
    told = {"created": float("nan"), "ttl": 5.0}
    path = tmp_path / layout.place("alias", KEYS[1])
    wrapped = json.loads(path.read_text()) | {"kept": told}
    wrapped["digest"] = layout._note_digest("alias", KEYS[1], wrapped["body"], told)
    path.write_text(json.dumps(wrapped))
    (tmp_path / NAME).unlink()
    store = opened(tmp_path)
    assert {entry.kind for entry in store.entries()} == {"alias", "package"}
    assert not list(tmp_path.glob("*.damaged")) and os.path.exists(tmp_path / NAME)
