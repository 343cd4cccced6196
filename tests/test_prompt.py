"""Boundaries and paths: law 2 and law 4 rest on them.

A boundary depends on nothing behind it. The reference finds boundaries by walking token by token
and never looking ahead, so it could not do otherwise; ours must agree with it everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hostile import bounded
from hypothesis import given
from hypothesis import strategies as st

from keepsight import digests
from keepsight.media.medium import Medium
from keepsight.prefix import prompt
from keepsight.prefix.prompt import Prompt, Rule, Span, common, shift

END, PAD = 9, 5
SHORT_RUN = 12


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "RUN", SHORT_RUN)


def medium(name: str, identity: str | None = None, tokens: int = 4) -> Medium:
    """A medium that nobody will ask for features."""
    feature_id = digests.digest("feature", name)
    what = digests.digest("identity", identity or name)
    return Medium(name, what, feature_id, {}, (tokens,), None, lambda: None)  # type: ignore[arg-type]


Piece = tuple[str, Any]


def build(pieces: list[Piece]) -> Prompt:
    """A prompt of texts and media. A medium is (name, ranges); between its ranges stands a 4."""
    ids: list[int] = []
    media, ranges = [], []
    for name, what in pieces:
        if name == "text":
            ids += what
            continue
        spans = []
        for i, length in enumerate(what):
            ids += [4] if i else []
            spans.append((len(ids), len(ids) + length))
            # A turn-end id inside a medium means nothing; only one of them holds any.
            ids += [END if (name, k) == ("C", 1) else PAD for k in range(length)]
        media.append(medium(name))
        ranges.append(tuple(spans))
    return Prompt(np.array(ids, dtype=np.int64), tuple(media), tuple(ranges))


def cut(whole: Prompt, end: int) -> Prompt | None:
    """The prompt up to `end`, or None where that would tear a medium apart."""
    if any(spans[0][0] < end < spans[-1][1] for spans in whole.ranges):
        return None
    kept = [j for j, spans in enumerate(whole.ranges) if spans[-1][1] <= end]
    return Prompt(
        whole.ids[:end],
        tuple(whole.media[j] for j in kept),
        tuple(whole.ranges[j] for j in kept),
    )


text = st.tuples(
    st.just("text"), st.lists(st.sampled_from([1, 2, PAD, END]), min_size=1, max_size=9)
)
image = st.tuples(st.sampled_from("ABC"), st.lists(st.integers(1, 20), min_size=1, max_size=3))
prompts = st.lists(text | image, min_size=1, max_size=8).map(build)
rules = st.builds(Rule, st.integers(1, 30), st.just(frozenset({END})), st.booleans())


def walked(whole: Prompt, rule: Rule) -> Iterator[int]:
    """The boundary rule as law 2 words it, token by token, without looking ahead."""
    last = 0
    ends = {spans[-1][1] for spans in whole.ranges}
    for here in range(1, len(whole)):
        inside = any(a < here < b for spans in whole.ranges for a, b in spans)
        a_turn = whole.ids[here - 1] in rule.turn_ends and whole.medium_at(here - 1) is None
        wanted = (here in ends or a_turn) and here - last >= rule.grain
        overdue = here - last >= SHORT_RUN and not (inside and rule.whole_media)
        if wanted or overdue:
            yield here
            last = here


# -- boundaries --------------------------------------------------------------------------------


@bounded(300)
@given(prompts, rules)
def test_boundaries_are_those_of_the_walk(whole: Prompt, rule: Rule) -> None:
    assert whole.boundaries(rule) == list(walked(whole, rule))


@bounded(150)
@given(prompts, rules)
def test_boundaries_depend_on_nothing_behind_them(whole: Prompt, rule: Rule) -> None:
    """For every cut: the prefix is cut as the whole is, strictly before the prefix's end."""
    boundaries = whole.boundaries(rule)
    for end in range(1, len(whole)):
        prefix = cut(whole, end)
        if prefix is not None:
            assert prefix.boundaries(rule) == [b for b in boundaries if b < end]


@bounded(100)
@given(prompts, prompts, rules)
def test_what_follows_changes_no_boundary(one: Prompt, two: Prompt, rule: Rule) -> None:
    """The same with another continuation: swapped pictures, edited turns."""
    moved = tuple(tuple((a + len(one), b + len(one)) for a, b in spans) for spans in two.ranges)
    longer = Prompt(np.concatenate([one.ids, two.ids]), one.media + two.media, one.ranges + moved)
    mine = longer.boundaries(rule)
    assert [b for b in mine if b < len(one)] == one.boundaries(rule)


@bounded(150)
@given(prompts, rules)
def test_the_tail_of_boundaries_is_found_from_any_of_them(whole: Prompt, rule: Rule) -> None:
    boundaries = whole.boundaries(rule)
    for spot, start in enumerate(boundaries):
        assert whole.boundaries(rule, start) == boundaries[spot + 1 :]


@bounded(150)
@given(prompts, rules)
def test_boundaries_keep_the_grain_and_tear_nothing(whole: Prompt, rule: Rule) -> None:
    last, ends = 0, {spans[-1][1] for spans in whole.ranges}
    for here in whole.boundaries(rule):
        assert 0 < here < len(whole)
        assert here - last >= min(rule.grain, SHORT_RUN)
        torn = any(a < here < b for spans in whole.ranges for a, b in spans)
        assert not (torn and rule.whole_media)
        if torn:
            assert here - last == SHORT_RUN
        if here - last > SHORT_RUN:  # moved behind the range it fell into
            assert rule.whole_media and any(here == b for r in whole.ranges for _, b in r)
        if here not in ends and whole.ids[here - 1] != END:
            assert here - last >= SHORT_RUN
        last = here
    if not rule.whole_media:
        assert len(whole) - last <= SHORT_RUN


def test_a_medium_with_several_ranges_is_cut_behind_its_last() -> None:
    whole = build([("text", [1]), ("A", [2, 2, 2]), ("text", [1, 1])])
    assert whole.boundaries(Rule(1, frozenset(), True)) == [1 + 2 + 1 + 2 + 1 + 2]


def test_turn_ends_count_in_text_only() -> None:
    whole = build([("text", [1, END, 1]), ("A", [4]), ("text", [END, 1])])
    assert whole.boundaries(Rule(1, frozenset({END}), True)) == [2, 7, 8]
    assert whole.boundaries(Rule(3, frozenset({END}), True)) == [7]
    assert whole.boundaries(Rule(9, frozenset({END}), True)) == []


def test_a_long_run_is_cut_every_2048_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rule = Rule(256, frozenset({END}), True)
    for length, expected in ((2048, []), (2049, [2048]), (6000, [2048, 4096])):
        assert build([("text", [1] * length)]).boundaries(rule) == expected
    whole = build([("text", [1] * 2000), ("A", [100]), ("text", [1] * 3000)])
    assert whole.boundaries(rule) == [2100, 4148]
    whole = build([("text", [1] * 2000), ("A", [5000]), ("text", [1] * 3000)])
    assert whole.boundaries(rule) == [7000, 9048]
    assert whole.boundaries(Rule(256, frozenset(), False)) == [2048, 4096, 6144, 7000, 9048]


def test_the_rule_is_part_of_the_namespace() -> None:
    one = Rule(16, frozenset({1, 2}), True)
    others = [Rule(17, one.turn_ends, True), Rule(16, frozenset({1}), True)]
    others.append(Rule(16, one.turn_ends, False))
    assert Rule(16, frozenset({2, 1}), True).record() == one.record()
    assert all(other.record() != one.record() for other in others)


# -- paths -------------------------------------------------------------------------------------

Token = tuple[int, str | None, int]


def path(whole: Prompt) -> list[Token]:
    """The path token by token: id, feature id, row of the feature."""
    tokens: list[Token] = [(int(i), None, 0) for i in whole.ids]
    for item, ranges in zip(whole.media, whole.ranges, strict=True):
        row = 0
        for a, b in ranges:
            for here in range(a, b):
                tokens[here] = (tokens[here][0], item.feature_id, row)
                row += 1
    return tokens


def first_difference(one: list[Token], two: list[Token]) -> int:
    pairs = enumerate(zip(one, two, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(two)))


@bounded(300)
@given(prompts, prompts, st.data())
def test_common_is_the_first_difference(one: Prompt, two: Prompt, data: st.DataObject) -> None:
    if data.draw(st.booleans(), "share a beginning"):
        a = cut(one, data.draw(st.integers(0, len(one)), "where"))
        two = two if a is None else joined(a, two)
    # From anywhere on, as the tree does it: a stretch may begin in the middle of a medium.
    starts = [data.draw(st.sampled_from([0, 0, *range(len(p))]), "from") for p in (one, two)]
    (ids, spans), (other_ids, other_spans) = map(stretch, (one, two), starts)
    found = common(ids, spans, other_ids, other_spans)
    assert found == first_difference(path(one)[starts[0] :], path(two)[starts[1] :])
    assert found == common(other_ids, other_spans, ids, spans)


def stretch(whole: Prompt, start: int) -> tuple[np.ndarray, tuple[Span, ...]]:
    return whole.ids[start:], shift(whole.clip(start, len(whole)), -start)


def joined(one: Prompt, two: Prompt) -> Prompt:
    moved = tuple(tuple((a + len(one), b + len(one)) for a, b in spans) for spans in two.ranges)
    return Prompt(np.concatenate([one.ids, two.ids]), one.media + two.media, one.ranges + moved)


@bounded(150)
@given(prompts, st.data())
def test_clipped_spans_say_what_the_path_says(whole: Prompt, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    found: dict[int, tuple[str, int]] = {}
    for span in shift(whole.clip(start, end), -start):
        assert 0 <= span.start < span.end <= end - start
        for here in range(span.start, span.end):
            assert here not in found
            found[here] = (span.feature_id, span.offset + here - span.start)
    tokens = path(whole)[start:end]
    assert found == {i: (f, row) for i, (_, f, row) in enumerate(tokens) if f is not None}


@bounded(100)
@given(prompts, st.data())
def test_pieces_tile_the_prompt(whole: Prompt, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    cursor = start
    for a, b, j in whole.pieces(start, end):
        assert a == cursor < b
        assert all(whole.medium_at(here) == j for here in range(a, b))
        assert (whole.types[a:b] == (j is not None)).all()
        cursor = b
    assert cursor == end


@bounded(150)
@given(prompts, prompts, rules)
def test_one_digest_is_one_path(one: Prompt, two: Prompt, rule: Rule) -> None:
    """Along their boundaries two prompts share names exactly as far as they share paths."""
    for start, end in ((0, min(len(one), len(two))), (1, 2)):
        if end > min(len(one), len(two)):
            continue
        same = path(one)[start:end] == path(two)[start:end]
        names = [p.segment_digest("parent", start, end) for p in (one, two)]
        assert (names[0] == names[1]) == same
        assert names[0] != one.segment_digest("other parent", start, end)
        assert names[0] != one.segment_digest("parent", start, end, "terminal")


def test_what_a_span_is_compared_by() -> None:
    span = Span(0, 4, "f", 0, "identity", 0)
    assert span == Span(0, 4, "f", 0, "another", 7)
    for other in (Span(1, 4, "f", 0, "", 0), Span(0, 3, "f", 0, "", 0), Span(0, 4, "g", 0, "", 0)):
        assert span != other
    assert span != Span(0, 4, "f", 1, "identity", 0)
    assert span.clip(1, 3) == Span(1, 3, "f", 1, "", 0)
    assert span.plain() == [0, 4, "f", 0, "identity", 0]


def test_the_row_of_the_feature_is_part_of_the_path() -> None:
    """The same id of the same picture, but not the same row of it."""
    ids, one = np.full(6, PAD), medium("A")
    early, late = (Prompt(ids, (one,), (((start, start + 4),),)) for start in (0, 1))
    assert early.segment_digest("", 2, 3) != late.segment_digest("", 2, 3)
    assert common(early.ids, early.spans, late.ids, late.spans) == 0


def test_same_size_pictures_never_share_a_path() -> None:
    """The ids are equal; only the feature ids tell the two apart."""
    one, two = (build([("text", [1, 2]), (name, [4]), ("text", [1])]) for name in "AB")
    assert (one.ids == two.ids).all()
    assert common(one.ids, one.spans, two.ids, two.spans) == 2
    assert one.segment_digest("", 0, 6) != two.segment_digest("", 0, 6)
    assert one.segment_digest("", 0, 2) == two.segment_digest("", 0, 2)
