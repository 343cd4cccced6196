"""Prompts spelled with letters, and tensors whose values say which path they stand for.

Reuse under a wrong path then shows as a wrong value. Nothing here needs a model.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from keepsight.media.medium import Medium
from keepsight.prefix import prompt
from keepsight.prefix.match import Match
from keepsight.prefix.node import LOGITS, Node
from keepsight.prefix.prompt import Prompt, Rule
from keepsight.prefix.tree import Tree
from keepsight.system import digests

END, PAD = 9, 5
RULE = Rule(frozenset({END}), True)
# Two pictures of one size, one of them also encoded by somebody else, and one with two ranges.
MEDIA = {"A": ("a", "ours", [2]), "B": ("b", "ours", [2]), "a": ("a", "theirs", [2])}
MEDIA |= {"C": ("c", "ours", [1, 2])}
Token = tuple[int, str | None, int]


def build(pieces: str | list[str]) -> Prompt:
    """A prompt from letters: digits and `.` (a turn's end) are text, the others media."""
    ids: list[int] = []
    media, ranges = [], []
    for piece in pieces:
        if piece not in MEDIA:
            ids.append(END if piece == "." else int(piece))
            continue
        what, maker, lengths = MEDIA[piece]
        spans = []
        for i, length in enumerate(lengths):
            ids += [4] if i else []
            spans.append((len(ids), len(ids) + length))
            ids += [PAD] * length
        names = digests.digest("identity", what), digests.digest("feature", what, maker)
        media.append(fake_medium(*names, sum(lengths)))
        ranges.append(tuple(spans))
    return Prompt(np.array(ids, dtype=np.int64), tuple(media), tuple(ranges))


def fake_medium(identity: str, feature_id: str, tokens: int) -> Medium:
    """A medium that nobody will ask for features."""
    nothing: Any = None
    return Medium(identity, identity, feature_id, {}, (tokens,), None, nothing)


def path(whole: Prompt) -> tuple[Token, ...]:
    """The path token by token: id, feature id, row of the feature."""
    tokens: list[Token] = [(int(i), None, 0) for i in whole.ids]
    for medium, ranges in zip(whole.media, whole.ranges, strict=True):
        rows = itertools.count()
        for a, b in ranges:
            for here in range(a, b):
                tokens[here] = (tokens[here][0], medium.feature_id, next(rows))
    return tuple(tokens)


def value(kind: str, tokens: tuple[Token, ...]) -> float:
    """A number for a path: nobody else's."""
    return float(zlib.crc32(repr((kind, tokens)).encode()) % 9_999_991)


def fake_kv(tokens: tuple[Token, ...], start: int, end: int) -> dict[str, torch.Tensor]:
    rows = [value("kv", tokens[: i + 1]) for i in range(start, end)]
    return {"kv": torch.tensor(rows, dtype=torch.float64).reshape(1, 1, -1, 1).repeat(2, 2, 1, 1)}


def fake_fixed(tokens: tuple[Token, ...], end: int) -> dict[str, torch.Tensor]:
    return {"0.conv.0": torch.full((5,), value("fixed", tokens[:end]), dtype=torch.float64)}


def fake_logits(tokens: tuple[Token, ...]) -> torch.Tensor:
    return torch.full((3,), value("logits", tokens), dtype=torch.float64)


@contextmanager
def short_stretches() -> Iterator[None]:
    """Snapshots of two to six tokens."""
    before = prompt.APART, prompt.LONGEST
    prompt.APART, prompt.LONGEST = 2, 6
    yield
    prompt.APART, prompt.LONGEST = before


def rule_of(tree: Tree) -> Rule:
    return dataclasses.replace(RULE, states=tree.has_fixed)


def found(tree: Tree, whole: Prompt, space: str = "n") -> Match:
    return tree.match(space, whole, rule_of(tree))


def begun(tree: Tree, whole: Prompt, space: str = "n") -> tuple[Match, Node]:
    """The match of a prompt, held, loaded and compared with what it should be."""
    rule = rule_of(tree)
    match = found(tree, whole, space)
    while True:
        node = tree.hold(match)
        loaded = tree.load(node, whole)
        if loaded and not (match.whole and match.logits is None):
            break
        tree.release(node)
        match = match.but_the_last(whole, rule) if loaded else found(tree, whole, space)
    assert node.end == match.length
    expect_values(node, whole, tree.has_fixed)
    return match, node


def ends_of(tree: Tree, whole: Prompt, match: Match) -> list[int]:
    """Where the snapshots behind a match end."""
    return [] if match.whole else [*whole.ends(rule_of(tree), match.length), len(whole)]


class Turn:
    """A turn as the engine does it, that others can come between: begun, taken on chunk by chunk,
    ended."""

    def __init__(self, tree: Tree, whole: Prompt, space: str = "n") -> None:
        self.tree, self.whole, self.space = tree, whole, space
        self.match, self.node = begun(tree, whole, space)
        self.ends = ends_of(tree, whole, self.match)

    def step(self, cost: float = 0.0) -> Node:
        end = self.ends.pop(0)
        tokens = path(self.whole)
        logits = fake_logits(tokens) if end == len(self.whole) else None
        kv, fixed = fake_kv(tokens, self.node.end, end), fake_fixed(tokens, end)
        after = self.tree.insert(
            self.node, self.whole, end, kv, fixed, logits, cost=cost, since=self.match.since
        )
        self.tree.release(self.node)
        self.node = after
        return after

    def end(self) -> Turn:
        self.tree.release(self.node)
        self.tree.settle()
        return self

    def run(self, steps: int | None = None, cost: float = 0.0) -> Turn:
        """To its end, or until the client hangs up."""
        for _ in self.ends[:steps]:
            self.step(cost)
        return self.end()


def prefill(tree: Tree, whole: Prompt, space: str = "n", steps: int | None = None) -> Match:
    """What a turn found that was run to its end, or for so many steps."""
    return Turn(tree, whole, space).run(steps).match


def is_whole(node: Node) -> bool:
    """Whether it ends a prompt, and knows what comes next."""
    return LOGITS in node.ends


def expect_values(node: Node, whole: Prompt, fixed: bool) -> None:
    """Everything that a reuse would take must be that of this very path."""
    tokens = path(whole)
    for n in node.chain():
        assert n.kv is not None
        assert torch.equal(n.kv["kv"], fake_kv(tokens, n.start, n.end)["kv"])
    if fixed and node.parent is not None:
        assert node.fixed is not None and set(node.fixed) == {"0.conv.0"}
        assert torch.equal(node.fixed["0.conv.0"], fake_fixed(tokens, node.end)["0.conv.0"])
    if node.logits is not None and node.end == len(whole):
        assert torch.equal(node.logits, fake_logits(tokens))


def spliced(whole: Prompt, keep: int, more: Prompt) -> Prompt:
    """The first `keep` tokens (no medium torn), then others."""
    while any(r[0][0] < keep < r[-1][1] for r in whole.ranges):
        keep += 1
    keep = min(keep, len(whole))
    kept = sum(ranges[-1][1] <= keep for ranges in whole.ranges)
    moved = tuple(tuple((a + keep, b + keep) for a, b in ranges) for ranges in more.ranges)
    return Prompt(
        np.concatenate([whole.ids[:keep], more.ids]),
        whole.media[:kept] + more.media,
        whole.ranges[:kept] + moved,
    )


def evictable_bytes(tree: Tree) -> int:
    """Bytes of memory that nothing holds."""
    return tree.device.nbytes + tree.host.nbytes - tree.held_bytes()


def demote(tree: Tree, nbytes: int) -> int:
    """Move at least so many bytes off the device if that many are evictable; the bytes moved."""
    start = tree.device.nbytes
    while start - tree.device.nbytes < nbytes and (node := tree.device.least()) is not None:
        (tree._demote if tree.host_budget else tree._drop)(node)
    tree.settle()
    return start - tree.device.nbytes
