"""One turn in seven steps: read `Turn.tokens` to know how Keepsight works.

Images are named before anything is computed, so a warm turn uses neither the tower nor a package.
Each snapshot is remembered at once, so nothing is lost if a client hangs up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch

from keepsight.core.decoding.drafts import DraftCounts
from keepsight.core.decoding.sampling import Sampler, SequenceSampler, check_length, decode, sampler
from keepsight.core.engine import Run
from keepsight.core.explain import CHANGED, Findings, Origin, explain
from keepsight.core.runtime import Runtime
from keepsight.errors import KeepsightError
from keepsight.formats.package import Package
from keepsight.kinds import Options
from keepsight.prefix.match import Match
from keepsight.prefix.node import Node
from keepsight.prefix.prompt import RUN, Prompt
from keepsight.report import Report, Usage, stage
from keepsight.system.interrupts import LATER


class Turn:
    """One prompt on its way to an answer."""

    _run: Run | None = None
    _waiting: Node | None = None  # held for the match until a run takes it over

    def __init__(
        self,
        runtime: Runtime,
        render: Callable[[], Prompt],
        options: Options,
        exact: bool = True,
        default_tokens: int = 1,
        tenant: str = "",
    ) -> None:
        self._tenant = tenant
        self._runtime, self._lock, self._render = runtime, runtime.lock, render
        self._options, self._exact, self._default_tokens = options, exact, default_tokens
        self.milliseconds: dict[str, float] = {}
        self._sources, self._notes = dict[int, str](), dict[int, str]()
        self._others: set[int] = set()
        self.piece = RUN  # tokens per pass, if a prompt can be cut anywhere
        self.asked: float | None = None  # when the caller asked, if earlier than `begin`
        self.generated: list[int] = []
        self.sampler: Sampler | None = None
        self._tally = DraftCounts()
        self._first: float | None = None
        self._changes = 0  # of the model, when the turn began
        self._reached: Node | None = None

    def tokens(self) -> Iterator[int]:
        """The seven steps. Each token is yielded before the next one is computed."""
        try:
            with self._lock:
                self._name()  # 1 name the media; encode nothing
                sampler = self._choose_sampler()
                self._hold_match()  # 2 find and hold the longest remembered prefix
                for _ in self.work():  # 3 encode and prefill only what is new,
                    pass  # 4 and put each snapshot into the tree when it is complete
            logits = self.run.last_logits()
            for token in decode(sampler, self._ids(), logits, self._step):  # 5 decode
                self._note_token(token)
                yield token  # 6 yield it before the next one is computed
            self.keep_decoded()  # 7 keep the decoded answer, or prefill it with the next turn
            self.finish()
        except GeneratorExit:  # keep the answer so far
            self._lock.put_off(partial(self.keep_decoded, self._run))
            raise
        finally:
            self.let_go()

    # -- the steps -------------------------------------------------------------------------------

    def ready(self) -> Run:
        """Run steps 1 to 4: the prompt is prefilled and its snapshots are in the tree."""
        with self._lock:
            self.begin()
            return self.prefill()

    def sequence_sampler(self) -> SequenceSampler:
        """The sampler of step 5, for a caller that drives decoding itself."""
        if self.sampler is None:
            raise KeepsightError("this turn was begun without sampling")
        return SequenceSampler(self.sampler, self._ids(), self._note_token)

    def begin(self, sample: bool = True) -> None:
        """Run steps 1 and 2."""
        self._name()
        if sample:
            self._choose_sampler()
        self._hold_match()

    def _choose_sampler(self) -> Sampler:
        if self.sampler is None:
            tokenizer = getattr(self._runtime.processor, "tokenizer", None)
            more = (self._options, self._default_tokens)
            self.sampler = sampler(self._runtime.model, tokenizer, self._ids(), *more)
        return self.sampler

    def _ids(self) -> torch.Tensor:
        """The prompt as a batch of one, on the model's device."""
        return torch.from_numpy(self.prompt.ids)[None].to(self._runtime.model.device)

    def _hold_match(self) -> None:
        """Run step 2."""
        with self._stage("match"):
            self._find()
        self.milliseconds["match"] -= self.milliseconds.get("load", 0.0)

    def predict_report(self) -> Report:
        """The report of steps 1 and 2; nothing is held, loaded or made fresher."""
        self._name()
        with self._stage("match"):
            self._look()
        self._vision.require(self.prompt.shown(self.match.length))
        return self.report()

    def _name(self) -> None:
        """Run step 1 with the current weights and settings."""
        self._started = time.perf_counter() if self.asked is None else self.asked
        self._sources, self._notes, self._others = {}, {}, set()  # drop earlier results
        with self._stage("check"):
            self.namespace = self._runtime.refresh(self._exact, self._tenant)
            self._changes = self._runtime.weights.changes
        self.rule, self._kernels = self._runtime.rule, self._runtime.finding.kernels
        if not self.rule.any_cut:
            self._kernels = None
        self._vision = self._runtime.vision_of(self._tenant)
        with self._stage("render"):
            self.prompt = self._render()
        check_length(self._runtime.model, len(self.prompt))

    @property
    def _loose(self) -> bool:
        """Whether snapshots of decoded state may be used at any place."""
        return not self._exact and self.rule.reuse == "prefix" and not self.rule.any_cut

    def _find(self) -> None:
        tree = self._runtime.prefixes
        self._look()
        while True:
            held = self._waiting = self.match.node
            tree.hold(held)
            with self._stage("load"):
                loaded = tree.load(held, self.prompt)
            if loaded and not (self.match.whole and self.match.logits is None):
                break  # else it is damaged on disk and marked so, or has lost its logits
            tree.release(held)
            self._waiting = None
            self.found.match = self.match.but_the_last(self.prompt) if loaded else self._deepest()
        self.ends = self._ends(self.match)
        self.cuts = self._pieces() if self.rule.any_cut else self.ends

    def _ends(self, match: Match) -> list[int]:
        """The ends of new snapshots, after the remembered ones."""
        ends = self.prompt.boundaries(self.rule, match.base.end)
        until = self.prompt.before_medium(self.found.known.until, self.rule)
        near = match.length + (self.rule.grain if match.length else 1)  # also common starts
        parts = self.rule.states and near <= until < len(self.prompt)  # the next one starts there
        return [*sorted({*ends, until} if parts else ends), len(self.prompt)]

    def _pieces(self) -> list[int]:
        """Where to cut a prompt that can be cut anywhere."""
        cuts = range(self.match.length + self.piece, len(self.prompt), self.piece)
        return sorted({self.prompt.move(cut, self.rule) for cut in cuts})

    def _look(self) -> None:
        known = self._runtime.prefixes.known(self.namespace, self.prompt)
        whole = known.until == len(self.prompt)  # then other namespaces do not matter
        other = None if whole else self._runtime.elsewhere(self.namespace, self.prompt)
        self.found = Findings(self._deepest(), known, other)

    @property
    def match(self) -> Match:
        """The longest remembered prefix found at first."""
        return self.found.match

    def _deepest(self) -> Match:
        if self.rule.any_cut:
            return self._runtime.prefixes.match_tokens(self.namespace, self.prompt, self.rule)
        find = self._runtime.prefixes.match
        next_cut = self.prompt.next_boundary(self.rule, self._exact)
        return find(self.namespace, self.prompt, next_cut, loose=self._loose)

    def from_boundary(self) -> None:
        """If the whole prompt is remembered, step back to the boundary before its end."""
        tree, whole = self._runtime.prefixes, self.match.node
        if self.match.whole:
            self.found.match = self.match.but_the_last(self.prompt)
        elif whole.terminal and whole.parent is not None:
            self.found.match = Match(whole.parent)
        if self.match.node is not whole:
            self._waiting = self.match.node
            tree.hold(self._waiting)
            tree.release(whole)
            tree.load(self._waiting, self.prompt)

    @property
    def begun(self) -> bool:
        """Whether it has a lane."""
        return self._run is not None

    @property
    def reached(self) -> Node:
        """The deepest snapshot on this prompt's path, once prefilled."""
        return self._reached if self._reached is not None else self.match.node

    def prefill(self) -> Run:
        """Run steps 3 and 4: prefill the rest of the prompt."""
        list(self.work())
        return self.run

    def out_of_date(self) -> bool:
        """Whether weights or settings changed since the turn began, also if they changed back."""
        now = self._runtime.refresh(self._exact, self._tenant)
        return now != self.namespace or self._runtime.weights.changes != self._changes

    @property
    def done_tokens(self) -> int:
        """How many prompt tokens are already computed or remembered."""
        return self.match.length if self._run is None else self._run.lane.length

    @property
    def run(self) -> Run:
        """The prompt on its lane, from the first pass to the end of the turn."""
        if self._run is None:
            raise KeepsightError("this turn has no lane: it was not begun, or it is over")
        return self._run

    def start(self, shared: bool = False) -> Run:
        """Take a lane, with what is remembered of the prompt on it. With `shared` also what other
        turns added since."""
        if self._run is None:
            self._vision.require(self.prompt.shown(self.match.length))  # before computing anything
            room = self.sampler.max_new_tokens if self.sampler is not None else 0
            with self._stage("restore"):
                given = (self.prompt, self.match, min(room, 4096), self._kernels)
                self._run = self._runtime.engine.start(*given)
                self._waiting = None
            self.milliseconds.setdefault("prefill", 0.0)
        if shared:
            while self.run.lane.length < len(self.prompt) and self._catch_up(self.run):
                pass
        return self.run

    def work(self, shared: bool = False) -> Iterator[int]:
        """Run steps 3 and 4 in pieces. After each pass of the tower or of the language model it
        yields a number of tokens, and others may use the model. With `shared` they do, and
        snapshots they add to the tree meanwhile are used instead of computed."""
        engine, end = self._runtime.engine, len(self.prompt)
        packages: dict[int, Package] = {}
        while (run := self.start(shared)).lane.length < end:
            start = run.lane.length
            cut = next((cut for cut in self.cuts if cut > start), end)
            media = {span.medium for span in self.prompt.clip(start, cut)}
            if missing := sorted(media - packages.keys()):
                packages[missing[0]] = self._fetch(missing[0])
                if self._sources[missing[0]] == "tower":
                    yield self.prompt.media[missing[0]].tokens
                continue
            with self._stage("prefill"):
                engine.prefill(run, cut, packages.__getitem__, self.out_of_date, self.ends)
            packages = {m: packages[m] for m in packages if self.prompt.ranges[m][-1][1] > cut}
            yield cut - start
        self._reached = run.node
        self._tell_change(run.changed)
        room = self.sampler.max_new_tokens if self.sampler is not None else 0
        engine.guess(run, self._tenant, room, self._tally)

    def _catch_up(self, run: Run) -> bool:
        """Whether another turn got further on this path meanwhile; if so, continue from there."""
        tree, start = self._runtime.prefixes, run.lane.length
        match, begun = self._deepest(), run.node.parent is not None
        while match.length > start and not (begun and run.node not in match.base.chain()):
            tree.hold(match.node)
            with self._stage("load"):
                loaded = tree.load(match.node, self.prompt)
            if loaded and not (match.whole and match.logits is None):
                with self._stage("restore"):
                    self._runtime.engine.go_on(run, match)
                self.found.taken_over.append((start, match))
                return True
            tree.release(match.node)
            if not loaded:
                return False
            match = match.but_the_last(self.prompt)  # its logits are lost
        return False

    def _fetch(self, medium: int) -> Package:
        shown = self.prompt.media[medium]
        if medium not in self._sources and self._vision.made_elsewhere(shown):
            self._others.add(medium)  # before our own package is stored
        with self._stage("encode"):
            may, rest = partial(self._may_keep, shown.key), self.prompt.shown(self.run.lane.length)
            package, where = self._vision.package(shown, may, rest)
        if medium not in self._sources and (note := self._vision.note(medium, package, where)):
            self._notes[medium] = note
        self._sources.setdefault(medium, where)
        return package

    def _may_keep(self, key: str) -> bool:
        """Whether features may be remembered: not of a deleted picture, nor of a changed model."""
        barred = self._runtime.prefixes.is_barred(self.run.node, key, self.run.since)
        return not barred and not self.out_of_date()

    def _step(self, token: int) -> torch.Tensor:
        if self._run is None:
            raise KeepsightError("the turn was closed while it was being decoded")
        with self._lock, self._stage("decode"):
            return self._runtime.engine.step(self._run, token)

    def _tell_change(self, changed: bool) -> bool:
        """Say in the report if other weights computed a part: then nothing more is remembered."""
        if changed:
            self._notes[len(self.prompt.media)] = CHANGED
        return changed

    def _note_token(self, token: int) -> None:
        self.generated.append(token)
        if self._first is None:
            self._first = time.perf_counter()
            self.milliseconds["first_token"] = 1e3 * (self._first - self._started)

    def keep_decoded(self, run: Run | None = None) -> None:
        """Remember the decoded answer if that is exact or need not be. After the run is released,
        nobody may have used the model in between."""
        run = run or self._run
        if not (self._loose or self.rule.any_cut) or run is None:
            return
        with self._lock:
            if self._tell_change(run.changed or self.out_of_date()):
                return
            run.settle()
            length = max(0, run.lane.length - len(self.prompt))
            ids = np.concatenate([self.prompt.ids, self.generated[:length]]).astype(np.int64)
            whole = Prompt(ids, self.prompt.media, self.prompt.ranges)
            self._runtime.engine.keep_decoded(run, whole, self.generated)

    def finish(self) -> None:
        """Release lane and path; safe to call at any time, and twice."""
        with self._lock:
            self._runtime.engine.let_go(*self._held())

    def let_go(self) -> None:
        """Release them without ever waiting: the garbage collector may end a turn at any moment."""
        with LATER:
            if self._run or self._waiting:
                self._lock.leave(partial(self._runtime.engine.let_go, *self._held()))

    def __del__(self) -> None:
        self.let_go()

    def _held(self) -> tuple[Run | None, Node | None]:
        held = self._run, self._waiting
        self._run = self._waiting = None
        return held

    # -- report ---------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """Counts so far."""
        images = len(self.prompt.media)
        encoded = sum(where == "tower" for where in self._sources.values())
        return Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.generated),
            cached_tokens=self.found.cached_tokens,
            images=images,
            images_encoded=encoded,
            images_reused=images - encoded,
            **vars(self._tally),
        )

    def report(self) -> Report:
        """Why each stretch of the prompt was reused or computed."""
        return Report(
            segments=explain(self.prompt, self.rule, self.found, self._origin),
            milliseconds=dict(self.milliseconds),
            prompt_tokens=len(self.prompt),
            cached_tokens=self.found.cached_tokens,
            grain=0 if self.rule.any_cut else self.rule.grain,
            exact=self._exact,
            notes=[self._notes[medium] for medium in sorted(self._notes)],
        )

    def _origin(self, medium: int) -> Origin:
        its, other = self.prompt.media[medium], medium in self._others
        where = self._sources.get(medium) or self._vision.where(its)
        return Origin(where, where == "tower" and (other or self._vision.made_elsewhere(its)))

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return stage(self.milliseconds, name)
