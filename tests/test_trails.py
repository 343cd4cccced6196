"""Going on where an earlier prompt stood finds what a search from the beginning finds.

Conversations grow, are edited, branch and are forgotten in every order; each prompt is looked for
with the trails of those before it and once without any.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_paths import END, build, fake_kv, fake_logits, path, short_stretches

from keepsight.prefix.match import Known, Match
from keepsight.prefix.prompt import Prompt, Rule
from keepsight.prefix.trails import Trail
from keepsight.prefix.tree import Tree


@pytest.fixture(autouse=True)
def _short_stretches() -> Iterator[None]:
    with short_stretches():
        yield


RULE = Rule(frozenset({END}), True, kernels=("some",))
DEEDS = ["go on", "go on", "go on", "again", "edit", "branch", "new", "forget", "evict", "evict"]


def looked(tree: Tree, whole: Prompt) -> tuple[Match, Known]:
    return tree.match("n", whole, RULE), tree.known("n", whole)


def without_trails(tree: Tree, whole: Prompt) -> tuple[Match, Known]:
    """The same by a search from the root; the trails stay as they were."""
    kept = tree.ways, tree.seen
    del tree.ways, tree.seen
    try:
        return looked(tree, whole)
    finally:
        tree.ways, tree.seen = kept


def prefill(tree: Tree, whole: Prompt, decoded: str = "") -> Match:
    """As the engine does where any cut is exact, with the answer kept as it was decoded."""
    wanted = without_trails(tree, whole)
    match, known = looked(tree, whole)
    assert (match, known) == wanted, (match, wanted)
    node = match.base
    tree.hold(node)
    assert tree.load(node, whole)
    tokens = path(whole)
    for end in [*whole.ends(RULE, node.end), len(whole)] if not match.whole else ():
        logits = fake_logits(tokens) if end == len(whole) else None
        kv = fake_kv(tokens, node.end, end)
        after = tree.insert(node, whole, end, kv, None, logits)
        tree.release(node)
        node = after
    if decoded:
        longer = Prompt(np.append(whole.ids, build(decoded).ids), whole.media, whole.ranges)
        kv = fake_kv(path(longer), node.end, len(longer))
        tree.release(tree.insert(node, longer, len(longer), kv, None))
    tree.release(node)
    return match


def said(chance: random.Random) -> str:
    return "".join(chance.choice("1122AaBC") for _ in range(chance.randint(1, 4))) + "."


@pytest.mark.parametrize("seed", range(12))
def test_a_search_goes_on_where_an_earlier_prompt_stood(seed: int) -> None:
    chance = random.Random(seed)
    tree = Tree(1 << 20, False)
    talks = [said(chance)]
    for _ in range(60):
        spot = chance.randrange(len(talks))
        deed = chance.choice(DEEDS)
        if deed in ("go on", "branch"):
            longer = talks[spot] + said(chance)
            if deed == "go on":
                talks[spot] = longer
            else:
                talks.append(longer)
                spot = len(talks) - 1
        elif deed == "edit":
            kept = chance.randrange(len(talks[spot]))
            talks[spot] = talks[spot][:kept] + said(chance)
        elif deed == "new":
            talks.append(said(chance))
            spot = len(talks) - 1
        elif deed == "forget":
            nodes = list(tree.nodes())
            if nodes and chance.random() < 0.2:
                tree.forget(chance.choice(nodes))
        elif deed == "evict":
            tree.evict(chance.randint(1, 800))
        prefill(tree, build(talks[spot]), "12"[: chance.randint(0, 2)])
        tree.check()


def test_what_was_put_beside_a_way_is_found() -> None:
    tree = Tree(1 << 20, False)
    prefill(tree, build("11.22."))
    prefill(tree, build("11.22.12."))  # it goes through a node that ends at 3
    longer = build("11.22.12.21")
    assert len(tree.ways.begin(tree.root("n"), longer, lambda node: True).nodes) == 2
    node, tokens = tree.root("n"), path(longer)
    tree.hold(node)
    for end in (5, 11):  # what was decoded ends anywhere
        after = tree.insert(node, longer, end, fake_kv(tokens, node.end, end), None)
        tree.release(node)
        node = after
    tree.release(node)
    assert looked(tree, longer)[0].node.start == 5
    assert looked(tree, longer) == without_trails(tree, longer)


def test_two_prompts_share_what_their_paths_share() -> None:
    def shared(one: str, two: str) -> int:
        trails = [Trail(Tree(1, False).root("n"), p.ids, p.spans) for p in map(build, (one, two))]
        found = trails[0].shares(trails[1], 0)
        assert found == trails[1].shares(trails[0], 0)
        return found

    assert shared("11.22.", "11.22.1") == 6
    assert shared("11A2", "11B2") == 2 == shared("11A2", "1155")
    assert shared("11A2", "11A3") == 4
    assert shared("1C2", "1C2") == 6
    assert shared("2", "1") == 0


def test_nothing_of_a_deleted_conversation_stays_in_trails() -> None:
    tree: Any = Tree(1 << 20, False)
    prefill(tree, build("11.22."))
    assert len(tree.ways) == len(tree.seen) == 1
    tree.clear()
    assert len(tree.ways) == len(tree.seen) == 0
