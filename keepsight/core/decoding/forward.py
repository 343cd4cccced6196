"""The only place that runs the language model: one pass over segments of several sequences.

A segment is a stretch of one sequence on its own lane: a piece of a prompt, a decoded token, or a
decoded token with guesses behind it. Segments lie end to end in a pass; attention and layers with
states go over each lane apart. What must run alone, or cannot lie beside others in this model, runs
one by one through the same call. State that a model object keeps between calls is not used:
positions are passed each time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from keepsight.core.decoding.lane_layer import JoinedLayer, LaneLayer, RowsLayer
from keepsight.core.decoding.lane_mixer import JoinedMixer, MixerLayer
from keepsight.core.decoding.recorded import RecordedPasses
from keepsight.core.decoding.state import Lane, Shape
from keepsight.core.decoding.steps import Steps
from keepsight.core.kernels import passes
from keepsight.core.kernels.passes import Kernels
from keepsight.kinds import CacheLayer, Inputs
from keepsight.models.families import Family
from keepsight.models.families.pixels import Part, embedding_of
from keepsight.models.no_gradients import quietly
from keepsight.models.renamed import with_cache
from keepsight.prefix.prompt import Prompt

logger = logging.getLogger(__name__)

_ANY = {"full", "sliding", "none", "linear"}  # kinds of layers that our kernels know
_DEVICE = "cuda"  # where keys are read on their lanes, and passes recorded
_NEAR = 0.05  # of the logits' scale: rounding, in any dtype
_TRIED = ((0, 9), (0, 5), (3, 4))  # (held before, end) of sequences tried beside each other


@dataclass(eq=False)
class Stretch:
    """A stretch of one sequence that a pass computes, right behind what its lane holds."""

    lane: Lane
    prompt: Prompt
    ids: np.ndarray  # those of the stretch
    positions: torch.Tensor  # likewise
    logits: int = 0  # how many of its last tokens need logits
    media: list[Part] = field(default_factory=list)  # features in it, by rows
    forced: bool = False  # a grammar leaves no choice about the tokens behind the first

    def __post_init__(self) -> None:
        self.start = self.lane.length
        self.end = self.start + len(self.ids)


class LanguageModel:
    """Runs the language model of one VLM. Callers hold the model's lock."""

    def __init__(self, model: PreTrainedModel, family: Family, shape: Shape, room: int = 0) -> None:
        self._model, self._family, self.shape = model, family, shape
        self._room = room  # bytes of a recorder
        self._exported = hasattr(model, "exported")
        self.steps: Steps | None = None  # layers without their modules
        self.recorder: RecordedPasses | None = None  # of short passes on an accelerator
        self._looked = False
        self._joins: bool | None = None  # whether torch's own kernels take sequences end to end
        self._rows: tuple[list[Lane], DynamicCache] | None = None  # of a graph's last pass
        self.passes = 0

    @property
    def pool_bytes(self) -> int:
        return 0 if self.recorder is None else self.recorder.nbytes

    def forget(self) -> None:
        """Look at the model again: it changed."""
        self._joins, self._rows = None, None
        self.steps, self.recorder, self._looked = None, None, False

    def together(self, segments: Sequence[Stretch], kernels: Kernels | None) -> bool:
        """Whether these segments can share a pass."""
        if not self._family.decodes_together or any(self._own_inputs(one) for one in segments):
            return False
        if self._exported:
            counts = {len(one.ids) for one in segments}
            grows = {"full", "sliding"}.issuperset(self.shape.kinds)
            return kernels is not None and counts == {1} and grows
        if kernels is not None:
            return _ANY.issuperset(self.shape.kinds)
        if self._joins is None:
            self._joins = self._try_to_join()
        return self._joins

    @quietly
    def forward(
        self, segments: Sequence[Stretch], kernels: Kernels | None
    ) -> list[torch.Tensor | None]:
        """Run segments through the model; the lanes hold them afterwards. Return the logits that
        each asked for, a row for each token."""
        if len(segments) == 1 or self.together(segments, kernels):
            return self._pass(segments, kernels)
        return [found for one in segments for found in self._pass([one], kernels)]

    def _pass(
        self, segments: Sequence[Stretch], kernels: Kernels | None
    ) -> list[torch.Tensor | None]:
        device, self.passes = self._model.device, self.passes + 1
        if kernels is not None and kernels.whole_steps:
            found = self._without_modules(segments, kernels)
            if found is not None:
                return found
        if kernels is None and self._in_place(kernels):
            found = self._recorded(segments)
            if found is not None:
                return found
        for one in segments:
            one.lane.settle()
        in_rows = self._exported and len(segments) > 1
        dim = -2 if in_rows else -1
        ids = [torch.from_numpy(one.ids)[None] for one in segments]
        inputs: Inputs = {
            "input_ids": torch.cat(ids, 0 if in_rows else 1).to(device),
            "position_ids": torch.cat([one.positions for one in segments], dim).to(device),
            "use_cache": True,
        }
        extra = self._own_inputs(segments[0]) if len(segments) == 1 else {}
        inputs |= {name: tensor.to(device) for name, tensor in extra.items()}
        media = [part for one in segments for part in one.media]
        inputs |= self._family.feature_inputs(media, inputs["input_ids"])
        joined = self._joined(segments, kernels, with_own_inputs=bool(extra))
        inputs |= with_cache(self._model, segments[0].lane.cache if joined is None else joined)
        plainly = joined is not None and kernels is None
        ours = passes.side_by_side() if plainly else passes.running(kernels)
        with passes.grouped_queries(device, plainly), ours:
            found = self._run(segments, inputs, in_rows)
        for one in segments:
            one.lane.length = one.end
        return found

    def _without_modules(
        self, segments: Sequence[Stretch], kernels: Kernels
    ) -> list[torch.Tensor | None] | None:
        """A pass over a few tokens of text, as one script; None where modules have to run."""
        if not self._are_text(segments):
            return None
        if not self._looked:
            self.steps, self._looked = None, True  # its modules run while the two are compared
            steps = Steps.of(self._model)
            self.steps = steps if steps is not None and self._agree(steps, kernels) else None
        if self.steps is None:
            return None
        with passes.running(kernels):
            found = self.steps.run(segments, kernels)
        for one in segments if found is not None else ():
            one.lane.length = one.end
        return found

    def _are_text(self, segments: Sequence[Stretch]) -> bool:
        """Whether the model needs nothing but ids and positions."""
        own = set(self._family.placeholders.values())  # which the model may treat in its own way
        for one in segments:
            if one.media or self._own_inputs(one) or not own.isdisjoint(one.ids.tolist()):
                return False
            if self._family.feature_inputs([], torch.from_numpy(one.ids)[None]):
                return False
        return True

    def _recorded(self, segments: Sequence[Stretch]) -> list[torch.Tensor | None] | None:
        """A short pass as it was recorded; None where it has to run as it is."""
        if sum(len(one.ids) for one in segments) > RecordedPasses.MOST or not self._are_text(
            segments
        ):
            return None
        if not self._looked:
            self._looked = True  # its passes come here too
            self.recorder = self._tried_recorder()
        if self.recorder is None:
            return None
        try:
            found = self.recorder.run(segments)
        except Exception as error:  # a foreign model may raise anything
            logger.info("short passes run as they are, one cannot be recorded: %s", error)
            self.recorder = None
            return None
        for one in segments if found is not None else ():
            one.lane.length = one.end
        return found

    def _tried_recorder(self) -> RecordedPasses | None:
        """A recorder whose passes give what the model gives, to rounding."""
        if not RecordedPasses.can(self._model, self.shape):
            return None
        found, tried = list[list[torch.Tensor | None]](), RecordedPasses(self._model, self._room)
        for self.recorder in (None, tried):
            found.append(self._tried((9, 10, 15), None))
        agree = all(
            a is not None and b is not None and bool((a - b).abs().max() <= _NEAR * a.abs().max())
            for a, b in zip(*found, strict=True)
        )
        return tried if agree and self.recorder is tried and tried.replays else None

    def _agree(self, steps: Steps, kernels: Kernels) -> bool:
        """Whether short passes have the bits of the modules, as the model is now: a finding may be
        of an earlier process, or older than a setting that code of the model reads."""
        if not steps.stand():
            return False  # who listens hears of answers only
        found = list[list[torch.Tensor | None]]()
        for self.steps in (None, steps):
            found.append(self._tried((5, 6, 9), kernels))
        pairs = zip(*found, strict=True)
        equal = all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
        return equal and steps.passes > 0

    def _run(
        self, segments: Sequence[Stretch], inputs: Inputs, in_rows: bool
    ) -> list[torch.Tensor | None]:
        core = self._model.base_model
        if not any(one.logits for one in segments) and core is not self._model:
            core(**inputs)  # without the output head: nobody reads these logits
            return [None] * len(segments)
        if in_rows or len(segments) == 1:
            most = max(1, *(one.logits for one in segments))
            logits = self._model(**inputs, logits_to_keep=most).logits
            return [
                logits[row, -one.logits :].clone() if one.logits else None
                for row, one in enumerate(segments)
            ]
        wanted, start = list[int](), 0
        for one in segments:
            start += len(one.ids)
            wanted += range(start - one.logits, start)
        keep = torch.tensor(wanted, device=self._model.device)
        logits = self._model(**inputs, logits_to_keep=keep).logits[0]
        found = logits.split([one.logits for one in segments])
        return [rows if len(rows) else None for rows in found]

    def _own_inputs(self, one: Stretch) -> Inputs:
        """Further inputs of a segment that has such: it runs alone, with the model's own masks."""
        family, prompt, start, end = self._family, one.prompt, one.start, one.end
        inputs = family.media_inputs(prompt.ids, prompt.grids, start, end)
        if start < len(prompt):
            return {**inputs, **family.chunk_inputs(prompt.ids, prompt.types, start, end)}
        return {**inputs, **family.step_inputs(1, end)}

    def _joined(
        self, segments: Sequence[Stretch], kernels: Kernels | None, with_own_inputs: bool
    ) -> Cache | None:
        """The lanes as one cache; None where the one lane is read as it is."""
        lanes = [one.lane for one in segments]
        if self._exported and len(lanes) > 1:
            if self._rows is None or self._rows[0] != lanes:
                each_layer = zip(*(lane.cache.layers for lane in lanes), strict=True)
                self._rows = lanes, _cache([RowsLayer(each) for each in each_layer])
            return self._rows[1]
        ours = kernels is not None and not kernels.in_graphs and _ANY.issuperset(self.shape.kinds)
        if len(lanes) == 1 and (with_own_inputs or not (ours or self._in_place(kernels))):
            return None
        edges, start = [], 0
        for one in segments:
            edges.append((start, start + len(one.ids)))
            start += len(one.ids)
        layers = list(lanes[0].cache.layers)
        for index, layer in enumerate(layers):
            each = [lane.cache.layers[index] for lane in lanes]
            if isinstance(layer, LaneLayer):
                layers[index] = JoinedLayer(each, edges)
            elif isinstance(layer, MixerLayer):
                layers[index] = JoinedMixer(each, edges)
        return _cache(layers)

    def _in_place(self, kernels: Kernels | None) -> bool:
        """Whether keys are read on their lanes, without masks and copies: on an accelerator."""
        if kernels is not None or self._exported or self._model.device.type != _DEVICE:
            return False
        if self._joins is None:
            self._joins = False  # its trial comes here too
            self._joins = self._try_to_join()
        return self._joins

    # -- whether sequences may lie end to end without our kernels ----------------------------------

    def _try_to_join(self) -> bool:
        """Whether a pass over several sequences gives what each alone gives, to rounding."""
        config = self._model.config.get_text_config()
        usual = getattr(config, "_attn_implementation", None) == "sdpa"
        if not usual or not {"full", "sliding", "none"}.issuperset(self.shape.kinds):
            return False
        try:
            return self._agrees()
        except Exception as error:  # a foreign model may raise anything
            logger.info("sequences run one by one, a pass over several fails: %s", error)
            return False

    def _agrees(self) -> bool:
        alone, joined = list[torch.Tensor](), list[Stretch]()
        for held, end in _TRIED:
            for together in (False, True):
                lane = Lane(self._model, self.shape)
                if held:
                    self._pass([self._scratch(lane, held)], None)
                segment = self._scratch(lane, end)
                if together:
                    joined.append(segment)
                else:
                    alone += [rows for rows in self._pass([segment], None) if rows is not None]
        found = self._pass(joined, None)
        return all(
            rows is not None and bool((rows - one).abs().max() <= _NEAR * one.abs().max())
            for rows, one in zip(found, alone, strict=True)
        )

    def _tried(self, ends: Sequence[int], kernels: Kernels | None) -> list[torch.Tensor | None]:
        """The logits at some ends of one sequence, each from a pass."""
        lane = Lane(self._model, self.shape)
        return [self._pass([self._scratch(lane, end)], kernels)[0] for end in ends]

    def _scratch(self, lane: Lane, end: int) -> Stretch:
        ids = ordinary_ids(self._model, self._family, end)
        positions = self._family.positions(ids, np.zeros(end, dtype=np.int8), [])
        some = slice(lane.length, end)
        return Stretch(lane, Prompt(ids), ids[some], positions[..., some], 1)


def _cache(layers: list[CacheLayer]) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = layers
    return cache


def ordinary_ids(model: PreTrainedModel, family: Family, count: int) -> np.ndarray:
    """Token ids of ordinary text, for trials."""
    size = embedding_of(model).num_embeddings
    kept = set(family.placeholders.values())
    some = (np.arange(count * 2) * 7919 + 11) % size
    return np.array([one for one in some if one not in kept][:count], dtype=np.int64)
