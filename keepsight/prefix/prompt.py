"""A prompt as the tree sees it: ids, media at known ranges, and a path.

In a path a text token is its id; a token of a medium is (feature id, offset). Two images of one
size have equal placeholder ids, but never equal paths. Snapshots end behind media and turns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from keepsight.kinds import Grid, Record
from keepsight.media.medium import Medium
from keepsight.system import digests

PASS = 2048  # most tokens of a pass
APART, LONGEST = 16, 512  # tokens of a snapshot
Range = tuple[int, int]
TYPES = {"image": 1, "video": 2, "audio": 3}


@dataclass(frozen=True)
class Span:
    """One range of a medium in a path, or of one step of a video. `offset` is its row at `start`,
    `row` is the row of the medium."""

    start: int
    end: int
    feature_id: str
    offset: int
    identity: str = field(compare=False)
    medium: int = field(compare=False)
    key: str = field(compare=False, default="")  # the image key, however its features were made
    row: int = field(compare=False, default=0)

    def clip(self, start: int, end: int) -> Span:
        a, b = max(self.start, start), min(self.end, end)
        by = a - self.start
        return replace(self, start=a, end=b, offset=self.offset + by, row=self.row + by)

    def all(self) -> tuple[int, int, str, int, str, int, str]:
        what = (self.feature_id, self.offset, self.identity, self.medium, self.key)
        return (self.start, self.end, *what)

    def plain(self) -> list[int | str]:
        return [self.start, self.end, self.feature_id, self.offset, self.identity, self.medium]


@dataclass(frozen=True)
class Rule:
    """Where prompts of one model can be cut, and where snapshots of them end."""

    turn_ends: frozenset[int] = frozenset()
    whole_media: bool = False  # never cut inside a range whose tokens attend to each other
    reuse: str = "prefix"  # see families/base.py
    media_ends: frozenset[int] = frozenset()
    states: bool = False  # then prompts continue only from captured fixed-size states
    kernels: tuple[str, ...] = ()  # those that give equal bits for any cut; empty: to rounding

    def record(self) -> list[object]:
        """What of the rule is part of the namespace."""
        return ["bits", *self.kernels] if self.kernels else ["rounding", self.whole_media]


@dataclass(frozen=True)
class Prompt:
    """Ids and media. `ranges[j]` are the half-open token ranges of medium j."""

    ids: np.ndarray
    media: tuple[Medium, ...] = ()
    ranges: tuple[tuple[Range, ...], ...] = ()
    text: str | None = None
    extra: Record = field(default_factory=dict)

    @classmethod
    def nothing(cls) -> Prompt:
        return cls(np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """All ranges of all media, in order."""
        spans: list[Span] = []
        for j, (medium, ranges) in enumerate(zip(self.media, self.ranges, strict=True)):
            row = 0
            for start, end in ranges:
                spans += _spans_of(medium, j, start, end, row)
                row += end - start
        return tuple(sorted(spans, key=lambda span: span.start))

    @classmethod
    def of_path(cls, start: int, ids: np.ndarray, spans: tuple[Span, ...]) -> Prompt:
        """A prompt of which only a stretch is known, as in the tree; what is before is blank."""
        prompt = cls(np.concatenate([np.zeros(start, dtype=np.int64), ids]))
        vars(prompt)["spans"] = spans
        return prompt

    @cached_property
    def code(self) -> bytes:
        """The ids in memory, eight bytes each."""
        return self.ids.astype(np.int64).tobytes()

    def key(self, at: int) -> tuple[object, ...]:
        """What a token is in a path: its id, or a row of features."""
        token, span = self.code[8 * at : 8 * at + 8], self._around(at)
        if span is None:
            return (token,)
        return token, span.feature_id, span.offset + at - span.start

    @cached_property
    def _ends(self) -> list[int]:
        """The end of each span, in order: they do not overlap."""
        return [span.end for span in self.spans]

    @cached_property
    def types(self) -> np.ndarray:
        """The type of each token: 0 text, 1 image, 2 video, 3 audio."""
        types = np.zeros(len(self.ids), dtype=np.int8)
        for span in self.spans:
            types[span.start : span.end] = TYPES[self.media[span.medium].modality]
        return types

    @property
    def grids(self) -> list[Grid]:
        """The processor's data about each medium besides its pixels."""
        return [medium.grid for medium in self.media]

    def clip(self, start: int, end: int) -> tuple[Span, ...]:
        """The parts of media between two positions."""
        place, found = bisect_right(self._ends, start), []
        for span in self.spans[place : place + end - start]:
            if span.start >= end:
                break
            if max(span.start, start) < min(span.end, end):
                inside = start <= span.start and span.end <= end
                found.append(span if inside else span.clip(start, end))
        return tuple(found)

    def shown(self, start: int) -> list[Medium]:
        """The media that appear after a position."""
        numbers = {span.medium: None for span in self.clip(start, len(self))}
        return [self.media[number] for number in numbers]

    def segment_digest(self, parent: str, start: int, end: int) -> str:
        """The digest of the path up to `end`, given the digest up to `start`."""
        spans = [
            [s.start - start, s.end - start, s.feature_id, s.offset] for s in self.clip(start, end)
        ]
        return digests.digest("segment", parent, start, self.ids[start:end], spans)

    def events(self, rule: Rule) -> list[int]:
        """After the last range of each medium, and after the end of each turn.

        A turn-end id inside a medium means nothing.
        """
        marks = (rule.turn_ends, rule.media_ends)
        if marks not in self._events:
            ends = _places(self.ids, rule.turn_ends)
            ends = ends[self.types[ends] == 0] + 1
            media = [self._behind(ranges[-1][1], rule) for ranges in self.ranges]
            # Not np.unique: it imports masked arrays at first use, which would delay a first turn.
            self._events[marks] = sorted({*ends.tolist(), *media})
        return self._events[marks]

    @cached_property
    def _events(self) -> dict[tuple[frozenset[int], frozenset[int]], list[int]]:
        return {}

    def ends(self, rule: Rule, start: int = 0) -> Iterator[int]:
        """The places after `start` and before the prompt's end where snapshots end."""
        last, first = start, self.first_cut(rule)
        events = self.events(rule)
        for place in range(bisect_right(events, start), len(events) + 1):
            event = events[place] if place < len(events) else len(self.ids)
            if event < first:
                continue
            while event - last > LONGEST:
                cut = self.move(last + LONGEST, rule)
                if cut >= event:
                    break
                yield cut
                last = cut
            if event < len(self.ids) and event - last >= APART:
                yield event
                last = event

    def first_cut(self, rule: Rule) -> int:
        """The first place to continue from: behind everything that a later token can change."""
        if rule.reuse == "whole prompt":
            return len(self.ids)
        if rule.reuse == "same media":
            ends = (self._behind(ranges[-1][1], rule) for ranges in self.ranges)
            return max(ends, default=0)
        return 0

    def _behind(self, end: int, rule: Rule) -> int:
        """The position after the id that closes the medium ending here, if there is one."""
        if rule.media_ends not in self._closing:
            self._closing[rule.media_ends] = _places(self.ids, rule.media_ends).tolist()
        closing = self._closing[rule.media_ends]
        place = bisect_left(closing, end)
        return closing[place] + 1 if place < len(closing) else end

    @cached_property
    def _closing(self) -> dict[frozenset[int], list[int]]:
        return {}

    def move(self, cut: int, rule: Rule) -> int:
        """Move a cut behind the range that contains it, if ranges must stay whole."""
        cut = max(cut, self.first_cut(rule))
        span = self._around(cut) if rule.whole_media else None
        return cut if span is None or span.start == cut else span.end

    def before_medium(self, cut: int, rule: Rule) -> int:
        """Move a cut before the range that contains it, if ranges must stay whole."""
        span = self._around(cut) if rule.whole_media else None
        return cut if span is None else span.start

    def medium_at(self, token: int) -> int | None:
        span = self._around(token)
        return None if span is None else span.medium

    def _around(self, token: int) -> Span | None:
        """The range that a token belongs to."""
        place = bisect_right(self._ends, token)
        span = self.spans[place] if place < len(self.spans) else None
        return span if span is not None and span.start <= token else None

    def pieces(self, start: int, end: int) -> list[tuple[int, int, int | None]]:
        """(from, to, medium or None) for each stretch of text or medium between two positions."""
        found: list[tuple[int, int, int | None]] = []
        cursor = start
        for span in self.clip(start, end):
            if found and cursor == span.start and found[-1][2] == span.medium:
                begin = found.pop()[0]  # the steps of a video are one stretch
            else:
                begin = span.start
                if begin > cursor:
                    found.append((cursor, begin, None))
            found.append((begin, span.end, span.medium))
            cursor = span.end
        if cursor < end:
            found.append((cursor, end, None))
        return found


def _spans_of(medium: Medium, j: int, start: int, end: int, row: int) -> Iterator[Span]:
    """The spans of one range of a medium, starting at a row: one, or one per step."""
    if not medium.steps:
        yield Span(start, end, medium.feature_id, row, medium.identity, j, medium.key, row)
        return
    size = medium.tokens // len(medium.steps)
    while start < end:
        number, offset = divmod(row, size)
        step, stop = medium.steps[number], min(end, start + size - offset)
        yield Span(start, stop, step.path, offset, step.identity, j, medium.key, row)
        start, row = stop, row + stop - start


def _places(ids: np.ndarray, wanted: frozenset[int]) -> np.ndarray:
    found = np.zeros(len(ids), dtype=bool)
    for one in wanted:
        found |= ids == one
    return np.flatnonzero(found)


def common(
    ids_a: np.ndarray, spans_a: Sequence[Span], ids_b: np.ndarray, spans_b: Sequence[Span]
) -> int:
    """How many leading tokens two segments share; spans are relative to the segments."""
    n = min(len(ids_a), len(ids_b))
    different = np.flatnonzero(ids_a[:n] != ids_b[:n])
    first = int(different[0]) if len(different) else n
    return min(first, _spans_agree(spans_a, spans_b, first), _spans_agree(spans_b, spans_a, first))


def _spans_agree(spans: Sequence[Span], others: Sequence[Span], limit: int) -> int:
    """The first position at which `spans` differ from `others`, or `limit`."""
    for span in spans:
        if span.start >= limit:
            break
        twin = next((o for o in others if o.start <= span.start < o.end), None)
        if twin is None or twin.feature_id != span.feature_id:
            return span.start
        if span.offset - twin.offset != span.start - twin.start:
            return span.start
        if twin.end < min(span.end, limit):
            return twin.end
    return limit


def shift(spans: Sequence[Span], by: int) -> tuple[Span, ...]:
    return tuple(replace(span, start=span.start + by, end=span.end + by) for span in spans)
