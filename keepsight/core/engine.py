"""The only caller of the language model: lanes, prefill boundary by boundary, decode steps.

A prompt is always prefilled in the chunks its boundaries give, whether something was remembered or
not, so the same shapes run either way and a warm answer equals a cold one bit for bit. Prefill of
two prompts never shares a forward pass. Nothing that a model object keeps between calls is used:
positions are passed explicitly each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from keepsight.core.attention import grouped_queries
from keepsight.core.drafts import Answers, Costs, Drafts, Tally, words_of
from keepsight.core.kernels.passes import Kernels, running
from keepsight.core.lanes import Lanes, restore, shared
from keepsight.core.placement import Placement
from keepsight.core.positions import place
from keepsight.core.recorded_steps import decode
from keepsight.core.state import Lane, Shape, Tensors, pattern
from keepsight.errors import KeepsightError
from keepsight.formats.package import Package
from keepsight.kinds import Inputs, Record
from keepsight.models.families import Family
from keepsight.models.no_gradients import quietly
from keepsight.prefix.cache import PrefixCache
from keepsight.prefix.match import Match
from keepsight.prefix.node import LOGITS, Node, Received
from keepsight.prefix.prompt import Prompt
from keepsight.system.devices import Order

MAX_PATTERNS = 64  # makings whose snapshots are known by shape


@dataclass(eq=False)
class Run:
    """One prompt on one lane. `node` is the deepest snapshot so far; it is held."""

    prompt: Prompt
    positions: torch.Tensor
    lane: Lane
    node: Node
    next_positions: torch.Tensor  # of the token behind the prompt, as forward takes it
    logits: torch.Tensor | None = None
    computed: int = 0
    since: int = 0  # when the prompt was matched
    open: bool = True
    left: bool = False  # its lane is for others, it goes on in a batch or not at all
    kernels: Kernels | None = None  # those by which any cut gives the same bits
    changed: bool = False  # another thread changed the model meanwhile: nothing is remembered
    drafts: Drafts | None = None  # tokens that are guessed, where several in a pass are exact

    def settle(self) -> None:
        """Take back from the lane what was guessed and not chosen."""
        if self.drafts is not None:
            self.drafts.settle()

    def last_logits(self) -> torch.Tensor:
        """The logits behind the prompt."""
        if self.logits is None:
            raise KeepsightError("a prompt that is not prefilled to its end has no logits")
        return self.logits


class Engine:
    """Runs one model. Callers take turns; the lock is theirs."""

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
        self.answers, self.costs, self.tally = Answers(), Costs(), Tally()
        self.guessing = True
        self.kernels: Kernels | None = None  # of this moment, by which any cut gives the same bits
        self._patterns: dict[str, Record] = {}  # by making
        self._placement: Placement | None = None
        self._order = Order()

    def bind(self, making: str) -> None:
        """Say what the model is now; called before each turn. What this caller queues on a device
        comes behind what callers before it queued there."""
        self.lanes.making = making
        if self._model.device.type != "cpu":
            self._order.follow(self.placement.devices)

    def receive(self, rows: Tensors, fixed: Tensors | None) -> Received | None:
        """A snapshot from a file, each tensor on the device where its layer computes; None where
        this model could not have made it."""
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
        """On which device each layer keeps its state."""
        if self._placement is None:
            self._placement = Placement(self._model, self.shape)
        return self._placement

    def look_again(self) -> bool:
        """The weights are not what they were. Where they have moved, what lies beside their old
        place is dropped, and True says that snapshots lie there too."""
        self._core = self._model.base_model
        before, self._placement = self._placement, None
        if before is not None and before != self.placement:
            self.lanes.clear()
            return True
        return False

    def snapshot_pattern(self) -> Record:
        """What all snapshots of one making have in common; it costs one small pass, once."""
        making = f"{self.lanes.making} {self.lanes.grows}"
        if making not in self._patterns:
            while len(self._patterns) >= MAX_PATTERNS:
                self._patterns.pop(next(iter(self._patterns)))
            self._patterns[making] = self._look_at_a_snapshot()
        return self._patterns[making]

    @quietly
    def _look_at_a_snapshot(self) -> Record:
        """The pattern of all snapshots, from one of two tokens that is thrown away."""
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
        """Put a lane where the (held) match ends. `room`: tokens that will follow the prompt."""
        lane = self.lanes.take(match.node)
        lane.busy = True
        lane.reserve(len(prompt) + room)
        length = shared(lane, match.base.chain())
        lane.placed = place(self._family, prompt, lane.placed if length else None)
        positions = lane.placed.positions
        lane.rewind(length)
        restore(lane, match, length)
        # As upstream's `generate` goes on: behind the last token, not behind the largest position,
        # which may belong to the last frame of a slow video.
        behind = (positions[..., -1:] + 1).to(self._model.device)
        run = Run(prompt, positions, lane, match.base, behind, kernels=kernels)
        run.logits, run.since = match.logits, match.since
        if match.base is not match.node:
            self._prefixes.hold(match.base)
            self._prefixes.release(match.node)
        return run

    @quietly
    def go_on(self, run: Run, match: Match) -> None:
        """Take over what the (held) match remembers behind the run's end, instead of computing."""
        restore(run.lane, match, run.lane.length)
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
        """Compute up to the next cut; its snapshot is in the tree when this returns.

        Where any cut gives the same bits, one pass goes over several snapshots, at `ends`.

        `fetch` gives the package of a medium by its index; each chunk asks only for its own.
        `changed` is asked behind the pass: where another thread changed the model or a switch
        meanwhile, neither this snapshot nor any behind it is remembered.
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
            self._remember_all(run, ends, logits, cost)
        elif run.node.end == start and not run.changed:
            self._remember(run, cut, logits, cost)

    @quietly
    def chunk(
        self, run: Run, start: int, end: int, parts: list[tuple[Package, int, int]]
    ) -> torch.Tensor | None:
        """One pass over a stretch of a prompt; the logits behind it, at the prompt's end."""
        device = self._model.device
        inputs: Inputs = {
            "input_ids": torch.from_numpy(run.prompt.ids[start:end])[None].to(device),
            "position_ids": run.positions[..., start:end].to(device),
            "past_key_values": run.lane.cache,
            "use_cache": True,
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
            else:  # without the output head, whose logits would not be read
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

    def _remember_all(
        self, run: Run, ends: Sequence[int], logits: torch.Tensor | None, cost: float
    ) -> None:
        """The snapshots of one pass, which went over several."""
        begin, stop = run.node.end, run.lane.length
        for end in ends:
            if run.node.end < end <= stop:
                share = cost * (end - run.node.end) / (stop - begin)
                self._remember(run, end, logits if end == len(run.prompt) else None, share)

    def guess(self, run: Run, tenant: str, most: int, tally: Tally) -> None:
        """Guess tokens while this sequence decodes, where several in a pass are exact."""
        family, length = self._family, run.lane.length
        exact = run.kernels is not None and not self.shape.has_states  # these are not taken back
        if not self.guessing or not exact or family.step_inputs(1, length + 1):
            return
        lane, words = _Decoding(self, run), words_of(run.prompt)
        earlier = self.answers.of(tenant)
        run.drafts = Drafts(lane, words, earlier, self.costs, most, tenant, tally)

    def step(self, run: Run, token: int) -> torch.Tensor:
        """One decoded token through the model; the logits behind it."""
        if run.drafts is not None:
            return run.drafts.step(token)
        return self.forward(run, [token])

    @quietly
    def forward(self, run: Run, tokens: list[int]) -> torch.Tensor:
        """Decoded tokens through the model in one pass; the logits behind each."""
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
        """Rewind what was decoded to so many tokens."""
        run.next_positions = run.next_positions - (run.lane.length - length)
        run.lane.rewind(length)

    def again(self, run: Run, tokens: Sequence[int]) -> None:
        """Compute a sequence again on a separate lane, from its prompt's snapshot on."""
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
        """Remember the lane as it is, with its decoded tokens."""
        if self._prefixes.is_forgotten(run.node, prompt, run.since):
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
        """The sequence goes on elsewhere, or ends: its lane is for others."""
        run.settle()
        if run.lane.busy and not run.left:
            run.left = True
            run.lane.busy = False
            if not self._prefixes.is_forgotten(run.node, run.prompt, run.since):
                self.lanes.give_back(run.lane)  # else it still holds what must not be kept

    def clear(self, tenant: str | None) -> None:
        """Forget idle lanes, and the answers of one tenant or of all."""
        self.lanes.clear()
        self.answers.clear(tenant)

    def let_go(self, run: Run | None, node: Node | None) -> None:
        """Finish a run, or release the node that was held for one that never began."""
        if run is not None:
            self.finish(run)
        elif node is not None:
            self._prefixes.release(node)

    def finish(self, run: Run) -> None:
        """Let go of the path and the lane; safe to call twice."""
        if run.open:
            run.open = False
            self.leave_lane(run)
            if run.drafts is not None:
                self.tally.add(run.drafts.tally)
                run.drafts = None
            self._prefixes.release(run.node)
            self._prefixes.settle()  # what fell out of the device goes now, not before an answer


class _Decoding:
    """A run, as far as guessing its tokens goes."""

    def __init__(self, engine: Engine, run: Run) -> None:
        self._engine, self._run = engine, run

    @property
    def length(self) -> int:
        """Tokens on its lane."""
        return self._run.lane.length

    def forward(self, tokens: list[int]) -> torch.Tensor:
        """Put tokens through the model; the logits behind each."""
        return self._engine.forward(self._run, tokens)

    def rewind(self, length: int) -> None:
        """Cut the run back to its first `length` tokens."""
        self._engine.take_back(self._run, length)
