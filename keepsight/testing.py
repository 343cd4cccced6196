"""Conformance suites that ship: what anyone who brings a store or a kind of layer has to fulfil.

Subclass one, give it its maker, and let pytest collect it; `tests/test_store.py` and
`tests/test_state.py` do so for what is built in. Nothing here imports pytest, or knows what the
methods do inside: only what they promise.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from keepsight.package import storage_bytes
from keepsight.state import Lane, Shape, Tensors
from keepsight.store import DiskStore

KEYS = [f"{number:02x}" * 32 for number in range(8)]


def expect(condition: object, promise: str) -> None:
    """Fail with the promise that was broken. (`assert` would vanish under `python -O`.)"""
    if not condition:
        raise AssertionError(promise)


def same_tensors(one: Tensors, two: Tensors) -> bool:
    """Equal names, dtypes and values."""
    return one.keys() == two.keys() and all(
        tensor.dtype == two[name].dtype and torch.equal(tensor, two[name])
        for name, tensor in one.items()
    )


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


class StateTests:
    """Capture and restore equal recompute, bit for bit, for one kind of layer.

    Give `make_model`: a small language model in eval mode that holds the kind, with weights large
    enough that its logits depend on every token it has seen.
    """

    tokens = 45
    cuts: Sequence[int] = (7, 16, 17, 33)

    def make_model(self) -> PreTrainedModel:
        """The model, with the same weights each time."""
        raise NotImplementedError

    def lane(self, model: PreTrainedModel) -> Lane:
        """A new lane with room for the whole prompt."""
        lane = Lane(model, Shape.of(model))
        lane.reserve(self.tokens + 8)
        return lane

    def ids(self, model: PreTrainedModel, seed: int = 0) -> torch.Tensor:
        """A prompt."""
        generator = torch.Generator().manual_seed(seed)
        size = model.get_input_embeddings().num_embeddings
        return torch.randint(0, size, (1, self.tokens), generator=generator)

    @torch.inference_mode()  # as the engine does it: what is made so can be written to only so
    def chunk(self, model: PreTrainedModel, lane: Lane, ids: torch.Tensor, end: int) -> Any:
        """The lane taken on to `end`; the logits of the chunk."""
        start = lane.length
        output = model(
            input_ids=ids[:, start:end],
            position_ids=torch.arange(start, end)[None],
            past_key_values=lane.cache,
            use_cache=True,
        )
        lane.length = end
        return output.logits

    def cold(self, model: PreTrainedModel, ids: torch.Tensor, lane: Lane) -> tuple[list, list]:
        """The whole prompt, cut by cut: the logits of each chunk and the snapshot behind it."""
        logits, snapshots = [], []
        for end in [*self.cuts, self.tokens]:
            start = lane.length
            logits.append(self.chunk(model, lane, ids, end))
            snapshots.append((start, end, *lane.capture(start, end)))
        return logits, snapshots

    @torch.inference_mode()
    def restored(self, lane: Lane, snapshots: Sequence[Any]) -> Lane:
        """The lane put where the last of the snapshots stands."""
        for start, _, full, _ in snapshots:
            lane.restore_full(start, full)
        lane.restore_fixed(snapshots[-1][1], snapshots[-1][3])
        return lane

    def expect_rest(self, model: Any, lane: Lane, ids: torch.Tensor, logits: list) -> None:
        """What is left of the prompt must give these logits."""
        ends = [end for end in [*self.cuts, self.tokens] if end > lane.length]
        for end, wanted in zip(ends, logits[len(logits) - len(ends) :], strict=True):
            expect(torch.equal(self.chunk(model, lane, ids, end), wanted), f"equal up to {end}")

    def test_restored_equals_recomputed(self) -> None:
        """From every cut on, into a new lane."""
        model = self.make_model()
        ids = self.ids(model)
        logits, snapshots = self.cold(model, ids, self.lane(model))
        for count in range(1, len(snapshots)):
            lane = self.restored(self.lane(model), snapshots[:count])
            self.expect_rest(model, lane, ids, logits)

    def test_the_state_matters(self) -> None:
        """The control: the states of another prompt give other logits."""
        model = self.make_model()
        ids = self.ids(model)
        logits, _ = self.cold(model, ids, self.lane(model))
        _, others = self.cold(model, self.ids(model, 1), self.lane(model))
        lane = self.restored(self.lane(model), others[:2])
        wrong = self.chunk(model, lane, ids, self.cuts[2])
        expect(not torch.allclose(wrong, logits[2], atol=1e-4), "a wrong state shows")

    def test_a_used_lane_is_as_good_as_a_new_one(self) -> None:
        """After another prompt, rewound to nothing or restored over."""
        model = self.make_model()
        ids = self.ids(model)
        logits, snapshots = self.cold(model, ids, self.lane(model))
        lane = self.lane(model)
        for count in (0, 2, 1):
            lane.rewind(0)
            self.cold(model, self.ids(model, 1), lane)
            lane.rewind(0)
            if count:
                self.restored(lane, snapshots[:count])
            self.expect_rest(model, lane, ids, logits)

    @torch.inference_mode()
    def test_rewinding_keeps_what_stands_before(self) -> None:
        """Full layers are cut, fixed states put back; the rest of the prompt comes out equal."""
        model = self.make_model()
        ids = self.ids(model)
        lane = self.lane(model)
        logits, snapshots = self.cold(model, ids, lane)
        for _, end, _, fixed in reversed(snapshots[:-1]):
            lane.rewind(end)
            lane.restore_fixed(end, fixed)
            self.expect_rest(model, lane, ids, logits)

    def test_a_snapshot_is_a_copy(self) -> None:
        """What the lane does later, restored or not, changes nothing in it."""
        model = self.make_model()
        lane = self.lane(model)
        _, snapshots = self.cold(model, self.ids(model), lane)
        copies = [[{n: t.clone() for n, t in part.items()} for part in s[2:]] for s in snapshots]
        for _ in range(2):
            for token in range(4):
                self.chunk(model, lane, self.ids(model)[:, [token] * 99], lane.length + 1)
            for snapshot, copy in zip(snapshots, copies, strict=True):
                expect(all(map(same_tensors, snapshot[2:], copy)), "a snapshot stays as it was")
            lane = self.restored(self.lane(model), snapshots)

    def test_branches_of_one_snapshot_do_not_meet(self) -> None:
        """Two lanes from one snapshot, token by token in turn, give what each gives alone."""
        model = self.make_model()
        _, snapshots = self.cold(model, self.ids(model), self.lane(model))
        futures = [self.ids(model, seed) for seed in (2, 3)]
        ends = range(self.cuts[1] + 1, self.cuts[1] + 9)
        alone = []
        for ids in futures:
            lane = self.restored(self.lane(model), snapshots[:2])
            alone.append([self.chunk(model, lane, ids, end) for end in ends])
        lanes = [self.restored(self.lane(model), snapshots[:2]) for _ in futures]
        for step, end in enumerate(ends):
            for number, ids in enumerate(futures):
                logits = self.chunk(model, lanes[number], ids, end)
                expect(torch.equal(logits, alone[number][step]), "branches do not meet")

    def test_rooms_grow_without_losing_anything(self) -> None:
        """A lane that was promised no length holds the same as one that was."""
        model = self.make_model()
        ids = self.ids(model).repeat(1, 8)
        lanes = [self.lane(model), self.lane(model)]
        lanes[0].reserve(ids.shape[1])
        lanes[1].reserve(0)
        for end in range(self.tokens, ids.shape[1] + 1, self.tokens):
            for lane in lanes:
                self.chunk(model, lane, ids, end)
        one, two = (lane.capture(0, ids.shape[1]) for lane in lanes)
        expect(all(map(same_tensors, one, two)), "growing changes nothing")

    def test_snapshots_stand_at_the_end_only(self) -> None:
        """A fixed-size state is that of now: no other place can be captured."""
        model = self.make_model()
        lane = self.lane(model)
        self.cold(model, self.ids(model), lane)
        for end in (0, self.cuts[0], self.tokens + 1):
            try:
                lane.capture(0, end)
            except ValueError:
                continue
            raise AssertionError(f"captured at {end} of {lane.length}")

    def test_bytes_are_those_of_storages(self) -> None:
        """A lane counts its rooms and states; a snapshot owns what it holds and no more."""
        model = self.make_model()
        lane = self.lane(model)
        _, snapshots = self.cold(model, self.ids(model), lane)
        expect(lane.nbytes > 0, "a lane takes memory")
        for *_, full, fixed in snapshots:
            tensors = [*full.values(), *fixed.values()]
            expect(storage_bytes(tensors) == sum(t.nbytes for t in tensors), "no view is kept")
