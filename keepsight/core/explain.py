"""Explains why each stretch of a prompt was reused or computed, from the findings of its turn.

A pure function: it looks up only where features come from, and changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from keepsight.prefix.match import Known, Match
from keepsight.prefix.prompt import Prompt, Rule
from keepsight.report import Segment

CHANGED = "weights changed while this was computed, so nothing more of it is remembered"


@dataclass
class Findings:
    """What a turn found remembered, at first and during prefill."""

    match: Match
    known: Known
    other: tuple[int, str] | None = None  # how far another namespace knows the prompt, and which
    taken_over: list[tuple[int, Match]] = field(default_factory=list)  # (from token, match)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens remembered when the turn began or before they were needed."""
        return self.match.length + sum(match.length - start for start, match in self.taken_over)


@dataclass(frozen=True)
class Origin:
    """Where the features of a medium come from."""

    where: str  # memory, disk, remote, caller or tower
    elsewhere: bool = False  # the store has features of it that were made elsewhere


def explain(
    prompt: Prompt, rule: Rule, found: Findings, origin: Callable[[int], Origin]
) -> list[Segment]:
    """Split a prompt into reused and computed stretches; `origin` is asked per computed medium."""
    reasons = _reasons(prompt, rule, found)
    reused = [(0, found.match), *found.taken_over]
    edges = {0, len(prompt), *(start for start, _ in reasons)}
    edges |= {edge for start, match in reused for edge in (start, match.length)}
    segments: list[Segment] = []
    for start, end in itertools.pairwise(sorted(edges)):
        match = next((m for at, m in reused if at <= start and end <= m.length), None)
        if match is not None:
            why = "whole prompt" if match.whole else match.tier
            segments += _reused(prompt, start, end, match.tier, why)
        else:
            why = next((reason for at, reason in reversed(reasons) if at <= start), "")
            segments += _computed(prompt, start, end, why, origin)
    return segments


def _reused(prompt: Prompt, start: int, end: int, tier: str, why: str) -> Iterator[Segment]:
    for a, b, medium in prompt.pieces(start, end):
        if medium is None:
            yield Segment("text", a, b, "reused", why, tier=tier)
        else:
            its = prompt.media[medium]
            yield Segment(its.modality, a, b, "reused", why, medium, None, tier, its.key)


def _computed(
    prompt: Prompt, start: int, end: int, why: str, origin: Callable[[int], Origin]
) -> Iterator[Segment]:
    for a, b, medium in prompt.pieces(start, end):
        if medium is None:
            yield Segment("text", a, b, "computed", why)
            continue
        its, features = prompt.media[medium], origin(medium)
        new = features.where == "tower"
        reason = "made elsewhere" if new and features.elsewhere else why
        yield Segment(its.modality, a, b, "computed", reason, medium, features.where, None, its.key)


def _reasons(prompt: Prompt, rule: Rule, found: Findings) -> list[tuple[int, str]]:
    """(first token, reason) pairs for everything after the match, in order."""
    at, known = found.match.length, found.known
    if found.other is not None and found.other[0] > max(at, known.until):
        return [(at, found.other[1])]
    reasons: list[tuple[int, str]] = []
    if known.until > at:
        reasons.append((at, known.why_not_usable(at, prompt, rule)))
    behind = max(at, known.until)
    if behind < len(prompt):
        reasons.append((behind, known.why_unknown(behind, prompt)))
    return reasons or [(at, "new")]
