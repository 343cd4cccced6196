"""Families whose whole prompt is one block: every token attends to every other (PaliGemma).

Anything added after a prompt changes everything before it, so only features and identical prompts
can be reused. Positions count from 1. The processor puts a start token after the last image and a
line break at the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch

from keepsight.kinds import Grid, Processor
from keepsight.models.families.base import Family


class PaliGemma(Family):
    """One unmasked chunk; the answer after it is causal."""

    reuse = "whole prompt"
    also_takes = ("labels",)  # the processor adds it for training; no answer depends on it

    def prompt_text(self, processor: Processor, text: str, written: re.Pattern[str]) -> str:
        spots = list(written.finditer(text))
        if not spots:
            return text
        behind = spots[-1].end()
        return f"{text[:behind]}{processor.tokenizer.bos_token}{text[behind:]}\n"

    def chunk_inputs(
        self, ids: np.ndarray, types: np.ndarray, start: int, end: int
    ) -> dict[str, torch.Tensor]:
        return {"token_type_ids": torch.zeros(1, end - start, dtype=torch.long)}

    def prompt_inputs(
        self, ids: np.ndarray, types: np.ndarray, grids: Sequence[Grid]
    ) -> dict[str, torch.Tensor]:
        return self.chunk_inputs(ids, types, 0, len(ids))

    def positions(self, ids: np.ndarray, types: np.ndarray, grids: Sequence[Grid]) -> torch.Tensor:
        return torch.arange(1, len(ids) + 1)[None]
