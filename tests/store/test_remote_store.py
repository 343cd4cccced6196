"""Stores at an address: the same promises, a line that fails, waits and lies, and other machines.

The promises themselves are `support.StoreTests`; `trial://` (support/remote_lines.py) is a file
system whose network does as it is told. A real S3 server runs where `moto` is installed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from support import StoreTests
from support.models import picture
from support.remote_lines import Line, TrialFileSystem, read_only, unreachable
from support.stores import KEYS, put, tensors

import keepsight as ks
from keepsight.errors import InputError, MissingExtra, StoreError
from keepsight.store import About, DiskStore, layout, open_store, remote
from keepsight.store.remote import RemoteStore

ADDRESS = "trial://shared/store"
ANN = layout.tenant_digest("ann")


class TestRemoteStore(StoreTests):
    def make_store(self, folder: Path, budget: int | None = None) -> RemoteStore:
        return RemoteStore(f"file://{folder}")


@pytest.fixture(autouse=True)
def _a_line_that_works() -> None:
    Line.reset()


@pytest.fixture
def store() -> Iterator[RemoteStore]:
    made = RemoteStore(ADDRESS)
    yield made
    made.close()


def raw(name: str) -> str:
    """Where an object lies in the trial file system."""
    return f"/shared/store/{name}"


def objects() -> dict[str, bytes]:
    """Everything at the address, as it lies there."""
    return {
        path.removeprefix("/shared/store/"): file.getvalue()
        for path, file in TrialFileSystem.store.items()
    }


def poke(name: str, data: bytes) -> None:
    """Put an object there behind the store's back."""
    fsspec.filesystem("trial").pipe_file(raw(name), data)


def names(store: Any) -> set[tuple[str, str]]:
    return {(entry.kind, entry.key) for entry in store.entries()}


# -- the same files as in a folder ---------------------------------------------------------------


def test_a_folder_and_an_address_hold_the_same_bytes(tmp_path: Path) -> None:
    near, far = DiskStore(tmp_path / "disk"), RemoteStore(f"file://{tmp_path}/remote")
    for one in (near, far, near.tenant("ann"), far.tenant("ann")):
        put(one, 1, About(cost=3.0, media=("image",)))
        put(one, 2, About(depends_on=("package", KEYS[1])), "snapshot")
        one.put_note("alias", KEYS[1], {"number": 1})
        one.flush()
    for one in (near, far):
        one.close()

    def lie(root: Path) -> dict[str, bytes]:
        found = (path for path in root.rglob("*") if path.suffix in (".sight", ".keep", ".json"))
        return {str(path.relative_to(root)): path.read_bytes() for path in found}

    assert lie(tmp_path / "disk") == lie(tmp_path / "remote")
    assert len(lie(tmp_path / "remote")) == 7  # 3 entries for each of two, and a marker


# -- what goes over the line ---------------------------------------------------------------------


def test_what_is_known_is_not_asked_for_again(store: RemoteStore) -> None:
    put(store, 1)
    store.flush()
    Line.calls.clear()
    for _ in range(3):
        assert store.has("package", KEYS[1]) and store.tier("package", KEYS[1]) == "remote"
        put(store, 1)
        store.flush()
    assert Line.total() == 0, "what this process wrote is there"
    other = RemoteStore(ADDRESS)
    Line.calls.clear()
    for _ in range(3):
        assert other.has("package", KEYS[1]) and not other.has("package", KEYS[2])
        assert other.get("package", KEYS[2]) is None and other.note("alias", KEYS[2]) is None
    assert Line.calls == {"cat_file": 3}, "each name is asked for once"


def test_an_absence_is_believed_for_some_seconds_only(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RemoteStore(ADDRESS)
    assert not other.has("package", KEYS[1])
    put(store, 1)
    store.flush()
    assert not other.has("package", KEYS[1])
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 6, time=time.time)
    monkeypatch.setattr(remote, "time", later)
    assert other.has("package", KEYS[1]) and other.get("package", KEYS[1]) is not None


def test_one_write_takes_few_calls(store: RemoteStore) -> None:
    put(store, 1)
    store.flush()
    Line.calls.clear()
    put(store, 2)
    store.flush()
    assert Line.calls == {"cat_file": 1, "makedirs": 1, "pipe_file": 1, "mv": 1}
    assert not [name for name in objects() if ".part-" in name]


def test_putting_waits_for_no_line(store: RemoteStore) -> None:
    gate = threading.Event()
    Line.delay = staticmethod(lambda asked, path: float(not gate.wait(20)))
    put(store, 1)
    store.put_note("alias", KEYS[1], {"a": 1})
    found = store.get("package", KEYS[1])
    assert found is not None and torch.equal(found[0]["a"], tensors(1)["a"])
    assert store.has("alias", KEYS[1]) and store.note("alias", KEYS[1]) == {"a": 1}
    entry = store.entry("package", KEYS[1])
    assert entry is not None and entry.nbytes >= 400
    gate.set()
    store.flush()


def test_a_record_of_any_length_is_read_without_its_tensors(store: RemoteStore) -> None:
    """In one call, or two where it is long; half of it is no record."""
    tensors = {"a": torch.zeros(200_000)}
    for number, length in ((1, 10), (2, 300_000)):
        store.put("package", KEYS[number], tensors, {"text": "x" * length})
    store.flush()
    for number, calls, part in ((1, 1, 100), (2, 2, 100_000)):
        other = RemoteStore(ADDRESS)
        Line.calls.clear()
        assert other.has("package", KEYS[number]) and Line.calls == {"cat_file": calls}
        place = layout.place("package", KEYS[number])
        poke(place, objects()[place][:part])
        assert not RemoteStore(ADDRESS).has("package", KEYS[number])


# -- a line that fails ---------------------------------------------------------------------------


def test_an_address_that_does_not_answer_is_told_once_and_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Line.fail = staticmethod(unreachable)
    store = RemoteStore(ADDRESS)  # opening does not need it
    Line.calls.clear()
    for number in range(8):
        put(store, number)
        with pytest.raises(StoreError, match=r"trial://shared/store.*not written.*unreachable"):
            store.flush()
        assert store.get("package", KEYS[number]) is None and not store.has("package", KEYS[number])
        assert store.note("alias", KEYS[number]) is None
    assert len(caplog.records) == 2, "one that it cannot be read, one that it cannot be written"
    assert all("Network is unreachable" in record.message for record in caplog.records)
    assert Line.total() <= 9, "nobody waits for it in a row: each flush lets it be tried again"
    assert "unreachable" in store.stats()["broken"]
    store.flush()  # there is nothing left to tell
    for asked in (lambda: store.delete("package", KEYS[1]), store.clear):
        with pytest.raises(StoreError, match="cannot be listed"):
            asked()
    with pytest.raises(StoreError, match="cannot be listed"):
        list(store.entries())
    assert "cannot be checked" in store.check()[0]
    store.close()


def test_it_comes_back_when_the_address_answers_again(store: RemoteStore) -> None:
    Line.fail = staticmethod(unreachable)
    put(store, 1)
    with pytest.raises(StoreError):
        store.flush()
    assert not store.has("package", KEYS[2])
    Line.fail = staticmethod(lambda asked, path: None)
    for health in (store.keeper.health, store.keeper.reads):
        assert health.why
        health.try_now()  # the pause is over
    put(store, 1)
    store.flush()
    assert store.get("package", KEYS[1]) is not None
    assert store.stats()["broken"] is None and store.check() == []


def test_what_can_only_be_read_is_read(
    store: RemoteStore, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, 1)
    store.flush()
    Line.fail = staticmethod(read_only)
    other = RemoteStore(ADDRESS)
    for number in (2, 3):
        put(other, number)
        with pytest.raises(StoreError, match="Access Denied"):
            other.flush()
        assert other.get("package", KEYS[1]) is not None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_line_that_loses_bytes_costs_no_entry(
    store: RemoteStore, caplog: pytest.LogCaptureFixture, kept: int
) -> None:
    put(store, 1)
    store.put_note("alias", KEYS[1], {"a": "b" * 100})
    store.flush()
    before = objects()
    Line.cut = staticmethod(lambda data: data[:kept])
    for read, kind in (("get", "package"), ("note", "alias")):
        other = RemoteStore(ADDRESS)
        assert getattr(other, read)(kind, KEYS[1]) is None and not other.has(kind, KEYS[1])
        assert "set aside" not in caplog.text
    assert objects() == before, "what is sound at the address stays there"
    Line.cut = staticmethod(lambda data: data)
    assert RemoteStore(ADDRESS).get("package", KEYS[1]) is not None


def test_a_read_that_arrives_after_a_deletion_is_not_remembered(store: RemoteStore) -> None:
    put(store, 1)
    store.flush()
    other, gate, arrived = RemoteStore(ADDRESS), threading.Event(), threading.Event()

    def late(asked: str, path: str) -> None:
        if asked == "cat_file" and KEYS[1] in path and not arrived.is_set():
            arrived.set()
            gate.wait(20)

    Line.after = staticmethod(late)
    reader = threading.Thread(target=lambda: other.get("package", KEYS[1]))
    reader.start()
    assert arrived.wait(20) and other.delete("package", KEYS[1]) > 0
    gate.set()
    reader.join(20)
    assert not other.has("package", KEYS[1])
    put(other, 1)
    other.flush()
    assert layout.place("package", KEYS[1]) in objects(), "its place is free"


# -- objects that are wrong ----------------------------------------------------------------------


def test_a_half_written_object_never_loads(store: RemoteStore) -> None:
    put(store, 1)
    store.put_note("alias", KEYS[1], {"a": 1})
    store.flush()

    def read(kind: str) -> Any:
        other = RemoteStore(ADDRESS)
        found = (other.get if kind == "package" else other.note)(kind, KEYS[1])
        assert other.has(kind, KEYS[1]) == (found is not None)
        return found

    for kind in ("package", "alias"):
        name = layout.place(kind, KEYS[1])
        whole = objects()[name]
        for length in [*range(0, len(whole), 97), len(whole) - 1]:
            poke(name, whole[:length])
            assert read(kind) is None, length
        poke(name, whole)
        assert read(kind) is not None


def test_check_names_what_is_wrong_and_repair_puts_it_right(store: RemoteStore) -> None:
    for number in range(4):
        put(store, number)
    put(store, 5, About(depends_on=("package", KEYS[2])), "snapshot")
    store.flush()
    assert store.check() == []
    damaged, base = (layout.place("package", KEYS[n]) for n in (1, 2))
    poke(damaged, objects()[damaged][:-1])
    fsspec.filesystem("trial").rm_file(raw(base))
    wrong = store.check()
    assert len(wrong) == 2 and KEYS[1] in wrong[0] and KEYS[5] in wrong[1]
    assert store.check(repair=True) == wrong and store.check() == []
    assert names(store) == {("package", KEYS[0]), ("package", KEYS[3])}


def test_hostile_names_are_passed_over(store: RemoteStore, tmp_path: Path) -> None:
    key = "ab" * 32
    store.put("package", key, tensors(), {})
    store.flush()
    hostile = [
        "../../x",
        f"package/../../{key}.sight",
        f"package/ab/../../../{key}.sight",
        f"/package/ab/{key}.sight",
        f"package/ac/{key}.sight",
        f"package/ab/{key}.sight/x",
        f"package/ab/{key.upper()}.sight",
        f"package/ab/{key}.json",
        "package/ab/\u202e\u0000é\udc80.sight".replace("\u0000", ""),
        f"weird/01/{key}.sight",
        f"tenants/../package/ab/{key}.sight",
        "tenants/x/package/ab/y.sight",
        f"pins/package/../../{key}.json",
        "pins/package/x.json",
    ]
    for name in hostile:
        TrialFileSystem.store[raw(name)] = type(next(iter(TrialFileSystem.store.values())))(
            TrialFileSystem(), raw(name), b"x"
        )
    before = set(tmp_path.parent.rglob("*"))
    assert names(store) == {("package", key)} and store.check() == []
    assert store.stats()["entries"] == 1
    assert store.delete("package", key) > 0 and store.clear() == 0
    assert set(tmp_path.parent.rglob("*")) == before


# -- addresses -----------------------------------------------------------------------------------


def test_what_is_no_address_is_refused_and_a_missing_library_is_named() -> None:
    for wrong in ("/folder", "", 7):
        with pytest.raises(InputError, match="no address"):
            RemoteStore(wrong)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="nowhere://x cannot be opened"):
        RemoteStore("nowhere://x")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(address: str, **options: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", missing)
    with pytest.raises(MissingExtra, match=r"s3fs is not installed.*extra 's3'.*pip install"):
        RemoteStore("s3://bucket/x")
    with pytest.raises(MissingExtra, match=r"gcsfs.*extra 'gcs'"):
        RemoteStore("gs://bucket/x")
    with pytest.raises(MissingExtra, match=r"odd://.*Install s3fs"):
        RemoteStore("odd://bucket/x")


def test_a_password_in_an_address_is_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    Line.fail = staticmethod(unreachable)
    store = RemoteStore("trial://user:secret@host/store")
    put(store, 1)
    with pytest.raises(StoreError) as told:
        store.flush()
    shown = f"{told.value}{caplog.text}{store.stats()}"
    assert "host/store" in shown and "secret" not in shown


# -- what entries stand on -----------------------------------------------------------------------


def tower(store: Any) -> None:
    """Snapshot 1, 2 on it, 3 on 2; states on 1 and 3; 4 stands alone."""
    for number, base in ((1, None), (2, 1), (3, 2), (4, None)):
        depends_on = None if base is None else ("snapshot", KEYS[base])
        put(store, number, About(depends_on=depends_on, media=(f"image{number}",)), "snapshot")
        if number in (1, 3):
            put(store, number, About(depends_on=("snapshot", KEYS[number])), "state")
    store.flush()


def test_nothing_is_written_before_what_it_stands_on(store: RemoteStore) -> None:
    gate = threading.Event()

    def delay(asked: str, path: str) -> float:
        """One is slow; another keeps the writer busy until all are handed over."""
        if f"{KEYS[5]}." in path:
            gate.wait(20)
        return 0.05 * (f"{KEYS[1]}." in path)

    Line.delay = staticmethod(delay)
    put(store, 5, About(), "snapshot")
    opened = threading.Timer(0.2, gate.set)
    opened.start()
    tower(store)
    opened.join()
    placed = [
        layout.parse(path.removeprefix(raw(""))) for asked, path in Line.names if asked == "mv"
    ]
    order = [(place.kind, KEYS.index(place.key)) for place in placed if place is not None]
    order.remove(("snapshot", 5))
    before = order.index
    assert sorted(order) == sorted(set(order)) and len(order) == 6
    assert before(("snapshot", 1)) < before(("snapshot", 2)) < before(("snapshot", 3))
    assert before(("snapshot", 1)) < before(("state", 1))
    assert before(("snapshot", 3)) < before(("state", 3))
    assert before(("snapshot", 4)) < before(("snapshot", 1)), "others do not wait for a slow one"


def test_what_lost_its_base_is_not_written(store: RemoteStore) -> None:
    base = layout.place("snapshot", KEYS[1])
    Line.fail = staticmethod(
        lambda asked, path: OSError("no") if asked == "mv" and base[-20:] in path else None
    )
    for number, on in ((1, None), (2, 1), (3, 2)):
        depends_on = None if on is None else ("snapshot", KEYS[on])
        put(store, number, About(depends_on=depends_on), "snapshot")
    with pytest.raises(StoreError, match="3 not written"):
        store.flush()
    assert [name for name in objects() if name.startswith("snapshot")] == []

    refused = store.stats()["refused"]
    put(store, 5, About(depends_on=("snapshot", KEYS[6])), "snapshot")
    put(store, 5, About(depends_on=("snapshot", KEYS[5])), "state")
    store.flush()
    assert store.stats()["refused"] == refused + 2 and not store.has("snapshot", KEYS[5])
    assert names(store) == set() and store.check() == [], "nor is its state kept"


def test_an_address_that_failed_is_left_alone(store: RemoteStore) -> None:
    Line.fail = staticmethod(
        lambda asked, path: OSError("no") if asked == "mv" and "package" in path else None
    )
    put(store, 1)
    store.stats()
    Line.fail = staticmethod(lambda asked, path: None)
    assert store.stats()["state"] == "unreachable"
    put(store, 2)
    with pytest.raises(StoreError, match="2 not written"):
        store.flush()
    put(store, 2)
    store.flush()
    assert store.stats()["state"] == "ok" and store.has("package", KEYS[2])


# -- time, tenants, room -------------------------------------------------------------------------


def test_a_bucket_keeps_what_it_is_given(store: RemoteStore) -> None:
    put(store, 1)
    store.flush()
    with pytest.raises(InputError, match="lifecycle rules"):
        store.gc(0)
    for limits in ({"budget": 1000}, {"quota": 1000}):
        with pytest.raises(InputError, match="is for folders"):
            open_store(ADDRESS, **limits)
    assert store.pin("package", KEYS[1]) and not store.pin("package", KEYS[2])
    assert names(store) == {("package", KEYS[1])}


def test_one_tenant_is_not_told_of_anothers_losses(store: RemoteStore) -> None:
    ann, bob = store.tenant("ann"), store.tenant("bob")
    ann.put("package", KEYS[1], {"a": torch.zeros(1, dtype=torch.complex64)}, {})
    put(bob, 2)
    bob.flush()
    with pytest.raises(StoreError, match="complex64"):
        ann.flush()
    assert bob.get("package", KEYS[2]) is not None, "one entry that cannot be spelled is its fault"


def test_only_who_waits_has_an_address_counted(store: RemoteStore) -> None:
    put(store, 1)
    store.flush()
    assert store.stats(0.2)["counted"] is None and "ls" not in Line.calls
    told = store.stats()
    assert told["kinds"] == {"package": {"entries": 1, "bytes": told["bytes"]}}
    assert told["bytes"] == sum(len(data) for name, data in objects().items() if "sight" in name)
    Line.calls.clear()
    assert store.stats(0.2)["entries"] == 1 and Line.total() == 0
    store.delete("package", KEYS[1])
    assert store.stats()["entries"] == 0


def test_leftovers_of_killed_writers_go_with_the_rest(store: RemoteStore) -> None:
    put(store, 1)
    store.flush()
    part = f"package/01/.part-{'0' * 32}-{KEYS[1]}.sight"
    poke(part, b"half")
    assert names(store) == {("package", KEYS[1])} and store.check() == []
    store.clear()
    assert set(objects()) == {"store.json"}


# -- a real server -------------------------------------------------------------------------------


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """An S3 server of its own, and how to reach it."""
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    options = {"key": "test", "secret": "test", "endpoint_url": f"http://{host}:{port}"}
    fsspec.filesystem("s3", skip_instance_cache=True, **options).makedirs("bucket", exist_ok=True)
    yield options
    running.stop()


def test_a_store_in_a_real_bucket(s3: dict[str, Any]) -> None:
    address = "s3://bucket/shared/store"
    store = RemoteStore(address, options=s3)
    tower(store)
    put(store, 5, About(ttl=1000.0, media=("image5",)))
    store.put_note("alias", KEYS[5], {"a": 1}, About(media=("image5",)))
    put(store.tenant("ann"), 6)
    store.flush()
    other = RemoteStore(address, options=s3)
    found = other.get("snapshot", KEYS[2])
    assert found is not None and torch.equal(found[0]["a"], tensors(2)["a"])
    assert other.note("alias", KEYS[5]) == {"a": 1} and not other.has("package", KEYS[7])
    told = other.entry("package", KEYS[5])
    assert told is not None and told.media == ("image5",) and told.expires is not None
    assert abs(told.created - time.time()) < 60
    assert len(names(other)) == 8 and other.check() == [] and other.stats()["entries"] == 8
    assert names(other.tenant("ann")) == {("package", KEYS[6])}
    raw_s3 = fsspec.filesystem("s3", skip_instance_cache=True, **s3)
    for hostile in ("package/../../x", "package/ab/..sight", "../x", "package/05/a b?#.sight"):
        raw_s3.pipe_file(f"bucket/shared/store/{hostile}", b"x")
    damaged = f"bucket/shared/store/{layout.place('snapshot', KEYS[4])}"
    raw_s3.pipe_file(damaged, raw_s3.cat_file(damaged)[:-1])
    third = RemoteStore(address, options=s3)
    assert len(third.check()) == 1 and third.get("snapshot", KEYS[4]) is None
    assert third.delete("snapshot", KEYS[2]) > 0 and third.delete_media("image5") > 0
    assert ("snapshot", KEYS[1]) in names(third) and third.clear() > 0
    left = {
        path.removeprefix("bucket/shared/store/") for path in raw_s3.find("bucket/shared/store")
    }
    assert {name for name in left if layout.parse(name)} == {layout.place("package", KEYS[6], ANN)}
    for one in (store, other, third):
        one.close()


def test_a_bucket_that_is_not_there_breaks_nothing(s3: dict[str, Any]) -> None:
    store = RemoteStore("s3://nothere/store", options=s3)
    put(store, 1)
    with pytest.raises(StoreError, match="s3://nothere/store: 1 not written"):
        store.flush()
    assert store.get("package", KEYS[1]) is None and not store.has("package", KEYS[2])
    store.close()


# -- under a model -------------------------------------------------------------------------------


def test_a_warm_turn_goes_over_no_line(demo_parts: dict[str, Any]) -> None:
    model, processor = demo_parts["demo"]
    with ks.wrap(model, processor, store=ADDRESS) as vlm:
        cold = vlm.ask(picture(1), "What is it?", max_new_tokens=2)
        vlm.flush()
        Line.calls.clear()
        warm = vlm.ask(picture(1), "What is it?", max_new_tokens=2)
        assert warm.text == cold.text and warm.usage.images_encoded == 0
        assert Line.total() == 0, dict(Line.calls)
    with ks.wrap(model, processor, store=ADDRESS) as other:
        again = other.ask(picture(1), "What is it?", max_new_tokens=2)
        assert again.text == cold.text and again.usage.images_encoded == 0
        assert again.usage.cached_tokens > 0, "another machine computes nothing twice"


def test_a_line_that_is_down_changes_no_answer(demo_parts: dict[str, Any]) -> None:
    model, processor = demo_parts["demo"]
    with ks.wrap(model, processor) as free:
        wanted = free.ask(picture(1), "What is it?", max_new_tokens=2)
    Line.fail = staticmethod(unreachable)
    with ks.wrap(model, processor, store=ADDRESS) as vlm:
        for _ in range(2):
            assert vlm.ask(picture(1), "What is it?", max_new_tokens=2).text == wanted.text
        with pytest.raises(StoreError, match="not written"):
            vlm.flush()
