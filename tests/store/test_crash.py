"""Stores whose processes are killed in the middle of everything, and a model that knows better.

The quick loops run always; the long ones, hundreds of kills, are `slow`.
"""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.hostile import bounded
from support.store_load import dies_at, forked, is_right, key_of, killed, put
from support.stores import KEYS

from keepsight.store import About, DiskStore
from keepsight.store.index import NAME

# -- kill -9 -----------------------------------------------------------------------------------


class Promises:
    """What the processes were promised, over all rounds."""

    def __init__(self) -> None:
        self.kept: set[int] = set()
        self.doubtful: set[int] = set()
        self.gone: set[int] = set()

    def hear(self, lines: list[str], shared: bool = False) -> None:
        """What one said; `shared`: another may put again what this one deletes."""
        for sign, number in (line.split(" ", 1) for line in lines):
            assert sign != "!", f"wrong content was read: {number}"
            gone = self.doubtful if shared else self.gone
            {"+": self.kept, "~": self.doubtful, "-": gone}[sign].add(int(number))

    def expect(self, store: DiskStore, all_kept: bool) -> None:
        for number in self.kept | self.doubtful:
            assert is_right(store, number), number
        for number in self.gone:
            assert not store.has("package", key_of(number)), "deleted is deleted"
        if all_kept:
            for number in self.kept - self.doubtful - self.gone:
                for kind in ("package", "alias", "snapshot", "state"):
                    assert store.has(kind, key_of(number)), (kind, number)


def is_harmless(line: str) -> bool:
    """Killed between a row and its file."""
    return "there is no such file" in line


def crash(root: Path, rounds: int, budget: int | None, processes: int, seed: int) -> Promises:
    chance, promises = random.Random(seed), Promises()
    for turn in range(rounds):
        firsts = [turn * 1000 + (0 if chance.random() < 0.5 else 500 * n) for n in range(processes)]
        started = [forked(root, first, budget, seed + turn) for first in firsts]
        for child, out in started:
            shared = len(set(firsts)) < len(firsts)
            promises.hear(killed(child, out, chance.random() * 0.5, spoken=turn == 0), shared)
        store = DiskStore(root, budget)
        found = store.check(repair=True)
        assert all(is_harmless(line) for line in found), found
        assert store.check() == [], turn
        promises.expect(store, budget is None)
        if budget is not None:
            store.put("package", key_of(-turn - 1), {"a": torch.zeros(9)}, {})
            store.flush()
            assert store.stats()["bytes"] <= budget
        if chance.random() < 0.3:  # the index may go at any time
            store.close()
            for path in root.glob(f"{NAME}*"):
                path.unlink()
        store.close()
    return promises


@pytest.mark.usefixtures("_nobody_writes")
@pytest.mark.parametrize(("budget", "processes"), [(None, 1), (None, 2), (400_000, 2)])
def test_random_kills(tmp_path: Path, budget: int | None, processes: int) -> None:
    assert crash(tmp_path, 5, budget, processes, seed=processes).kept


@pytest.mark.usefixtures("_nobody_writes")
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_step(tmp_path: Path, stride: int) -> None:
    """At each step of writing, entering and removing, what was promised holds."""
    for step in range(1, 400, stride):
        root, promises = tmp_path / str(step), Promises()
        lines = dies_at(root, step)
        promises.hear([line for line in lines if line != "end"])
        store = DiskStore(root)
        assert all(is_harmless(line) for line in store.check(repair=True)), step
        assert store.check() == [], step
        promises.expect(store, True)
        for number in (1, 3):
            put(store, number)
        store.flush()
        assert store.stats()["entries"] == 8 and store.check() == [], step
        store.close()
        if "end" in lines:
            break
    assert step > 40 and "end" in lines, "it was killed at every step, and then ran through"


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "processes"), [(None, 1), (None, 2), (400_000, 2)])
def test_hundreds_of_random_kills(tmp_path: Path, budget: int | None, processes: int) -> None:
    for seed in range(4):
        promises = crash(tmp_path / str(seed), 40, budget, processes, 100 + seed)
        assert len(promises.kept) > 40


# -- against a model ---------------------------------------------------------------------------

Named = tuple[int, str, str]  # tenant, kind, key
TENANTS = (None, "one")


class StoreMachine(RuleBasedStateMachine):
    """The store against a dictionary that knows what was put, what depends on what, what is pinned.

    Which entry goes first is the store's choice; that only allowed ones go is checked.
    """

    places = st.tuples(
        st.integers(0, 1), st.sampled_from(["snapshot", "package"]), st.sampled_from(KEYS[:4])
    )

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.model: dict[Named, tuple[tuple[str, str] | None, str]] = {}
        self.pinned: set[Named] = set()
        self.open()

    def open(self) -> None:
        self.store = DiskStore(self.root)
        self.views = [self.store.tenant(name) for name in TENANTS]

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.root, ignore_errors=True)  # a store that was dropped may still close

    def upon(self, place: Named) -> set[Named]:
        """A place and all that depends on it."""
        found = {place}
        while True:
            more = {
                other
                for other, (base, _) in self.model.items()
                if base is not None and (other[0], *base) in found
            }
            if more <= found:
                return found
            found |= more

    def drop(self, places: set[Named]) -> None:
        for place in places:
            self.model.pop(place, None)
            self.pinned.discard(place)

    @rule(place=places, base=st.sampled_from([None, *KEYS[:4]]), image=st.sampled_from("ab"))
    def put(self, place: Named, base: str | None, image: str) -> None:
        tenant, kind, key = place
        depends_on = None if base is None or base >= key or kind != "snapshot" else (kind, base)
        content = {"a": torch.full((50 * (KEYS.index(key) + 1),), float(KEYS.index(key)))}
        about = About(1.0, depends_on, (image,))
        self.views[tenant].put(kind, key, content, {"kind": kind}, about)
        known = depends_on is None or (tenant, *depends_on) in self.model
        if place not in self.model and known:
            self.model[place] = (depends_on, image)

    @rule(place=places)
    def get(self, place: Named) -> None:
        tenant, kind, key = place
        found = self.views[tenant].get(kind, key)
        assert (found is not None) == (place in self.model)
        if found is not None:
            assert (found[0]["a"] == KEYS.index(key)).all() and found[1]["kind"] == kind

    @rule(place=places)
    def delete(self, place: Named) -> None:
        freed = self.views[place[0]].delete(*place[1:])
        assert (freed > 0) == (place in self.model)
        self.drop(self.upon(place) if place in self.model else set())

    @rule(tenant=st.integers(0, 1), image=st.sampled_from("ab"))
    def delete_media(self, tenant: int, image: str) -> None:
        holders = {p for p, (_, held) in self.model.items() if p[0] == tenant and held == image}
        freed = self.views[tenant].delete_media(image)
        assert (freed > 0) == bool(holders)
        for place in holders:
            self.drop(self.upon(place))

    @rule(place=places, pinned=st.booleans())
    def pin(self, place: Named, pinned: bool) -> None:
        assert self.views[place[0]].pin(*place[1:], pinned) == (place in self.model)
        if place in self.model:
            (self.pinned.add if pinned else self.pinned.discard)(place)

    @rule(tenant=st.integers(0, 1), share=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    def gc(self, tenant: int, share: float) -> None:
        view = self.views[tenant]
        before = view.stats()["bytes"]
        freed = view.gc(int(before * share))
        left = {(tenant, e.kind, e.key) for e in view.entries()}
        mine = {place for place in self.model if place[0] == tenant}
        assert left <= mine and view.stats()["bytes"] == before - freed
        stay = {place for place in mine if self.upon(place) & self.pinned}
        assert stay <= left, "what is pinned stays, with what it depends on"
        assert before - freed <= before * share or left == stay
        self.drop(mine - left)

    @rule(tenant=st.integers(0, 1))
    def clear(self, tenant: int) -> None:
        self.views[tenant].clear()
        self.drop({place for place in self.model if place[0] == tenant})

    @rule(close=st.booleans(), harm=st.booleans())
    def open_again(self, close: bool, harm: bool) -> None:
        self.store.flush()
        if close or harm:
            self.store.close()
        if harm:
            for path in self.root.glob(f"{NAME}*"):
                path.unlink()
        self.open()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        tenant, kind, key = place = data.draw(st.sampled_from(sorted(self.model)))
        self.store.flush()
        (path,) = [
            found
            for found in self.root.rglob(f"{key}.*")
            if found.parts[-3] == kind and ("tenants" in found.parts) == (tenant == 1)
        ]
        path.write_bytes(path.read_bytes()[:-1])
        assert any(str(path) in line for line in self.store.check(repair=True))
        self.drop(self.upon(place))

    @invariant()
    def agrees(self) -> None:
        assert self.store.check() == []
        for number, view in enumerate(self.views):
            told = {(number, e.kind, e.key): e for e in view.entries()}
            assert set(told) == {place for place in self.model if place[0] == number}
            assert {place for place, e in told.items() if e.pinned} == {
                place for place in self.pinned if place[0] == number
            }
            assert view.stats()["bytes"] == sum(e.nbytes for e in told.values())
            for place, entry in told.items():
                assert entry.depends_on == self.model[place][0]
                assert view.has(*place[1:])


class TestStoreMachine(StoreMachine.TestCase):
    settings = bounded(10, stateful_step_count=20)


@pytest.mark.slow
class TestStoreMachineForLong(StoreMachine.TestCase):
    settings = bounded(200, stateful_step_count=20)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("keepsight")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)
