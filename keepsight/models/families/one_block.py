"""Families where the tokens of an image, or of a whole prompt, attend to each other both ways.

Such a block is never cut. It is found by type ids, which each pass over a chunk needs in full.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from keepsight.errors import PlaceholderMismatch, UnsupportedModel
from keepsight.formats.package import Layout
from keepsight.kinds import Grid, Inputs, Processor
from keepsight.models.families.base import Family
from keepsight.models.families.pixels import Pixels, Tensors


class Gemma3(Family):
    """Families where the tokens of one image attend to each other both ways (Gemma 3 and 4).

    Transformers finds the images by type ids, which it reads by absolute position. So they must
    cover everything from the first token on; ids of the chunk alone are silently wrong. A chunk of
    text needs none: without them its mask is the plain causal one.

    Gemma 3 can add crops after an image ("pan and scan", off by default). No tensor says which rows
    are crops, so `generate` takes each for an image: the answers are equal, less is shared.
    """

    sees_whole_media = True
    type_ids = "token_type_ids"  # their names in forward

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        both_ways = getattr(model.config.get_text_config(), "use_bidirectional_attention", None)
        if both_ways in (True, "all"):
            raise UnsupportedModel(
                "this model's text tokens attend in both directions: it makes embeddings and "
                "gives no answers"
            )

    def chunk_inputs(self, ids: np.ndarray, types: np.ndarray, start: int, end: int) -> Tensors:
        if not types[start:end].any():
            return {}
        return {self.type_ids: _row(types[:end])}

    def prompt_inputs(self, ids: np.ndarray, types: np.ndarray, grids: Sequence[Grid]) -> Tensors:
        return {self.type_ids: _row(types)}


class Gemma4(Gemma3):
    """Images of any shape, padded to one number of patches (Gemma 4).

    Small checkpoints are causal inside images too, and may be cut there.
    """

    type_ids = "mm_token_type_ids"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        text = model.config.get_text_config()
        self.sees_whole_media = text.use_bidirectional_attention == "vision"

    def chunk_inputs(self, ids: np.ndarray, types: np.ndarray, start: int, end: int) -> Tensors:
        return super().chunk_inputs(ids, types, start, end) if self.sees_whole_media else {}

    def _pixels(self, processed: Inputs, layout: Layout) -> Pixels:
        """Pixels without a grid: only the tower needs the places of patches."""
        names = [name for name in processed if name in self._encoder_inputs]
        return Pixels({name: torch.as_tensor(processed[name]) for name in names}, {}, layout)

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
        pixels, places = tensors.get("pixel_values"), tensors.get("image_position_ids")
        if pixels is None:
            return []
        if places is None:
            raise PlaceholderMismatch("pixel_values came without image_position_ids")
        media = []
        for row, place in zip(pixels.split(1), places.split(1), strict=True):
            patches = int((place != -1).all(-1).sum())
            processed = {"pixel_values": row, "image_position_ids": place}
            media.append(self._pixels(processed, (patches // self.patches_of_a_token(),)))
        return media

    def patches_of_a_token(self) -> int:
        """How many patches the tower pools into one token."""
        return int(self.model.config.vision_config.pooling_kernel_size) ** 2


class Gemma4Unified(Gemma4):
    """A model without a tower: each patch is a token (Gemma 4 Unified)."""

    def patches_of_a_token(self) -> int:
        return 1


def _row(types: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(types.astype(np.int64))[None]


class PaliGemma(Family):
    """Families whose whole prompt is one block: every token attends to every other (PaliGemma).

    Anything added after a prompt changes everything before it, so only features and identical
    prompts can be reused. Positions count from 1. The processor puts a start token after the last
    image and a line break at the end.

    One unmasked chunk; the answer after it is causal.
    """

    reuse = "whole prompt"
    also_takes = ("labels",)  # the processor adds it for training; no answer depends on it

    def prompt_text(self, processor: Processor, text: str, written: re.Pattern[str]) -> str:
        spots = list(written.finditer(text))
        if not spots:
            return text
        behind = spots[-1].end()
        return f"{text[:behind]}{processor.tokenizer.bos_token}{text[behind:]}\n"

    def chunk_inputs(self, ids: np.ndarray, types: np.ndarray, start: int, end: int) -> Tensors:
        return {"token_type_ids": torch.zeros(1, end - start, dtype=torch.long)}

    def prompt_inputs(self, ids: np.ndarray, types: np.ndarray, grids: Sequence[Grid]) -> Tensors:
        return self.chunk_inputs(ids, types, 0, len(ids))

    def positions(self, ids: np.ndarray, types: np.ndarray, grids: Sequence[Grid]) -> torch.Tensor:
        return torch.arange(1, len(ids) + 1)[None]
