"""Prefills the short ends of several prompts in one pass, with the bits that each has alone.

A pass over few tokens costs little more than its weights, so eight questions about known pictures
take the time of four or five. The shorter ones are padded behind their end. That this changes no
bit is tried once for each model and its kernels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from transformers import PreTrainedModel

from keepsight.core.decoding.lane_batch import LaneBatch
from keepsight.core.engine import Engine, Run
from keepsight.core.kernels.passes import Kernels
from keepsight.core.trials.graph_trial import equal, states_of
from keepsight.core.trials.scratch_runs import ScratchRuns
from keepsight.models.families import Family
from keepsight.models.no_gradients import quiet

logger = logging.getLogger(__name__)

SHORT = 96  # tokens left of a prompt; a longer pass uses the processor well by itself
_PAUSE = 60.0  # seconds without joint passes after one failed
_TRIED = ((40, 57), (7, 19), (21, 22))  # tokens before and after the joint pass of a trial


class JointPrefill:
    """Joint passes of one model."""

    def __init__(self, model: PreTrainedModel, family: Family, engine: Engine) -> None:
        self._model, self._family, self._engine = model, family, engine
        self._scratch = ScratchRuns(model, family, engine)
        self._paused_until = 0.0

    def tokens(self, run: Run) -> int:
        """How many tokens are left of a prompt, if a joint pass may read them; otherwise 0. The
        caller holds the model's lock."""
        prompt, start, kernels = run.prompt, run.lane.length, run.kernels
        count, end = len(prompt) - start, len(prompt)
        if kernels is None or kernels is not self._engine.kernels or kernels.in_graphs:
            return 0
        if not 0 < count <= SHORT or prompt.clip(start, end) or not self._may_join:
            return 0
        more = (
            self._family.chunk_inputs(prompt.ids, prompt.types, start, end),
            self._family.media_inputs(prompt.ids, prompt.grids, start, end),
            self._family.step_inputs(1, end),
        )
        return 0 if any(more) or not self.is_exact(kernels) else count

    def prefill(self, runs: Sequence[Run]) -> bool:
        """Read what is left of some prompts. False if the pass failed: then they stand where they
        stood."""
        starts = [run.lane.length for run in runs]
        try:
            logits = LaneBatch(self._model, self._family, runs).prefill()
        except Exception as error:  # mostly memory; each can go on alone
            logger.warning("prompts are read apart, a joint pass failed: %s", error)
            for run, start in zip(runs, starts, strict=True):
                run.lane.rewind(start)
            self._paused_until = time.monotonic() + _PAUSE
            return False
        for row, (run, start) in enumerate(zip(runs, starts, strict=True)):
            run.logits = logits[row : row + 1].clone()
            run.computed += run.lane.length - start
            self._engine.prefill_tokens += run.lane.length - start
        return True

    def warm_up(self) -> None:
        """Make the trial before anyone waits for it."""
        kernels = self._engine.kernels
        if kernels is not None and not kernels.in_graphs and self._may_join:
            self.is_exact(kernels)

    @property
    def _may_join(self) -> bool:
        paused = time.monotonic() < self._paused_until
        return self._family.decodes_together and not self._engine.shape.has_states and not paused

    def is_exact(self, kernels: Kernels) -> bool:
        """Whether a joint pass gives each prompt the bits that it has alone; tried once."""
        if kernels.joins is None:
            with quiet(self._model), self._scratch.uncounted():
                try:
                    kernels.joins = self._agrees(kernels)
                except Exception as error:  # a foreign model may raise anything
                    kernels.joins = False
                    logger.info("prompts are read apart, joint passes fail: %s", error)
        return kernels.joins

    def _agrees(self, kernels: Kernels) -> bool:
        """Whether the ends of three prompts get the same bits together and each alone."""
        ids = self._scratch.ids(max(end for _, end in _TRIED))
        alone, together = list[Run](), list[Run]()
        for start, end in _TRIED:
            for runs, cuts in ((alone, [start, end]), (together, [start])):
                run, before = self._scratch.begin(kernels, ids[:end]), 0
                for cut in cuts:
                    run.logits = self._engine.chunk(run, before, cut, [])
                    before = cut
                runs.append(run)
        found = LaneBatch(self._model, self._family, together).prefill()
        return all(
            equal([*states_of(one.lane), one.last_logits()], [*states_of(other.lane), logits])
            for one, other, logits in zip(alone, together, found.split(1), strict=True)
        )
