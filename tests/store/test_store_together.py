"""Several entries asked for at once: the same as one by one, also where some are damaged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import keepsight as ks
from keepsight.core.decoding.state import Tensors
from keepsight.kinds import Record
from keepsight.store import About, DiskStore
from keepsight.store.tiers import TieredStore

KEYS = [f"{number:02x}" * 32 for number in range(9)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStore]:
    """A tree of snapshots: 0 upon nothing; 1 and 2 upon 0; 3 upon 1, 4 upon 3; 5 upon nothing."""
    store = DiskStore(tmp_path / "store")
    for number, base in enumerate([None, 0, 0, 1, 3, None]):
        about = About(depends_on=None if base is None else ("snapshot", KEYS[base]))
        store.put("snapshot", KEYS[number], content(number), {"number": number}, about)
    store.flush()
    yield store
    store.close()


def content(number: int) -> Tensors:
    return {"a": torch.full((1000,), float(number)), "b": torch.tensor([number])}


def numbers(found: dict[str, tuple[Tensors, Record]]) -> list[int]:
    for tensors, record in found.values():
        assert torch.equal(tensors["a"], content(record["number"])["a"])
    return sorted(record["number"] for _, record in found.values())


@pytest.mark.parametrize("manner", ["disk", "tiers", "waiting"])
def test_several_are_read_as_one_by_one(disk: DiskStore, tmp_path: Path, manner: str) -> None:
    store: Any = disk
    if manner == "tiers":
        near = DiskStore(tmp_path / "near")
        near.put("snapshot", KEYS[1], content(1), {"number": 1})
        store = TieredStore(near, disk)
    if manner == "waiting":
        disk.put("snapshot", KEYS[6], content(6), {"number": 6})  # perhaps not on the disk yet
    found = store.get_all("snapshot", [KEYS[n] for n in (0, 1, 6, 4, 8)])
    assert numbers(found) == [0, 1, 4] + [6] * (manner == "waiting")
    assert store.get_all("snapshot", []) == {}
    if manner == "tiers":
        store.close()


def test_what_is_damaged_or_over_is_left_out_and_the_others_come(disk: DiskStore) -> None:
    disk.put("snapshot", KEYS[7], content(7), {"number": 7}, About(ttl=0.05))
    disk.flush()
    (path,) = disk.root.glob(f"snapshot/*/{KEYS[3]}*")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    threading.Event().wait(0.1)
    assert numbers(disk.get_all("snapshot", KEYS)) == [0, 1, 2, 4, 5]
    assert not path.exists() and disk.stats()["misses"] >= 2


def test_what_depends_on_an_entry_comes_level_by_level(disk: DiskStore, tmp_path: Path) -> None:
    def keys(below: dict[Any, Any]) -> dict[int | None, list[int]]:
        return {
            None if base is None else KEYS.index(base): sorted(KEYS.index(key) for key, _ in upon)
            for base, upon in below.items()
        }

    whole = {None: [0, 5], 0: [1, 2], 1: [3], 2: [], 3: [4], 4: [], 5: []}
    assert keys(disk.below("snapshot", None, 32)) == whole
    assert keys(disk.below("snapshot", KEYS[1], 32)) == {1: [3], 3: [4], 4: []}
    assert len(disk.below("snapshot", None, 1)[None]) == 1
    tiers = TieredStore(DiskStore(tmp_path / "near"), disk)
    assert keys(tiers.below("snapshot", None, 32)) == whole
    tiers.close()


def test_a_long_conversation_asks_a_store_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [{"role": "user", "content": "Hello there."}]
    with ks.load("demo", store=tmp_path) as vlm:
        for turn in range(8):
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
