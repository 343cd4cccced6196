"""Families that merge packed patches (Ernie 4.5 VL, PaddleOCR, Kimi K2.5, VideoLLaMA 3).

`image_grid_thw` counts patches, and a token stands for a square of several. Qwen and GLM keep the
size of the square on the tower; these keep it in the vision settings or beside each grid.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from keepsight.errors import InputError
from keepsight.models.families.cast import Cast
from keepsight.models.families.pixels import Pixels


class PaddleOcrVL(Cast):
    """The vision settings say how many patches become one token.

    Most of these models cast pixels to the tower's dtype themselves, and Kimi's expects it done.
    """

    def merge_size(self) -> int:
        vision = self.model.config.vision_config
        side = getattr(vision, "spatial_merge_size", None)
        return int(vision.merge_kernel_size[0] if side is None else side)

    def _split_rows(self, pixels: torch.Tensor, ids: np.ndarray) -> list[Pixels]:
        raise InputError("pixel_values came without image_grid_thw")


class VideoLlama3(PaddleOcrVL):
    """The processor chooses for each image, in `image_merge_sizes` (VideoLLaMA 3)."""

    def merge_size(self) -> int:
        return 1

    def split_tensors(
        self, tensors: dict[str, torch.Tensor], rows: Sequence[np.ndarray]
    ) -> list[Pixels]:
        media = super().split_tensors(tensors, rows)
        if not media:
            return []
        sides = tensors.get("image_merge_sizes", torch.empty(0))
        if sides.shape != (len(media),) or sides.is_floating_point() or (sides < 1).any():
            raise InputError(
                f"image_merge_sizes must be {len(media)} whole numbers, one for each image"
            )
        return [
            self._pixels({**pixels.tensors, "image_merge_sizes": side}, (count // int(side) ** 2,))
            for pixels, side in zip(media, sides.split(1), strict=True)
            for count in pixels.layout
            if isinstance(count, int)
        ]
