"""Stores: what is acknowledged is there, what is damaged is absent, and nothing stops for a disk.

The promises themselves are `support.BoundedStoreTests`; here are the accidents: kill -9,
a full disk, a folder that is none, a file out of reach.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import finished, lines_until_killed, start
from models import picture
from support import BoundedStoreTests
from support.stores import KEYS

import keepsight as ks
from keepsight.errors import InputError, StoreError
from keepsight.formats import tensorfile
from keepsight.store import FORMAT, DiskStore, health
from keepsight.store.layout import KINDS
from keepsight.system import digests
from keepsight.system.units import parse_bytes


class TestDiskStore(BoundedStoreTests):
    @pytest.fixture(autouse=True)
    def _closed(self) -> Iterator[None]:
        self.made: list[DiskStore] = []
        yield
        for store in self.made:
            store.close()

    def make_store(self, folder: Path, budget: int | None = None) -> DiskStore:
        self.made.append(DiskStore(folder, budget))
        return self.made[-1]


@pytest.fixture(autouse=True)
def _loud(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="keepsight")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = DiskStore(tmp_path / "store")
    yield made
    made.close()


def files(root: Path) -> list[Path]:
    """All that lies where entries lie: whole, damaged or half written."""
    return sorted(path for path in root.rglob("*.*") if path.parent.parent.name in KINDS)


def tensors(number: int = 0, size: int = 100) -> dict[str, torch.Tensor]:
    return {"a": torch.full((size,), float(number))}


# -- a folder that cannot be used --------------------------------------------------------------


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """A folder under a regular file: not even root can write there."""
    (tmp_path / "file").write_text("no folder")
    return tmp_path / "file" / "store"


def test_a_folder_that_is_none_is_given_up_with_one_warning(
    nowhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(nowhere)
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


def test_the_model_works_on_without_its_store(
    demo_parts: dict[str, Any], nowhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, processor = demo_parts["demo"]
    with ks.wrap(model, processor) as free:
        wanted = free.ask(picture(1), "What is it?", max_new_tokens=2)
    with ks.wrap(model, processor, store=nowhere) as vlm:
        for cached in (0, wanted.usage.prompt_tokens):
            reply = vlm.ask(picture(1), "What is it?", max_new_tokens=2)
            assert (reply.text, reply.usage.cached_tokens) == (wanted.text, cached)
        with pytest.raises(StoreError):
            vlm.flush()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_remote_path_is_refused_by_name() -> None:
    with pytest.raises(StoreError, match="only local folders"):
        DiskStore("s3://bucket/store")


# -- writes that fail --------------------------------------------------------------------------


def test_a_full_disk_is_told_by_flush_and_breaks_nothing(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store.put("package", KEYS[0], tensors(), {})
    store.flush()
    monkeypatch.setattr(os, "fsync", full)
    for key in KEYS[1:]:
        store.put("package", key, tensors(), {})
    with pytest.raises(StoreError, match="No space left"):
        store.flush()
    store.flush()  # all that was lost was told
    assert len(caplog.records) == 1
    assert store.get("package", KEYS[0]) is not None and store.get("package", KEYS[1]) is None
    assert [path.name[:2] for path in files(store.root)] == [KEYS[0][:2]]


FULL = """
import resource, sys, torch
from keepsight.errors import StoreError
from keepsight.store import DiskStore
store = DiskStore(sys.argv[1])
store.stats()
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
store.put("package", "aa" * 32, {"a": torch.zeros(1000)}, {})
store.flush()
store.put("package", "bb" * 32, {"a": torch.zeros(100_000)}, {})
try:
    store.flush()
except StoreError as error:
    print(error)
"""


def test_flush_never_acknowledges_what_the_disk_refused(tmp_path: Path) -> None:
    """For real, by a limit on the size of files: the error comes from where bytes are written."""
    assert "not written" in finished(start(FULL, tmp_path))
    store = DiskStore(tmp_path)
    assert [entry.key for entry in store.entries()] == ["aa" * 32] and store.check() == []


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


def test_what_is_out_of_reach_is_not_what_is_damaged(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Too many open files, no permission: the entry is absent now, and still there later."""

    def unreadable(*arguments: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    store.put("package", KEYS[0], tensors(), {})
    store.put_note("alias", KEYS[0], {"a": 1})
    store.flush()
    monkeypatch.setattr(health, "PAUSE", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(tensorfile, "read", unreadable)
        patch.setattr(Path, "read_bytes", unreadable)
        for _ in range(3):
            assert store.get("package", KEYS[0]) is None and store.note("alias", KEYS[0]) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert store.get("package", KEYS[0]) is not None and store.note("alias", KEYS[0]) == {"a": 1}


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


def test_notes_of_every_kind_are_sound(store: DiskStore) -> None:
    """Each kind of note that the engine writes is one that `check` can read."""
    for kind in ("alias", "made", "weights"):
        store.put_note(kind, KEYS[0], {"a": 1})
    store.flush()
    assert store.check() == []


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

UNDER_LOAD = """
import sys, torch
from keepsight.system import digests
from keepsight.store import DiskStore
store, n = DiskStore(sys.argv[1]), 0
while True:
    for _ in range(5):
        n += 1
        key = digests.digest("entry", n)
        store.put("package", key, {"a": torch.full((5000,), float(n))}, {"n": n})
        store.put_note("alias", key, {"n": n})
    store.flush()
    print(n, flush=True)
"""


@pytest.mark.parametrize("lines", [1, 12])
def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, lines: int) -> None:
    acknowledged = int(lines_until_killed(start(UNDER_LOAD, tmp_path), lines)[-1])
    store = DiskStore(tmp_path)
    assert store.check() == [] and acknowledged >= 5 * lines
    for n in range(1, acknowledged + 1):
        found, note = (read(kind, digests.digest("entry", n)) for read, kind in readers(store))
        assert found is not None and (found[0]["a"] == n).all() and found[1]["n"] == n
        assert note == {"n": n}
    for key in [entry.key for entry in store.entries()]:  # and whatever else loads is whole too
        found = store.get("package", key)
        assert found is None or (found[0]["a"] == found[1]["n"]).all()


def readers(store: DiskStore) -> Iterator[tuple[Any, str]]:
    yield store.get, "package"
    yield store.note, "alias"


SHARED = """
import sys, torch
from keepsight.system import digests
from keepsight.store import DiskStore
store = DiskStore(sys.argv[1])
for n in range(60):
    key = digests.digest("entry", n)
    store.put("package", key, {"a": torch.full((5000,), float(n))}, {"n": n})
    store.put_note("alias", key, {"n": n})
    if n % 10 == 9:
        store.flush()
store.close()
print(len(store.check()))
"""


def test_two_processes_may_write_the_same_keys(tmp_path: Path) -> None:
    processes = [start(SHARED, tmp_path) for _ in range(2)]
    assert [finished(process).strip() for process in processes] == ["0", "0"]
    store = DiskStore(tmp_path)
    assert store.check() == [] and len(list(store.entries())) == 120
    for n in range(60):
        found = store.get("package", digests.digest("entry", n))
        assert found is not None and (found[0]["a"] == n).all()
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


def test_an_entry_of_another_version_is_left_alone(tmp_path: Path) -> None:
    """It is sound, and the version that wrote it may still want it."""
    store = DiskStore(tmp_path)
    store.put("package", "ab" * 32, {"a": torch.ones(2)}, {})
    store.flush()
    path = next(tmp_path.glob("package/*/*.sight"))
    tensors, record = tensorfile.read(path, "package", FORMAT)
    for name in ("kind", "format", "tensors"):
        record.pop(name)
    tensorfile.write(path, "package", FORMAT + 1, tensors, record)
    data = path.read_bytes()
    assert DiskStore(tmp_path).get("package", "ab" * 32) is None
    assert path.read_bytes() == data and not list(tmp_path.rglob("*.damaged"))
