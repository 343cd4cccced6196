"""All answers of one model: the loop that every call goes through.

`answer` adds a sequence and steps until its tokens have come; whoever waits may step, for all.
`step` is one pass: pieces of waiting prompts beside one token of every running answer. Nothing else
runs the language model.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from keepsight.core.decoding.drafts import DraftCounts, EarlierAnswers, Guesses, PassCosts
from keepsight.core.decoding.forward import LanguageModel, Stretch, ordinary_ids
from keepsight.core.decoding.lanes import Lanes, restore, shared
from keepsight.core.decoding.positions import place
from keepsight.core.decoding.sampling import Detokenizer, check_length, sampler
from keepsight.core.decoding.state import Lane, Placement, Shape, Tensors, pattern
from keepsight.core.explain import Findings
from keepsight.core.sequence import Sequence, there
from keepsight.errors import ModelKeepsChanging
from keepsight.formats.package import Package
from keepsight.kinds import Record
from keepsight.models.families.pixels import Part
from keepsight.models.no_gradients import quietly
from keepsight.prefix.match import Match
from keepsight.prefix.node import LOGITS, Received
from keepsight.prefix.prompt import PASS, Prompt
from keepsight.report import Piece
from keepsight.system.devices import StreamOrder

if TYPE_CHECKING:
    from keepsight.core.runtime import Runtime

logger = logging.getLogger(__name__)

PIECE = 512  # prompt tokens of a pass beside running answers
MAX_RUNNING = 16  # sequences that are computed at a time
MAX_RESTARTS = 8  # of one prompt, because the model changed
MOST_LOGITS = 64 << 20  # bytes of the logits of a pass that prompts want
_PLANNED = 4096  # tokens of an answer for which memory is planned; it may get longer

Chosen = list[tuple[Sequence, Stretch]]


class Engine:
    """Runs one model. `step` is called with the model's lock."""

    def __init__(self, memory: Runtime, shape: Shape, budget: int, guessing: bool) -> None:
        self._memory, self._model, self._family = memory, memory.model, memory.family
        self._tree, self.guessing = memory.tree, guessing
        self._room = self._budget = budget  # for all of memory, and for what runs at a time
        self.shape = shape
        self.decoder = LanguageModel(memory.model, memory.family, shape, budget // 2)
        self.lanes = Lanes(memory.model, shape, budget)
        self.answers, self._costs, self.tally = EarlierAnswers(), PassCosts(), DraftCounts()
        self.came: deque[Sequence] = deque()  # added by any thread
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._listened: list[Sequence] = []  # those with a listener that has not heard their end
        self._telling = self._gave_way = False
        self.piece, self.max_running = PIECE, MAX_RUNNING
        self.longest_pass = PASS
        # A vision encoder alone has no words.
        words = getattr(memory.model.config.get_text_config(), "vocab_size", 1)
        self.most_rows = max(1, MOST_LOGITS // (4 * words))  # of a pass
        self.prefill_tokens = self.decode_steps = self.towers = 0
        self._number = self._round = self._rows = 0
        self._pattern: tuple[str, Record] = ("", {})  # of the last model and kernels
        self._placement: Placement | None = None
        self._order = StreamOrder()

    # -- for callers, in any thread ----------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        self.came.append(seq)

    def answer(self, seq: Sequence) -> Iterator[Piece]:
        """The pieces of an answer as they come; the last one carries usage and report."""
        self.add(seq)
        try:
            while True:
                while seq.pieces:
                    yield seq.pieces.popleft()
                if seq.ended:
                    return seq.raise_error()
                with self._memory.lock:
                    if not seq.pieces and not seq.ended:
                        self.step()
        finally:
            self.leave(seq)

    def run(self, several: Several[Sequence]) -> None:
        """Compute sequences to their ends, together; an error of one is raised at the end."""
        for seq in several:
            self.add(seq)
        try:
            while not all(seq.ended for seq in several):
                with self._memory.lock:
                    self.step()
        finally:
            for seq in several:
                self.leave(seq)
        for seq in several:
            seq.raise_error()

    def leave(self, seq: Sequence) -> None:
        """Nobody waits for this sequence any more. Never waits itself: the garbage collector may
        come here at any moment."""
        if not seq.ended:
            seq.cancelled = True
            self._memory.lock.leave(self._sweep)

    def serve(self, running: int, piece: int, tokens: int | None) -> None:
        """Set the bounds for sequences that are computed together."""
        self.max_running, self.piece = running, piece
        self._budget = self._room
        if tokens is not None:
            column, state = self.bytes_per_token
            self._budget = tokens * column + running * state

    def count(self) -> tuple[int, int]:
        """How many sequences read their prompts, and how many decode."""
        running = list(self.running)
        reading = sum(seq.reading for seq in running)
        return reading, len(running) - reading

    @property
    def busy(self) -> bool:
        return bool(self.came or self.waiting or self.running or self._listened)

    # -- the loop ----------------------------------------------------------------------------------

    def step(self) -> bool:
        """One pass; whether there is more to do. Under the lock an interrupt waits for its end."""
        self._sweep()
        # A first token that memory gave goes out before the next pass, but never two times in turn.
        self._gave_way = self._begin_waiting() and not self._gave_way
        if not self._gave_way and (chosen := self._choose()):
            self._pass(chosen)
        self._tell()
        return self.busy

    def _pass(self, chosen: Chosen) -> None:
        begun, before = time.perf_counter(), self.decoder.passes
        decoding = sum(not seq.reading for seq, _ in chosen)
        try:
            found = self.decoder.forward([one for _, one in chosen], chosen[0][0].kernels)
        except Exception as error:  # a foreign model may raise anything
            self._failed(chosen, error)
            return
        seconds = time.perf_counter() - begun
        self.decode_steps += min(decoding, self.decoder.passes - before)
        for (seq, segment), logits in zip(chosen, found, strict=True):
            with self._guarded(seq):
                self._advance(seq, segment, logits, seconds)

    def _advance(
        self, seq: Sequence, segment: Stretch, logits: torch.Tensor | None, seconds: float
    ) -> None:
        """Take what a pass computed for one sequence."""
        count = len(segment.ids)
        seq.computed, seq.alone = seq.computed + count, False
        if seq.reading:
            if seq.wanted is not None and logits is not None:
                seq.wanted.take(seq.done - len(logits), logits)
                logits = logits[-1:]
            seq.milliseconds["prefill"] = seq.milliseconds.get("prefill", 0.0) + 1e3 * seconds
            self.prefill_tokens += count
            self._read(seq, logits, 1e3 * seconds, whole=count == len(seq.read))
            return
        seq.milliseconds["decode"] = seq.milliseconds.get("decode", 0.0) + 1e3 * seconds
        logits, over = there(logits), False
        guessed, right = segment.ids[1:].tolist(), 0
        unread = count - len(logits)  # tokens that were forced: nobody reads the logits before them
        for spot in range(count):
            row = logits[spot - unread : spot - unread + 1] if spot >= unread else None
            token, over = self._take(seq, row, *guessed[spot : spot + 1])
            if over or spot == len(guessed) or token != guessed[spot]:
                break
            right += 1
        if segment.forced:
            seq.tally.forced_tokens += right
        elif seq.guesses is not None:
            seq.guesses.checked(len(guessed), right, seconds)
        if right < len(guessed) and seq.lane is not None:
            seq.lane.rewind(seq.lane.length - (len(guessed) - right))
        if over:
            self._finish(seq)

    def _read(self, seq: Sequence, logits: torch.Tensor | None, cost: float, whole: bool) -> None:
        """Remember what was read of a prompt, and choose the first token at its end."""
        read = seq.done == len(seq.read)
        seq.packages = {
            m: seq.packages[m] for m in seq.packages if seq.prompt.ranges[m][-1][1] > seq.done
        }
        if seq.again is not None:
            seq.again = None if read else seq.again
            return None
        # What a lone sequence read in one pass is of one model, if not of one that is still there.
        seq.changed = self._out_of_date(seq)
        if seq.changed and not (whole and len(self.running) == 1):
            return self._restart(seq)
        if not seq.changed:
            self._remember(seq, logits, cost)
        if read:
            self._begin_decoding(seq, there(logits))
        return None

    def _begin_decoding(self, seq: Sequence, logits: torch.Tensor) -> None:
        seq.logits = logits
        if seq.sampler is None:
            self._finish(seq)
            return
        if seq.tokenizer is not None:
            chooser = seq.sampler
            seq.detokenizer = Detokenizer(seq.tokenizer, chooser.stop, chooser.skip_special_tokens)
        # What was guessed wrong is taken back, which layers of fixed size do not allow.
        exact = bool(seq.rule.kernels) and not self.shape.has_states
        if self.guessing and exact and not self._family.step_inputs(1, len(seq.prompt) + 1):
            earlier = self.answers.of(seq.tenant)
            seq.guesses = Guesses(seq.prompt, earlier, self._costs, seq.room, seq.tally)
        _, over = self._take(seq, logits)
        if over:
            self._finish(seq)

    def _take(
        self, seq: Sequence, logits: torch.Tensor | None, forced: int = 0
    ) -> tuple[int, bool]:
        """Choose a token, or take a forced one where there are no logits, and hand out its text;
        whether it ends the answer."""
        chooser = there(seq.sampler)
        token = chooser.accept(forced) if logits is None else chooser.take(logits)
        seq.generated.append(token)
        if "first_token" not in seq.milliseconds:
            seq.milliseconds["first_token"] = 1e3 * (time.perf_counter() - seq.asked)
        text, over = "", chooser.over
        if seq.detokenizer is not None:
            text = seq.detokenizer.push(token)
            over |= seq.detokenizer.stopped  # Transformers' criterion misses some in a token
        seq.pieces.append(Piece(text, token))
        return token, over

    # -- which segments ----------------------------------------------------------------------------

    def _choose(self) -> Chosen:
        """One token of every running answer, and pieces of prompts. Accounts take turns: none gets
        more than another by asking more at once."""
        able = self._in_turn(self._alike([seq for seq in self.running if not seq.ended]))
        self._round, self._rows = self._round + 1, self.most_rows
        for seq in able:
            seq.served = self._round
        decoding = [seq for seq in able if not seq.reading]
        chosen: Chosen = []
        for seq in decoding:
            with self._guarded(seq):
                chosen.append((seq, self._tokens(seq, len(decoding) == len(able) == 1)))
        room = self.piece if decoding else self.longest_pass
        towers, begun = self.towers, list[Sequence]()
        for seq in sorted(able, key=_rank):
            if not seq.reading or room <= 0 or self.towers > towers:
                continue
            with self._guarded(seq):
                segment = self._next_piece(seq, room, begun)
                if segment is not None:
                    chosen.append((seq, segment))
                    room -= len(segment.ids)
        return self._in_one_pass(chosen)

    def _in_one_pass(self, chosen: Chosen) -> Chosen:
        """Those that can share a pass; what must run alone does so in this step if it is the first
        piece of a prompt, and one token each otherwise."""
        alone = [(seq, one) for seq, one in chosen if seq.alone]
        if alone:
            return alone[:1]
        reading = [(seq, one) for seq, one in chosen if seq.reading]
        segments = [one for _, one in chosen]
        if len(chosen) > 1 and not self.decoder.together(segments, chosen[0][0].kernels):
            chosen = [(seq, one) for seq, one in chosen if not seq.reading] + reading[:1]
            reading = reading[:1]
        for seq in [*self.waiting, *self.running]:
            if reading and seq.reading and seq not in [read for read, _ in reading]:
                seq.passed += sum(len(one.ids) for _, one in reading)
        for seq, _ in reading:
            seq.passed = 0
        return chosen

    def _in_turn(self, running: list[Sequence]) -> list[Sequence]:
        """Equally many of each account, those first that had their turn longest ago."""
        counts = Counter(seq.account for seq in running)
        least = min(counts.values(), default=0)
        if least == max(counts.values(), default=0):
            return running
        seen, chosen = Counter[str](), set[int]()
        for seq in sorted(running, key=lambda one: one.served):
            seen[seq.account] += 1
            if seen[seq.account] <= least:
                chosen.add(seq.number)
        return [seq for seq in running if seq.number in chosen]

    def _alike(self, running: list[Sequence]) -> list[Sequence]:
        """Those that began with the same kernels as the one that had its turn longest ago: another
        thread may use another number of threads."""
        first = min(running, key=lambda one: one.served, default=None)
        return [seq for seq in running if first is not None and seq.kernels is first.kernels]

    def _tokens(self, seq: Sequence, alone: bool) -> Stretch:
        """The last chosen token, and those behind it that are forced, or guesses if it is alone."""
        start, guess, chooser = seq.done, self._forced(seq), there(seq.sampler)
        forced = bool(guess)
        if not guess and alone and seq.guesses is not None:
            guess = chooser.fitting(seq.guesses.next(seq.generated))
        ids = np.array([*seq.generated[start - len(seq.prompt) :], *guess], dtype=np.int64)
        positions = seq.positions(start, start + len(ids))
        rows = 1 if forced and not chooser.reads_all else len(ids)
        return Stretch(there(seq.lane), seq.prompt, ids, positions, rows, forced=forced)

    def _forced(self, seq: Sequence) -> list[int]:
        """Tokens about which a grammar leaves no choice: one pass reads them all. States of fixed
        size cannot be rewound, so nothing else may end the answer amid them there."""
        sampler, family = seq.sampler, self._family
        if sampler is None or seq.alone or not family.decodes_as_prefilled:
            return []
        if family.step_inputs(1, seq.done + 1) or (self.shape.has_states and sampler.may_end_early):
            return []
        return sampler.forced()

    def _next_piece(self, seq: Sequence, room: int, begun: list[Sequence]) -> Stretch | None:
        """The next piece of a prompt; None if it waits in this step, or its tower ran instead."""
        lane = self._start(seq)
        start, end = seq.done, len(seq.read)
        if start == end:  # all of it was remembered, or another read the rest
            self._all_is_read(seq)
            return None
        # Where two go on alike, the second takes over what the first computes.
        if any(_goes_on_as(seq, other) for other in begun):
            return None
        if seq.wanted is not None and self._rows <= 0:
            return None
        begun.append(seq)
        stop = min(end, seq.prompt.move(min(start + room, end), seq.rule))
        if seq.rule.states and not _captures(seq):  # states are captured at the end of a pass only
            stop = min([stop, *(cut for cut in seq.ends if cut > start)])
        rows = 0
        if seq.wanted is not None:
            stop, rows = seq.wanted.cut(start, stop, self._rows)
            self._rows -= rows
        parts = self._parts(seq, start, stop)
        if parts is None:
            return None
        ends = [cut for cut in seq.ends if start < cut < stop]
        lane.watch(ends if _captures(seq) else ())
        if start < len(seq.prompt):
            stop = min(stop, len(seq.prompt))
        some = (seq.ids(start, stop), seq.positions(start, stop))
        rows = max(rows, int(stop == len(seq.prompt)))
        return Stretch(lane, seq.prompt, *some, rows, parts)

    def _parts(self, seq: Sequence, start: int, stop: int) -> list[Part] | None:
        """The features in a stretch. If the tower has to run, it runs for one medium, and the
        others get their tokens first: None."""
        spans = seq.prompt.clip(start, stop)
        for medium in sorted({span.medium for span in spans} - seq.packages.keys()):
            seq.packages[medium] = self._fetch(seq, medium)
            if seq.sources[medium] == "tower":
                self.towers += 1
                if len(self.running) > 1:
                    return None
        return [
            (seq.packages[span.medium], span.row, span.row + span.end - span.start)
            for span in spans
        ]

    def _fetch(self, seq: Sequence, medium: int) -> Package:
        vision, node, shown = there(seq.vision), there(seq.node), seq.prompt.media[medium]
        if medium not in seq.sources and vision.made_elsewhere(shown):
            seq.others.add(medium)  # before our own package is stored

        def may_keep() -> bool:
            """Not of a deleted picture, nor of a changed model."""
            barred = self._tree.is_barred(node, shown.key, seq.since)
            return not barred and not self._out_of_date(seq)

        with seq.stage("encode"):
            package, where = vision.package(shown, may_keep, seq.prompt.shown(seq.done))
        if medium not in seq.sources and (note := vision.note(medium, package, where)):
            seq.notes[medium] = note
        seq.sources.setdefault(medium, where)
        return package

    # -- beginning and ending ----------------------------------------------------------------------

    def _begin_waiting(self) -> bool:
        """Begin sequences while there is room, accounts with the fewest running ones first. If all
        running ones belong to one account, one more of another may run. Whether one of them has
        its first token from memory."""
        first = False
        while self.waiting:
            counts = Counter(seq.account for seq in self.running)
            seq = min(self.waiting, key=lambda one: (counts[one.account], *_rank(one)))
            beside = len(counts) == 1 and seq.account not in counts
            full = len(self.running) >= self.max_running + beside
            if full or (self.running and self._planned(seq) > self._budget):
                break
            self.waiting.remove(seq)
            self.running.append(seq)
            with self._guarded(seq):
                self._begin(seq)
            first |= bool(seq.pieces)
        return first

    def _planned(self, new: Sequence) -> int:
        """Bytes of the lanes of all running sequences and a new one."""
        column, state = self.bytes_per_token
        longest = [len(one.prompt) + min(one.room, _PLANNED) for one in [*self.running, new]]
        return sum(longest) * column + len(longest) * state

    def _begin(self, seq: Sequence) -> None:
        """Check the model, find what is remembered, and hold it."""
        memory = self._memory
        memory.require_answers()
        with seq.stage("check"):
            seq.namespace = memory.refresh(seq.tenant)
        seq.changes, seq.rule = memory.weights.changes, memory.rule
        seq.kernels = memory.finding.kernels
        seq.vision = memory.vision_of(seq.tenant)
        with seq.stage("render"):
            before = seq.prompt.ids
            if seq.current is not None:
                seq.prompt = seq.current()
            seq.prompt = self._under_present_names(seq)
        check_length(self._model, len(seq.prompt))
        if seq.sampler is None or (seq.prompt.ids is not before and not seq.generated):
            self.choose(seq)
        with seq.stage("match"):
            self._find(seq)
        seq.milliseconds["match"] -= seq.milliseconds.get("load", 0.0)
        seq.vision.require(seq.prompt.shown(seq.match.length))  # before computing anything
        if seq.match.whole:
            self._start(seq)
            self._all_is_read(seq)

    def choose(self, seq: Sequence) -> None:
        """How its tokens are chosen; unknown and impossible options are refused."""
        if seq.options is not None:
            self._memory.require_words()
            ids = torch.from_numpy(seq.prompt.ids)[None].to(self._model.device)
            tokenizer = getattr(self._memory.processor, "tokenizer", None)
            more = (seq.options, seq.default_tokens, seq.draws, seq.row)
            seq.sampler = sampler(self._model, tokenizer, ids, *more)

    def _under_present_names(self, seq: Sequence) -> Prompt:
        """The prompt with its media named under the present weights."""
        if seq.vision is None or not seq.prompt.media:
            return seq.prompt
        media = tuple(map(seq.vision.again, seq.prompt.media))
        if [m.feature_id for m in media] == [m.feature_id for m in seq.prompt.media]:
            return seq.prompt
        return dataclasses.replace(seq.prompt, media=media)

    def look(self, seq: Sequence) -> None:
        """What `begin` would find; nothing is held, loaded or made fresher."""
        memory = self._memory
        with seq.stage("check"):
            seq.namespace = memory.refresh(seq.tenant)
        seq.rule, seq.vision = memory.rule, memory.vision_of(seq.tenant)
        seq.prompt = self._under_present_names(seq)
        with seq.stage("match"):
            self._look(seq)
        seq.vision.require(seq.prompt.shown(seq.match.length))

    def _look(self, seq: Sequence) -> None:
        known = self._tree.known(seq.namespace, seq.read)
        whole = known.until == len(seq.read)  # then other namespaces do not matter
        other = None if whole else self._memory.elsewhere(seq.namespace, seq.read)
        match = self._match(seq)
        seq.found = Findings(match, known, other)
        if seq.again is None:
            seq.told = seq.found

    def _match(self, seq: Sequence) -> Match:
        """The longest remembered prefix that leaves all wanted logits to be computed."""
        sought = seq.sought
        match = self._tree.match(seq.namespace, sought, seq.rule)
        if match.whole and len(sought) < len(seq.read):
            return match.but_the_last(sought, seq.rule)
        return match

    def _find(self, seq: Sequence) -> None:
        """The longest remembered prefix, loaded and held."""
        self._look(seq)
        if seq.found is None:
            return
        if seq.reads_again and seq.match.whole:
            seq.found.match = seq.match.but_the_last(seq.read, seq.rule)
        while True:
            held = self._tree.hold(seq.match)
            with seq.stage("load"):
                loaded = self._tree.load(held, seq.read)
            if loaded and not (seq.match.whole and seq.match.logits is None):
                break  # else it is damaged on disk and marked so, or has lost its logits
            self._tree.release(held)
            again = self._match(seq)
            seq.found.match = seq.match.but_the_last(seq.read, seq.rule) if loaded else again
        seq.node, seq.since = held, seq.match.since
        seq.ends = self._ends(seq)

    def _ends(self, seq: Sequence) -> list[int]:
        """Where new snapshots end, behind the remembered ones."""
        prompt, rule, known = seq.read, seq.rule, seq.match
        ends = {*prompt.ends(rule, known.length), *seq.shares}
        if seq.passing:
            kept = max(seq.shares, default=0)
            return sorted(end for end in ends if known.length < end <= kept)
        if seq.found is not None and rule.states:  # where the next prompt will part again
            until = prompt.before_medium(seq.found.known.until, rule)
            if known.length + 16 <= until < len(prompt):
                ends.add(until)
        return [*sorted(ends), len(prompt)]

    @quietly
    def _start(self, seq: Sequence) -> Lane:
        """A lane with what is remembered of the prompt on it."""
        self._catch_up(seq)
        if seq.lane is not None:
            return seq.lane
        node = there(seq.node)
        with seq.stage("restore"):
            lane = self.lanes.take(node)
            lane.reserve(len(seq.prompt) + min(seq.room, _PLANNED))
            length = shared(lane, node)
            lane.placed = place(self._family, seq.prompt, lane.placed if length else None)
            lane.rewind(length)
            restore(lane, node, length)
            seq.lane = lane
        seq.milliseconds.setdefault("queued", 1e3 * (time.perf_counter() - seq.asked))
        seq.milliseconds.setdefault("prefill", 0.0)
        return lane

    def _catch_up(self, seq: Sequence) -> None:
        """Use what other turns read on this path meanwhile."""
        alone = len(self.running) < 2 and not seq.passed
        if seq.node is None or seq.found is None or alone:
            return
        start = seq.match.length if seq.lane is None else seq.done
        match = self._match(seq)
        behind = seq.lane is None or seq.node.parent is None or seq.node in match.node.chain()
        if match.length <= start or not behind:
            return
        if match.whole and match.node.logits is None:
            match = match.but_the_last(seq.read, seq.rule)
            if match.length <= start:
                return
        node = self._tree.hold(match)
        with seq.stage("load"):
            loaded = self._tree.load(node, seq.read)
        if not loaded or (match.whole and match.logits is None):
            self._tree.release(node)
            return
        held, seq.node = seq.node, node
        if seq.lane is None:
            seq.found.match = match
        else:
            restore(seq.lane, node, start)
            seq.found.taken_over.append((start, match))
        self._tree.release(held)

    def _all_is_read(self, seq: Sequence) -> None:
        """Go on where all that was to be read was remembered."""
        if seq.again is not None:
            seq.again = None
            return
        taken = there(seq.found).taken_over
        logits = there((taken[-1][1] if taken else seq.match).logits)
        if seq.wanted is not None:
            seq.wanted.take(len(seq.prompt) - 1, logits)
        self._begin_decoding(seq, logits)

    def _out_of_date(self, seq: Sequence) -> bool:
        """Whether weights or settings changed since it began, also if they changed back."""
        now = self._memory.refresh(seq.tenant)
        return now != seq.namespace or self._memory.weights.changes != seq.changes

    def _restart(self, seq: Sequence) -> None:
        """Read a prompt again from its start: parts of two models do not belong together."""
        seq.restarts += 1
        if seq.restarts > MAX_RESTARTS:
            raise ModelKeepsChanging(
                f"weights, settings or hooks of the model changed {seq.restarts} times while one "
                "prompt was prefilled, so its parts do not belong together; stop what changes them "
                "(training in another thread, or a hook that changes weights in each pass), "
                "and ask again"
            )
        self._release(seq, keep_lane=False)
        seq.packages, seq.sources, seq.notes, seq.others = {}, {}, {}, set()
        self._begin(seq)

    @quietly
    def _remember(self, seq: Sequence, logits: torch.Tensor | None, cost: float) -> None:
        """Remember the snapshots that ended in the last pass."""
        lane, prompt = seq.lane, seq.prompt
        if lane is None or seq.node is None:
            return
        begin = seq.node.end
        for end in seq.ends:
            if not seq.node.end < end <= lane.length:
                continue
            share = cost * (end - seq.node.end) / (lane.length - begin)
            own = logits.clone() if end == len(prompt) and logits is not None else None
            self._insert(seq, prompt, end, own, share)
        lane.watch(())

    def _insert(
        self, seq: Sequence, prompt: Prompt, end: int, logits: torch.Tensor | None, cost: float
    ) -> None:
        lane, above = there(seq.lane), there(seq.node)
        kv, fixed = lane.capture_watched(above.end, end)
        seq.node = lane.node = self._tree.insert(
            above, prompt, end, kv, fixed, logits, cost, seq.since
        )
        self._tree.release(above)

    @quietly
    def _remember_reply(self, seq: Sequence) -> None:
        """Remember the answer as it was decoded."""
        lane, node = seq.lane, seq.node
        known = self._family.reuse == "prefix" and self._family.decodes_as_prefilled
        if lane is None or node is None or seq.passing or not known:
            return
        if not (seq.generated or seq.computed):
            return
        if seq.changed or self._out_of_date(seq):
            seq.changed = True
            return
        end = lane.length
        if self._tree.is_forgotten(node, seq.prompt, seq.since):
            return
        if seq.sampler is not None:
            self.answers.add(seq.tenant, seq.prompt, seq.generated)
        if end > node.end:
            self._insert(seq, seq.whole(end), end, None, 0.0)

    def _finish(self, seq: Sequence, error: BaseException | None = None) -> None:
        """End a sequence: remember its reply, give back its lane, and say the last words."""
        if seq.ended:
            return
        if error is None and not seq.reading:
            self._remember_reply(seq)
        if error is None and seq.found is not None:
            seq.pieces.append(seq.last())
        seq.ended, seq.error = True, error
        for queue in (self.waiting, self.running):
            if seq in queue:
                queue.remove(seq)
        self.tally.add(seq.tally)
        try:
            self._release(seq, keep_lane=error is None)
        except Exception as failure:  # it is off every list, and must end
            logger.exception("not all that a sequence held could be let go of")
            seq.error = error or failure

    def _tell(self) -> None:
        """Hand listeners what came, when nothing is half done: they may call the model again."""
        if self._telling:
            return
        self._telling = True
        try:
            for seq in [one for one in self._listened if one.pieces or one.ended]:
                self._tell_one(seq)
        finally:
            self._telling = False

    def _tell_one(self, seq: Sequence) -> None:
        try:
            while seq.pieces and seq.on_piece is not None:
                seq.on_piece(seq.pieces.popleft())
        except Exception as error:  # it ends only its own sequence
            seq.pieces.clear()
            self._finish(seq, error)
            seq.error = seq.error or error
        if not seq.ended:
            return
        self._listened.remove(seq)
        try:
            if seq.on_end is not None:
                seq.on_end()
        except Exception:  # it is over for that one anyway
            logger.exception("a listener of a sequence failed")

    def _release(self, seq: Sequence, keep_lane: bool) -> None:
        lane, node = seq.lane, seq.node
        seq.lane = None
        try:
            if lane is not None and node is not None and keep_lane:
                forgotten = self._tree.is_forgotten(node, seq.prompt, seq.since)
                if not forgotten:  # else it holds states that must not be kept
                    self.lanes.waiting = len(self.waiting)
                    self.lanes.give_back(lane)
        finally:
            # Of a call that was interrupted nobody takes the node over.
            whole = seq.ended and seq.error is None and not seq.cancelled
            if node is not None and not (seq.keeps_node and whole):
                seq.node = None
                self._tree.release(node)
                self._tree.settle()  # write evicted entries now, not before an answer

    def _sweep(self) -> None:
        """Let go of sequences that nobody waits for; what they computed stays remembered."""
        self._receive()
        for seq in [seq for seq in [*self.waiting, *self.running] if seq.cancelled]:
            try:
                self._finish(seq)
            except Exception as error:  # nobody is there to hear of it
                logger.error("an abandoned answer could not be released", exc_info=error)
                self._finish(seq, error)

    def _receive(self) -> None:
        while self.came:
            seq = self.came.popleft()
            self._number += 1
            seq.number = self._number
            self.waiting.append(seq)
            if seq.on_piece is not None or seq.on_end is not None:
                self._listened.append(seq)

    def end_all(self, error: Exception, owner: object = None) -> None:
        """End every sequence with an error, or those of one owner."""
        self._receive()
        for seq in [*self.waiting, *self.running]:
            if owner is None or seq.owner is owner:
                self._finish(seq, error)
        self._tell()

    # -- errors ------------------------------------------------------------------------------------

    @contextmanager
    def _guarded(self, seq: Sequence) -> Iterator[None]:
        """Any error in a block ends this sequence only."""
        try:
            yield
        except Exception as error:
            self._finish(seq, error)

    def _failed(self, chosen: Chosen, error: Exception) -> None:
        """A pass failed. Alone, the sequence ends with the error; of several each runs again by
        itself, so that only the one at fault ends."""
        for seq, segment in chosen:
            if len(chosen) == 1:
                self._finish(seq, error)
                continue
            seq.alone = True
            if self.shape.has_states:
                self._begin_again(seq)
            else:
                segment.lane.rewind(segment.start)

    def _begin_again(self, seq: Sequence) -> None:
        """Read a sequence again whose states are lost: its prompt, and its answer so far."""
        self._release(seq, keep_lane=False)
        if seq.generated:
            seq.again = seq.whole(len(seq.prompt) + len(seq.generated) - 1)
        with self._guarded(seq):
            self._begin(seq)

    # -- layouts -----------------------------------------------------------------------------------

    def bind(self, variant: str) -> None:
        """Set the current model and kernels. Work that this caller queues on a device waits for the
        work of earlier callers."""
        self.lanes.variant = variant
        if self._model.device.type != "cpu":
            self._order.follow(self.placement.devices)

    def receive(self, rows: Tensors, fixed: Tensors | None) -> Received | None:
        """Place a snapshot from a file on the devices of its layers; None if this model could not
        have made it."""
        kv = {name: tensor for name, tensor in rows.items() if name != LOGITS}
        found, wanted = pattern(kv, fixed or {}), self.snapshot_pattern()
        if fixed is None:
            wanted = {name: sizes for name, sizes in wanted.items() if name.startswith("kv ")}
        if found != wanted:
            return None
        place = self.placement
        return place.rows(rows), None if fixed is None else place.fixed(fixed)

    @property
    def placement(self) -> Placement:
        if self._placement is None:
            self._placement = Placement(self._model, self.shape)
        return self._placement

    def look_again(self) -> bool:
        """Handle changed weights. If they moved, drop what lies beside their old place and return
        True: snapshots lie there too."""
        self.decoder.forget()
        before, self._placement = self._placement, None
        if before is not None and before != self.placement:
            self.lanes.clear()
            return True
        return False

    @property
    def bytes_per_token(self) -> tuple[int, int]:
        """Bytes that a token takes on a lane, and bytes of a lane's states of fixed size."""
        found = {"kv": 0, "fixed": 0}
        for name, (dtype, *sizes) in self.snapshot_pattern().items():
            found[name.split()[0]] += dtype.itemsize * int(np.prod(sizes))
        return found["kv"], found["fixed"]

    def snapshot_pattern(self) -> Record:
        """The layout that all snapshots of a namespace share; costs one small pass, once."""
        variant = f"{self.lanes.variant} {bool(self._memory.finding.kernels)}"
        if variant != self._pattern[0]:
            self._pattern = variant, self._look_at_a_snapshot()
        return self._pattern[1]

    @quietly
    def _look_at_a_snapshot(self) -> Record:
        """Derive the layout from a snapshot of two tokens, which is dropped."""
        ids, lane = ordinary_ids(self._model, self._family, 2), self.lanes.fresh()
        positions = self._family.positions(ids, np.zeros(2, dtype=np.int8), [])
        kernels = self._memory.finding.kernels
        self.decoder.forward([Stretch(lane, Prompt(ids), ids, positions)], kernels)
        return pattern(*lane.capture(0, 2))

    # -- forgetting --------------------------------------------------------------------------------

    def clear(self, tenant: str | None) -> None:
        """Forget idle lanes, and the answers of one tenant or of all."""
        self.lanes.clear()
        self.answers.clear(tenant)


def _captures(seq: Sequence) -> bool:
    """Whether layers of fixed size give their states in the middle of a pass."""
    return seq.kernels is not None and not seq.kernels.in_graphs


def _rank(seq: Sequence) -> tuple[int, int]:
    """The shortest prompt comes first. Each token computed for others while it waits counts as one
    less, so that a long one gets its turn, however many short ones come."""
    return seq.remaining - seq.passed, seq.number


def _goes_on_as(seq: Sequence, other: Sequence) -> bool:
    """Whether a sequence would compute what another is about to remember, or a part of it."""
    start, ids = seq.done, other.read.ids
    alike = other.node is seq.node and start <= other.done and start < len(ids)
    ends = other.ends[-1] if other.ends else 0
    return alike and start < ends and bool(ids[start] == seq.read.ids[start])
