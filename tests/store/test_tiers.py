"""Stores in a row: near first, promotion behind the scenes, and what is deleted stays away.

Near is a folder and far an address (`trial://`, whose network does as it is told), as people will
have it; the promises of each alone are tested elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import StoreTests
from support.remote_lines import Line, unreachable
from support.stores import KEYS, put, tensors

from keepsight.errors import InputError, StoreError
from keepsight.store import NOTHING, About, DiskStore, open_store
from keepsight.store.remote import RemoteStore
from keepsight.store.tiers import TieredStore

ADDRESS = "trial://shared/store"


class TestTieredStore(StoreTests):
    """Two folders in a row: each promise of a store holds for both together."""

    def make_store(self, folder: Path, budget: int | None = None) -> TieredStore:
        near = DiskStore(folder / "near", budget)
        return TieredStore(near, RemoteStore(f"file://{folder}/far"))


@pytest.fixture(autouse=True)
def _a_line_that_works() -> None:
    Line.reset()


class Pair:
    """A folder before an address."""

    def __init__(self, folder: Path) -> None:
        self.near, self.far = DiskStore(folder), RemoteStore(ADDRESS)
        self.both = TieredStore(self.near, self.far)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path / "near")
    yield made
    Line.fail = staticmethod(lambda asked, path: None)
    Line.delay = staticmethod(lambda asked, path: 0.0)
    made.both.close()


def names(store: Any) -> set[tuple[str, int]]:
    return {(entry.kind, KEYS.index(entry.key)) for entry in store.entries()}


def found(store: Any, number: int, kind: str = "package") -> bool:
    content = store.get(kind, KEYS[number])
    return content is not None and torch.equal(content[0]["a"], tensors(number)["a"])


# -- near and far --------------------------------------------------------------------------------


def test_writing_goes_to_all_and_reading_to_the_nearest(pair: Pair) -> None:
    put(pair.both, 1)
    pair.both.put_note("alias", KEYS[1], {"a": 1})
    pair.both.flush()
    for store in (pair.near, pair.far):
        assert found(store, 1) and store.note("alias", KEYS[1]) == {"a": 1}
    assert pair.both.tier("package", KEYS[1]) == "disk"
    Line.calls.clear()
    for _ in range(3):
        assert pair.both.has("package", KEYS[1]) and found(pair.both, 1)
        assert pair.both.note("alias", KEYS[1]) == {"a": 1}
        put(pair.both, 1)
    pair.both.flush()
    assert Line.total() == 0, "what is near and known goes over no line"


def test_what_was_found_far_is_near_the_next_time(pair: Pair) -> None:
    about = About(media=("image",), ttl=1000.0)
    put(pair.far, 1, about)
    pair.far.put_note("alias", KEYS[1], {"a": 1}, about)
    put(pair.far, 2, NOTHING, "snapshot")
    put(pair.far, 3, About(depends_on=("snapshot", KEYS[2])), "snapshot")
    pair.far.flush()
    assert pair.both.tier("package", KEYS[1]) == "remote"
    assert found(pair.both, 1) and pair.both.note("alias", KEYS[1]) == {"a": 1}
    assert found(pair.both, 2, "snapshot") and found(pair.both, 3, "snapshot")
    pair.both.flush()
    assert pair.both.tier("package", KEYS[1]) == "disk" and names(pair.near) == names(pair.far)
    for kind, key in (("package", KEYS[1]), ("alias", KEYS[1]), ("snapshot", KEYS[3])):
        near, far = pair.near.entry(kind, key), pair.far.entry(kind, key)
        assert near is not None and far is not None
        assert (near.media, near.depends_on) == (far.media, far.depends_on)
        if far.expires is not None:
            assert near.expires is not None and abs(near.expires - far.expires) < 1
    Line.calls.clear()
    assert found(pair.both, 1) and found(pair.both, 3, "snapshot")
    assert Line.total() == 0 and pair.both.check() == []


def test_what_stands_on_something_far_is_promoted_after_it(pair: Pair) -> None:
    put(pair.far, 1, NOTHING, "snapshot")
    put(pair.far, 2, About(depends_on=("snapshot", KEYS[1])), "snapshot")
    pair.far.flush()
    assert found(pair.both, 2, "snapshot")
    pair.both.flush()
    assert pair.near.check() == [], "nothing is near without what it depends on"
    assert found(pair.both, 1, "snapshot") and found(pair.both, 2, "snapshot")
    pair.both.flush()
    assert names(pair.near) == {("snapshot", 1), ("snapshot", 2)}


def test_several_come_from_all_tiers_and_what_depends_on_them_from_the_nearest_with_any(
    pair: Pair,
) -> None:
    for number, base in enumerate([None, 0, 0, 1, 3, None]):
        on = None if base is None else ("snapshot", KEYS[base])
        put(pair.near, number, About(depends_on=on), "snapshot")
    put(pair.far, 6, NOTHING, "snapshot")
    put(pair.far, 7, About(depends_on=("snapshot", KEYS[6])), "snapshot")
    pair.both.flush()
    [(key, _)] = pair.both.below("snapshot", KEYS[6], 32)[KEYS[6]]
    assert key == KEYS[7], "where the nearest has none, the next is asked"
    several = pair.both.get_all("snapshot", [KEYS[number] for number in (0, 1, 6, 4)])
    told = {KEYS.index(key): record["number"] for key, (_, record) in several.items()}
    assert told == {number: number for number in (0, 1, 6, 4)}
    upon = {
        base and KEYS.index(base): sorted(KEYS.index(key) for key, _ in found)
        for base, found in pair.both.below("snapshot", None, 32).items()
    }
    assert upon == {None: [0, 5], 0: [1, 2], 1: [3], 2: [], 3: [4], 4: [], 5: []}
    assert set(pair.near.below("snapshot", KEYS[1], 32)) == {KEYS[1], KEYS[3], KEYS[4]}


def test_what_the_near_one_lets_go_is_still_far(tmp_path: Path) -> None:
    near, far = DiskStore(tmp_path, budget=4000), RemoteStore(ADDRESS)
    both = TieredStore(near, far)
    for number in range(8):
        put(both, number)
        both.flush()
    assert len(names(near)) < 8 == len(names(far)) == len(names(both))
    assert both.stats()["entries"] == 8
    assert both.stats()["bytes"] == far.stats()["bytes"] > near.stats()["bytes"]
    tiers = {both.tier("package", key) for key in KEYS}
    assert tiers == {"disk", "remote"} and all(found(both, number) for number in range(8))
    both.close()


def test_damage_near_is_healed_from_far(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    put(pair.both, 1)
    pair.both.flush()
    (path,) = pair.near.root.glob("package/*/*.sight")
    path.write_bytes(path.read_bytes()[:-1])
    assert found(pair.both, 1) and "set aside" in caplog.text
    pair.both.flush()
    assert found(pair.near, 1) and pair.both.check() == []


def test_three_in_a_row(tmp_path: Path) -> None:
    stores = [DiskStore(tmp_path / "a"), DiskStore(tmp_path / "b"), RemoteStore(ADDRESS)]
    row = TieredStore(*stores)
    put(stores[2], 1)
    stores[2].flush()
    assert found(row, 1)
    row.flush()
    assert all(found(store, 1) for store in stores)
    assert row.delete("package", KEYS[1]) > 0 and not any(names(store) for store in stores)
    row.close()


def test_a_row_of_none_is_refused() -> None:
    with pytest.raises(InputError, match="none was given"):
        TieredStore()


def test_tenants_are_the_same_everywhere(pair: Pair) -> None:
    ann = pair.both.tenant("ann")
    put(ann, 1)
    ann.flush()
    for store in (pair.near, pair.far):
        assert found(store.tenant("ann"), 1) and not store.has("package", KEYS[1])
    put(pair.far.tenant("bob"), 2)
    pair.far.flush()
    assert not ann.has("package", KEYS[2]) and found(pair.both.tenant("bob"), 2)
    pair.both.flush()
    assert found(pair.near.tenant("bob"), 2) and not ann.has("package", KEYS[2])
    assert pair.both.clear() == 0 and names(ann) == {("package", 1)}


def test_an_address_behind_a_folder_is_opened_as_one(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget=1 << 20, remote=ADDRESS)
    put(store, 1)
    store.flush()
    assert isinstance(store, TieredStore) and found(RemoteStore(ADDRESS), 1)
    assert [tier["budget"] for tier in store.stats()["tiers"]] == [1 << 20, None]
    store.close()


# -- one of them fails ---------------------------------------------------------------------------


def test_a_far_one_that_does_not_answer_costs_nothing_but_itself(pair: Pair) -> None:
    Line.fail = staticmethod(unreachable)
    put(pair.both, 1)
    with pytest.raises(StoreError, match=r"not written to every tier: trial://shared/store"):
        pair.both.flush()
    assert found(pair.both, 1) and found(pair.near, 1) and names(pair.both) == {("package", 1)}
    assert "unreachable" in pair.both.stats()["broken"]
    with pytest.raises(StoreError, match=r"not removed from every tier: trial://"):
        pair.both.delete("package", KEYS[1])
    assert not pair.near.has("package", KEYS[1]), "what can be removed is"


def test_the_far_one_is_named_even_when_the_near_one_is_lost(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    both = TieredStore(DiskStore(tmp_path / "file" / "store"), RemoteStore(ADDRESS))
    put(both, 1)
    with pytest.raises(StoreError, match="file/store"):
        both.flush()
    assert found(both, 1), "it is far"
    both.close()


# -- gone is gone --------------------------------------------------------------------------------

GONE: dict[str, Callable[[Any], Any]] = {
    "delete": lambda store: store.delete("package", KEYS[1]),
    "delete_media": lambda store: store.delete_media("image"),
    "clear": lambda store: store.clear(),
}


@pytest.mark.parametrize("how", GONE)
def test_what_is_deleted_is_gone_from_every_tier(pair: Pair, how: str) -> None:
    about = About(media=("image",))
    put(pair.both, 1, about)
    put(pair.far, 2, About(media=("image",), depends_on=("package", KEYS[1])), "snapshot")
    pair.both.flush()
    assert GONE[how](pair.both) > 0
    for store in (pair.both, pair.near, pair.far):
        assert names(store) == set() and not store.has("package", KEYS[1])
    assert pair.both.check() == [] and GONE[how](pair.both) == 0


@pytest.mark.parametrize("how", GONE)
def test_what_is_on_its_way_near_does_not_come_back(pair: Pair, how: str) -> None:
    """Found far, deleted everywhere, and only then put near: it must not be."""
    put(pair.far, 1, About(media=("image",)))
    pair.far.flush()
    reader = RemoteStore(ADDRESS)
    both = TieredStore(pair.near, reader)
    gate, arrived = threading.Event(), threading.Event()
    assert reader.has("package", KEYS[1])

    def late(asked: str, path: str) -> None:
        """The first answer about it was true when it was given, and arrives after the deletion."""
        if asked == "cat_file" and KEYS[1] in path and not arrived.is_set():
            arrived.set()
            gate.wait(20)

    Line.after = staticmethod(late)
    found_late: list[bool] = []
    read = threading.Thread(target=lambda: found_late.append(found(both, 1)))
    read.start()
    assert arrived.wait(20)
    GONE[how](both)
    gate.set()
    read.join(20)
    both.flush()
    assert found_late == [True], "the reader got what was there when it asked"
    assert not pair.near.has("package", KEYS[1]) and names(both) == set()
    both.close()


def test_deleting_while_many_read_leaves_nothing(tmp_path: Path) -> None:
    """Readers in threads promote all the time; whatever is deleted stays away."""
    far = RemoteStore(ADDRESS)
    near = DiskStore(tmp_path)
    both = TieredStore(near, far)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            for key in KEYS:
                both.get("package", key)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(5):
        for number in range(8):
            put(far, number, About(media=("image",)))
        far.flush()
        time.sleep(0.02)
        both.delete_media("image")
        both.flush()
        assert names(near) == set() == names(far)
    stop.set()
    for reader in readers:
        reader.join()
    both.close()


def test_what_could_not_be_carried_and_is_deleted_is_no_loss(tmp_path: Path) -> None:
    near, far = DiskStore(tmp_path, budget=10), RemoteStore(ADDRESS)  # nothing fits into the first
    both = TieredStore(near, far)
    put(far, 1, About(media=("image",)))
    far.flush()
    assert found(both, 1)
    assert near.stats()["refused"]
    both.delete_media("image")
    both.flush()
    assert names(both) == set()
    both.close()
