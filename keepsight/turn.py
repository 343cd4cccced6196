"""One turn, in seven hops. Who reads `Turn.tokens` knows how Keepsight works.

Images are named before anything is computed, so a warm turn touches neither the tower nor a
package. Each snapshot is in the tree as soon as it stands, so a client who hangs up loses nothing.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import numpy as np
import torch

from keepsight.engine import Run
from keepsight.errors import KeepsightError
from keepsight.generation import Sampler, Taker, check_length, decode, sampler
from keepsight.memory import Memory
from keepsight.node import Node
from keepsight.package import Package
from keepsight.prefix import Known, Match
from keepsight.prompt import Prompt
from keepsight.report import Report, Segment, Usage


class Turn:
    """One prompt on its way to an answer."""

    def __init__(
        self,
        memory: Memory,
        lock: RLock,
        render: Callable[[], Prompt],
        options: dict[str, Any],
        exact: bool = True,
        default_tokens: int = 1,
    ) -> None:
        self._memory, self._lock, self._render = memory, lock, render
        self._options, self._exact, self._default_tokens = options, exact, default_tokens
        self.milliseconds: dict[str, float] = {}
        self._sources: dict[int, str] = {}
        self.generated: list[int] = []
        self.sampler: Sampler | None = None
        self._run: Run | None = None
        self._first: float | None = None
        self._waiting: Node | None = None  # held by the match until a run takes it over

    def tokens(self) -> Iterator[int]:
        """The seven hops. Each token is handed out before the next one is computed."""
        try:
            run = self.ready()  # 1 render, 2 match and hold, 3 prefill, 4 insert each snapshot
            ids = torch.from_numpy(self.prompt.ids)[None].to(self._memory.model.device)
            if self.sampler is None or run.logits is None:
                return
            for token in decode(self.sampler, ids, run.logits, self._step):  # 5 decode
                self._note_token(token)
                yield token  # 6 emit
            self._keep_decoded()  # 7 remember the turn: prefilled with the next, or kept as it is
        finally:
            self.finish()

    # -- the hops --------------------------------------------------------------------------------

    def ready(self) -> Run:
        """Hops 1 to 4: the prompt is prefilled, its snapshots are in the tree."""
        with self._lock:
            self.begin()
            return self.prefill()

    def taker(self) -> Taker:
        """Hop 5 for somebody else to drive."""
        if self.sampler is None:
            raise KeepsightError("this turn was begun without sampling")
        ids = torch.from_numpy(self.prompt.ids)[None].to(self._memory.model.device)
        return Taker(self.sampler, ids, self._note_token)

    def begin(self, sample: bool = True) -> None:
        """Hops 1 and 2."""
        self._started = time.perf_counter()
        memory = self._memory
        with self._stage("check"):
            self.namespace = memory.refresh(self._exact)
        with self._stage("render"):
            self.prompt = self._render()
        check_length(memory.model, len(self.prompt))
        if sample:
            ids = torch.from_numpy(self.prompt.ids)[None].to(memory.model.device)
            tokenizer = getattr(memory.processor, "tokenizer", None)
            self.sampler = sampler(
                memory.model, tokenizer, ids, self._options, self._default_tokens
            )
        with self._stage("match"):
            self._find()

    @property
    def _loose(self) -> bool:
        """Whether snapshots of decoded state may be used, wherever they stand."""
        return not self._exact and self._memory.rule.reuse == "prefix"

    def _find(self) -> None:
        tree = self._memory.tree
        self.known = tree.known(self.namespace, self.prompt)
        self._other = self._known_elsewhere()
        while True:
            self.match = tree.match(
                self.namespace, self.prompt, self._next_cut(), loose=self._loose
            )
            tree.hold(self.match.node)
            self._waiting = self.match.node
            with self._stage("load"):
                if tree.load(self.match.node, self.prompt):
                    break
            # An entry on disk was damaged. It is marked now, and the next match ends before it.
            tree.release(self.match.node)
            self._waiting = None
        self.cuts = self.prompt.boundaries(self._memory.rule, self.match.length)

    def from_boundary(self) -> None:
        """Where the whole prompt is remembered, step back to the boundary before its end."""
        tree, whole = self._memory.tree, self.match.node
        if whole.terminal and whole.parent is not None:
            tree.hold(whole.parent)
            tree.release(whole)
            self._waiting = whole.parent
            self.match = Match(whole.parent)
            tree.load(whole.parent, self.prompt)

    def _next_cut(self) -> Callable[[int], int | None]:
        rule, prompt = self._memory.rule, self.prompt
        cuts = prompt.boundaries(rule)

        def next_cut(position: int) -> int | None:
            if position == 0 or position in cuts or self._exact:
                spot = bisect.bisect_right(cuts, position)
                return cuts[spot] if spot < len(cuts) else None
            return next(iter(prompt.boundaries(rule, position)), None)

        return next_cut

    def prefill(self, keep: bool = True) -> Run:
        """Hops 3 and 4: what is left of the prompt, boundary by boundary."""
        engine = self._memory.engine
        room = self.sampler.max_new_tokens if self.sampler is not None else 0
        with self._stage("restore"):
            self._run = run = engine.start(self.prompt, self.match, min(room, 4096))
            self._waiting = None
        with self._stage("prefill"):
            for _ in engine.prefill(run, self.cuts, self._fetch, keep):
                pass
        self.milliseconds["prefill"] -= self.milliseconds.get("encode", 0.0)
        return run

    def _fetch(self, medium: int) -> Package:
        with self._stage("encode"):
            package, where = self._memory.vision.package(self.prompt.media[medium])
        self._sources.setdefault(medium, where)
        return package

    def _step(self, token: int) -> torch.Tensor:
        if self._run is None:
            raise KeepsightError("the turn was closed while it was being decoded")
        with self._lock, self._stage("decode"):
            return self._memory.engine.step(self._run, token)

    def _note_token(self, token: int) -> None:
        self.generated.append(token)
        if self._first is None:
            self._first = time.perf_counter()
            self.milliseconds["first_token"] = 1e3 * (self._first - self._started)

    def _keep_decoded(self) -> None:
        if not self._loose or self._run is None:
            return
        with self._lock:
            length = self._run.lane.length - len(self.prompt)
            ids = np.concatenate([self.prompt.ids, self.generated[:length]]).astype(np.int64)
            whole = Prompt(ids, self.prompt.media, self.prompt.ranges)
            self._memory.engine.keep_decoded(self._run, whole)

    def finish(self) -> None:
        """Let go of lane and path; safe to call at any time, and twice."""
        with self._lock:
            if self._run is not None:
                self._memory.engine.finish(self._run)
                self._run = None
            elif self._waiting is not None:
                self._memory.tree.release(self._waiting)
            self._waiting = None

    # -- telling ---------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """Counts so far."""
        images = len(self.prompt.media)
        encoded = sum(where == "tower" for where in self._sources.values())
        return Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.generated),
            cached_tokens=self.match.length,
            images=images,
            images_encoded=encoded,
            images_reused=images - encoded,
        )

    def report(self) -> Report:
        """Why each stretch of the prompt was reused or computed."""
        return Report(
            segments=list(self._segments()),
            milliseconds=dict(self.milliseconds),
            prompt_tokens=len(self.prompt),
            cached_tokens=self.match.length,
            grain=self._memory.rule.grain,
            exact=self._exact,
        )

    def _segments(self) -> Iterator[Segment]:
        reasons = self._reasons()
        edges = sorted({0, self.match.length, *(start for start, _ in reasons), len(self.prompt)})
        tier = "whole prompt" if self.match.logits is not None else self.match.tier
        for start, end in itertools.pairwise(edges):
            reused = end <= self.match.length
            why = tier if reused else next(r for s, r in reversed(reasons) if s <= start)
            for a, b, medium in self.prompt.pieces(start, end):
                yield self._segment(a, b, medium, reused, why)

    def _segment(self, a: int, b: int, medium: int | None, reused: bool, why: str) -> Segment:
        features = None
        if medium is not None and not reused:
            vision = self._memory.vision
            features = self._sources.get(medium) or vision.where(self.prompt.media[medium])
            if features == "tower" and vision.made_elsewhere(self.prompt.media[medium]):
                why = "made elsewhere"
        kind = "text" if medium is None else self.prompt.media[medium].modality
        status = "reused" if reused else "computed"
        return Segment(kind, a, b, status, why, medium, features)

    def _reasons(self) -> list[tuple[int, str]]:
        """(from token, reason) for what is behind the match, in order."""
        at, known = self.match.length, self.known
        reasons: list[tuple[int, str]] = []
        if self._other is not None and self._other[0] > max(at, known.until):
            return [(at, self._other[1])]
        if known.until > at:
            reasons.append((at, self._why_not_usable(at, known)))
        behind = max(at, known.until)
        if behind < len(self.prompt):
            reasons.append((behind, self._why_unknown(behind, known)))
        return reasons or [(at, "new")]

    def _why_not_usable(self, at: int, known: Known) -> str:
        if known.evicted_from is not None:
            return "evicted"
        reuse = self._memory.rule.reuse
        if reuse == "whole prompt":
            return "not possible: every token of this model's prompts sees all others"
        if reuse == "same media" and self._new_media_behind(at):
            return "not possible: a new medium changes what stands before it"
        if known.until - at < self._memory.rule.grain:
            return "no boundary yet (below the grain)"
        return f"no snapshot between {at} and {known.until}"

    def _new_media_behind(self, at: int) -> bool:
        return any(span.start >= at for span in self.prompt.spans)

    def _why_unknown(self, behind: int, known: Known) -> str:
        if not known.diverged or behind != known.until:
            return "new"
        if known.elsewhere:
            return "made elsewhere"
        medium = self.prompt.medium_at(behind)
        return f"diverged at token {behind} ({'text' if medium is None else f'medium {medium}'})"

    def _known_elsewhere(self) -> tuple[int, str] | None:
        """The longest prefix known under other weights or settings, and which of the two."""
        tree, best = self._memory.tree, None
        for namespace in tree.roots:
            if namespace != self.namespace:
                until = tree.known(namespace, self.prompt).until
                if until and (best is None or until > best[0]):
                    best = (until, self._memory.why_elsewhere(namespace))
        return best

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = 1e3 * (time.perf_counter() - start)
            self.milliseconds[name] = self.milliseconds.get(name, 0.0) + spent
