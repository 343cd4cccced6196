"""The tree against plain dictionaries: what must be found is found, and nothing else ever.

The tensors are fakes whose values say which path they stand for, so reuse under a wrong path shows
as a wrong value. `check()` runs after every operation (law 7).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support.fake_paths import (
    Token,
    build,
    ends_of,
    expect_values,
    fake_kv,
    fake_logits,
    fake_medium,
    found,
    path,
    prefill,
    rule_of,
    short_stretches,
    spliced,
)
from support.hostile import bounded

from keepsight.formats import tensorfile
from keepsight.prefix import residency
from keepsight.prefix.match import Known, Match
from keepsight.prefix.node import Node
from keepsight.prefix.prompt import Prompt, Rule
from keepsight.prefix.tree import Tree
from keepsight.store import FORMAT, DiskStore
from keepsight.system import digests


@pytest.fixture(autouse=True)
def _short_runs() -> Iterator[None]:
    with short_stretches():
        yield


# -- the machine -------------------------------------------------------------------------------


class TreeMachine(RuleBasedStateMachine):
    """The tree beside `seen`: every path ever inserted. (What is held, evicted and forgotten is in
    test_tree_tiers.py.)"""

    letters = st.lists(st.sampled_from("12.12.ABCa"), min_size=1, max_size=14)
    spaces = st.sampled_from(["n", "m"])

    @initialize(budget=st.sampled_from([1 << 40, 3000, 900, 0]), has_fixed=st.booleans())
    def begin(self, budget: int, has_fixed: bool) -> None:
        self.tree = Tree(budget, has_fixed)
        self.seen: dict[str, dict[tuple[tuple[Token, ...], bool], None]] = {"n": {}, "m": {}}
        self.prompts: list[Prompt] = []
        self.lost = False  # whether anything may have been let go

    @rule(letters=letters, space=spaces, steps=st.none() | st.integers(0, 3))
    def serve(self, letters: list[str], space: str, steps: int | None) -> None:
        self.prompts.append(build(letters))
        self.serve_again(len(self.prompts) - 1, space, steps, 0, [])

    @precondition(lambda self: self.prompts)
    @rule(
        which=st.integers(0, 99),
        space=spaces,
        steps=st.none() | st.integers(0, 3),
        keep=st.integers(0, 14),
        more=letters,
    )
    def serve_again(
        self, which: int, space: str, steps: int | None, keep: int, more: list[str]
    ) -> None:
        """A prompt from before, or (with `keep`) its beginning with another end."""
        whole = self.prompts[which % len(self.prompts)]
        if keep:
            whole = spliced(whole, keep, build(more))
        expected = self.deepest(whole, space)
        match = prefill(self.tree, whole, space, steps)
        if not self.lost:
            assert (match.length, match.logits is not None) == expected
        assert match.length <= expected[0]
        self.remember(whole, space, match, steps)

    def remember(self, whole: Prompt, space: str, match: Match, steps: int | None) -> None:
        tokens = path(whole)
        for end in ends_of(self.tree, whole, match)[:steps]:
            self.seen[space][tokens[:end], end == len(whole)] = None
        self.lost |= self.tree.evictions > 0

    def deepest(self, whole: Prompt, space: str) -> tuple[int, bool]:
        """What the dictionary says must be found: how far, and whether with the last logits."""
        tokens, seen = path(whole), self.seen[space]
        if (tokens, True) in seen:
            return len(tokens), True
        last = len(tokens) - 1
        if self.tree.has_fixed:
            ends = [len(known) for known, _ in seen if tokens[: len(known)] == known]
            return max((end for end in ends if end <= last), default=0), False
        until = max((shared(tokens, known) for known, _ in seen), default=0)
        return whole.before_medium(min(until, last), rule_of(self.tree)), False

    @precondition(lambda self: self.prompts)
    @rule(letters=letters, which=st.integers(0, 99), keep=st.integers(0, 14), space=spaces)
    def ask_how_far(self, letters: list[str], which: int, keep: int, space: str) -> None:
        """`known` is the true first difference from everything seen."""
        whole = spliced(self.prompts[which % len(self.prompts)], keep, build(letters))
        going = beginnings(tokens for tokens, _ in self.seen[space])
        expect_known(self.tree.known(space, whole), whole, going)

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 99), space=spaces)
    def look(self, which: int, space: str) -> None:
        """With states, the deepest of all nodes that are usable, found by looking at each."""
        whole = self.prompts[which % len(self.prompts)]
        if self.tree.has_fixed:
            usable = [0, *(n.end for n in self.tree.nodes() if self.may_use(n, whole, space))]
            assert found(self.tree, whole, space).length == max(usable)

    def may_use(self, node: Node, whole: Prompt, space: str) -> bool:
        chain = node.chain()
        if chain[0].parent is not self.tree.roots.get(space) or node.fixed is None:
            return False
        if node.end == len(whole) and node.logits is None:
            return False
        return all(n.kv is not None and n.shared(whole) == len(n.ids) for n in chain)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check()


TestTree = TreeMachine.TestCase
TestTree.settings = bounded(100, stateful_step_count=25)


def shared(one: tuple[Token, ...], two: tuple[Token, ...]) -> int:
    pairs = zip(one, two, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def beginnings(paths: Iterable[tuple[Token, ...]]) -> dict[tuple[Token, ...], bool]:
    """Every beginning of every path, and whether some path goes on from there."""
    going: dict[tuple[Token, ...], bool] = {(): False}
    for tokens in paths:
        for end in range(len(tokens) + 1):
            going[tokens[:end]] = going.get(tokens[:end], False) or end < len(tokens)
    return going


def expect_known(known: Known, whole: Prompt, going: dict[tuple[Token, ...], bool]) -> None:
    """The first difference from everything seen, found by trying each length."""
    tokens = path(whole)
    until = max(end for end in range(len(tokens) + 1) if tokens[:end] in going)
    assert known.until == until
    assert known.diverged == (going[tokens[:until]] and until < len(tokens))


# -- matching ----------------------------------------------------------------------------------


def test_prompts_that_part_inside_an_edge_share_what_is_before() -> None:
    """At any token, also twice, and in memory of their own: what parts may go alone."""
    tree = Tree(1 << 30, has_fixed=False)
    wholes = [build(letters) for letters in ("121212", "121221", "122121", "12121")]
    for whole, length in zip(wholes, (0, 4, 2, 4), strict=True):
        assert prefill(tree, whole).length == length
        tree.check()
    tokens = {path(whole)[: end + 1] for whole in wholes for end in range(len(whole))}
    row, logits = fake_kv(path(wholes[0]), 0, 1)["kv"].nbytes, 3 * 8
    assert tree.nbytes == len(tokens) * row + 4 * logits
    held = tree.hold(found(tree, build("12125")))
    assert held.end == 4
    tree.evict(1 << 30)
    assert tree.nbytes == 4 * row
    expect_values(held, wholes[0], fixed=False)


@pytest.mark.parametrize("reuse", ["same media", "whole prompt"])
def test_prompts_that_change_what_is_before_share_nothing(reuse: str) -> None:
    tree, rule = Tree(1 << 30, has_fixed=False, reuse=reuse), Rule(reuse=reuse)
    for letters in ("11A2", "11A2B", "11A2"):
        whole = build(letters)
        tokens, match = path(whole), tree.match("n", whole, rule)
        assert match.whole == (tree.known("n", whole).until == len(whole) and match.length > 0)
        node = tree.hold(match)
        if not match.whole:
            kv = {"kv": fake_kv(tokens, 0, len(whole))["kv"] + len(letters)}
            tree.release(tree.insert(node, whole, len(whole), kv, None, fake_logits(tokens)))
        tree.release(node)
        tree.check()
    for letters in ("11A2", "11A2B"):
        match = tree.match("n", build(letters), rule)
        assert match.whole and match.node.kv is not None
        assert match.node.kv["kv"][0, 0, 0] == fake_kv(path(build("1")), 0, 1)["kv"][0, 0, 0] + len(
            letters
        )
    longer = tree.match("n", build("11A22"), rule).length
    assert longer == (5 if reuse == "same media" else 0)
    assert tree.known("n", build("11A22")).until == 5


def test_a_hit_is_compared_and_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were two paths to collide in their digest, the ids and feature ids would tell."""
    tree = Tree(1 << 30, has_fixed=False)
    monkeypatch.setattr(Prompt, "segment_digest", lambda self, parent, a, b: "equal")
    prefill(tree, build("12A1"))
    assert found(tree, build("12A1")).length == 5
    for other, length in (("12B1", 2), ("12a1", 2), ("22A1", 0), ("1255", 2)):
        assert found(tree, build(other)).length == length


# -- holding and letting go --------------------------------------------------------------------


def test_the_least_recently_used_goes_first() -> None:
    tree = Tree(1 << 30, has_fixed=False)
    for letters in ("11.1", "22.1", "33.1"):
        prefill(tree, build(letters))
    prefill(tree, build("11.1"))
    for gone in ("22.1", "33.1", "11.1"):  # the least recent path, from its end on
        for length in (4, 3):
            assert found(tree, build(gone)).length == length
            tree.evict(1)
        assert found(tree, build(gone)).length == 0
    assert tree.nbytes == 0
    tree.check()


def test_a_view_is_counted_as_all_that_it_pins() -> None:
    tree = Tree(1 << 30, has_fixed=False)
    whole = build("12")
    rows = torch.zeros(100, 1, 2, 1, dtype=torch.float64)
    node = tree.insert(tree.root("n"), whole, 2, {"a": rows[:2], "b": rows[2:4]}, {})
    tree.release(node)
    assert tree.nbytes == node.nbytes == rows.nbytes
    tree.check()


@pytest.mark.parametrize(
    "break_it",
    [
        lambda tree, node: setattr(tree.device, "nbytes", tree.nbytes + 1),
        lambda tree, node: setattr(tree.device, "held", 1),
        lambda tree, node: setattr(tree.device, "snapshots", 1),
        lambda tree, node: tree.device.bytes_of.clear(),
        lambda tree, node: setattr(node, "rows", {}),
        lambda tree, node: setattr(node, "tier", "host"),
        lambda tree, node: tree.device.order.pop(node),
        lambda tree, node: tree.device.order.move_to_end(node, last=False),
        lambda tree, node: setattr(node, "gone", True),
        lambda tree, node: setattr(node, "holds", -1),
        lambda tree, node: setattr(node, "ids", node.ids[1:]),
        lambda tree, node: setattr(tree, "budget", 1),
        lambda tree, node: node.parent.children.clear(),
    ],
)
def test_check_notices(break_it: Callable[[Tree, Node], Any]) -> None:
    tree = Tree(1 << 30, has_fixed=True)
    prefill(tree, build("11.22.1"))
    tree.check()
    break_it(tree, found(tree, build("11.2")).node)
    with pytest.raises(AssertionError):
        tree.check()


def test_records_are_remembered_and_at_last_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = Tree(1 << 30, has_fixed=False)
    whole = build("11.22.1")
    prefill(tree, whole)
    tree.evict(1 << 30)
    assert tree.known("n", whole) == Known(7, False, evicted_from=0)
    assert found(tree, whole).length == 0
    tree.check()
    monkeypatch.setattr(residency, "MAX_RECORDS", 0)
    tree.evict(1)
    assert tree.known("n", whole).until == 0 and list(tree.nodes()) == []
    assert not tree.records
    tree.check()


# -- how far something is known ----------------------------------------------------------------


def test_known_among_pictures_of_one_size() -> None:
    """Their ids are all the same; the closest is found by what the pictures are."""
    tree = Tree(1 << 40, has_fixed=False)
    wholes = []
    for number in range(40):
        one = build("11A2.1" if number % 2 else "11A1.1")
        name = digests.digest("feature", number)
        wholes.append(dataclasses.replace(one, media=(fake_medium(name, name, 2),)))
        prefill(tree, wholes[-1])
    going = beginnings(map(path, wholes))
    for whole in wholes:
        assert found(tree, whole).logits is not None
        other = dataclasses.replace(whole, ids=np.append(whole.ids[:-1], 3))
        expect_known(tree.known("n", other), other, going)
        assert tree.known("n", other).until == 6


def test_what_other_namespaces_know() -> None:
    tree = Tree(1 << 30, has_fixed=False)
    for space, letters in (("n", "11.1"), ("m", "11.22.1")):
        prefill(tree, build(letters), space)
    asked = build("11.22.2")
    assert tree.elsewhere("o", asked) == (6, "m")
    assert tree.elsewhere("m", asked) == (3, "n")
    assert tree.elsewhere("n", asked) == (6, "m")
    assert tree.elsewhere("o", build("12.1"))[0] == 1
    assert tree.elsewhere("o", build("2.1"))[0] == 0
    tree.check()


def test_a_path_that_many_namespaces_know_is_followed_in_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = Tree(1 << 30, has_fixed=False)
    for number in range(40):
        prefill(tree, build("11.22.1"), f"n{number}")
    followed: list[Any] = []
    follow = tree._known_from
    monkeypatch.setattr(tree, "_known_from", lambda *a: followed.append(a) or follow(*a))
    asked = build("11.22.2")
    assert tree.elsewhere("n0", asked) == (6, "n39")
    assert len(followed) < 10
    tree.clear()
    assert tree.drop_empty("n0") == {f"n{number}" for number in range(1, 40)}
    assert tree.namespaces() == []


def test_a_namespace_with_a_turn_in_flight_is_not_dropped() -> None:
    tree = Tree(1 << 30, has_fixed=False)
    root = tree.hold(Match(tree.root("n")))
    assert tree.drop_empty("m") == set()
    tree.release(root)
    assert tree.drop_empty("m") == {"n"}


# -- on disk -----------------------------------------------------------------------------------

LONG = "11.A2.22.1"


@pytest.fixture(params=[False, True], ids=["full", "fixed"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[DiskStore, bool]]:
    """A store in which a tree has left the snapshots of one prompt."""
    store = DiskStore(tmp_path)
    tree = Tree(1 << 30, request.param, store)
    prefill(tree, build(LONG))
    store.flush()
    yield store, request.param
    store.close()


def test_snapshots_are_found_by_another_process(written: tuple[DiskStore, bool]) -> None:
    store, has_fixed = written
    tree = Tree(1 << 30, has_fixed, DiskStore(store.root))
    match = prefill(tree, build(LONG + "2."))
    assert (match.length, match.tier) == (11, "disk")
    assert found(tree, build(LONG + "2.")).tier == "memory"
    assert prefill(tree, build(LONG)).logits is not None
    assert found(tree, build("11.B2.22.1")).length == 3
    assert found(tree, build("11.a2.22.1")).length == 3
    tree.check()


def test_what_goes_on_inside_an_entry_is_found_by_another_process(
    written: tuple[DiskStore, bool],
) -> None:
    """A prompt that parts inside of what was stored stores what is new alone."""
    store, has_fixed = written
    before = {entry.key for entry in store.entries()}
    other = build("11.A2.21.1")
    prefill(Tree(1 << 30, has_fixed, store), other)
    store.flush()
    new = [e for e in store.entries() if e.key not in before and e.kind == "snapshot"]
    ids = [store.get("snapshot", entry.key)[1]["ids"] for entry in new]  # type: ignore[index]
    assert sorted(map(len, ids)) == [1, 2]
    for letters in (LONG, "11.A2.21.1"):
        tree = Tree(1 << 30, has_fixed, DiskStore(store.root))
        match = prefill(tree, build(letters))
        assert (match.length, match.logits is not None) == (11, True)
        assert found(tree, build("11.A2.25")).length == (7 if has_fixed else 8)
        tree.check()


def test_loading_keeps_the_budget(written: tuple[DiskStore, bool]) -> None:
    store, has_fixed = written
    tree = Tree(600, has_fixed, store)
    for letters in ("22.12.1", LONG, "22.12.1"):
        whole = build(letters)
        node = tree.hold(found(tree, whole))
        assert tree.load(node, whole)
        tree.check()
        tree.release(node)
        prefill(tree, whole)
        tree.check()
    assert tree.nbytes <= 600


def test_entries_that_are_gone_or_damaged_are_computed_again(
    written: tuple[DiskStore, bool],
) -> None:
    store, has_fixed = written
    files = sorted(store.root.rglob("*.keep"))
    assert len(files) == (11 if has_fixed else 6)  # one has the last logits
    for number, path_of_one in enumerate(files):
        data = path_of_one.read_bytes()
        path_of_one.unlink()
        if number % 2:
            path_of_one.write_bytes(data[:-1])
        tree = Tree(1 << 30, has_fixed, DiskStore(store.root))
        prefill(tree, build(LONG))
        tree.check()
        assert found(tree, build(LONG)).logits is not None
        tree.store.flush()  # type: ignore[union-attr]
        # What was not needed was not read either: only that may still be damaged.
        assert all(str(path_of_one) in line for line in DiskStore(store.root).check())
        path_of_one.write_bytes(data)


def other_ids(tensors: dict[str, Any], record: dict[str, Any]) -> None:
    tensors["ids"] = tensors["ids"] + 1


LIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "other ids": other_ids,
    "no ids": lambda tensors, record: tensors.pop("ids"),
    "other media": lambda tensors, record: record.update(spans=[[0, 2, "0" * 64, 0]]),
    "media where there are none": lambda tensors, record: record["spans"].append([0, 1, "x", 0]),
    "no media": lambda tensors, record: record.pop("spans"),
    "another parent": lambda tensors, record: record.update(parent="0" * 64),
    "no parent": lambda tensors, record: record.pop("parent"),
    "another start": lambda tensors, record: record.update(start=record["start"] + 1),
    "another end": lambda tensors, record: record.update(end="7"),
    "a row too few": lambda tensors, record: tensors.update(
        {"kv/kv": tensors["kv/kv"][:, :, 1:].clone()}
    ),
    "a scalar": lambda tensors, record: tensors.update({"kv/kv": torch.zeros(())}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_sealed_snapshot_of_something_else_is_rejected(
    written: tuple[DiskStore, bool], lie: str
) -> None:
    """All digests hold and the name is right: only what the file says of its path is false."""
    store, has_fixed = written
    for file in sorted(store.root.glob("snapshot/*/*.keep")):
        data = file.read_bytes()
        tensors, record = tensorfile.read(file, "snapshot", FORMAT)
        LIES[lie](tensors, record)
        tensorfile.save(file, "snapshot", FORMAT, tensors, record)
        tree = Tree(1 << 30, has_fixed, DiskStore(store.root))
        match = prefill(tree, build(LONG))
        assert match.length < record["start"] + 3 if isinstance(record.get("start"), int) else True
        assert match.length < 11
        tree.check()
        file.write_bytes(data)


def test_a_snapshot_under_another_name_is_rejected(written: tuple[DiskStore, bool]) -> None:
    """The same stretch behind another past: same ids, same place, other values."""
    store, has_fixed = written
    twin = "12.A2.22.1"
    other = DiskStore(store.root / "other")
    prefill(Tree(1 << 30, has_fixed, other), build(twin))
    other.flush()
    names = {}
    for letters in (LONG, twin):
        tree = Tree(1 << 30, has_fixed, store if letters == LONG else other)
        prefill(tree, build(letters))
        chain = found(tree, build(letters)).node.chain()
        names[letters] = [n.entry.name for n in chain if n.entry is not None]
    for mine, theirs in zip(names[LONG], names[twin], strict=True):
        for kind in ("snapshot", "state") if has_fixed else ("snapshot",):
            files = [
                s.root / kind / name[:2] / f"{name}.keep"
                for s, name in ((store, mine), (other, theirs))
            ]
            files[0].write_bytes(files[1].read_bytes())
    tree = Tree(1 << 30, has_fixed, DiskStore(store.root))
    assert prefill(tree, build(LONG)).length == 0  # its values were compared with LONG's own
    tree.check()
