"""Where snapshots end, and paths: law 2 and law 4 rest on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile import bounded

from keepsight.media.medium import Medium
from keepsight.prefix import prompt
from keepsight.prefix.prompt import Prompt, Rule, Span, common, shift
from keepsight.system import digests

END, PAD = 9, 5
APART, LONGEST = 4, 12


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "APART", APART)
    monkeypatch.setattr(prompt, "LONGEST", LONGEST)


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
rules = st.builds(Rule, st.just(frozenset({END})), st.booleans())


# -- where snapshots end -------------------------------------------------------------------------


@bounded(150)
@given(prompts, rules, st.data())
def test_snapshots_end_behind_turns_and_media_and_are_never_long(
    whole: Prompt, rule: Rule, data: st.DataObject
) -> None:
    start = last = data.draw(st.integers(0, len(whole) - 1))
    media = {spans[-1][1] for spans in whole.ranges}
    for here in [*whole.ends(rule, start), len(whole)]:
        assert last < here <= len(whole)
        torn = any(a < here < b for spans in whole.ranges for a, b in spans)
        assert not (torn and rule.whole_media)
        turn = whole.ids[here - 1] == END and whole.medium_at(here - 1) is None
        if here < len(whole):
            assert here - last >= LONGEST or ((turn or here in media) and here - last >= APART)
        if here - last > LONGEST:  # moved behind the range it fell into
            assert rule.whole_media and any(a < here for r in whole.ranges for a, _ in r)
        last = here


@bounded(100)
@given(prompts, rules)
def test_ends_are_found_from_any_of_them(whole: Prompt, rule: Rule) -> None:
    """A turn that goes on from a snapshot ends its own where one from the beginning would."""
    ends = list(whole.ends(rule))
    for spot, start in enumerate(ends):
        assert list(whole.ends(rule, start)) == ends[spot + 1 :]


def test_a_snapshot_behind_a_medium_with_several_ranges_ends_behind_its_last() -> None:
    whole = build([("text", [1]), ("A", [2, 2, 2]), ("text", [1, 1])])
    assert list(whole.ends(Rule())) == [1 + 2 + 1 + 2 + 1 + 2]


def test_turn_ends_count_in_text_only() -> None:
    whole = build([("text", [1, 1, 1, END, 1]), ("C", [4]), ("text", [1, 1, 1, END, 1])])
    assert list(whole.ends(Rule(frozenset({END})))) == [4, 9, 13]
    assert list(whole.ends(Rule())) == [9]


def test_a_long_run_is_cut_every_512_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    whole = build([("text", [1] * 500), ("A", [100]), ("text", [1] * 1100)])
    assert list(whole.ends(Rule(whole_media=True))) == [600, 1112, 1624]
    assert list(whole.ends(Rule())) == [512, 600, 1112, 1624]
    assert list(build([("text", [1] * 512)]).ends(Rule())) == []


def test_exactness_and_kernels_are_part_of_the_namespace_and_turn_ends_are_not() -> None:
    one = Rule(frozenset({1}), kernels=("a",))
    assert Rule(frozenset({2}), kernels=("a",)).record() == one.record()
    for other in (Rule(frozenset({1})), Rule(frozenset({1}), kernels=("a", "b"))):
        assert other.record() != one.record()


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
@given(prompts, prompts)
def test_one_digest_is_one_path(one: Prompt, two: Prompt) -> None:
    """Two prompts share names exactly as far as they share paths."""
    for start, end in ((0, min(len(one), len(two))), (1, 2)):
        if end > min(len(one), len(two)):
            continue
        same = path(one)[start:end] == path(two)[start:end]
        names = [p.segment_digest("parent", start, end) for p in (one, two)]
        assert (names[0] == names[1]) == same
        assert names[0] != one.segment_digest("other parent", start, end)


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
