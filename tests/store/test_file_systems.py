"""Models and servers with a store on real file systems that are full, read-only or taken away."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.common import until
from support.file_systems import allow_writing, fill_up, mounted
from support.models import picture
from support.server_harness import asked, live, scene

import keepsight as ks
from keepsight.errors import NotStored, StoreError
from keepsight.store import DiskStore, health
from keepsight.store.writer import Writer
from keepsight.system import digests
from keepsight.system.accounts import under_salt

TEXT = "What is it?"


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No disk is left alone for long."""
    monkeypatch.setattr(health, "PAUSE", 0.05)


@pytest.fixture(scope="module")
def wanted(demo_parts: dict[str, Any]) -> list[str]:
    """What a model without a store says of some pictures."""
    with ks.wrap(*demo_parts["demo"]) as vlm:
        return answers(vlm)


def answers(vlm: Any) -> list[str]:
    return [vlm.ask(picture(number), TEXT, max_new_tokens=3).text for number in range(4)]


@contextlib.contextmanager
def asking(vlm: Any) -> Iterator[list[dict[str, Any]]]:
    """Statistics asked for all the time by another thread; all of them."""
    got: list[dict[str, Any]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            got.append(vlm.stats())
            over.wait(0.002)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield got
    finally:
        over.set()
        thread.join(30)
        assert not thread.is_alive(), "statistics hang"


@contextlib.contextmanager
def mended(vlm: Any) -> Iterator[None]:
    """Around what mends a disk: whatever was begun on it before is over, so that no failure of then
    is taken for one of now, and what it refused is named once and for all."""
    vlm.runtime.store.stats(30.0)  # counted by the writer, behind all else that it does
    yield
    with contextlib.suppress(NotStored):
        vlm.flush()
    vlm.flush()


def damaged(root: Path) -> list[Path]:
    return list(root.rglob("*.damaged"))


@pytest.mark.parametrize("room", [0, 40_000, 150_000])
def test_a_full_disk_holds_up_neither_answers_nor_statistics(
    demo_parts: dict[str, Any],
    tmp_path: Path,
    wanted: list[str],
    room: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With no room at all, with some for the index alone, and with some for a few entries."""
    rounds, real = [0], Writer._look_after

    def counted(writer: Writer) -> float:
        rounds[0] += 1
        return real(writer)

    monkeypatch.setattr(Writer, "_look_after", counted)
    disk = tmp_path / "disk"
    with mounted(disk, "2m"):
        ballast = fill_up(disk, room)
        with ks.wrap(*demo_parts["demo"], store=disk / "store") as vlm:
            with asking(vlm) as got:
                for _ in range(3):
                    assert answers(vlm) == wanted
                    with pytest.raises(StoreError, match="No space|full"):
                        vlm.flush()
                    vlm.clear()
                until(lambda: vlm.stats()["store"]["state"] == "full")
                until(lambda: len(got) > 5)
            before = rounds[0]
            time.sleep(0.3)
            assert rounds[0] - before < 30, "the writer spins"
            assert not damaged(disk)
            with mended(vlm):
                ballast.unlink()
            assert answers(vlm) == wanted
            vlm.flush()
            told = vlm.runtime.store.stats(30.0)
            assert told["state"] == "ok" and told["entries"] > 3
            assert vlm.runtime.store.check() == []


def test_a_server_over_a_full_disk_answers_chats_and_metrics(
    demo_parts: dict[str, Any], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "2m"):
        fill_up(disk, 0)
        with (
            ks.wrap(*demo_parts["demo"], store=disk / "store") as vlm,
            live(vlm) as server,
        ):
            for seed in range(3):
                status, reply, _ = server.chat({"messages": asked(scene(seed)), "max_tokens": 2})
                assert status == 200, reply
                assert server.call("/metrics")[0] == 200
                told = server.call("/v1/cache/stats")
                assert told[0] == 200
            until(lambda: server.call("/v1/cache/stats")[1]["store"]["state"] == "full")
            status, reply, _ = server.call("/v1/cache/flush", {})
            assert status == 503 and reply["error"]["code"] == "not_written"


def test_a_disk_that_becomes_read_only_is_read_and_what_it_refuses_is_named(
    demo_parts: dict[str, Any], tmp_path: Path, wanted: list[str]
) -> None:
    disk = tmp_path / "disk"
    with mounted(disk):
        with ks.wrap(*demo_parts["demo"], store=disk / "store") as vlm:
            vlm.ask(picture(0), TEXT, max_new_tokens=3)
            vlm.flush()
        allow_writing(disk, False)
        with ks.wrap(*demo_parts["demo"], store=disk / "store") as vlm:
            with asking(vlm):
                reply = vlm.ask(picture(0), TEXT, max_new_tokens=3)
                assert reply.text == wanted[0] and reply.usage.images_encoded == 0
                assert answers(vlm) == wanted
                with pytest.raises(NotStored) as refused:
                    vlm.flush()
                assert "package" in {kind for kind, _ in refused.value.reasons}
                assert "readonly" in str(refused.value).lower().replace("-", "")
                until(lambda: vlm.stats()["store"]["state"] == "read-only")
                until(lambda: vlm.stats()["store"]["entries"] > 0)
            with mended(vlm):
                allow_writing(disk, True)
            vlm.clear()
            assert answers(vlm) == wanted
            vlm.flush()
            assert vlm.runtime.store.check() == [] and not damaged(disk)


@pytest.mark.parametrize("salted", [False, True])
def test_a_full_disk_is_emptied_entry_by_entry(tmp_path: Path, salted: bool) -> None:
    """Also where each entry is smaller than what the index's journal takes to forget it."""
    disk = tmp_path / "disk"
    names = [under_salt("ann", str(n)) if salted else f"tenant {n}" for n in range(120)]
    with mounted(disk, "3m"):
        store = DiskStore(disk / "store")
        for number, name in enumerate(names):
            content = {"a": torch.full((5000,), float(number))}
            store.tenant(name).put("package", digests.digest("n", number), content, {})
            if number % 10 == 9:
                with contextlib.suppress(StoreError):
                    store.flush()
        fill_up(disk, 0)
        held = len(list(disk.rglob("*.sight")))
        assert held > 20
        assert sum(store.tenant(name).clear() > 0 for name in names) == held
        assert not list(disk.rglob("*.sight")) and store.check() == []
        assert store.stats(30.0)["entries"] == 0 and store.tenants() == []
        with contextlib.suppress(StoreError):
            store.flush()
        store.put("package", digests.digest("n", 0), {"a": torch.zeros(5000)}, {})
        store.flush()
        assert store.has("package", digests.digest("n", 0)) and store.check() == []
        store.close()


@pytest.mark.parametrize("room", [0, 33_000])
def test_a_store_on_a_full_disk_is_read_checked_and_cleared_by_a_new_process(
    tmp_path: Path, room: int
) -> None:
    """The index finds room neither for memory that processes share nor for a journal."""
    disk = tmp_path / "disk"
    keys = [digests.digest("n", number) for number in range(20)]
    with mounted(disk, "2m"):
        with contextlib.closing(DiskStore(disk / "store")) as store:
            for key in keys:
                store.put("package", key, {"a": torch.zeros(50)}, {})
            store.flush()
        fill_up(disk, room)

        def anew(work: Callable[[DiskStore], Any]) -> Any:
            with contextlib.closing(DiskStore(disk / "store")) as store:
                return work(store)

        assert anew(lambda store: store.stats())["entries"] == len(keys)
        assert len(anew(lambda store: list(store.entries()))) == len(keys)
        assert anew(lambda store: store.check()) == []
        assert anew(lambda store: store.check(repair=True)) == []
        assert anew(lambda store: store.delete("package", keys[0])) > 0
        assert len(anew(lambda store: list(store.entries()))) == len(keys) - 1
        assert anew(lambda store: store.gc(2000)) > 0
        assert anew(lambda store: store.clear()) > 0
        assert not list(disk.rglob("*.sight")) and anew(lambda store: store.check()) == []


def test_a_full_disk_is_no_damaged_index(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "1m"):
        fill_up(disk, 8192)
        with contextlib.closing(DiskStore(disk / "store")) as store:
            store.put("package", digests.digest("n"), {"a": torch.zeros(50)}, {})
            with pytest.raises(NotStored):
                store.flush()
            for repair in (False, True):
                with pytest.raises(StoreError, match="full"):
                    store.check(repair)


def test_a_loop_of_links_in_place_of_a_folder_stops_no_answer(
    demo_parts: dict[str, Any], tmp_path: Path, wanted: list[str]
) -> None:
    root = tmp_path / "store"
    root.symlink_to(root)
    with ks.wrap(*demo_parts["demo"], store=root) as vlm:
        assert answers(vlm) == wanted
        assert vlm.stats()["store"]["state"] != "ok"
        with pytest.raises(StoreError):
            vlm.flush()
