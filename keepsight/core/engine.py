"""The only caller of the language model: lanes, prefill from boundary to boundary, decode steps.

A prompt is always prefilled in the chunks that its boundaries give, remembered or not. So the same
shapes run either way, and a warm answer equals a cold one bit for bit. Two prompts never share a
prefill pass. State that a model object keeps between calls is not used: positions are passed
explicitly each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from keepsight.core.decoding.drafts import DraftCounts, Drafts, EarlierAnswers, PassCosts, words_of
from keepsight.core.decoding.lanes import Lanes, restore, shared
from keepsight.core.decoding.placement import Placement
from keepsight.core.decoding.positions import place
from keepsight.core.decoding.recorded_steps import decode
from keepsight.core.decoding.state import Lane, Shape, Tensors, pattern
from keepsight.core.kernels.grouped import grouped_queries
from keepsight.core.kernels.passes import Kernels, running
from keepsight.errors import KeepsightError
from keepsight.formats.package import Package
from keepsight.kinds import Inputs, Record
from keepsight.models.families import Family
from keepsight.models.no_gradients import quietly
from keepsight.models.renamed import with_cache
from keepsight.prefix.cache import PrefixCache
from keepsight.prefix.match import Match
from keepsight.prefix.node import LOGITS, Node, Received
from keepsight.prefix.prompt import Prompt
from keepsight.system.devices import StreamOrder
from keepsight.system.interrupts import LATER

MAX_PATTERNS = 64  # namespaces whose snapshot layout is known


@dataclass(eq=False)
class Run:
    """One prompt on one lane. `node` is the deepest snapshot so far; it is held."""

    prompt: Prompt
    positions: torch.Tensor
    lane: Lane
    node: Node
    next_positions: torch.Tensor  # position of the token after the prompt, as forward takes it
    logits: torch.Tensor | None = None
    computed: int = 0
    since: int = 0  # when the prompt was matched
    open: bool = True
    left: bool = False  # its lane was given to others; it goes on in a batch or not at all
    kernels: Kernels | None = None  # the kernels that make any cut exact
    changed: bool = False  # another thread changed the model meanwhile: remember nothing
    drafts: Drafts | None = None  # guesses tokens if passes over several are exact

    def settle(self) -> None:
        """Remove guesses that were not chosen from the lane."""
        if self.drafts is not None:
            self.drafts.settle()

    def last_logits(self) -> torch.Tensor:
        """The logits after the prompt."""
        if self.logits is None:
            raise KeepsightError("a prompt that is not prefilled to its end has no logits")
        return self.logits


class Engine:
    """Runs one model. Callers take turns and hold the lock themselves."""

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        prefixes: PrefixCache,
        shape: Shape,
        budget: int,
    ) -> None:
        self._model, self._family, self._prefixes = model, family, prefixes
        self._core: PreTrainedModel = model.base_model
        self.lanes = Lanes(model, shape, budget)
        self.shape = shape
        self.prefill_tokens = 0
        self.decode_steps = 0
        self.answers, self.costs, self.tally = EarlierAnswers(), PassCosts(), DraftCounts()
        self.guessing = True
        self.kernels: Kernels | None = None  # the current kernels that make any cut exact
        self._patterns: dict[str, Record] = {}  # by namespace
        self._placement: Placement | None = None
        self._order = StreamOrder()

    def bind(self, variant: str) -> None:
        """Set the current model and kernels; called before each turn. Work that this caller queues
        on a device waits for the work of earlier callers."""
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
        """The device on which each layer keeps its state."""
        if self._placement is None:
            self._placement = Placement(self._model, self.shape)
        return self._placement

    def look_again(self) -> bool:
        """Handle changed weights. If they moved, drop what lies beside their old place and return
        True: snapshots lie there too."""
        self._core = self._model.base_model
        before, self._placement = self._placement, None
        if before is not None and before != self.placement:
            self.lanes.clear()
            return True
        return False

    def snapshot_pattern(self) -> Record:
        """The layout that all snapshots of a namespace share; costs one small pass, once."""
        variant = f"{self.lanes.variant} {self.lanes.grows}"
        if variant not in self._patterns:
            while len(self._patterns) >= MAX_PATTERNS:
                self._patterns.pop(next(iter(self._patterns)))
            self._patterns[variant] = self._look_at_a_snapshot()
        return self._patterns[variant]

    @quietly
    def _look_at_a_snapshot(self) -> Record:
        """Derive the layout from a snapshot of two tokens, which is dropped."""
        ids = np.zeros(2, dtype=np.int64)
        lane = self.lanes.fresh()
        positions = self._family.positions(ids, ids, [])
        above = Node(None, 0, 0, "")
        run = Run(Prompt(ids), positions, lane, above, positions, kernels=self.kernels)
        counted = self.prefill_tokens
        self.chunk(run, 0, 2, [])
        self.prefill_tokens = counted
        return pattern(*lane.capture(0, 2))

    @quietly
    def start(self, prompt: Prompt, match: Match, room: int, kernels: Kernels | None = None) -> Run:
        """Prepare a lane at the end of the (held) match. `room`: tokens that will follow the
        prompt."""
        lane = self.lanes.take(match.node)
        lane.busy = True
        lane.reserve(len(prompt) + room)
        length = shared(lane, match.base.chain())
        lane.placed = place(self._family, prompt, lane.placed if length else None)
        positions = lane.placed.positions
        lane.rewind(length)
        restore(lane, match, length)
        # Continue like `generate` of Transformers: after the last token, not after the largest
        # position, which may belong to the last frame of a slow video.
        behind = (positions[..., -1:] + 1).to(self._model.device)
        run = Run(prompt, positions, lane, match.base, behind, kernels=kernels)
        run.logits, run.since = match.logits, match.since
        if match.base is not match.node:
            self._prefixes.hold(match.base)
            self._prefixes.release(match.node)
        return run

    @quietly
    def go_on(self, run: Run, match: Match) -> None:
        """Restore what the (held) match remembers beyond the run's end, instead of computing it."""
        start = run.lane.length
        try:
            restore(run.lane, match, start)
        except BaseException:
            run.lane.rewind(start)
            self._prefixes.release(match.node)
            raise
        if match.base is not match.node:
            self._prefixes.hold(match.base)
            self._prefixes.release(match.node)
        self._prefixes.release(run.node)
        run.node, run.logits = match.base, match.logits

    def prefill(
        self,
        run: Run,
        cut: int,
        fetch: Callable[[int], Package],
        changed: Callable[[], bool],
        ends: Sequence[int] = (),
    ) -> None:
        """Compute up to the next cut; when this returns, its snapshot is in the tree.

        If any cut is exact, one pass covers several snapshots, at `ends`.

        `fetch` returns the package of a medium by index; each chunk asks only for its own.
        `changed` is called after the pass: if another thread changed the model or a setting
        meanwhile, neither this snapshot nor a later one is remembered.
        """
        start = run.lane.length
        parts = [
            (fetch(span.medium), span.row, span.row + span.end - span.start)
            for span in run.prompt.clip(start, cut)
        ]
        begun = time.perf_counter()
        run.lane.watch([end for end in ends if start < end < cut] if run.kernels else ())
        logits = self.chunk(run, start, cut, parts)
        run.lane.unwatch()
        cost = 1e3 * (time.perf_counter() - begun)
        if cut == len(run.prompt):
            run.logits = logits
        run.changed |= changed()
        if run.kernels is not None and not run.changed:
            self.remember(run, ends, logits, cost)
        elif run.node.end == start and not run.changed:
            self._remember(run, cut, logits, cost)

    @quietly
    def chunk(
        self, run: Run, start: int, end: int, parts: list[tuple[Package, int, int]]
    ) -> torch.Tensor | None:
        """Run one pass over a stretch of a prompt; return the logits at the prompt's end."""
        LATER.check()
        device = self._model.device
        inputs: Inputs = {
            "input_ids": torch.from_numpy(run.prompt.ids[start:end])[None].to(device),
            "position_ids": run.positions[..., start:end].to(device),
            "use_cache": True,
            **with_cache(self._model, run.lane.cache),
        }
        extra = self._family.chunk_inputs(run.prompt.ids, run.prompt.types, start, end)
        inputs |= {name: tensor.to(device) for name, tensor in extra.items()}
        inputs |= self._media_inputs(run, start, end)
        inputs |= self._family.feature_inputs(parts, inputs["input_ids"])
        self.prefill_tokens += end - start
        run.computed += end - start
        last = end == len(run.prompt)
        with grouped_queries(device), running(run.kernels):
            if last or self._core is self._model:
                output = self._model(**inputs, logits_to_keep=1)
            else:  # without the output head: nobody reads these logits
                output = self._core(**inputs)
        run.lane.length = end
        if not last:
            return None
        logits: torch.Tensor = output.logits[:, -1].clone()
        return logits

    def _media_inputs(self, run: Run, start: int, end: int) -> dict[str, torch.Tensor]:
        inputs = self._family.media_inputs(run.prompt.ids, run.prompt.grids, start, end)
        return {name: tensor.to(self._model.device) for name, tensor in inputs.items()}

    @quietly
    def _remember(self, run: Run, end: int, logits: torch.Tensor | None, cost: float) -> None:
        previous, ends = run.node, run.kernels is None
        kv, fixed = run.lane.capture_watched(previous.end, end)
        node = self._prefixes.insert(
            previous, run.prompt, end, kv, fixed, logits, cost=cost, since=run.since, ends=ends
        )
        self._prefixes.release(previous)
        run.node = node
        if not node.terminal:
            run.lane.marks.append((end, node))

    def remember(
        self, run: Run, ends: Sequence[int], logits: torch.Tensor | None, cost: float
    ) -> None:
        """Remember the snapshots of one pass, which took so many milliseconds."""
        begin, stop = run.node.end, run.lane.length
        for end in ends:
            if run.node.end < end <= stop:
                share = cost * (end - run.node.end) / (stop - begin)
                self._remember(run, end, logits if end == len(run.prompt) else None, share)

    def guess(self, run: Run, tenant: str, most: int, tally: DraftCounts) -> None:
        """Guess tokens while this sequence decodes, if passes over several tokens are exact."""
        family, length = self._family, run.lane.length
        exact = run.kernels is not None and not self.shape.has_states  # these are not taken back
        if not self.guessing or not exact or family.step_inputs(1, length + 1):
            return
        lane, words = _Decoding(self, run), words_of(run.prompt)
        earlier = self.answers.of(tenant)
        run.drafts = Drafts(lane, words, earlier, self.costs, most, tenant, tally)

    def step(self, run: Run, token: int) -> torch.Tensor:
        """Run one decoded token through the model; return the logits after it."""
        return run.drafts.step(token) if run.drafts is not None else self.forward(run, [token])

    @quietly
    def forward(self, run: Run, tokens: list[int]) -> torch.Tensor:
        """Run decoded tokens through the model in one pass; return the logits after each."""
        LATER.check()
        start, end = run.lane.length, run.lane.length + len(tokens)
        extra = self._family.step_inputs(1, end)
        extra = {name: tensor.to(self._model.device) for name, tensor in extra.items()}
        extra |= self._media_inputs(run, start, end)
        model = (self._model, self._family, run.kernels)
        logits = decode(*model, [run], [tokens], run.lane.cache, extra)
        run.lane.length = end
        run.next_positions = run.next_positions + len(tokens)
        self.decode_steps += 1
        return logits[0]

    def take_back(self, run: Run, length: int) -> None:
        """Rewind the decoded part to this many tokens."""
        run.next_positions = run.next_positions - (run.lane.length - length)
        run.lane.rewind(length)

    def again(self, run: Run, tokens: Sequence[int]) -> None:
        """Compute a sequence again on a separate lane, starting at its prompt's snapshot."""
        self.leave_lane(run)
        if not self._prefixes.load(run.node, run.prompt):
            raise KeepsightError("the prompt was forgotten while its answer was being computed")
        match = Match(run.node, since=run.since)
        fresh = self.start(run.prompt, match, len(tokens), run.kernels)
        run.lane, run.next_positions, run.left = fresh.lane, fresh.next_positions, False
        for token in tokens:
            self.forward(run, [token])

    @quietly
    def keep_decoded(self, run: Run, prompt: Prompt, answer: list[int]) -> None:
        """Remember the lane with its decoded tokens."""
        empty = not answer and not run.computed  # the tree has all of it
        if run.changed or empty or self._prefixes.is_forgotten(run.node, prompt, run.since):
            return
        if run.drafts is not None:
            self.answers.add(run.drafts.tenant, run.prompt, answer)
        node = run.node
        if node.terminal and node.parent is not None:
            node = node.parent
        end = min(run.lane.length, len(prompt))
        if end <= node.end:
            return
        self._prefixes.hold(node)
        stays = run.kernels is not None
        kv, fixed = run.lane.capture(node.end, end)
        decoded = self._prefixes.insert(
            node, prompt, end, kv, fixed, keep_on_disk=stays, since=run.since
        )
        self._prefixes.release(node)
        run.lane.marks.append((end, decoded))
        self._prefixes.release(decoded)

    def leave_lane(self, run: Run) -> None:
        """Release the lane: the sequence goes on elsewhere, or ends."""
        run.settle()
        if run.lane.busy and not run.left:
            run.left = True
            run.lane.busy = False
            if not self._prefixes.is_forgotten(run.node, run.prompt, run.since):
                self.lanes.give_back(run.lane)  # else it still holds states that must not be kept

    def clear(self, tenant: str | None) -> None:
        """Forget idle lanes, and the answers of one tenant or of all."""
        self.lanes.clear()
        self.answers.clear(tenant)

    def let_go(self, run: Run | None, node: Node | None) -> None:
        """Finish a run, or release the held node if the run never began."""
        if run is not None:
            self.finish(run)
        elif node is not None:
            self._prefixes.release(node)

    def finish(self, run: Run) -> None:
        """Release the path and the lane; safe to call twice."""
        if run.open:
            run.open = False
            self.leave_lane(run)
            if run.drafts is not None:
                self.tally.add(run.drafts.tally)
                run.drafts = None
            self._prefixes.release(run.node)
            self._prefixes.settle()  # write evicted entries now, not before an answer


class _Decoding:
    """A run, as guessing sees it."""

    def __init__(self, engine: Engine, run: Run) -> None:
        self._engine, self._run = engine, run

    @property
    def length(self) -> int:
        """Tokens on its lane."""
        return self._run.lane.length

    def forward(self, tokens: list[int]) -> torch.Tensor:
        """Run tokens through the model; return the logits after each."""
        return self._engine.forward(self._run, tokens)

    def rewind(self, length: int) -> None:
        """Cut the run back to its first `length` tokens."""
        self._engine.take_back(self._run, length)
