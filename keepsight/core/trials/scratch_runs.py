"""Prompts on scratch lanes, for trials of what is exact.

Nobody asked about them, so nothing of them is counted or kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from transformers import PreTrainedModel

from keepsight.core.decoding.state import Lane
from keepsight.core.engine import Engine, Run
from keepsight.core.kernels.passes import Kernels
from keepsight.models.families import Family
from keepsight.prefix.node import Node
from keepsight.prefix.prompt import Prompt


class ScratchRuns:
    """Makes runs of one model that belong to no turn."""

    def __init__(self, model: PreTrainedModel, family: Family, engine: Engine) -> None:
        self._model, self._family, self._engine = model, family, engine

    def ids(self, tokens: int) -> np.ndarray:
        """Token ids of ordinary text."""
        count = self._model.get_input_embeddings().num_embeddings
        kept = set(self._family.placeholders.values())
        some = (np.arange(tokens * 2) * 7919 + 11) % count
        return np.array([one for one in some if one not in kept][:tokens], dtype=np.int64)

    def begin(self, kernels: Kernels | None, ids: np.ndarray) -> Run:
        """A prompt at its start, on a lane of its own."""
        engine, types = self._engine, np.zeros(len(ids), dtype=np.int8)
        lane = Lane(self._model, engine.shape, engine.lanes.variant, grows=True)
        positions = self._family.positions(ids, types, [])
        behind = positions[..., -1:] + 1
        return Run(Prompt(ids), positions, lane, Node(None, 0, 0, ""), behind, kernels=kernels)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Tokens that nobody asked about are not counted."""
        engine = self._engine
        counted = engine.prefill_tokens, engine.decode_steps
        try:
            yield
        finally:
            engine.prefill_tokens, engine.decode_steps = counted
