"""Stores on disks that are full, read-only, slow or gone: that is no damage, and nobody waits."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import queue
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from support.common import raised, until
from support.file_systems import mounted
from support.models import picture
from support.stores import KEYS

import keepsight as ks
from keepsight.core import settings as core_settings
from keepsight.errors import NotStored, StoreError
from keepsight.formats import tensorfile
from keepsight.store import About, DiskStore, Store, health, layout
from keepsight.store.contract import EntryName
from keepsight.store.files import Folder
from keepsight.store.health import Health
from keepsight.store.index import NAME, Index
from keepsight.system import private_files

T = TypeVar("T")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No disk is left alone for long."""
    monkeypatch.setattr(health, "PAUSE", 0.05)


def put(store: Store, *numbers: int) -> None:
    for number in numbers:
        tensors = {"a": torch.full((100,), float(number))}
        store.put("package", KEYS[number], tensors, {"n": number})


def fill(store: Store, *numbers: int) -> None:
    put(store, *numbers)
    store.flush()


def held(store: DiskStore) -> set[int]:
    """The numbers of all that can be read, and is what was put."""
    found = {n: store.get("package", key) for n, key in enumerate(KEYS)}
    assert all(it is None or (it[0]["a"] == n).all() for n, it in found.items())
    return {n for n, it in found.items() if it is not None}


def refusing(error: BaseException) -> Callable[..., Any]:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise error

    return refuse


# -- each operation, each error ----------------------------------------------------------------

ERRORS = {errno.ENOSPC: "full", errno.EROFS: "read-only", errno.EIO: "failing"}
# What an operation needs of the disk, and how a caller learns that it failed: by an error, or
# because nothing is found.
OPERATIONS: dict[str, tuple[Any, str, Callable[[DiskStore], object], bool]] = {
    "write": (private_files, "new_file", lambda store: fill(store, 2), True),
    "sync": (os, "fsync", lambda store: fill(store, 2), True),
    "place": (os, "replace", lambda store: fill(store, 2), True),
    "index": (Index, "change", lambda store: fill(store, 2), True),
    "read": (tensorfile, "read", lambda store: store.get("package", KEYS[0]), False),
    "note": (Path, "read_bytes", lambda store: store.note("alias", KEYS[0]), False),
    "look": (Index, "look", lambda store: store.below("package", None, 9), False),
    "delete": (os, "unlink", lambda store: store.delete("package", KEYS[0]), True),
    "forget": (os, "unlink", lambda store: store.delete_media("image"), True),
    "gc": (os, "unlink", lambda store: store.gc(0), True),
    "clear": (os, "unlink", lambda store: store.clear(), True),
    "pin": (private_files, "new_file", lambda store: store.pin("package", KEYS[0]), True),
}


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_that_a_disk_refuses(
    tmp_path: Path,
    opened: Any,
    hurried: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    operation: str,
    number: int,
) -> None:
    """It is told and damages nothing; what is there stays readable, and it works when it may."""
    owner, name, act, is_told = OPERATIONS[operation]
    store = opened(tmp_path)
    store.put_note("alias", KEYS[0], {"a": 1}, About(media=("image",)))
    fill(store, 0, 1)
    with monkeypatch.context() as patch:
        told = os.strerror(number)
        error = StoreError(told) if owner is Index else OSError(number, told)
        patch.setattr(owner, name, refusing(error))
        for _ in range(2):
            if is_told:
                with pytest.raises(StoreError, match=told):
                    act(store)
            else:
                assert not act(store)
        if operation in ("write", "sync", "place"):
            assert store.stats()["state"] == ERRORS[number] and held(store) == {0, 1}
        assert sum(record.levelname == "WARNING" for record in caplog.records) <= 1
    until(lambda: works(store, act))
    assert not list(tmp_path.rglob("*.damaged")) and store.check() == []
    until(lambda: works(store, lambda store: fill(store, 0, 1, 3)))
    until(lambda: held(store) >= {0, 1, 3} and store.stats()["state"] == "ok")


def test_a_batch_that_fails_halfway_is_told_entry_by_entry(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real = opened(tmp_path), os.replace

    def refuse(source: Any, target: Any) -> None:
        if KEYS[2] in str(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        for number in (1, 2, 3):
            put(store, number)
        with pytest.raises(NotStored, match="No space") as refused:
            store.flush()
    missing = {KEYS.index(key) for _, key in refused.value.reasons}
    assert 2 in missing and 1 not in missing and held(store) == {1, 2, 3} - missing
    fill(store, 2, 3)
    assert held(store) == {1, 2, 3} and store.check() == []


def works(store: DiskStore, act: Callable[[DiskStore], object]) -> bool:
    """Whether a disk refuses an operation no longer."""
    with contextlib.suppress(StoreError):
        return act(store) is not False
    return False


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
    ours = StoreError("told")
    ours.__cause__ = full
    assert health.named(ours) == "full", "and through an error of ours"


def test_a_disk_that_refuses_is_told_once_and_left_alone_for_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    disk = Health("it cannot be written", lambda: now[0])
    for _ in range(10):  # entries that fail together
        disk.failed(OSError(errno.ENOSPC, "No space left on device"))
    assert disk.is_aside and disk.state == "full" and disk.since is not None
    now[0] += health.PAUSE
    assert not disk.is_aside and disk.state == "full"
    disk.worked()
    assert (disk.state, disk.since, disk.is_aside) == ("ok", None, False)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    disk.failed(OSError(errno.EROFS, "Read-only file system"))
    assert disk.state == "read-only" and len(caplog.records) == 2, "another trouble is news"
    disk.try_now()
    assert not disk.is_aside


# -- an index that cannot be filled -------------------------------------------------------------


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
    store = opened(tmp_path)
    store.put_note("alias", KEYS[1], {"a": 1})
    fill(store, 0)
    store.close()
    told = {"created": float("nan"), "ttl": 5.0}
    path = tmp_path / layout.place("alias", KEYS[1])
    wrapped = json.loads(path.read_text()) | {"kept": told}
    wrapped["digest"] = layout.note_digest(EntryName("alias", KEYS[1]), wrapped["body"], told)
    path.write_text(json.dumps(wrapped))
    (tmp_path / NAME).unlink()
    store = opened(tmp_path)
    assert {entry.kind for entry in store.entries()} == {"package"}, "it is over"
    assert not list(tmp_path.glob("*.damaged")) and os.path.exists(tmp_path / NAME)


# -- statistics wait for no disk ---------------------------------------------------------------


class Stall:
    """A call to a disk that does not come back until it is let go."""

    def __init__(self, real: Callable[..., Any], only: Callable[..., bool] = lambda *a: True):
        self._real, self._only = real, only
        self.reached, self.over = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.over.is_set() and self._only(*arguments):
            self.reached.set()
            assert self.over.wait(60)
        return self._real(*arguments, **options)


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stall]]:
    made: list[Stall] = []

    def make(where: Any, name: str, *only: Callable[..., bool]) -> Stall:
        stall = Stall(getattr(where, name), *only)
        made.append(stall)
        call = lambda *arguments, **options: stall(*arguments, **options)  # noqa: E731
        monkeypatch.setattr(where, name, call)
        return stall

    yield make
    for stall in made:
        stall.over.set()


def soon(call: Callable[[], T]) -> T:
    """What a call gives that must not wait for anything that has been brought to a stop."""
    answer: queue.SimpleQueue[T] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(call()), daemon=True).start()
    return answer.get(timeout=30)


def test_what_waits_for_a_slow_disk_is_bounded_by_the_budgets_of_memory(
    demo_parts: dict[str, Any], tmp_path: Path, stalled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_settings, "LEAST_WAITING", 0)
    budgets = {"cache_budget": "150KB", "vision_budget": "50KB"}
    with ks.wrap(*demo_parts["demo"], store=tmp_path, **budgets) as vlm:
        stall = stalled(os, "fsync")
        vlm.ask(picture(0), "What is it?", max_new_tokens=2)
        assert stall.reached.wait(30)
        for number in range(1, 6):
            assert soon(lambda n=number: vlm.ask(picture(n), "What is it?", max_new_tokens=2))
            told = soon(vlm.stats)["store"]
            assert 0 < told["waiting"] <= told["waiting_budget"] == 200_000
        assert told["refused"] > 0
        assert soon(lambda: vlm.stats("somebody"))["store"]["waiting"] == 0
        stall.over.set()
        with pytest.raises(NotStored, match="too much waits"):
            vlm.flush()
        assert vlm.stats()["store"]["waiting"] == 0


# -- a disk that is slow -----------------------------------------------------------------------


def test_nothing_that_is_handed_over_waits_for_a_disk(
    tmp_path: Path, opened: Any, stalled: Any
) -> None:
    """Whether it is there already, and what it depends on, the writer looks."""
    store = opened(tmp_path)
    stalls = [stalled(os, name) for name in ("lstat", "open", "fsync")]
    for number, key in enumerate(KEYS):
        on = ("snapshot", KEYS[number - 1]) if number else None
        content = {"a": torch.full((100,), float(number))}
        soon(lambda c=content, k=key, o=on: store.put("snapshot", k, c, {}, About(depends_on=o)))
        soon(lambda k=key: store.put_note("alias", k, {"a": 1}))
        assert soon(lambda k=key: store.note("alias", k)) == {"a": 1}, "readable at once"
    for stall in stalls:
        stall.over.set()
    store.flush()
    assert len(list(store.entries())) == 16 and store.check() == []


def shown(seed: int) -> list[Any]:
    parts = [{"type": "image", "image": picture(seed)}, {"type": "text", "text": "What is it?"}]
    return [{"role": "user", "content": parts}]


def test_a_disk_that_refuses_a_pin_leaves_none_in_memory(
    demo_parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ks.wrap(*demo_parts["demo"], store=tmp_path / "store") as vlm:
        vlm.chat(shown(1), max_new_tokens=3)
        vlm.flush()
        tree, shelf = vlm.runtime.tree, vlm.runtime.caches.packages
        with monkeypatch.context() as patch:
            patch.setattr(Folder, "write", refusing(OSError(errno.EIO, "broken")))
            with pytest.raises(StoreError, match="no pin"):
                vlm.pin(shown(1))
        assert not shelf.pinning() and not any(node.pinned for node in tree.nodes())
        vlm.pin(shown(1))
        assert shelf.pinning() and any(node.pinned for node in tree.nodes())
        vlm.runtime.check()


# -- a store that is full of pins ----------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"budget": 4000}, {"quota": 4000}])
def test_pins_that_leave_no_room_are_named(
    tmp_path: Path, opened: Any, limits: dict[str, int]
) -> None:
    store = opened(tmp_path, **limits)
    while store.stats()["bytes"] < 3200:
        number = store.stats()["entries"]
        fill(store, number)
        store.pin("package", KEYS[number])
    for number in (6, 7):
        put(store, number)
        with pytest.raises(NotStored, match="pins take .* unpin something") as refused:
            store.flush()
        assert set(refused.value.reasons) == {("package", KEYS[number])}
    told = store.stats()
    assert told["state"] == "ok" and told["refused"] == 2 and told["bytes"] <= 4000
    store.pin("package", KEYS[0], False)
    fill(store, 5)
    assert store.get("package", KEYS[5])


@pytest.mark.parametrize("limit", ["budget", "quota"])
def test_what_alone_is_too_large_is_named_and_pushes_nothing_out(
    tmp_path: Path, opened: Any, limit: str
) -> None:
    record = {"said": "x" * 4000}  # counted only once it is written
    store = opened(tmp_path, **{limit: 4000})
    store.put("package", KEYS[0], {"a": torch.zeros(9)}, {})
    store.put("package", KEYS[1], {"a": torch.zeros(9)}, record)
    with pytest.raises(NotStored, match=f"more than the {limit} of") as refused:
        store.flush()
    assert set(refused.value.reasons) == {("package", KEYS[1])}
    assert store.stats()["state"] == "ok" and store.has("package", KEYS[0])


# -- a disk that vanishes ----------------------------------------------------------------------


def test_a_folder_that_is_removed_is_told_and_then_made_anew(
    tmp_path: Path, opened: Any, hurried: None, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "store"
    store = opened(root)
    fill(store, 0, 1)
    shutil.rmtree(root)
    assert held(store) == set() and store.stats()["state"] == "gone"
    assert store.stats()["entries"] == 0 and not root.exists(), "looking makes no folder"
    put(store, 2)
    with contextlib.suppress(StoreError):
        store.flush()
    until(lambda: fill(store, 3) or store.stats()["state"] == "ok")
    assert 3 in held(store) and store.stats()["entries"] == len(held(store))
    assert store.check() == [] and [r.levelname for r in caplog.records] == ["WARNING"]


def test_a_folder_that_comes_back_is_used_again(tmp_path: Path, opened: Any, hurried: None) -> None:
    root, away = tmp_path / "disk" / "store", tmp_path / "away"
    store = opened(root)
    fill(store, 0, 1)
    (tmp_path / "disk").rename(away)
    for number in (2, 3):
        put(store, number)
        with pytest.raises(StoreError, match="gone|No such"):
            store.flush()
        assert held(store) == set() and store.stats()["state"] == "gone"
    assert not root.exists(), "nothing is made where the folder above is gone too"
    away.rename(tmp_path / "disk")
    until(lambda: store.stats()["state"] == "ok")
    assert held(store) == {0, 1} and store.stats()["entries"] == 2
    fill(store, 2, 3)
    assert held(store) == {0, 1, 2, 3} and store.check() == []


def test_nothing_is_written_where_a_disk_was_mounted(
    tmp_path: Path, opened: Any, hurried: None
) -> None:
    """It would lie under the disk when that comes back."""
    disk = tmp_path / "disk"
    for root in (disk, disk / "store"):
        with mounted(disk):
            store = opened(root)
            fill(store, 0)
        for number in (1, 2):
            put(store, number)
            with pytest.raises(StoreError, match="gone|mounted"):
                store.flush()
            assert store.stats()["state"] == "gone" and held(store) == set()
        assert list(disk.iterdir()) == []
        with mounted(disk):  # another, empty one
            until(functools.partial(works, store, lambda store: fill(store, 3)))
            assert 3 in held(store) and store.check() == []
            store.close()


@pytest.mark.parametrize("lost", [False, True])
def test_what_is_no_file_in_the_place_of_one_holds_up_nobody(
    tmp_path: Path, opened: Any, lost: bool
) -> None:
    """Whoever opens a pipe waits for a writer, for ever."""
    store = opened(tmp_path)
    store.put_note("alias", KEYS[0], {"a": 1})
    fill(store, 0, 1)
    store.close()
    for kind in ("package", "alias"):
        path = tmp_path / layout.place(kind, KEYS[0])
        path.unlink()
        os.mkfifo(path)
    if lost:
        (tmp_path / NAME).unlink()
    store = opened(tmp_path)
    if lost:
        assert len(soon(lambda: list(store.entries()))) == 1
    assert soon(lambda: store.note("alias", KEYS[0])) is None
    assert soon(lambda: held(store)) == {1} and store.stats()["state"] == "ok"
    soon(lambda: fill(store, 0))
    assert held(store) == {0, 1} and soon(store.check) == []
    store.close()
    (tmp_path / layout.MARKER).unlink()
    os.mkfifo(tmp_path / layout.MARKER)
    store = opened(tmp_path)
    told = soon(lambda: raised(StoreError, lambda: fill(store, 1)))
    assert "is no file" in str(told) and held(store) >= {0}
