"""What a second look found: features that changed their name in a `.keep` file, an index with
flipped bits, and a base that another process removed."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import keepsight as ks
from keepsight.errors import NotStored, StoreError
from keepsight.store import About, DiskStore, layout, open_store
from keepsight.store.disk import Disk
from keepsight.store.index import Index


def key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def square(*colour: int) -> Image.Image:
    pixels = np.full((96, 96, 3), 255, np.uint8)
    pixels[20:70, 20:70] = colour
    return Image.fromarray(pixels)


@pytest.mark.parametrize("model", ["demo", "demo-hybrid"])
def test_features_that_somebody_changed_stay_foreign_in_a_file(model: str, tmp_path: Path) -> None:
    red, blue, question = square(220, 30, 30), square(30, 30, 220), "What colour is the square?"
    with ks.load(model) as vlm:
        true = vlm.ask(red, question, max_new_tokens=12).tokens
        mine, other = vlm.encode(red), vlm.encode(blue)
        changed = dataclasses.replace(mine, tensors=dict(other.tensors))  # red by name, blue inside
        chat = vlm.session()
        chat.ask(question, images=[changed], max_new_tokens=12)
        chat.save(tmp_path / "talk.keep")
    for name in ("talk.keep", "again.keep"):
        with ks.load(model) as vlm:
            resumed = vlm.resume(tmp_path / name)
            assert not resumed.notes
            resumed.save(tmp_path / "again.keep")
            resumed.ask("And now?", max_new_tokens=2)
            assert vlm.ask(red, question, max_new_tokens=12).tokens == true


def filled(root: Path) -> None:
    store = DiskStore(root)
    for i in range(4):
        base = ("snapshot", key(f"s{i - 1}")) if i else None
        about = About(depends_on=base, media=(key("image"),))
        store.put("snapshot", key(f"s{i}"), {"x": torch.ones(4)}, {}, about)
    store.flush()
    store.pin("snapshot", key("s1"))
    store.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE entry SET name = 'x' || substr(name, 2)",
        "UPDATE entry SET kind = 'snapshoe'",
        "UPDATE entry SET media = '[' WHERE id = 2",
        f"UPDATE entry SET base = '{layout.place('snapshot', key('nowhere'))}' WHERE id = 2",
        "UPDATE entry SET media = '[]'",
        "UPDATE entry SET pinned = 0",
        "UPDATE entry SET bytes = 'many' WHERE id = 3",
    ],
)
def test_a_damaged_row_costs_no_entry_and_is_repaired(damage: str, tmp_path: Path) -> None:
    filled(tmp_path)
    base = sqlite3.connect(tmp_path / "index.sqlite")
    base.execute("DROP TRIGGER changed")
    base.execute(damage)
    base.commit()
    base.close()
    store = DiskStore(tmp_path)
    assert store.check(repair=True)
    assert store.check() == []
    assert all(store.get("snapshot", key(f"s{i}")) is not None for i in range(4))
    assert sum(entry.pinned for entry in store.entries()) == 1
    store.delete_media(key("image"))
    assert not any(store.has("snapshot", key(f"s{i}")) for i in range(4))
    store.close()


def test_an_index_that_fails_once_stops_no_reading_and_is_over_when_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    store = DiskStore(tmp_path)

    def failing(*given: object) -> None:
        raise StoreError("the index fails")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "look", failing)
        assert store.below("snapshot", None, 4) == {} and store.stats()["state"] == "failing"
        assert store.get("snapshot", key("s0")) is not None
    assert store.stats()["state"] == "ok" and store.below("snapshot", None, 4)
    store.close()


def test_an_index_that_goes_while_entries_are_written_loses_them_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    store, enter = DiskStore(tmp_path), Disk._enter

    def entered(self: Disk, *given: Any) -> None:
        enter(self, *given)
        kept.append(os.open(tmp_path / "index.sqlite", os.O_RDONLY))  # nobody gets its number
        for file in tmp_path.glob("index.sqlite*"):
            file.unlink()

    kept: list[int] = []
    monkeypatch.setattr(Disk, "_enter", entered)
    store.put("snapshot", key("new"), {"x": torch.ones(4)}, {})
    with pytest.raises(NotStored):
        store.flush()
    assert not store.has("snapshot", key("new"))
    monkeypatch.undo()
    store.put("snapshot", key("new"), {"x": torch.ones(4)}, {})
    store.flush()
    assert store.has("snapshot", key("new")) and store.check() == []
    store.close()
    os.close(*kept)


def test_nothing_stands_on_what_another_process_removed(tmp_path: Path) -> None:
    one, two = (open_store(f"file://{tmp_path}/far") for _ in range(2))
    image = (key("image"),)
    two.put("snapshot", key("s0"), {"x": torch.ones(4)}, {}, About(media=image))
    two.flush()
    assert one.delete_media(key("image")) > 0
    about = About(depends_on=("snapshot", key("s0")), media=image)
    two.put("snapshot", key("s1"), {"x": torch.ones(4)}, {}, about)
    two.flush()
    assert two.stats()["refused"] == 1
    assert one.check() == [] and not one.has("snapshot", key("s1"))
    one.close()
    two.close()
