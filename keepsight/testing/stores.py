"""The suite for whatever keeps tensors and notes under keys.

A store may lose what it has (and then says "absent"); it may never give back something else.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from keepsight.state import Tensors
from keepsight.store import DiskStore
from keepsight.testing.common import expect, same_tensors

KEYS = [f"{number:02x}" * 32 for number in range(8)]


class StoreTests:
    """What a store of tensors and notes promises. Give `make_store`."""

    def make_store(self, folder: Path, budget: int | None = None) -> DiskStore:
        """A store over this folder; called again, another one over the same content."""
        raise NotImplementedError

    def entry(self, number: int) -> tuple[Tensors, dict[str, Any]]:
        """Some tensors and a record, different for each number."""
        tensors = {"a": torch.full((3, 2), float(number)), "b": torch.tensor([number])}
        return tensors, {"number": number, "text": "é"}

    def filled(self, folder: Path) -> DiskStore:
        """A store with four entries of two kinds and two notes, all on the disk."""
        store = self.make_store(folder)
        for number, key in enumerate(KEYS[:4]):
            store.put("package" if number % 2 else "state", key, *self.entry(number))
            if number % 2:
                store.put_note("alias", key, {"number": number})
        store.flush()
        return store

    def expect_entry(self, store: DiskStore, number: int) -> None:
        """The entry of that number must be there and whole."""
        tensors, record = self.entry(number)
        found = store.get("package" if number % 2 else "state", KEYS[number])
        expect(found is not None, "what was put is found")
        if found is not None:
            expect(same_tensors(found[0], tensors), "tensors come back bit for bit")
            expect(record.items() <= found[1].items(), "the record comes back")

    def test_what_was_put_is_found_at_once_and_later(self, tmp_path: Path) -> None:
        """Before it is written, after `flush`, and by another store over the same content."""
        store = self.make_store(tmp_path)
        store.put("package", KEYS[1], *self.entry(1))
        self.expect_entry(store, 1)
        expect(store.has("package", KEYS[1]), "what was handed over is there")
        store.flush()
        self.expect_entry(store, 1)
        store.close()
        other = self.make_store(tmp_path)
        expect(other.has("package", KEYS[1]), "another store over the same content has it")
        self.expect_entry(other, 1)

    def test_notes(self, tmp_path: Path) -> None:
        """Small records come back too, at once and later."""
        store = self.make_store(tmp_path)
        body = {"a": [1, {"b": None}], "é": "x", "n": 1.5}
        store.put_note("alias", KEYS[0], body)
        expect(store.note("alias", KEYS[0]) == body, "a note is readable at once")
        store.flush()
        for again in (store, self.make_store(tmp_path)):
            expect(again.note("alias", KEYS[0]) == body, "a note is readable later")
            expect(again.has("alias", KEYS[0]), "a note that can be read is there")

    def test_what_was_not_put_is_absent(self, tmp_path: Path) -> None:
        """Neither under another key nor under another kind."""
        store = self.filled(tmp_path)
        for kind, key in (("package", KEYS[0]), ("state", KEYS[1]), ("package", KEYS[5])):
            expect(not store.has(kind, key), "what was never put is not there")
            expect(store.get(kind, key) is None, "what was never put is not found")
        expect(store.note("alias", KEYS[0]) is None, "a note that was never put is not found")

    def test_the_books(self, tmp_path: Path) -> None:
        """Entries, bytes and `check` tell what is on the disk."""
        store = self.filled(tmp_path)
        entries = sorted((kind, key) for kind, key, _, _ in store.entries())
        packages = [(kind, key) for kind in ("alias", "package") for key in KEYS[1:4:2]]
        expect(entries == [*packages, *(("state", key) for key in KEYS[:4:2])], "all are listed")
        sizes = [size for _, _, size, _ in store.entries()]
        expect(store.stats()["bytes"] == sum(sizes) and min(sizes) > 0, "bytes are counted")
        expect(store.stats()["kinds"]["package"]["entries"] == 2, "entries are counted by kind")
        expect(store.check() == [], "a sound store has nothing to complain of")

    def test_clear(self, tmp_path: Path) -> None:
        """Everything goes, and its place can be taken again."""
        store = self.filled(tmp_path)
        total = store.stats()["bytes"]
        expect(store.clear() == total, "the bytes freed are those that were there")
        expect(list(store.entries()) == [], "nothing is left")
        expect(store.get("package", KEYS[1]) is None, "nothing is found")
        store.put("package", KEYS[1], *self.entry(1))
        store.flush()
        self.expect_entry(store, 1)

    def test_gc_lets_the_least_recently_used_go(self, tmp_path: Path) -> None:
        """Reading makes recent; what is let go of is absent and not damaged."""
        store = self.filled(tmp_path)
        for age, path in enumerate(sorted(tmp_path.rglob("*.*"))):
            os.utime(path, (1e9 - age, 1e9 - age))
        self.expect_entry(store, 3)
        wanted = ("package", KEYS[3])
        size = next(size for kind, key, size, _ in store.entries() if (kind, key) == wanted)
        total = store.stats()["bytes"]
        freed = store.gc(size)
        self.expect_entry(store, 3)
        expect(store.stats()["bytes"] == total - freed <= size, "the rest fits the budget")
        expect(store.get("package", KEYS[1]) is None, "the others are gone")
        expect(store.check() == [], "and none is damaged")
        expect(store.gc(size) == 0, "what fits stays")

    def test_a_changed_byte_makes_an_entry_absent(self, tmp_path: Path) -> None:
        """Whatever byte of whatever file: the entry is named by `check`, then absent, then
        writable again, and all others are readable."""
        store = self.filled(tmp_path)
        path = next(tmp_path.glob(f"package/*/{KEYS[1]}*"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        expect(len(store.check()) == 1, "the damage is found")
        expect(store.get("package", KEYS[1]) is None, "a damaged entry is absent")
        expect(not store.has("package", KEYS[1]), "and its place is free")
        self.expect_entry(store, 3)
        store.put("package", KEYS[1], *self.entry(1))
        store.flush()
        self.expect_entry(store, 1)

    def test_an_entry_under_another_key_is_absent(self, tmp_path: Path) -> None:
        """A copy that took another's name is whole, and still not what its name says."""
        store = self.filled(tmp_path)
        for path in list(tmp_path.glob(f"*/*/{KEYS[1]}*")):
            twin = path.parents[1] / KEYS[3][:2] / path.name.replace(KEYS[1], KEYS[3])
            twin.write_bytes(path.read_bytes())
        expect(store.get("package", KEYS[3]) is None, "tensors of another key are not found")
        expect(store.note("alias", KEYS[3]) is None, "a note of another key is not found")
        self.expect_entry(store, 1)

    def test_stores_over_one_folder_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        """Writers of the same keys need no lock: the content is the same."""
        stores = [self.make_store(tmp_path) for _ in range(3)]
        for number, key in enumerate(KEYS):
            for store in stores:
                store.put("package" if number % 2 else "state", key, *self.entry(number))
        for store in stores:
            store.flush()
        for number in range(len(KEYS)):
            self.expect_entry(stores[0], number)
        expect(len(list(stores[0].entries())) == len(KEYS), "one key is one entry")
        expect(stores[0].check() == [], "all are whole")
