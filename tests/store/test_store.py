"""The store in a folder: its index, its accidents, its processes, and that it stays in its folder.

What all stores promise is in `support.StoreTests`; disks that refuse are in `test_faults.py`,
kills in `test_crash.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import BoundedStoreTests
from support.hostile import ended_well, in_child
from support.stores import KEYS, tensors

import keepsight as ks
from keepsight.errors import InputError, NotStored, StoreError
from keepsight.store import About, DiskStore, Entry, index, layout, open_store
from keepsight.store.contract import EntryName
from keepsight.store.files import Folder
from keepsight.store.index import NAME, Index
from keepsight.store.layout import KINDS
from keepsight.system import digests
from keepsight.system.units import parse_bytes


class TestDiskStore(BoundedStoreTests):
    def make_store(self, folder: Path, budget: int | None = None) -> DiskStore:
        return DiskStore(folder, budget)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = DiskStore(tmp_path / "store")
    yield made
    made.close()


def files(root: Path) -> list[Path]:
    """All that lies where entries lie: whole, damaged or half written."""
    return sorted(path for path in root.rglob("*.*") if path.parent.parent.name in KINDS)


# -- a folder that cannot be used --------------------------------------------------------------


def test_a_folder_that_is_none_is_given_up_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")  # below which not even root can write
    store = DiskStore(tmp_path / "file" / "store")
    for number, key in enumerate(KEYS):
        store.put("package", key, tensors(number), {})
        store.put_note("alias", key, {})
        with pytest.raises(StoreError, match="not written"):
            store.flush()
        assert store.get("package", key) is None and store.note("alias", key) is None
        assert not store.has("package", key)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert store.stats()["broken"] and list(store.entries()) == [] and store.check() == []
    assert store.clear() == store.gc(0) == 0
    store.close()


# -- writes that fail --------------------------------------------------------------------------


def test_one_write_that_fails_is_told_once(
    store: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("package", KEYS[0], {"a": torch.zeros(1, dtype=torch.complex64)}, {})
    with pytest.raises(StoreError, match="complex64"):
        store.flush()
    assert "going on without it" in caplog.text
    store.put("package", KEYS[1], tensors(), {})
    store.flush()
    assert store.get("package", KEYS[0]) is None and store.get("package", KEYS[1]) is not None


# -- reads that fail ---------------------------------------------------------------------------


DAMAGE = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "noise": lambda data: b"\xff" * len(data),
    "longer": lambda data: data + b" x",
    "JSON of another shape": lambda data: b"[1]",
    "nested deeply": lambda data: b"[" * 100_000,
    "no body": lambda data: b'{"digest": 1}',
    "a body that is no object": lambda data: b'{"body": 7, "digest": 1}',
    "another digest": lambda data: data.replace(b'"digest":"', b'"digest":"0'),
    "another body": lambda data: data.replace(b"number", b"numbed"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_set_aside_with_a_warning_and_can_be_replaced(
    store: DiskStore, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    for kind, suffix in (("package", "sight"), ("alias", "json")):
        store.put("package", KEYS[0], tensors(), {"number": 1})
        store.put_note("alias", KEYS[0], {"number": 1})
        store.flush()
        (path,) = store.root.glob(f"{kind}/*/*.{suffix}")
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
        caplog.clear()
        read = store.get if kind == "package" else store.note
        assert read(kind, KEYS[0]) is None
        assert "damaged entry set aside" in caplog.text and str(path) in caplog.text
        assert not path.exists() and path.with_suffix(".damaged").exists()
        assert not store.has(kind, KEYS[0]) and read(kind, KEYS[0]) is None
        assert len(caplog.records) == 1
    store.clear()
    assert files(store.root) == []


def test_files_of_nobody_are_named_and_change_nothing(store: DiskStore) -> None:
    store.put("package", KEYS[0], tensors(), {})
    store.flush()
    (folder,) = store.root.glob("package/*")
    (folder / "stray.txt").write_text("?")
    (store.root / "README").write_text("?")
    assert len(store.check()) == 1 and store.get("package", KEYS[0]) is not None


# -- budgets -----------------------------------------------------------------------------------


def test_gc_sweeps_what_killed_writers_left_but_not_what_is_being_written(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put("package", KEYS[0], tensors(), {})
    store.flush()
    (folder,) = tmp_path.glob("package/*")
    for name, age in ((".part-old", 2e9), (".part-new", 0), ("old.damaged", 2e9), ("x.damaged", 0)):
        (folder / name).write_text("?")
        stamp = (folder / name).stat().st_mtime - age
        os.utime(folder / name, (stamp, stamp))
    store.gc(1 << 30)
    names = {path.name for path in folder.iterdir()}
    assert names == {f"{KEYS[0]}.sight", ".part-new", "x.damaged"}


# -- processes ---------------------------------------------------------------------------------


def test_processes_that_open_a_new_store_at_once_and_write_the_same_keys(tmp_path: Path) -> None:
    def work() -> bool:
        store = DiskStore(tmp_path)
        for number in range(60):
            key = digests.digest("entry", number)
            store.put("package", key, tensors(number, 5000), {"n": number})
            store.put_note("alias", key, {"n": number})
            if number % 10 == 9:
                store.flush()
        told = store.stats()["broken"]
        store.close()
        return told is None and store.check() == []

    assert all(map(ended_well, [in_child(work) for _ in range(3)]))
    store = DiskStore(tmp_path)
    assert store.check() == [] and len(list(store.entries())) == 120
    for number in range(60):
        found = store.get("package", digests.digest("entry", number))
        assert found is not None and (found[0]["a"] == number).all()
    assert list(tmp_path.rglob(".part-*")) == []


def test_notes_are_plain_json(store: DiskStore) -> None:
    store.put_note("alias", KEYS[0], {"a": 1})
    store.flush()
    (path,) = store.root.glob("alias/*/*.json")
    assert json.loads(path.read_text())["body"] == {"a": 1}


# -- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "count"),
    [
        *((0, 0), (7, 7), ("7", 7), ("7b", 7), ("1.5 kB", 1500), ("1KiB", 1024)),
        *((" 2 gib ", 2 << 30), ("500 MB", 500_000_000), ("1e3", 1000), ("3TiB", 3 << 40)),
    ],
)
def test_sizes(size: int | str, count: int) -> None:
    assert parse_bytes(size) == count


@pytest.mark.parametrize(
    "size", ["", "GiB", "-1", -1, "nan", "inf", "1e99", "2 GiG", "two", True, 1.5, None, "0x10"]
)
def test_what_is_no_size(size: Any) -> None:
    with pytest.raises(InputError, match="is not a size"):
        parse_bytes(size)


def changed(folder: Path, work: Callable[[sqlite3.Connection], object]) -> None:
    """Change the index behind the stores."""
    book = Index(Folder(folder))
    book.change(work)
    book.close()


def fill(store: DiskStore, count: int = 4) -> None:
    for number in range(count):
        store.put("package", KEYS[number], tensors(number), {"n": number})
        store.put_note("alias", KEYS[number], {"n": number})
    store.flush()


def expect_whole(store: DiskStore, count: int = 4) -> None:
    for number in range(count):
        found = store.get("package", KEYS[number])
        assert found is not None and (found[0]["a"] == number).all()
        assert store.note("alias", KEYS[number]) == {"n": number}


# -- the index can be lost ------------------------------------------------------------------

HARM: dict[str, Callable[[Path], object]] = {
    "deleted": lambda path: path.unlink(),
    "noise": lambda path: path.write_bytes(b"\xff" * 20_000),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, 5000),
    "zeros inside": lambda path: path.write_bytes(path.read_bytes()[:4096] + bytes(40_000)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link": lambda path: (path.unlink(), path.symlink_to("/dev/null")),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_book_that_is_harmed_is_written_anew(
    tmp_path: Path, opened: Any, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    fill(store)
    store.pin("package", KEYS[2])
    before = {(e.kind, e.key): e.nbytes for e in store.entries()}
    store.close()
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"{NAME}{suffix}").unlink(missing_ok=True)
    HARM[harm](tmp_path / NAME)
    store = opened(tmp_path)
    expect_whole(store)
    assert {(e.kind, e.key): e.nbytes for e in store.entries()} == before
    assert store.check() == [] and len(caplog.records) <= 1
    store.gc(0)
    assert [(e.key, e.pinned) for e in store.entries()] == [(KEYS[2], True)], (
        "pins outlive the index"
    )
    fill(store)
    assert len(list(store.entries())) == 8 and store.check() == []


def test_a_book_that_is_deleted_under_us_is_written_anew(tmp_path: Path, opened: Any) -> None:
    store = opened(tmp_path)
    fill(store, 2)
    for path in tmp_path.glob(f"{NAME}*"):
        path.unlink()
    fill(store, 4)
    assert len(list(store.entries())) == 8 and store.check() == []
    assert (tmp_path / NAME).exists()


def test_reading_never_touches_the_book(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opened(tmp_path)
    fill(before)
    before.close()

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a reader opened the index")

    store = opened(tmp_path)
    monkeypatch.setattr(store.keeper, "used", lambda name: None)  # what it does later
    for name in ("look", "change"):
        monkeypatch.setattr(Index, name, refuse)
    expect_whole(store)
    assert store.get("package", KEYS[7]) is None and not store.has("package", KEYS[7])
    monkeypatch.undo()


def test_whether_an_entry_is_there_is_known_without_opening_its_file(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.put("package", KEYS[0], tensors(), {}, About(ttl=60.0))
    store.flush()
    with monkeypatch.context() as patch:
        patch.setattr("keepsight.store.files.Folder.entry", None)
        assert store.has("package", KEYS[0])
        now = time.time
        patch.setattr(time, "time", lambda: now() + 61.0)
        assert not store.has("package", KEYS[0])
    with store.keeper._index._lock:  # where the index is busy nobody waits for it
        there = []
        asking = threading.Thread(target=lambda: there.append(store.has("package", KEYS[0])))
        asking.start()
        asking.join(20)
    assert there == [True]


def test_a_locked_book_stops_no_readers_and_flush_says_what_is_missing(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(opened(tmp_path), 2)
    monkeypatch.setattr("keepsight.store.index._PATIENCE", 0.05)
    other = sqlite3.connect(tmp_path / NAME, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    store = opened(tmp_path)
    with pytest.raises(NotStored, match="locked"):
        fill(store, 4)
    expect_whole(store, 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    other.execute("ROLLBACK")
    other.close()
    fill(store, 4)
    assert store.check() == [] and len(list(store.entries())) == 8


def test_opening_looks_at_no_entry(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of calls to the disk is the same for few entries and for many."""

    def calls_of(count: int) -> dict[str, int]:
        folder = tmp_path / str(count)
        store = opened(folder)
        fill(store, 2)
        store.close()
        rows = [Entry("state", digests.digest("n", n), 10, 1.0) for n in range(count)]
        changed(folder, lambda base: index.put(base, rows))
        counted = dict.fromkeys(("scandir", "listdir", "stat", "lstat", "open", "walk"), 0)

        def counting(name: str) -> Callable[..., Any]:
            real = getattr(os, name)

            def call(*arguments: Any, **options: Any) -> Any:
                counted[name] += 1
                return real(*arguments, **options)

            return call

        with monkeypatch.context() as patch:
            for name in counted:
                patch.setattr(os, name, counting(name))
            store = opened(folder)
            store.put("package", KEYS[5], tensors(5), {})
            store.flush()
            assert store.stats()["entries"] == count + 5 and store.has("package", KEYS[5])
            store.close()
        return counted

    few, many = calls_of(3), calls_of(3000)
    assert few["scandir"] == few["walk"] == few["listdir"] == 0
    assert sum(many.values()) <= sum(few.values()) + 4, "the thread may look once more or less"


@pytest.mark.slow
def test_a_million_entries_open_in_less_than_a_second(tmp_path: Path, opened: Any) -> None:
    fill(opened(tmp_path), 1)
    rows = (Entry("state", digests.digest("n", n), 1000, 1.0) for n in range(1_000_000))
    changed(tmp_path, lambda base: index.put(base, rows))
    began = time.perf_counter()
    store = opened(tmp_path, 1 << 40)
    told = store.stats()
    store.put("package", KEYS[5], tensors(5), {})
    store.flush()
    seconds = time.perf_counter() - began
    assert told["entries"] == 1_000_002 and store.get("package", KEYS[0]) is not None
    assert seconds < 1.0, f"{seconds:.2f} s"


# -- never outside the store -------------------------------------------------------------------


def test_links_inside_the_store_are_not_followed(tmp_path: Path, opened: Any) -> None:
    outside = tmp_path / "outside"
    (outside / KEYS[0][:2]).mkdir(parents=True)
    precious = outside / KEYS[0][:2] / f"{KEYS[0]}.sight"
    precious.write_text("mine")
    root = tmp_path / "store"
    root.mkdir()
    (root / "package").symlink_to(outside)
    store = opened(root)
    store.put("package", KEYS[0], tensors(), {})
    store.put("package", KEYS[3], tensors(), {})
    with pytest.raises(StoreError, match="a link"):
        store.flush()
    for act in (store.clear, lambda: store.delete("package", KEYS[0]), lambda: store.gc(0)):
        with contextlib.suppress(StoreError):
            act()
    store.check(repair=True)
    assert precious.read_text() == "mine" and len(list(outside.rglob("*.*"))) == 1


def test_a_link_in_place_of_an_entry_is_replaced_or_removed_itself(
    tmp_path: Path, opened: Any
) -> None:
    store = opened(tmp_path / "store")
    fill(store, 3)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for path in (tmp_path / "store").glob("package/*/*.sight"):
        path.unlink()
        path.symlink_to(precious)
    assert sum("a link" in line for line in store.check()) == 3
    assert not store.has("package", KEYS[0])
    store.put("package", KEYS[0], tensors(0), {"n": 0})
    store.flush()
    assert store.get("package", KEYS[0]) is not None
    store.delete("package", KEYS[1])
    store.check(repair=True)
    assert store.check() == [] and precious.read_text() == "mine"
    store.clear()
    assert precious.read_text() == "mine" and not list((tmp_path / "store").glob("package/*/*.*"))


@pytest.mark.parametrize("name", ["line\nend", "\udcff\udc80", "%41?#"])
def test_folders_that_no_address_can_name(tmp_path: Path, opened: Any, name: str) -> None:
    """The root itself may be a link."""
    (tmp_path / "link").symlink_to(tmp_path)
    store = opened(tmp_path / name)
    fill(store)
    store.close()
    again = opened(tmp_path / "link" / name)
    expect_whole(again)
    assert again.check() == [] and again.stats()["entries"] == 8


def test_folders_that_cannot_be(tmp_path: Path, opened: Any) -> None:
    with pytest.raises(InputError, match="zero byte"):
        DiskStore("a\0b")
    with pytest.raises(InputError, match="is no path"):
        DiskStore("a\ud800b")
    store = opened(tmp_path / ("x" * 300))
    store.put("package", KEYS[0], tensors(), {})
    with pytest.raises(StoreError, match="too long"):
        store.flush()


def test_a_folder_in_place_of_an_entry_is_set_aside(
    tmp_path: Path, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    fill(store)
    path = next(tmp_path.glob(f"package/*/{KEYS[1]}.sight"))
    for read_first in (True, False):
        path.unlink()
        path.mkdir()
        (path / "inside").write_text("mine")
        caplog.clear()
        if read_first:
            assert store.get("package", KEYS[1]) is None and KEYS[1] in caplog.text
        assert not store.has("package", KEYS[1])
        store.put("package", KEYS[1], tensors(1), {"n": 1})
        store.flush()
        expect_whole(store)
    assert store.check() == [] and len(list(tmp_path.rglob("inside"))) == 2


@pytest.mark.usefixtures("_nobody_writes")
def test_a_file_that_is_deleted_under_us_is_absent_and_told(tmp_path: Path, opened: Any) -> None:
    store = opened(tmp_path)
    fill(store)
    next(tmp_path.glob(f"package/*/{KEYS[1]}.sight")).unlink()
    assert store.get("package", KEYS[1]) is None
    (line,) = store.check(repair=True)
    assert KEYS[1] in line and "no such file" in line and store.check() == []
    fill(store)
    expect_whole(store)


@pytest.mark.usefixtures("_nobody_writes")
def test_repair_makes_files_and_book_agree(tmp_path: Path, opened: Any) -> None:
    store = opened(tmp_path)
    fill(store, 4)
    store.put("snapshot", KEYS[4], tensors(), {})
    store.put("snapshot", KEYS[5], tensors(), {}, About(depends_on=("snapshot", KEYS[4])))
    store.put("state", KEYS[5], tensors(), {}, About(depends_on=("snapshot", KEYS[5])))
    store.flush()
    for kind, key in (("package", KEYS[0]), ("snapshot", KEYS[4])):  # a row and a file less
        next(tmp_path.glob(f"{kind}/*/{key}.*")).unlink()

    def harm(base: sqlite3.Connection) -> None:
        index.drop(base, [EntryName("package", KEYS[1])])
        base.execute(
            "UPDATE entry SET bytes = 7 WHERE name = ?", [layout.place("package", KEYS[2])]
        )

    changed(tmp_path, harm)
    wrong = store.check()
    assert len(wrong) == 4 and len(store.check(repair=True)) == 5
    for words in (
        "no such file",
        "not in the index",
        "the index says 7",
    ):
        assert any(words in line for line in wrong)
    assert store.check() == []
    assert {(e.kind, KEYS.index(e.key)) for e in store.entries()} == {
        *(("package", n) for n in (1, 2, 3)),
        *(("alias", n) for n in range(4)),
    }


# -- time --------------------------------------------------------------------------------------


def test_what_is_over_is_swept_without_being_asked(tmp_path: Path, opened: Any) -> None:
    store = opened(tmp_path)
    store.put("state", KEYS[0], tensors(), {}, About(ttl=0.1))
    store.flush()
    deadline = time.monotonic() + 20
    while list(tmp_path.glob("state/*/*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


# -- budgets -----------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_blocks_nobody(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, waiting=100_000)
    writer = store.keeper
    monkeypatch.setattr(writer, "_awake", lambda: None)  # nobody writes
    for key in KEYS:
        store.put("package", key, tensors(0, 5000), {})
    assert [store.has("package", key) for key in KEYS] == [True] * 4 + [False] * 4
    assert writer.counts.of("")["refused"] == 4 and writer.nbytes <= 100_000
    monkeypatch.undo()
    with pytest.raises(NotStored, match="4 not written.*too much waits") as refused:
        store.flush()
    assert set(refused.value.reasons) == {("package", key) for key in KEYS[4:]}
    store.flush()
    assert writer.nbytes == 0 and store.stats()["entries"] == 4


def test_a_chain_goes_from_its_end(tmp_path: Path, opened: Any) -> None:
    """A long one too, in one go."""
    store = opened(tmp_path)
    chain = [digests.digest("link", n) for n in range(150)]
    for number, key in enumerate(chain):
        base = ("snapshot", chain[number - 1]) if number else None
        store.put("snapshot", key, tensors(number), {}, About(1.0, base))
    store.flush()
    for part in (0.9, 0.5, 0.1):
        store.gc(int(store.stats()["bytes"] * part))
        left = {entry.key for entry in store.entries()}
        assert left == set(chain[: len(left)]) and store.check() == []


# -- processes ---------------------------------------------------------------------------------


def test_a_forked_child_uses_the_store_by_itself(tmp_path: Path, opened: Any) -> None:
    store = opened(tmp_path)
    fill(store, 2)

    def work() -> bool:
        fill(store, 4)
        expect_whole(store, 4)
        return store.stats()["entries"] == 8

    assert ended_well(in_child(work))
    assert len(list(store.entries())) == 8 and store.check() == []


def test_what_another_process_let_go_of_is_absent(tmp_path: Path, opened: Any) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    fill(one)
    expect_whole(two)
    one.gc(0)
    assert two.get("package", KEYS[0]) is None and not two.has("package", KEYS[0])
    fill(two)
    expect_whole(one)
    assert one.stats()["bytes"] == two.stats()["bytes"] > 0


def test_budgets_of_two_stores_over_one_folder_are_counted_together(
    tmp_path: Path, opened: Any
) -> None:
    stores = [opened(tmp_path, 30_000) for _ in range(2)]
    for number in range(40):
        stores[number % 2].put("package", digests.digest("n", number), tensors(number, 400), {})
    for store in stores:
        store.flush()
    assert stores[0].stats()["bytes"] == stores[1].stats()["bytes"] <= 30_000
    assert stores[0].check() == []


def test_equal_content_is_written_once(tmp_path: Path, opened: Any) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    fill(one)
    fill(two)
    assert (one.stats()["written"], two.stats()["written"]) == (8, 0)


def test_looking_at_a_folder_makes_no_store_of_it(tmp_path: Path, opened: Any) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    store = opened(tmp_path)
    assert store.stats()["entries"] == 0 and store.check() == [] and list(store.entries()) == []
    assert store.stats()["counted"] is not None and store.stats()["state"] == "ok"
    assert store.get("package", KEYS[0]) is None and store.clear() == store.gc(0) == 0
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    fill(store)
    store.close()
    assert opened(tmp_path).stats()["entries"] == 8


# -- opening -----------------------------------------------------------------------------------


def test_an_address_opens_what_it_names(tmp_path: Path) -> None:
    assert isinstance(open_store(tmp_path), DiskStore)
    assert isinstance(open_store(str(tmp_path / "a"), 10, quota=5), DiskStore)
    for address, remote in ((None, None), (tmp_path, "a folder")):
        with pytest.raises(InputError):
            open_store(address, remote=remote)
    with pytest.raises(StoreError, match="only local folders"):
        DiskStore("s3://bucket/store")


# -- under a model -----------------------------------------------------------------------------


def test_a_long_conversation_asks_a_store_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [{"role": "user", "content": "Hello there."}]
    with ks.load("demo", store=tmp_path) as vlm:
        for turn in range(5):
            reply = vlm.chat(said, max_new_tokens=2)
            said += [
                {"role": "assistant", "content": reply.text},
                {"role": "user", "content": f"And then, {turn}?"},
            ]
        wanted = vlm.chat(said, max_new_tokens=2)
        vlm.flush()
    asked = {"below": 0, "get_all": 0}
    for name in asked:
        real = getattr(DiskStore, name)

        def counted(self: DiskStore, *given: Any, name: str = name, real: Any = real) -> Any:
            asked[name] += given[0] == "snapshot"
            return real(self, *given)

        monkeypatch.setattr(DiskStore, name, counted)
    with ks.load("demo", store=tmp_path) as vlm:
        again = vlm.chat(said, max_new_tokens=2)
    assert again.text == wanted.text and again.report.cached_tokens > 50
    assert again.report.prompt_tokens - again.report.cached_tokens <= 1
    assert asked["below"] <= 2 and asked["get_all"] <= 2
