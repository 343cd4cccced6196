"""Chooses prompts whose ends are short enough to be read in one pass.

The one whose turn it is decides; others join it while padding costs less than it saves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from keepsight.core.decoding.joint_prefill import SHORT, JointPrefill
from keepsight.core.engine import Engine
from keepsight.scheduler.intake import Request
from keepsight.scheduler.policy import had_its_turn, next_of

_PADDED = 1.5  # rows of a joint pass for each token


class JointPasses:
    """The joint passes of one scheduler, of at most so many rows each."""

    def __init__(self, joint: JointPrefill, engine: Engine, rows: int) -> None:
        self._joint, self._engine, self._rows = joint, engine, rows

    def group(self, prefilling: Sequence[Request], now: int) -> list[Request]:
        """The request whose turn it is, and others that are as short. `now`: the current round. The
        caller holds the model's lock."""
        chosen, found, starts = next_of(prefilling), list[Request](), set[tuple[int, int]]()
        counts: list[int] = []
        for request in sorted(prefilling, key=lambda one: (one is not chosen, one.number)):
            if max(counts, default=0) * (len(counts) + 1) > self._rows:
                break  # nobody else fits: do not look at the rest
            tokens = self._tokens(request, now)
            if tokens is None or (not tokens and request is chosen):
                return [chosen]
            run = request.turn.run if tokens else None
            if run is None:
                continue
            # Where two go on alike, the second takes over what the first computes.
            begin = id(run.node), int(run.prompt.ids[run.lane.length])
            rows = max([*counts, tokens]) * (len(counts) + 1)
            fits = rows <= min(self._rows, _PADDED * (sum(counts) + tokens))
            if begin not in starts and (fits or not found):
                found.append(request)
                counts.append(tokens)
                starts.add(begin)
        return found

    def _tokens(self, request: Request, now: int) -> int | None:
        """The tokens left of a prompt that a joint pass may read; 0 if it goes alone, and None if
        the model changed: then nobody joins, and each is looked at again in its turn."""
        turn = request.turn
        try:
            if request.remaining > SHORT:
                return 0  # without taking a lane for it
            if request.looked_at != now and turn.out_of_date():
                return None
            if not turn.begun:
                waited = 1e3 * (time.perf_counter() - request.ready)
                turn.milliseconds.setdefault("queued", waited)
            return self._joint.tokens(turn.start(shared=True))
        except Exception:  # it is raised again where it ends this request only
            return 0

    def prefill(self, group: Sequence[Request], others: Sequence[Request]) -> dict[Request, float]:
        """Read what is left of their prompts in one pass; return the milliseconds that each took of
        it. Empty if each must go on alone."""
        if len(group) < 2:
            return {}
        begun, counts = time.perf_counter(), [request.remaining for request in group]
        if not self._joint.prefill([request.turn.run for request in group]):
            return {}
        spent = 1e3 * (time.perf_counter() - begun)
        waiting = [other for other in others if other not in group]
        for request, count in zip(group, counts, strict=True):
            stages = request.turn.milliseconds
            stages["prefill"] += spent  # all of them waited for all of it
            had_its_turn(request, waiting, count)
        return {r: spent * n / sum(counts) for r, n in zip(group, counts, strict=True)}

    def remember(self, request: Request, cost: float) -> None:
        """Remember what a joint pass computed, unless the model changed meanwhile. It took this
        prompt so many milliseconds."""
        run, turn = request.turn.run, request.turn
        run.changed |= turn.out_of_date()
        if not run.changed:
            self._engine.remember(run, turn.ends, run.logits, cost)
