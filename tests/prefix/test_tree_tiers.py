"""The tree in tiers: device, host and store; tenants, quotas, pins, times to live, forgetting.

A machine does all of it at once, turns in flight included, and after every step the laws are walked
through (`check`) and compared with what a few dictionaries say must or must not be there.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.common import Clock
from support.fake_paths import (
    Turn,
    build,
    demote,
    evictable_bytes,
    expect_values,
    found,
    is_whole,
    path,
    short_stretches,
)
from support.hostile import bounded

from keepsight.errors import InputError, PinsFull
from keepsight.prefix.match import Known
from keepsight.prefix.node import DEVICE, HOST, Node
from keepsight.prefix.prompt import Prompt
from keepsight.prefix.residency import Residency
from keepsight.prefix.tree import Tree
from keepsight.store import NOTHING, About
from keepsight.system import digests
from keepsight.system.accounts import under_salt

HUGE = 1 << 40
LONG = ["11.A2.22.B1.", "11.A2.21.C.", "22.B.A.1", "12.12.12.12.1"]
KEYS = {letter: digests.digest("identity", letter.lower()) for letter in "ABC"}


@pytest.fixture(autouse=True)
def _short_runs() -> Iterator[None]:
    with short_stretches():
        yield


@dataclass
class Shelf:
    """A store in a dictionary, for one tenant, that keeps what it was told of each entry."""

    whose: str = ""
    clock: Clock = field(default_factory=Clock)
    all: dict[Any, Any] = field(default_factory=dict)
    where: str = "disk"
    log: list[tuple[str, str]] = field(default_factory=list)

    def tenant(self, name: str | None) -> Shelf:
        return type(self)(name or "", self.clock, self.all, self.where, self.log)

    def _find(self, kind: str, key: str) -> Any:
        entry = self.all.get((self.whose, kind, key))
        return entry if entry is not None and entry[3] > self.clock() else None

    def has(self, kind: str, key: str) -> bool:
        return self._find(kind, key) is not None

    def tier(self, kind: str, key: str) -> str | None:
        return self.where if self.has(kind, key) else None

    def get(self, kind: str, key: str) -> Any:
        entry = self._find(kind, key)
        if entry is None:
            return None
        return {name: tensor.clone() for name, tensor in entry[0].items()}, dict(entry[1])

    def get_all(self, kind: str, keys: Any) -> Any:
        return {key: found for key in keys if (found := self.get(kind, key)) is not None}

    def below(self, kind: str, base: str | None, count: int) -> Any:
        return {}  # it lists nothing

    def put(self, kind: str, key: str, tensors: Any, record: Any, about: About = NOTHING) -> None:
        base = about.depends_on
        if base is not None and not self.has(*base):
            raise AssertionError("written without what it depends on")
        until = self.clock() + (about.ttl or float("inf"))
        self.log.append((kind, key))
        if not self.has(kind, key):
            self.all[self.whose, kind, key] = (tensors, record, about, until)

    def reject(self, kind: str, key: str, why: str) -> None:
        self.lose(kind, key)

    def lose(self, kind: str, key: str) -> None:
        """This entry and all that depends on it."""
        self.all.pop((self.whose, kind, key), None)
        for whose, other, name in list(self.all):
            entry = self.all.get((whose, other, name))
            if entry is not None and whose == self.whose and entry[2].depends_on == (kind, key):
                self.lose(other, name)

    def delete_media(self, image_key: str) -> None:
        for whose, kind, key in list(self.all):
            entry = self.all.get((whose, kind, key))
            if entry is not None and whose == self.whose and image_key in entry[2].media:
                self.lose(kind, key)


class Catalogue(Shelf):
    """A store that can say what goes on from an entry."""

    def below(self, kind: str, base: str | None, count: int) -> Any:
        found = []
        for whose, other, key in list(self.all):
            if (whose, other) == (self.whose, kind) and self.has(kind, key):
                stands_on = self.all[whose, kind, key][2].depends_on
                if (stands_on and stands_on[1]) == base:
                    found.append((key, dict(self.all[whose, kind, key][1])))
        return {base: found[-count:]}


def lies(tree: Tree, space: str = "n") -> dict[tuple[int, bool], str]:
    """Where the rows of each node of a namespace lie."""
    root = tree.root(space)
    return {(n.end, is_whole(n)): n.tier for n in root.below() if n is not root}


# -- the machine -------------------------------------------------------------------------------


class TierMachine(RuleBasedStateMachine):
    """Everything at once; `born` says when a path was last remembered, and by a turn begun when."""

    letters = st.lists(st.sampled_from("12.12.ABCa"), min_size=1, max_size=12)
    spaces = st.sampled_from(["n", "m", "k", "s"])
    tenant: ClassVar = {"n": "a", "m": "b", "k": "a", "s": under_salt("a", "salt")}

    @initialize(
        budget=st.sampled_from([HUGE, 3000, 900, 0]),
        host=st.sampled_from([HUGE, 1500, 300, 0]),
        quota=st.sampled_from([None, 1200, 400]),
        ttl=st.sampled_from([None, 50.0]),
        stored=st.sampled_from([None, Shelf, Catalogue]),
        has_fixed=st.booleans(),
    )
    def begin(self, budget: int, host: int, quota: Any, ttl: Any, stored: Any, has_fixed: bool):  # type: ignore[no-untyped-def]
        self.clock = Clock()
        self.shelf = stored("", self.clock) if stored else None
        self.tree = Tree(
            budget,
            has_fixed,
            self.shelf,  # type: ignore[arg-type]
            host_budget=host,
            quota=quota,
            ttl=ttl,
            clock=self.clock,
        )
        for space, tenant in self.tenant.items():
            self.tree.root(space, tenant)
        self.turns: list[Turn] = []
        self.begun: dict[int, int] = {}
        self.prompts: list[Prompt] = []
        self.count = itertools.count(1)
        self.forgotten: dict[tuple[str, str], int] = {}  # when an image was, counted in steps
        self.came_back: set[tuple[str, str]] = set()  # in a turn that began after that
        self.cleared: dict[str, int] = {}  # when a space was
        self.born: dict[Any, float] = {}

    def _begin(self, whole: Prompt, space: str) -> Turn:
        self.tree.root(space, self.tenant[space])
        turn = Turn(self.tree, whole, space)
        self.begun[id(turn)] = next(self.count)
        expect_values(turn.node, whole, self.tree.has_fixed)
        tokens = path(whole)
        for n in turn.node.chain():
            born = max(
                when
                for (its, known), when in self.born.items()
                if its == space and known[: n.end] == tokens[: n.end]
            )
            assert self.tree.ttl is None or self.clock.now < born + self.tree.ttl
            for span in n.spans:
                when = self.forgotten.get((self.tenant[space], span.key), -1)
                assert when < 0 or (self.tenant[space], span.key) in self.came_back
        return turn

    def _step(self, turn: Turn) -> None:
        node = turn.step()
        if node.gone:
            return
        assert self.begun[id(turn)] > self.cleared.get(turn.space, -1)
        for span in node.spans:
            name = self.tenant[turn.space], span.key
            if name in self.forgotten:
                assert self.begun[id(turn)] > self.forgotten[name]
                self.came_back.add(name)
        self.born[turn.space, path(turn.whole)[: node.end]] = self.clock.now

    @rule(letters=letters, space=spaces)
    def serve(self, letters: list[str], space: str) -> None:
        self.prompts.append(build(letters))
        self.start(len(self.prompts) - 1, space)
        self.take_on(len(self.turns) - 1, 99)
        self.finish(len(self.turns) - 1)

    @rule(which=st.integers(0, 99), space=spaces, more=letters)
    def serve_more(self, which: int, space: str, more: list[str]) -> None:
        """A conversation that goes on, as most do."""
        asked = LONG[which % len(LONG)]
        for letters in (asked, [*asked, *more], asked):
            self.serve(list(letters), space)

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 99), space=spaces)
    def start(self, which: int, space: str) -> None:
        self.turns.append(self._begin(self.prompts[which % len(self.prompts)], space))

    @precondition(lambda self: self.turns)
    @rule(which=st.integers(0, 99), steps=st.integers(1, 3))
    def take_on(self, which: int, steps: int) -> None:
        turn = self.turns[which % len(self.turns)]
        for _ in range(min(steps, len(turn.ends))):
            self._step(turn)

    @precondition(lambda self: self.turns)
    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        turn = self.turns.pop(which % len(self.turns))
        node = turn.node
        turn.end()
        if node.gone and not node.holds:
            assert not node.nbytes
        if not self.turns:
            self.settled()

    @rule(nbytes=st.integers(0, 3000))
    def evict(self, nbytes: int) -> None:
        total = self.tree.device.nbytes + self.tree.host.nbytes
        evictable = evictable_bytes(self.tree)
        freed = self.tree.evict(nbytes)
        assert total - self.tree.device.nbytes - self.tree.host.nbytes == freed
        assert freed >= min(nbytes, evictable)

    @rule(nbytes=st.integers(0, 3000))
    def demote(self, nbytes: int) -> None:
        free = self.tree.device.nbytes - self.tree.device.held
        assert demote(self.tree, nbytes) >= min(nbytes, free)

    @rule()
    def settle(self) -> None:
        self.tree.settle()
        self.settled()

    def settled(self) -> None:
        """Budgets and quotas hold now, but for what is held."""
        assert not self.tree.late
        self.tree.check()

    @precondition(lambda self: any(True for _ in self.tree.nodes()))
    @rule(which=st.integers(0, 999), on=st.booleans())
    def pin(self, which: int, on: bool) -> None:
        nodes = list(self.tree.nodes())
        with contextlib.suppress(PinsFull):
            self.tree.pin(nodes[which % len(nodes)], on)

    @precondition(lambda self: any(True for _ in self.tree.nodes()))
    @rule(which=st.integers(0, 999))
    def forget(self, which: int) -> None:
        nodes = list(self.tree.nodes())
        node = nodes[which % len(nodes)]
        below = list(node.below())
        free = sum(n.nbytes for n in below if not n.holds)
        store, entry = node.home.store, node.entry
        assert self.tree.forget(node) >= free
        assert not set(below) & set(self.tree.nodes())
        assert all(n.holds or not n.nbytes for n in below)
        if store is not None and entry is not None:
            store.lose("snapshot", entry.name)  # type: ignore[attr-defined]

    @rule(letter=st.sampled_from("ABC"), tenant=st.sampled_from("ab"))
    def forget_media(self, letter: str, tenant: str) -> None:
        key, other = KEYS[letter], {"a": "b", "b": "a"}[tenant]
        before = self.tree.bytes_of(other)
        self.tree.forget_media(key, tenant)
        if self.shelf is not None:
            self.shelf.tenant(tenant).delete_media(key)
        assert self.tree.bytes_of(other) == before
        self.forgotten[tenant, key] = next(self.count)
        self.came_back.discard((tenant, key))

    @rule(seconds=st.sampled_from([-500.0, 1.0, 20.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        if self.tree.ttl is not None and seconds < 0:
            return  # what was born later is then younger than new; only `expire` is asked below
        self.clock.now += seconds

    @precondition(lambda self: self.shelf is not None and self.shelf.all)
    @rule(which=st.integers(0, 999))
    def lose(self, which: int) -> None:
        whose, kind, key = list(self.shelf.all)[which % len(self.shelf.all)]  # type: ignore[union-attr]
        self.shelf.tenant(whose).lose(kind, key)  # type: ignore[union-attr]

    @rule(tenant=st.sampled_from(["a", "b", None]), really=st.integers(0, 3))
    def clear(self, tenant: str | None, really: int) -> None:
        if really:
            return  # not too often
        self.tree.clear(tenant)
        for space, whose in self.tenant.items():
            if tenant in (None, whose):
                self.cleared[space] = next(self.count)
                assert not list(self.tree.nodes(whose))

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        for turn in self.turns:
            if not turn.node.gone:
                expect_values(turn.node, turn.whole, False)
        for space, root in self.tree.roots.items():
            assert root.home.tenant == self.tenant[space]
            for node in root.below():
                assert not node.pinned or node.holds
                for span in node.spans:
                    name = self.tenant[space], span.key
                    assert name not in self.forgotten or name in self.came_back
        self.sound_store()

    def sound_store(self) -> None:
        """What was forgotten is not written, and everything lies with its own tenant."""
        for whose, _, key in self.shelf.all if self.shelf is not None else ():
            assert whose in self.tenant.values()
            for image in self.shelf.all[whose, _, key][2].media:  # type: ignore[union-attr]
                assert (whose, image) not in self.forgotten or (whose, image) in self.came_back


TestTiers = TierMachine.TestCase
TestTiers.settings = bounded(50, stateful_step_count=40, phases=[Phase.generate])


@pytest.mark.slow
def test_more_of_the_same() -> None:
    how = bounded(500, stateful_step_count=60, phases=[Phase.generate])
    run_state_machine_as_test(TierMachine, settings=how)


# -- two tiers of memory -----------------------------------------------------------------------


@pytest.mark.parametrize("has_fixed", [False, True])
def test_what_falls_out_of_the_device_comes_back_bit_for_bit(has_fixed: bool) -> None:
    tree = Tree(HUGE, has_fixed, host_budget=HUGE)
    whole = build("11.A2.22.1")
    Turn(tree, whole).run()
    assert found(tree, whole).tier == "memory"
    total = tree.nbytes
    assert demote(tree, HUGE) == total == tree.host.nbytes and tree.nbytes == 0
    assert set(lies(tree).values()) == {HOST}
    tree.check()
    match = found(tree, whole)
    assert (match.length, match.tier, match.logits) == (11, "host", None)
    turn = Turn(tree, whole)
    expect_values(turn.node, whole, has_fixed)
    assert turn.match.logits is not None
    assert set(lies(tree).values()) == {DEVICE} and tree.host.nbytes == 0
    turn.end()
    tree.check()
    assert tree.evictions == 0 and tree.promotions == tree.demotions


def test_a_warm_turn_copies_nothing_before_it_has_ended() -> None:
    tree = Tree(HUGE, True, host_budget=HUGE)
    for letters in ("12.12.12.1", "11.A2.22.1"):
        Turn(tree, build(letters)).run()
    tree.budget = tree.nbytes
    turn = Turn(tree, build("11.A2.22.11"))
    assert turn.match.length == 11
    turn.step()
    assert not turn.ends and tree.nbytes > tree.budget and tree.demotions == 0
    tree.check()
    turn.end()
    assert tree.nbytes <= tree.budget and tree.demotions and not tree.promotions
    tree.check()


def test_a_cold_turn_far_over_the_budget_does_not_wait() -> None:
    tree = Tree(1000, False, host_budget=HUGE)
    Turn(tree, build("12.12.12.12.12.12.1")).run()
    before = tree.demotions
    turn = Turn(tree, build("21.21.21.21.21.21.1"))
    while turn.ends:
        turn.step()
        assert tree.nbytes <= 1000 + 1000 // 8 or tree.device.held == tree.nbytes
    assert tree.demotions > before
    turn.end()


def test_without_a_host_tier_budgets_hold_at_once_and_nothing_is_copied() -> None:
    tree = Tree(400, False)
    Turn(tree, build("12.12.12.1")).run()
    turn = Turn(tree, build("21.21.1"))
    while turn.ends:
        turn.step()
        assert tree.nbytes <= 400 and not tree.late
    turn.end()
    assert tree.evictions and tree.demotions == tree.promotions == 0


def test_a_full_host_lets_go_and_a_node_too_large_for_it_is_not_copied() -> None:
    tree = Tree(0, False, host_budget=200)
    Turn(tree, build("11.22.12.1")).run()
    assert 0 < tree.host.nbytes <= 200 and tree.nbytes == 0
    assert lies(tree)[3, False] == HOST and lies(tree)[9, False] == ""
    tree.check()
    tree = Tree(0, False, host_budget=20)
    Turn(tree, build("11.22.12.1")).run()
    assert tree.demotions == tree.host.nbytes == tree.nbytes == 0


def test_no_eviction_walks_through_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree(HUGE, True, host_budget=2000)
    for number in range(300):
        Turn(tree, build([*f"{number:09b}".replace("0", "2"), ".", "1"])).run()
    tree.budget = tree.nbytes - 2000

    def walk(*_: Any) -> Any:
        raise AssertionError("this would take long with many nodes")

    with monkeypatch.context() as patch:
        patch.setattr(Residency, "nodes", walk)
        patch.setattr(Node, "below", walk)
        for number in range(20):
            Turn(tree, build([*f"{number:09b}".replace("0", "A"), ".", "1"])).run()
            tree.evict(1)
            tree.stats(), tree.held_bytes(), evictable_bytes(tree)
    tree.check()


# -- tenants -----------------------------------------------------------------------------------


def test_a_namespace_belongs_to_one_tenant() -> None:
    shelf = Shelf()
    tree = Tree(HUGE, False, shelf)  # type: ignore[arg-type]
    tree.root("n", "a"), tree.root("m", "b"), tree.root("o")
    assert tree.namespaces("a") == ["n"] and tree.namespaces() == ["o"]
    with pytest.raises(InputError, match="another tenant"):
        tree.root("n", "b")
    assert tree.known("nowhere", build("11")) == Known(0, False)
    assert "nowhere" not in tree.roots
    for space in "nmo":
        Turn(tree, build("11.1"), space).run()
    assert {whose for whose, _, _ in shelf.all} == {"a", "b", ""}
    other = Shelf("own")
    tree.root("p", "c", other)  # type: ignore[arg-type]
    Turn(tree, build("11.1"), "p").run()
    assert {whose for whose, _, _ in other.all} == {"own"}
    tree.clear("a")
    assert tree.namespaces("a") == [] and tree.bytes_of("a") == 0 < tree.bytes_of("b")
    tree.check()
    Turn(tree, build("11.22.1"), "n").run()  # whose it is was not forgotten
    assert tree.namespaces("a") == ["n"] and tree.bytes_of("a") > 0
    assert {whose for whose, _, _ in shelf.all} == {"a", "b", ""}


# -- pins, times to live -----------------------------------------------------------------------


def test_to_forget_and_to_clear_is_stronger_than_a_pin() -> None:
    for undo in (lambda tree, node: tree.forget(node), lambda tree, node: tree.clear()):
        tree = Tree(HUGE, True)
        Turn(tree, build("11.22.1")).run()
        first, last = found(tree, build("11.22.1")).node.chain()[::2]
        tree.pin(last)
        undo(tree, first)
        assert tree.nbytes == 0 and found(tree, build("11.22.1")).length == 0
        assert not first.holds and not last.pinned
        tree.check()


def test_what_a_forgotten_pin_protected_counts_again() -> None:
    tree = Tree(0, True)
    whole = build("11.22.1")
    Turn(tree, whole).run()
    first, *_, last = sorted(tree.nodes(), key=lambda node: node.end)
    tree.pin(last)
    Turn(tree, whole).run()
    assert first.nbytes and last.nbytes
    tree.forget(last)
    tree.check()
    assert not tree.nbytes


def test_what_is_too_old_is_not_matched_and_is_let_go() -> None:
    clock = Clock()
    tree = Tree(HUGE, False, ttl=10.0, clock=clock)
    whole = build("11.22.1")
    Turn(tree, whole).run()
    clock.now += 9
    Turn(tree, build("11.12.1")).run()
    clock.now -= 500  # a clock that jumps back makes nothing older, and nothing crash
    assert found(tree, whole).length == 7
    clock.now += 501
    assert tree.known("n", whole).until == 0  # 11. is too old, and so is what depends on it
    assert found(tree, build("11.12.1")).length == 0
    assert tree.nbytes == 0 and not list(tree.nodes())
    tree.check()


def test_what_gets_too_old_while_it_is_held_goes_when_it_is_released() -> None:
    clock = Clock()
    tree = Tree(HUGE, True, ttl=10.0, clock=clock)
    whole = build("11.22.1")
    Turn(tree, whole).run()
    turn = Turn(tree, build("11.22.2"))
    clock.now += 11
    tree.expire()
    assert not list(tree.nodes()) and tree.held_bytes() == tree.nbytes > 0
    expect_values(turn.node, turn.whole, True)
    tree.check()
    assert turn.step().gone
    turn.end()
    assert tree.nbytes == 0 and not tree.detached
    tree.check()


# -- forgetting --------------------------------------------------------------------------------


def test_an_image_is_forgotten_with_all_that_stands_on_it() -> None:
    tree = Tree(HUGE, True, host_budget=HUGE)
    for space, tenant in (("n", "a"), ("m", "b")):
        tree.root(space, tenant)
        for letters in ("11.A2.22.1", "11.B2.22.1", "11.a2.21.1"):
            Turn(tree, build(letters), space).run()
    demote(tree, tree.nbytes // 2)
    theirs = tree.bytes_of("b")
    lanes = []
    tree.on_forget = lambda everything: lanes.append(everything)
    before = tree.bytes_of("a")
    assert tree.forget_media(KEYS["A"], "a") == before - tree.bytes_of("a") > 0
    assert lanes[-1] and tree.bytes_of("b") == theirs
    for letters, left in (("11.A2.22.1", 3), ("11.a2.21.1", 3), ("11.B2.22.1", 11)):
        assert found(tree, build(letters), "n").length == left
        assert found(tree, build(letters), "m").length == 11
    assert tree.known("n", build("11.A2.22.1")).evicted_from is None  # as if it had never been
    tree.check()


def test_an_image_that_is_in_use_is_out_of_reach_at_once_and_gone_when_released() -> None:
    shelf = Shelf()
    tree = Tree(HUGE, True, shelf)  # type: ignore[arg-type]
    whole = build("11.A2.22.1")
    Turn(tree, whole).run()
    turn = Turn(tree, build("11.A2.22.2"))
    assert turn.match.length == 10
    tree.forget_media(KEYS["A"])
    shelf.delete_media(KEYS["A"])
    left = dict(shelf.all)
    assert found(tree, whole).length == 3
    expect_values(turn.node, turn.whole, True)  # the turn itself goes on
    tree.check()
    node = turn.step()
    assert node.gone and not node.nbytes and tree.is_forgotten(node, turn.whole, turn.match.since)
    tree.check()
    turn.end()
    assert shelf.all == left and not tree.detached and found(tree, whole).length == 3
    assert tree.nbytes == sum(n.nbytes for n in tree.nodes())
    assert Turn(tree, whole).run() and found(tree, whole).length == 11  # a new turn may


# -- what a store is told ----------------------------------------------------------------------


def test_a_store_is_told_what_an_entry_costs_shows_and_stands_on() -> None:
    shelf = Shelf()
    tree = Tree(HUGE, True, shelf, ttl=5.0)  # type: ignore[arg-type]
    Turn(tree, build("11.A2.C1")).run(cost=7.0)
    chain = found(tree, build("11.A2.C1")).node.chain()
    for above, node in itertools.pairwise([None, *chain]):
        images = sorted({span.key for span in node.spans})
        name = node.entry.name
        base = None if above is None else ("snapshot", above.entry.name)
        told = shelf.all["", "snapshot", name][2]
        assert told == About(7.0, base, tuple(images), 5.0)
        told = shelf.all["", "state", name][2]
        assert told == About(7.0, ("snapshot", name), tuple(images), 5.0)
    assert [n.spans[0].key for n in chain if n.spans] == [KEYS["A"], KEYS["C"]]
    # Nothing is there without what it depends on.
    assert [kind for kind, _ in shelf.log] == [*["snapshot", "state"] * len(chain), "state"]


def test_what_the_store_has_lost_is_written_again_before_what_stands_on_it() -> None:
    shelf = Shelf()
    tree = Tree(HUGE, True, shelf)  # type: ignore[arg-type]
    Turn(tree, build("11.22.12.1")).run()
    chain = found(tree, build("11.22.12.1")).node.chain()
    shelf.lose("snapshot", chain[1].entry.name)
    Turn(tree, build("11.22.12.2")).run()
    for node in found(tree, build("11.22.12.2")).node.chain():
        assert shelf.has("snapshot", node.entry.name) and shelf.has("state", node.entry.name)


def test_the_farthest_tier_is_named_and_evicted_means_gone_everywhere() -> None:
    shelf = Shelf(where="remote")
    tree = Tree(HUGE, True, shelf, host_budget=HUGE)  # type: ignore[arg-type]
    whole = build("11.22.1")
    Turn(tree, whole).run()
    name = found(tree, whole).node.entry.name
    assert found(tree, whole).tier == "memory"
    demote(tree, HUGE)
    assert found(tree, whole).tier == "host"
    tree.evict(HUGE)
    assert found(tree, whole).tier == "remote"
    assert tree.known("n", whole) == Known(7, False)
    shelf.lose("snapshot", name)
    assert tree.known("n", whole) == Known(7, False, evicted_from=6)
    assert Turn(tree, whole).run().match.tier == "remote"
    shelf.all.clear()
    tree.evict(HUGE)
    assert tree.known("n", whole) == Known(7, False, evicted_from=0)
    assert Turn(tree, whole).run().match.length == 0


def test_what_another_process_stored_inside_an_edge_keeps_the_order() -> None:
    """Only a look at the store splits an edge in memory that nobody holds."""
    shelf = Shelf()
    tree, other = (Tree(HUGE, False, shelf) for _ in range(2))  # type: ignore[arg-type]
    Turn(tree, build("11.22122212.1")).run()
    theirs = build("11.22112221.1")
    Turn(other, theirs).run()
    nodes = len(list(tree.nodes()))
    assert found(tree, theirs).tier == "disk" and len(list(tree.nodes())) > nodes
    tree.check()
    while tree.nbytes:
        tree.evict(1)
        tree.check()


def test_what_cannot_be_read_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that is there and cannot be read must not be tried for ever."""
    shelf = Shelf()
    whole = build("11.22.1")
    Turn(Tree(HUGE, True, shelf), whole).run()  # type: ignore[arg-type]
    tree = Tree(HUGE, True, shelf)  # type: ignore[arg-type]
    monkeypatch.setattr(Shelf, "get", lambda self, kind, key: None)
    assert Turn(tree, whole).run().match.length == 0
    tree.check()
