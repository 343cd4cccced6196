"""The suite for anything that keeps tensors and notes under keys.

A store may lose entries (and then says "absent"); it may never return other content. Only the
contract is used, except in a few tests that change files, found by their names.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from keepsight.core.decoding.state import Tensors
from keepsight.errors import InputError, NotStored, WrongFormatVersion
from keepsight.formats import tensorfile
from keepsight.kinds import Record
from keepsight.store import FORMAT, NOTHING, About, Store, layout
from support.common import expect, raised, same_tensors, swapped_in
from support.hostile import opened_up

KEYS = [f"{number:02x}" * 32 for number in range(8)]
IMAGES = ["image one", "image two"]


def tensors(number: int = 0, size: int = 100) -> Tensors:
    """Tensors that say which entry they are of."""
    return {"a": torch.full((size,), float(number))}


def put(store: Store, number: int = 0, about: About = NOTHING, kind: str = "package") -> None:
    """Hand over the entry of that number."""
    store.put(kind, KEYS[number], tensors(number), {"number": number}, about)


class StoreTests:
    """What a store of tensors and notes promises. Define `make_store`."""

    lifetime = 0.4  # seconds long enough to write and read an entry

    def make_store(self, folder: Path, budget: int | None = None) -> Store:
        """A store over this folder; called again, another one over the same content."""
        raise NotImplementedError

    def setup_method(self) -> None:
        """No store is open yet."""
        self.made: list[Store] = []

    def teardown_method(self) -> None:
        """Close them all."""
        for store in self.made:
            store.close()

    def open(self, folder: Path, budget: int | None = None) -> Store:
        """A store that is closed after the test."""
        self.made.append(self.make_store(folder, budget))
        return self.made[-1]

    def files(self, folder: Path, name: str) -> list[Path]:
        """The files of a name, in each place where such a store keeps them."""
        return sorted(folder.rglob(name))

    def entry(self, number: int) -> tuple[Tensors, Record]:
        """Some tensors and a record, different for each number."""
        tensors = {"a": torch.full((3, 2), float(number)), "b": torch.tensor([number])}
        return tensors, {"number": number, "text": "é"}

    def filled(self, folder: Path) -> Store:
        """A store with four entries of two kinds and two notes, all on the disk."""
        store = self.open(folder)
        for number, key in enumerate(KEYS[:4]):
            store.put("package" if number % 2 else "state", key, *self.entry(number))
            if number % 2:
                store.put_note("alias", key, {"number": number})
        store.flush()
        return store

    def chain(self, folder: Path) -> Store:
        """A store with three snapshots in a chain, a state on the last, and a package."""
        store = self.open(folder)
        store.put("package", KEYS[3], *self.entry(3), About(media=(IMAGES[0],)))
        for number in range(3):
            base = ("snapshot", KEYS[number - 1]) if number else None
            media = (IMAGES[0],) if number == 1 else ()
            store.put("snapshot", KEYS[number], *self.entry(number), About(1.0, base, media))
        store.put("state", KEYS[2], *self.entry(2), About(depends_on=("snapshot", KEYS[2])))
        store.flush()
        return store

    def names(self, store: Store) -> set[tuple[str, int]]:
        """The kind and number of all entries."""
        return {(entry.kind, KEYS.index(entry.key)) for entry in store.entries()}

    def expect_entry(self, store: Store, number: int, kind: str | None = None) -> None:
        """Require that the entry of that number exists and is intact."""
        tensors, record = self.entry(number)
        found = store.get(kind or ("package" if number % 2 else "state"), KEYS[number])
        expect(found is not None, "what was put is found")
        if found is not None:
            expect(same_tensors(found[0], tensors), "tensors come back bit for bit")
            expect(record.items() <= found[1].items(), "the record comes back")

    # -- written entries -------------------------------------------------------------------------

    def test_what_was_put_is_found_at_once_and_later(self, tmp_path: Path) -> None:
        """Before it is written, after `flush`, and from another store over the same content."""
        store = self.open(tmp_path)
        store.put("package", KEYS[1], *self.entry(1))
        self.expect_entry(store, 1)
        expect(store.has("package", KEYS[1]), "what was handed over is there")
        store.flush()
        self.expect_entry(store, 1)
        store.close()
        other = self.open(tmp_path)
        expect(other.has("package", KEYS[1]), "another store over the same content has it")
        expect(other.tier("package", KEYS[1]) is not None, "and says where")
        self.expect_entry(other, 1)

    def test_notes(self, tmp_path: Path) -> None:
        """Small records are returned too, at once and later."""
        store = self.open(tmp_path)
        body = {"a": [1, {"b": None}], "é": "x", "n": 1.5}
        store.put_note("alias", KEYS[0], body)
        expect(store.note("alias", KEYS[0]) == body, "a note is readable at once")
        store.flush()
        for again in (store, self.open(tmp_path)):
            expect(again.note("alias", KEYS[0]) == body, "a note is readable later")
            expect(again.has("alias", KEYS[0]), "a note that can be read is there")

    def test_what_was_not_put_is_absent(self, tmp_path: Path) -> None:
        """Neither under another key nor under another kind."""
        store = self.filled(tmp_path)
        for kind, key in (("package", KEYS[0]), ("state", KEYS[1]), ("package", KEYS[5])):
            expect(not store.has(kind, key), "what was never put is not there")
            expect(store.tier(kind, key) is None, "and lies nowhere")
            expect(store.get(kind, key) is None, "what was never put is not found")
            expect(store.entry(kind, key) is None, "and not in the listing")
            expect(store.delete(kind, key) == 0, "and cannot be deleted")
            expect(not store.pin(kind, key), "or pinned")
        expect(store.note("alias", KEYS[0]) is None, "a note that was never put is not found")

    def test_names_that_are_none_are_refused(self, tmp_path: Path) -> None:
        """A key is a digest and kinds are known, so no name leads out of the store."""
        store = self.open(tmp_path / "store")
        names = [("package", key) for key in ("", "aa", "../" + KEYS[0], KEYS[0].upper() + "é")]
        for kind, key in [*names, ("cats", KEYS[0]), ("../package", KEYS[0]), ("", KEYS[0])]:
            for call in (store.get, store.has, store.delete):
                expect(_refused(call, kind, key), f"{kind}/{key} is refused by name")
            expect(_refused(store.put, kind, key, *self.entry(0)), "nothing is put there")
        for about in (About(ttl=-1), About(ttl=float("nan")), About(cost=float("inf"))):
            expect(_refused(store.put, "state", KEYS[0], *self.entry(0), about), "nonsense is")
        store.flush()
        expect(list(store.entries()) == [], "and nothing is written")

    # -- counters --------------------------------------------------------------------------------

    def test_the_listing(self, tmp_path: Path) -> None:
        """Entries, bytes and `check` agree with the disk."""
        store = self.filled(tmp_path)
        expect(
            self.names(store)
            == {
                ("state", 0),
                ("package", 1),
                ("state", 2),
                ("package", 3),
                ("alias", 1),
                ("alias", 3),
            },
            "all are listed",
        )
        sizes = [entry.nbytes for entry in store.entries()]
        stats = store.stats()
        expect(stats["bytes"] == sum(sizes) and min(sizes) > 0, "bytes are counted")
        expect(stats["entries"] == len(sizes), "entries are counted")
        expect(stats["kinds"]["package"]["entries"] == 2, "entries are counted by kind")
        expect(store.check() == [], "a sound store has nothing to complain of")

    def test_an_entry_is_listed_as_it_was_put(self, tmp_path: Path) -> None:
        """Its base, its image, and its expiry."""
        before = time.time()
        store = self.chain(tmp_path)
        store.put_note("alias", KEYS[0], {}, About(media=(IMAGES[1],), ttl=1000))
        store.flush()
        for again in (store, self.open(tmp_path)):
            found, note = again.entry("snapshot", KEYS[1]), again.entry("alias", KEYS[0])
            expect(found is not None and note is not None, "both are listed")
            if found is not None and note is not None:
                expect(found.depends_on == ("snapshot", KEYS[0]), "what it depends on is listed")
                expect(found.media == (IMAGES[0],) and found.expires is None, "and its image")
                expect(found.nbytes > 0 and before - 2 <= found.created, "and its size and age")
                expect(note.media == (IMAGES[1],) and note.depends_on is None, "of a note too")
                expect(note.expires is not None and note.expires > before + 990, "and its end")

    def test_what_is_read_is_counted(self, tmp_path: Path) -> None:
        """Hits and misses of reads."""
        store = self.filled(tmp_path)
        before = store.stats()
        self.expect_entry(store, 1)
        store.get("package", KEYS[7])
        after = store.stats()
        expect(after["hits"] == before["hits"] + 1, "a hit is counted")
        expect(after["misses"] == before["misses"] + 1, "a miss is counted")

    def test_clear(self, tmp_path: Path) -> None:
        """All entries are removed, and can be written again."""
        store = self.filled(tmp_path)
        store.pin("package", KEYS[1])
        total = store.stats()["bytes"]
        expect(store.clear() == total, "the bytes freed are those that were there")
        expect(list(store.entries()) == [], "nothing is left")
        expect(store.get("package", KEYS[1]) is None, "nothing is found")
        store.put("package", KEYS[1], *self.entry(1))
        store.flush()
        self.expect_entry(store, 1)

    def test_stores_over_one_folder_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        """Writers of the same keys need no lock: the content is the same."""
        stores = [self.open(tmp_path) for _ in range(3)]
        for number, key in enumerate(KEYS):
            for store in stores:
                store.put("package" if number % 2 else "state", key, *self.entry(number))
        for store in stores:
            store.flush()
        for number in range(len(KEYS)):
            self.expect_entry(stores[0], number)
        expect(len(list(stores[0].entries())) == len(KEYS), "one key is one entry")
        expect(stores[0].check() == [], "all are whole")

    # -- tenants ---------------------------------------------------------------------------------

    def test_tenants_share_nothing(self, tmp_path: Path) -> None:
        """One tenant's entries are absent for all others, in every answer."""
        store = self.open(tmp_path)
        one, two = store.tenant("one"), store.tenant("two ü\n../..")
        one.put("package", KEYS[1], *self.entry(1), About(media=(IMAGES[0],)))
        two.put("package", KEYS[3], *self.entry(3))
        one.flush()
        self.expect_entry(one, 1)
        self.expect_entry(self.open(tmp_path).tenant("one"), 1)
        for other in (store, two, store.tenant("One"), two.tenant(None)):
            expect(not other.has("package", KEYS[1]), "no other tenant has it")
            expect(other.get("package", KEYS[1]) is None, "or can read it")
            expect(other.entry("package", KEYS[1]) is None, "or sees it listed")
            expect(other.delete("package", KEYS[1]) == 0, "or deletes it")
            expect(other.delete_media(IMAGES[0]) == 0, "by its image neither")
        expect(store.stats()["entries"] == 0 and two.stats()["entries"] == 1, "counts are apart")
        expect(two.clear() > 0 and self.names(one) == {("package", 1)}, "clearing is too")
        self.expect_entry(one, 1)
        expect(store.check() == [] and one.check() == [], "all are whole")
        expect(store.of(None).clear() > 0 and not self.names(one), "all can go at once")

    def test_nothing_is_put_on_what_is_absent(self, tmp_path: Path) -> None:
        """It is refused, which is no loss."""
        store = self.chain(tmp_path)
        store.put("snapshot", KEYS[5], *self.entry(5), About(depends_on=("snapshot", KEYS[4])))
        store.flush()
        expect(not store.has("snapshot", KEYS[5]), "nothing is put on what is absent")
        expect(store.stats()["refused"] >= 1, "and that is counted")

    def test_delete_removes_what_depends_on_it(self, tmp_path: Path) -> None:
        """It is deleted in every store over the same content, and can be written again."""
        store = self.chain(tmp_path)
        store.pin("snapshot", KEYS[2])
        total = store.stats()["bytes"]
        freed = store.delete("snapshot", KEYS[1])
        expect(0 < freed == total - store.stats()["bytes"], "the bytes freed are returned")
        for again in (store, self.open(tmp_path)):
            expect(self.names(again) == {("snapshot", 0), ("package", 3)}, "the rest stays")
            expect(again.get("snapshot", KEYS[1]) is None, "it is gone")
            expect(again.get("state", KEYS[2]) is None, "with what depended on it")
        store.put("snapshot", KEYS[1], *self.entry(1), About(depends_on=("snapshot", KEYS[0])))
        store.flush()
        self.expect_entry(store, 1, "snapshot")
        expect(store.check() == [], "all is whole")

    def test_delete_media_takes_all_that_holds_anything_of_an_image(self, tmp_path: Path) -> None:
        """Features, states, notes, and their dependents."""
        store = self.chain(tmp_path)
        store.put_note("alias", KEYS[6], {}, About(media=(IMAGES[0],)))
        store.put_note("alias", KEYS[7], {}, About(media=(IMAGES[1],)))
        expect(store.delete_media(IMAGES[0]) > 0, "bytes are freed")
        for again in (store, self.open(tmp_path)):
            expect(self.names(again) == {("snapshot", 0), ("alias", 7)}, "only others are left")
        expect(store.delete_media(IMAGES[0]) == 0, "and a second time nothing")

    def test_what_is_over_is_absent(self, tmp_path: Path) -> None:
        """After its time to live, with all its dependents; its key can be written again."""
        store = self.open(tmp_path)
        store.put("snapshot", KEYS[0], *self.entry(0), About(ttl=self.lifetime))
        store.put("snapshot", KEYS[1], *self.entry(1), About(depends_on=("snapshot", KEYS[0])))
        store.put_note("alias", KEYS[0], {"a": 1}, About(ttl=self.lifetime))
        store.put_note("alias", KEYS[1], {"a": 1}, About(ttl=1000.0))
        self.expect_entry(store, 0, "snapshot")
        expect(store.note("alias", KEYS[0]) == {"a": 1}, "until then it is there")
        store.flush()
        time.sleep(1.2 * self.lifetime)
        for again in (store, self.open(tmp_path)):
            expect(again.get("snapshot", KEYS[0]) is None, "then it is absent")
            expect(again.note("alias", KEYS[0]) is None, "a note as well")
            expect(not again.has("snapshot", KEYS[0]), "and not there")
            expect(again.entry("snapshot", KEYS[0]) is None, "nor listed")
            expect(again.note("alias", KEYS[1]) == {"a": 1}, "what has time left stays")
        expect(self.names(store) == {("alias", 1)}, "with what depended on it")
        store.put("snapshot", KEYS[0], *self.entry(0), About(ttl=1000.0))
        store.flush()
        self.expect_entry(store, 0, "snapshot")
        expect(store.check() == [], "all is whole")

    def test_clocks_that_jump(self, tmp_path: Path) -> None:
        """What is kept for ever stays; what ends never outlives it by a clock that was wrong."""
        real = time.time
        for jump in (-1e9, -3600.0, 3600.0, 1e9):
            folder = tmp_path / str(jump)
            with swapped_in(time, "time", lambda jump=jump: real() + jump):
                store = self.filled(folder)
                store.put("state", KEYS[5], *self.entry(5), About(ttl=600.0))
                store.put_note("alias", KEYS[5], {"a": 1}, About(ttl=600.0))
                store.flush()
                expect(store.get("state", KEYS[5]) is not None, "it is there while its time runs")
                expect(store.note("alias", KEYS[5]) == {"a": 1}, "a note as well")
                store.close()
            store = self.open(folder)
            for number in range(4):
                self.expect_entry(store, number)
            for kind in ("state", "alias"):
                expect(not store.has(kind, KEYS[5]), "by the true clock it is over")
            expect(store.get("state", KEYS[5]) is None, "and is not found")
            expect(store.note("alias", KEYS[5]) is None, "nor is the note")
            expect(len(self.names(store)) == 6 and store.check() == [], "the rest is whole")

    # -- several at once -------------------------------------------------------------------------

    def tree(self, folder: Path) -> Store:
        """A store with snapshots: 1 and 2 upon 0, 3 upon 1, 4 upon 3; 0 and 5 upon nothing."""
        store = self.open(folder)
        for number, base in enumerate([None, 0, 0, 1, 3, None]):
            about = About(depends_on=None if base is None else ("snapshot", KEYS[base]))
            store.put("snapshot", KEYS[number], *self.entry(number), about)
        store.flush()
        return store

    def numbers(self, store: Store, *asked: int) -> set[int]:
        """Which of these snapshots come when all are asked for at once, each as it was put."""
        found = store.get_all("snapshot", [KEYS[number] for number in asked])
        for key, (tensors, record) in found.items():
            wanted = self.entry(KEYS.index(key))
            expect(same_tensors(tensors, wanted[0]), "tensors come back bit for bit")
            expect(wanted[1].items() <= record.items(), "with their record")
        return set(map(KEYS.index, found))

    def test_several_are_read_as_one_by_one(self, tmp_path: Path) -> None:
        """Written or waiting; what is absent, damaged or over is left out."""
        store = self.tree(tmp_path)
        store.put("snapshot", KEYS[6], *self.entry(6))  # perhaps not on the disk yet
        expect(self.numbers(store, 0, 1, 6, 4, 7) == {0, 1, 4, 6}, "those that are there come")
        expect(self.numbers(store) == set(), "of none come none")
        store.put("snapshot", KEYS[7], *self.entry(7), About(ttl=0.05))
        store.flush()
        self.damage(tmp_path, "snapshot", 3)
        time.sleep(0.1)
        expect(self.numbers(store, *range(8)) == {0, 1, 2, 4, 5, 6}, "the others come")

    def test_what_depends_on_an_entry_is_listed(self, tmp_path: Path) -> None:
        """With its record, and no more of it than is asked for."""
        for store in (self.tree(tmp_path), self.open(tmp_path)):
            for base, wanted in ((None, {0, 5}), (0, {1, 2}), (1, {3}), (3, {4}), (4, set())):
                key = None if base is None else KEYS[base]
                found = store.below("snapshot", key, 32).get(key, [])
                expect({record["number"] for _, record in found} == wanted, "they are listed")
                expect({KEYS.index(key) for key, _ in found} == wanted, "by their keys")
            expect(len(store.below("snapshot", None, 1)[None]) == 1, "or as many as are wanted")

    # -- other names and versions ----------------------------------------------------------------

    def test_folders_of_any_name(self, tmp_path: Path) -> None:
        """Whatever else such a name means elsewhere."""
        for name in ("sp ace", "Zürich 👁", "a[1]*?", "x" * 200, "#&=+", "a/" * 100):
            self.filled(tmp_path / name)
            expect(self.files(tmp_path / name, layout.MARKER), "it lies in the folder")
            again = self.open(tmp_path / name)
            self.expect_entry(again, 1)
            expect(len(self.names(again)) == 6 and again.check() == [], "all is whole")
            expect(again.clear() > 0 and not self.names(again), "and can go")

    def test_an_entry_of_another_version_is_left_alone(self, tmp_path: Path, caplog: Any) -> None:
        """It is sound, and the version that wrote it may still want it."""
        self.filled(tmp_path)
        before = {}
        for path in self.files(tmp_path, f"{KEYS[1]}.sight"):
            tensorfile.save(path, "package", FORMAT + 1, *opened_up(path, "package"))
            before[path] = path.read_bytes()
        for _ in range(2):
            other = self.open(tmp_path)
            expect(other.get("package", KEYS[1]) is None, "it is not read")
            other.put("package", KEYS[1], *self.entry(1))
            other.flush()
        expect(all(path.read_bytes() == data for path, data in before.items()), "nor written over")
        expect(not self.files(tmp_path, "*.damaged"), "nor set aside")
        expect(f"format {FORMAT + 1}" in caplog.text, "and somebody is told")

    def test_a_store_of_a_newer_format_is_refused_by_name(self, tmp_path: Path) -> None:
        """A marker that says nothing is written anew."""
        self.filled(tmp_path).close()
        for marker in self.files(tmp_path, layout.MARKER):
            body = json.loads(marker.read_text())
            expect(body["format"] == layout.STORE_FORMAT, "the marker names the format")
            marker.write_text(json.dumps(body | {"format": 99}))
            error = raised(WrongFormatVersion, lambda: self.open(tmp_path))
            expect("format 99" in str(error), "a store of another format is not opened")
            marker.write_bytes(b"\xff{")
        store = self.open(tmp_path)
        store.put("package", KEYS[5], *self.entry(5))
        store.flush()
        for marker in self.files(tmp_path, layout.MARKER):
            layout.check_marker(marker.read_bytes(), "here")
        expect(store.check() == [], "all is whole")

    # -- damage ----------------------------------------------------------------------------------

    def damage(self, folder: Path, kind: str, number: int) -> list[Path]:
        """Change the last byte of an entry, wherever it lies."""
        paths = self.files(folder, f"{kind}/*/{KEYS[number]}.*")
        for path in paths:
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        expect(paths, "it lies somewhere")
        return paths

    def test_a_changed_byte_makes_an_entry_absent(self, tmp_path: Path) -> None:
        """`check` names each copy; the entry is absent, then writable; others stay."""
        store = self.filled(tmp_path)
        paths = self.damage(tmp_path, "package", 1)
        wrong = store.check()
        named = len(wrong) == len(paths) and all(KEYS[1] in line for line in wrong)
        expect(named, "the damage is found and named")
        expect(all(path.exists() for path in paths), "looking changes nothing")
        expect(store.get("package", KEYS[1]) is None, "a damaged entry is absent")
        expect(not store.has("package", KEYS[1]), "and its place is free")
        self.expect_entry(store, 3)
        store.put("package", KEYS[1], *self.entry(1))
        store.flush()
        self.expect_entry(store, 1)
        expect(store.check() == [], "all is whole")

    def test_repair_puts_right_what_is_wrong(self, tmp_path: Path) -> None:
        """Damaged entries are named and removed, and nothing else is lost."""
        store = self.filled(tmp_path)
        paths = self.damage(tmp_path, "package", 1)
        wrong = store.check(repair=True)
        named = len(wrong) == len(paths) and all(KEYS[1] in line for line in wrong)
        expect(named, "what was wrong is named")
        expect(store.check() == [], "and nothing is wrong afterwards")
        expect(("package", 1) not in self.names(store), "the damaged entry is gone")
        expect(len(self.names(store)) == 5, "and no other")

    def test_an_entry_under_another_key_is_absent(self, tmp_path: Path) -> None:
        """A copy under another name is intact, but does not match its name."""
        store = self.filled(tmp_path)
        for path in self.files(tmp_path, f"{KEYS[1]}.*"):
            twin = path.parents[1] / KEYS[3][:2] / path.name.replace(KEYS[1], KEYS[3])
            twin.write_bytes(path.read_bytes())
        expect(store.get("package", KEYS[3]) is None, "tensors of another key are not found")
        expect(store.note("alias", KEYS[3]) is None, "a note of another key is not found")
        self.expect_entry(store, 1)

    def test_what_its_reader_rejects_is_absent(self, tmp_path: Path) -> None:
        """The reader knows more than the store: what it rejects must be made again."""
        store = self.filled(tmp_path)
        store.reject("package", KEYS[1], "it is something else")
        expect(store.get("package", KEYS[1]) is None, "it is absent")
        expect(not store.has("package", KEYS[1]), "and its place is free")
        expect(len(self.names(store)) == 5 and store.check() == [], "it is listed")


class BoundedStoreTests(StoreTests):
    """What a store promises that has a budget, and lets the least recently used go."""

    def test_gc_lets_the_least_recently_used_go(self, tmp_path: Path) -> None:
        """Entries that were read stay longer; an evicted entry is absent, not damaged."""
        store = self.filled(tmp_path)
        for _ in range(3):
            self.expect_entry(store, 3)
        size = next(e.nbytes for e in store.entries() if (e.kind, e.key) == ("package", KEYS[3]))
        total = store.stats()["bytes"]
        freed = store.gc(size)
        self.expect_entry(store, 3)
        expect(store.stats()["bytes"] == total - freed <= size, "the rest fits the budget")
        expect(store.get("package", KEYS[1]) is None, "the others are gone")
        expect(store.check() == [], "and none is damaged")
        expect(store.gc(size) == 0, "what fits stays")

    def test_a_budget_holds(self, tmp_path: Path) -> None:
        """The budget holds however much is written; an entry larger than it is refused."""
        budget = 20_000
        store = self.open(tmp_path, budget)
        for number in range(30):
            key = f"{number:064x}"
            store.put("package", key, {"a": torch.full((400,), float(number))}, {"number": number})
        store.flush()
        expect(0 < store.stats()["bytes"] <= budget, "the budget holds")
        refused = store.stats()["refused"]
        store.put("package", KEYS[1], {"a": torch.zeros(budget)}, {})
        error = raised(NotStored, store.flush)
        named = error is not None and list(error.reasons) == [("package", KEYS[1])]
        expect(named, "and named by flush")
        expect(store.get("package", KEYS[1]) is None, "what is over the whole budget is not kept")
        expect(store.stats()["refused"] == refused + 1, "and counted as refused")
        expect(store.check() == [], "all is whole")

    def test_what_is_pinned_stays(self, tmp_path: Path) -> None:
        """A pinned entry stays with its base, in every store over this content, until unpinned."""
        store = self.chain(tmp_path)
        expect(store.pin("snapshot", KEYS[1]), "what is there can be pinned")
        again = self.open(tmp_path)
        again.gc(0)
        expect(self.names(again) == {("snapshot", 0), ("snapshot", 1)}, "it stays, with its base")
        pinned = {entry.key: entry.pinned for entry in again.entries()}
        expect(pinned == {KEYS[0]: False, KEYS[1]: True}, "and is listed as pinned")
        expect(again.pin("snapshot", KEYS[1], False), "it can be unpinned")
        store.gc(0)
        expect(self.names(store) == set(), "and goes then")


def _refused(call: Callable[..., object], *arguments: object) -> bool:
    try:
        call(*arguments)
    except InputError:
        return True
    return False
