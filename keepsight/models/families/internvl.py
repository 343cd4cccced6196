"""Families that cut one image into several tiles (InternVL).

A processor's packed output holds the tiles of all images in sequence; only the runs of placeholders
tell where one image ends.
"""

from __future__ import annotations

import numpy as np
import torch

from keepsight.models.families.base import Family
from keepsight.models.families.pixels import Pixels


class InternVL(Family):
    """One run of placeholders is one image; its tiles go through the tower together."""

    def _split_rows(self, pixels: torch.Tensor, ids: np.ndarray) -> list[Pixels]:
        tokens = self.tokens_per_row(pixels.shape[0], ids)
        is_image = np.concatenate([[0], ids == self.image_token_id, [0]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(is_image))
        media, row = [], 0
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            tiles = int(end - start) // tokens
            part = pixels[row : row + tiles]
            media.append(self._pixels({"pixel_values": part}, (tiles * tokens,)))
            row += tiles
        return media
