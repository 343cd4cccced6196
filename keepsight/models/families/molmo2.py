"""Families where the tokens of all images of a prompt are one block (Molmo 2).

A later image changes what is before it, so a prompt is remembered only after its last image. The
block also holds the tokens that frame an image and end its rows: all from an opening token to the
closing one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from keepsight.errors import PlaceholderMismatch
from keepsight.formats.package import Layout
from keepsight.kinds import Grid, Inputs, Processor
from keepsight.models.families.base import Family
from keepsight.models.families.pixels import Pixels, Tensors

_POOLING = "image_token_pooling"


class Molmo2(Family):
    """Crops of all images in sequence; pooling indices count patches through all of them."""

    reuse = "same media"
    sees_whole_media = True
    counts_by_grid = True
    also_takes = ("image_num_crops",)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        config = model.config
        self.video_token_id = None  # Transformers gives frame tokens the placeholder of images
        self.media_ends = frozenset({config.image_end_token_id})
        self._opens = [config.image_start_token_id, config.low_res_image_start_token_id]

    # -- text ------------------------------------------------------------------------------------

    def prompt_text(self, processor: Processor, text: str, written: re.Pattern[str]) -> str:
        start: str = processor.tokenizer.bos_token or processor.tokenizer.eos_token
        return text if text.startswith(start) else start + text

    def _block(self, ids: np.ndarray) -> torch.Tensor:
        """1 for every token of the block; shape (1, n)."""
        places = np.arange(len(ids))
        opened = np.maximum.accumulate(np.where(np.isin(ids, self._opens), places, -1))
        closed = np.maximum.accumulate(np.where(np.isin(ids, list(self.media_ends)), places, -1))
        closed = np.concatenate([[-1], closed[:-1]])  # the closing token is part of the block
        return torch.from_numpy((opened > closed).astype(np.int64))[None]

    def chunk_inputs(self, ids: np.ndarray, types: np.ndarray, start: int, end: int) -> Tensors:
        # All images are in the first chunk.
        return {"mm_token_type_ids": self._block(ids[:end])} if types[start:end].any() else {}

    def prompt_inputs(self, ids: np.ndarray, types: np.ndarray, grids: Sequence[Grid]) -> Tensors:
        return {"mm_token_type_ids": self._block(ids)}

    # -- images ----------------------------------------------------------------------------------

    def _pixels(self, processed: Inputs, layout: Layout) -> Pixels:
        tensors = {n: torch.as_tensor(processed[n]) for n in sorted(self._encoder_inputs)}
        return Pixels(tensors, {"image_grids": tensors["image_grids"].tolist()}, layout)

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
        if tensors.get("pixel_values") is None:
            return []
        missing = {*self._encoder_inputs, *self.also_takes} - tensors.keys()
        if missing:
            raise PlaceholderMismatch(f"pixel_values came without {', '.join(sorted(missing))}")
        grids = tensors["image_grids"]
        tokens = [_tokens(grid) for grid in grids.tolist()]
        crops = tensors["pixel_values"].split(tensors["image_num_crops"].tolist())
        pooling = tensors[_POOLING].split(tokens)
        media, before = [], 0
        for pixels, places, grid in zip(crops, pooling, grids.split(1), strict=True):
            processed = {"pixel_values": pixels, "image_grids": grid}
            processed[_POOLING] = _moved(places, -before)
            media.append(self._pixels(processed, (len(places),)))
            before += pixels.shape[0] * pixels.shape[1]
        return media

    def join_pixels(self, media: Sequence[Pixels]) -> Tensors:
        joined = super().join_pixels(media)
        parts, before = [], 0
        for medium in media:
            parts.append(_moved(medium.tensors[_POOLING], before))
            pixels = medium.tensors["pixel_values"]
            before += pixels.shape[0] * pixels.shape[1]
        return {**joined, _POOLING: torch.cat(parts)} if parts else joined

    def _grid_tokens(self, grid: Grid) -> int | None:
        match grid.get("image_grids"):
            case [[int(), int(), int(), int()] as row]:
                return _tokens(row)
        return None


def _tokens(grid: Sequence[int]) -> int:
    """A small view of the whole image, and its crops."""
    return grid[0] * grid[1] + grid[2] * grid[3]


def _moved(pooling: torch.Tensor, by: int) -> torch.Tensor:
    """Indices shifted for other crops; -1 means none."""
    return torch.where(pooling >= 0, pooling + by, pooling)
