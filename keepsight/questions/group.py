"""Prompts that begin alike are read together: what they share once, the rest side by side.

Where many prompts part from each other a snapshot is remembered, and the others go on from there.
What only one of them has is not remembered. All run as sequences of the engine, so the answers of
others go on between its passes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from keepsight.core.call import Call
from keepsight.core.order import Order
from keepsight.core.runtime import Runtime
from keepsight.core.sequence import Sequence as Answer
from keepsight.core.sequence import Wanted
from keepsight.kinds import Message
from keepsight.media.medium import Medium
from keepsight.prefix.prompt import Prompt, Range, Rule
from keepsight.prompt.messages import parse_messages, with_media
from keepsight.report import GroupReport, Shared
from keepsight.system.accounts import account_of

WORTH = 32  # tokens that a snapshot must save

Run = Callable[[Sequence[Answer]], None]


def named(runtime: Runtime, thing: object, tenant: str, kind: str = "image") -> Medium:
    """A medium, looked at once for a whole call."""
    message = {"role": "user", "content": [{"type": kind, kind: thing}]}
    order = Order(runtime, [message], Call(tenant, {}, {}))
    with runtime.lock:
        order.learn()
    return order.media[0]


class Named:
    """The media of one call: what is given several times, as the same object or under the same
    path, is opened once."""

    def __init__(self, runtime: Runtime, tenant: str) -> None:
        self._runtime, self._tenant = runtime, tenant
        self._known: dict[object, tuple[object, Medium]] = {}  # with what was given, kept alive

    def messages(self, messages: list[Message]) -> list[Message]:
        """Messages with named media in place of the given ones."""
        clean, given = parse_messages(messages)
        return with_media(clean, [self._medium(kind, thing) for kind, thing in given])

    def _medium(self, kind: str, thing: object) -> Medium:
        key = kind, thing if isinstance(thing, str) else id(thing)
        if key not in self._known:
            self._known[key] = thing, named(self._runtime, thing, self._tenant, kind)
        return self._known[key][1]


@dataclass
class Reading:
    """One prompt, the places behind which its logits are wanted, and who takes them."""

    prompt: Prompt
    runs: list[Range]
    take: Callable[[int, torch.Tensor], None]
    current: Callable[[], Prompt] | None = None


def read_together(
    runtime: Runtime,
    readings: Sequence[Reading],
    beginnings: Sequence[Prompt] = (),
    tenant: str = "",
    run: Run | None = None,
) -> GroupReport:
    """Read all prompts. `beginnings` are not read: where they part from the others, later calls
    will part too."""
    begun = time.perf_counter()
    numbers: dict[str, int] = {}
    paths = [path_of(one.prompt, numbers) for one in readings]
    several: dict[tuple[bytes, tuple[Range, ...]], list[int]] = {}
    for number, (one, path) in enumerate(zip(readings, paths, strict=True)):
        several.setdefault((path.tobytes(), tuple(one.runs)), []).append(number)
    firsts = [same[0] for same in several.values()]
    known = [paths[first] for first in firsts] + [path_of(one, numbers) for one in beginnings]
    cuts, shared = branches(known)
    sequences = []
    for (first, *others), ends in zip(several.values(), cuts, strict=False):
        one = readings[first]
        takers = [readings[number].take for number in (first, *others)]
        seq = Answer(one.prompt, tenant, account=account_of(tenant), current=one.current)
        seq.wanted = Wanted(one.runs, _to_all(takers))
        seq.shares = _kept(one.prompt, ends, runtime.rule)
        seq.passing = True
        sequences.append(seq)
    (run or runtime.engine.run)(sequences)
    report = _report(sequences, shared)
    report.prompt_tokens = sum(len(one.prompt) for one in readings)
    report.milliseconds["total"] = 1e3 * (time.perf_counter() - begun)
    return report


def _kept(prompt: Prompt, ends: Sequence[int], rule: Rule) -> tuple[int, ...]:
    """Where snapshots of a prompt end: where others part from it, and behind its last medium."""
    kept = {prompt.before_medium(end, rule) for end in ends}
    if prompt.ranges:
        last = max(ranges[-1][1] for ranges in prompt.ranges)
        kept.add(min(end for end in (*prompt.events(rule), len(prompt)) if end >= last))
    return tuple(sorted(end for end in kept if end >= prompt.first_cut(rule)))


def _to_all(takers: list[Callable[[int, torch.Tensor], None]]) -> Callable[..., None]:
    def take(place: int, rows: torch.Tensor) -> None:
        for each in takers:
            each(place, rows)

    return take


def _report(sequences: list[Answer], shared: list[Shared]) -> GroupReport:
    media = {medium.key for seq in sequences for medium in seq.prompt.media}
    encoded = sum(where == "tower" for seq in sequences for where in seq.sources.values())
    report = GroupReport(
        prompts=len(sequences),
        computed_tokens=sum(seq.computed for seq in sequences),
        images=len(media),
        images_encoded=encoded,
        shared=shared,
        exactness="bits" if all(seq.rule.kernels for seq in sequences) else "rounding",
        reports=[seq.report() for seq in sequences],
    )
    for one in report.reports:
        for name in ("render", "encode"):
            if name in one.milliseconds:
                spent = report.milliseconds.get(name, 0.0)
                report.milliseconds[name] = spent + one.milliseconds[name]
    return report


def path_of(prompt: Prompt, numbers: dict[str, int]) -> np.ndarray:
    """The prompt as numbers that are equal where paths are: rows of features are negative."""
    path = prompt.ids.astype(np.int64)
    for span in prompt.spans:
        first = (numbers.setdefault(span.feature_id, len(numbers)) << 32) + span.offset
        path[span.start : span.end] = -1 - first - np.arange(span.end - span.start)
    return path


@dataclass
class _Alike:
    """Neighbours in the order of paths, with what they have in common so far."""

    first: int
    last: int
    until: int = 0  # the last snapshot on their path
    cuts: tuple[int, ...] = field(default=())


def branches(paths: Sequence[np.ndarray]) -> tuple[list[tuple[int, ...]], list[Shared]]:
    """For each path, where others part from it and a snapshot saves enough; and the stretches that
    are shared."""
    order = in_order(paths)
    agree = [agreement(paths[one], paths[two]) for one, two in itertools.pairwise(order)]
    found: list[tuple[int, ...]] = [()] * len(paths)
    shared: list[Shared] = []
    waiting = [_Alike(0, len(order))] if order else []
    while waiting:
        group = waiting.pop()
        count = group.last - group.first
        if count == 1:
            found[order[group.first]] = group.cuts
            continue
        inside = agree[group.first : group.last - 1]
        end = min(inside)
        until, cuts = group.until, group.cuts
        if (count - 1) * (end - until) >= WORTH:
            shared.append(Shared(until, end, count))
            until, cuts = end, (*cuts, end)
        edges = [group.first + 1 + at for at, common in enumerate(inside) if common == end]
        for first, last in zip([group.first, *edges], [*edges, group.last], strict=True):
            waiting.append(_Alike(first, last, until, cuts))
    return found, sorted(shared, key=lambda one: (one.start, -one.prompts, one.end))


def in_order(paths: Sequence[np.ndarray]) -> list[int]:
    """The numbers of paths, those that begin alike beside each other."""
    return sorted(range(len(paths)), key=lambda number: paths[number].astype(">i8").tobytes())


def agreement(one: np.ndarray, two: np.ndarray) -> int:
    """How far two paths are equal."""
    shorter = min(len(one), len(two))
    different = np.flatnonzero(one[:shorter] != two[:shorter])
    return int(different[0]) if len(different) else shorter
