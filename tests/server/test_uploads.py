"""Uploads with a store: good after a restart until they expire, gone when deleted, never half."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.common import Clock
from support.hostile import bounded
from support.server_harness import Live, bearer, live, png, scene

import keepsight as ks
from keepsight.server import running
from keepsight.server.config import ApiKey
from keepsight.server.errors import ApiError
from keepsight.server.files import Files, InMemory, OnDisk, contents_for
from keepsight.store import open_store

DATA = b"the bytes of a picture" * 50
KEYS = (
    ApiKey("ann", "ann-key"),
    ApiKey("bob", "bob-key"),
    ApiKey("small", "small-key", files_bytes=600),
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(root: Path, clock: Any, budget: int = 1 << 20, ttl: float = 100) -> Files:
    """As a server opens them that is started (again) on this folder."""
    return Files(budget, ttl, clock, OnDisk(root))


def put(files: Files, data: bytes = DATA, who: str = "ann", **options: Any) -> str:
    given = {"ttl": None, "quota": None, **options}
    return files.put(who, data, "cat.png", "vision", given["ttl"], given["quota"]).id


def on_disk(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def absent(files: Files, file_id: str, who: str = "ann") -> None:
    with pytest.raises(ApiError) as caught:
        files.read(who, file_id)
    assert caught.value.status == 404 and caught.value.code == "file_not_found"


# -- files alone -------------------------------------------------------------------------------


def test_an_id_is_good_after_a_restart_for_its_tenant(tmp_path: Path, clock: Clock) -> None:
    before = opened(tmp_path, clock)
    sent = before.get("ann", put(before))
    files = opened(tmp_path, clock)
    assert files.get("ann", sent.id) == sent and files.read("ann", sent.id) == DATA
    assert files.of("ann") == [sent] and files.nbytes == len(DATA)
    assert files.of("bob") == []
    absent(files, sent.id, "bob")
    [path] = on_disk(tmp_path)
    assert "ann" not in str(path.relative_to(tmp_path))


def test_what_expires_is_removed_from_the_disk(tmp_path: Path, clock: Clock) -> None:
    files = opened(tmp_path, clock)
    short, long = put(files, b"short", ttl=60), put(files, b"long")
    clock.now += 61
    absent(files, short)
    files.sweep()  # nobody asks; the server does this by itself
    assert [path.name for path in on_disk(tmp_path)] == [f"{long}.upload"]
    clock.now += 60
    again = opened(tmp_path, clock)
    absent(again, long)
    again.sweep()
    assert on_disk(tmp_path) == []
    kept = put(again)
    clock.now -= 10_000  # a clock that jumped back makes nothing live longer
    absent(again, kept)


def test_sent_again_lasts_longer_and_stays_one_file(tmp_path: Path, clock: Clock) -> None:
    files = opened(tmp_path, clock)
    sent = put(files)
    clock.now += 90
    assert put(files) == sent and len(on_disk(tmp_path)) == 1
    clock.now += 90
    assert opened(tmp_path, clock).read("ann", sent) == DATA


@bounded(60)
@given(st.data())
def test_a_damaged_file_is_never_served(tmp_path_factory: Any, data: st.DataObject) -> None:
    root, clock = tmp_path_factory.mktemp("files"), Clock()
    files = opened(root, clock)
    sent = put(files)
    [path] = on_disk(root)
    whole = path.read_bytes()
    spot = data.draw(st.integers(0, len(whole) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "longer"]))
    if how == "flip":
        flipped = bytes([whole[spot] ^ data.draw(st.integers(1, 255))])
        path.write_bytes(whole[:spot] + flipped + whole[spot + 1 :])
    else:
        path.write_bytes(whole[:spot] if how == "cut" else whole + b"x")
    for one in (files, opened(root, clock)):
        absent(one, sent)
    assert on_disk(root) == [], "what nobody can delete by its id must not lie there"
    assert put(files) == sent and files.read("ann", sent) == DATA


def test_a_file_of_another_or_a_link_is_never_served(tmp_path: Path, clock: Clock) -> None:
    root = tmp_path / "store"
    files = opened(root, clock)
    mine, his = put(files), put(files, b"his", who="bob")
    paths = {path.name: path for path in on_disk(root)}
    ours = paths[f"{mine}.upload"].parent
    os.replace(paths[f"{his}.upload"], ours / f"{his}.upload")  # moved to another tenant
    (ours / f"file-{'1' * 64}.upload").write_bytes(paths[f"{mine}.upload"].read_bytes())
    secret = tmp_path / "secret"
    secret.write_bytes(b"private")
    (ours / f"file-{'2' * 64}.upload").symlink_to(secret)
    os.mkfifo(ours / f"file-{'3' * 64}.upload")
    again = opened(root, clock)
    for file_id in (his, *(f"file-{n * 64}" for n in "123"), "file-../../secret", "x"):
        absent(again, file_id)
    assert again.read("ann", mine) == DATA and secret.exists()
    assert [f.id for f in again.of("ann")] == [mine]


def test_half_a_write_is_no_file_and_goes(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = opened(tmp_path, clock)
    sent = put(files)

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ApiError, match="No space left") as caught:
        put(files, b"more")
    assert caught.value.status == 503
    monkeypatch.undo()
    assert len(on_disk(tmp_path)) == 1 and files.read("ann", sent) == DATA
    left = on_disk(tmp_path)[0].with_name(".part-0123456789abcdef")  # of a process that was killed
    left.write_bytes(b"half")
    again = opened(tmp_path, clock)
    assert [f.id for f in again.of("ann")] == [sent]
    again.sweep()
    assert left.exists(), "a writer may be at work on it"
    os.utime(left, (1, 1))
    again.sweep()
    assert not left.exists()


def test_an_upload_does_not_wait_for_a_sweep_that_reads(tmp_path: Path, clock: Clock) -> None:
    begun, going_on = threading.Event(), threading.Event()

    class Slow(OnDisk):
        def find(self, *given: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                assert going_on.wait(60)
            return super().find(*given)

    files = Files(1 << 20, 100, clock, Slow(tmp_path))
    old = put(opened(tmp_path, clock))  # another server's, which is to be looked at
    with ThreadPoolExecutor(1) as pool:
        sweep = pool.submit(files.sweep)
        assert begun.wait(60)
        new = put(files, b"new")
        files.delete("ann", old)
        going_on.set()
        sweep.result(60)
    assert [f.id for f in files.of("ann")] == [new]


# -- through the server ------------------------------------------------------------------------


def test_only_a_named_store_is_written_to(demo_parts: dict[str, Any], tmp_path: Path) -> None:
    assert isinstance(contents_for(None), InMemory)
    assert isinstance(contents_for(open_store("memory://uploads-nowhere")), InMemory)
    both = open_store(tmp_path / "near", remote="memory://uploads-far")
    assert isinstance(contents_for(both), OnDisk)
    both.close()


@pytest.fixture
def served(
    demo_parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Live]:
    monkeypatch.setattr(running, "_SWEEP", 0.1)
    with ks.wrap(*demo_parts["demo"], store=tmp_path) as vlm, live(vlm, keys=KEYS) as server:
        yield server


def test_uploads_of_a_server_with_a_store(served: Live, tmp_path: Path) -> None:
    image = png(scene(80))
    status, sent, _ = served.upload(image, bearer("ann"))
    assert status == 200
    found = [path for path in on_disk(tmp_path) if path.suffix == ".upload"]
    assert len(found) == 1 and stat.S_ISREG(found[0].stat().st_mode)
    where = f"/v1/files/{sent['id']}"
    unknown = f"/v1/files/file-{'0' * 64}"
    for path, method in (("", "GET"), ("/content", "GET"), ("", "DELETE")):
        hidden, absent_ = (
            served.call(one + path, method=method, headers=bearer("bob"))[:2]
            for one in (where, unknown)
        )
        assert hidden[0] == 404 and hidden[1]["error"]["param"] == "file_id"
        assert str(hidden).replace(sent["id"], f"file-{'0' * 64}") == str(absent_)
    listed = served.call("/v1/files", headers=bearer("ann"))[1]["data"]
    assert [file["id"] for file in listed] == [sent["id"]] and listed[0]["bytes"] == len(image)
    assert served.call("/v1/cache/stats", headers=bearer("ann"))[1]["files"]["files"] == 1
    assert served.upload(b"x" * 500, bearer("small"))[0] == 200
    assert served.upload(b"y" * 500, bearer("small"))[0] == 413
    served.call("/v1/cache/reset", {"store": True}, headers=bearer("ann"))
    assert served.call(where, headers=bearer("ann"))[0] == 200, "a file is deleted by its id"
    assert served.call(where, method="DELETE", headers=bearer("ann"))[0] == 200
    assert not found[0].exists()
    assert open_store(tmp_path).check() == []


def test_a_server_removes_what_expires_by_itself(
    served: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.upload(png(scene(81)), bearer("ann"))[0] == 200
    swept, files = threading.Event(), served.service.files
    removed = files._contents.remove
    monkeypatch.setattr(files, "_clock", lambda: time.time() + 1e6)
    monkeypatch.setattr(files._contents, "remove", lambda one: (removed(one), swept.set()))
    assert swept.wait(30), "nobody asked, and it was not removed"
    assert not [path for path in on_disk(tmp_path) if path.suffix == ".upload"]


def test_servers_may_share_a_folder_and_its_room(tmp_path: Path, clock: Clock) -> None:
    """What the other has taken since the last sweep counts, and what it has removed does not."""
    one, two = (opened(tmp_path, clock, budget=3000) for _ in range(2))
    first = put(one, b"a" * 1000)
    his = put(one, b"b" * 1000, "bob")
    for who, quota in (("ann", 1500), ("bob", None)):
        with pytest.raises(ApiError) as refusal:
            put(two, b"c" * 1001, who, quota=quota)
        assert refusal.value.status == 413
    assert two.read("ann", first) == b"a" * 1000
    two.delete("ann", first)
    absent(one, first)
    put(two, b"c" * 1001, quota=1500)
    one.delete("bob", his)
    put(two, b"d" * 1900)


def test_small_files_are_counted_too() -> None:
    """However small: each takes memory, and time of whoever counts."""
    files = Files(1 << 30, 100.0, most=3)
    ids = [files.put("ann", b"%d" % n, "a", "vision", None, None).id for n in range(3)]
    files.put("ann", b"0", "a", "vision", None, None)  # one that is there already
    with pytest.raises(ApiError, match="as many as there may be") as caught:
        files.put("ann", b"4", "a", "vision", None, None)
    assert caught.value.status == 413 and caught.value.code == "files_quota_exceeded"
    files.put("bob", b"4", "a", "vision", None, None)
    files.delete("ann", ids[0])
    files.put("ann", b"4", "a", "vision", None, None)
