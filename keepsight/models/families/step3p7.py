"""Families that show an image whole and, if it is large, its parts again.

Step 3.7 and DeepSeek-OCR 2. The whole views of all images are one tensor, the local views of all
images another, and `num_local_patches` gives each image's number of them. An image's features are
those of its local views, then those of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from keepsight.errors import InputError
from keepsight.models.families.base import Family
from keepsight.models.families.cast import Cast
from keepsight.models.families.pixels import Pixels


class Step3p7(Family):
    """One whole view per image, and a number of local ones."""

    separators = 0  # tokens after the views of an image

    def split_tensors(
        self, tensors: dict[str, torch.Tensor], rows: Sequence[np.ndarray]
    ) -> list[Pixels]:
        """Each image's whole view, its local views and their number."""
        whole, local = tensors.get("pixel_values"), tensors.get("pixel_values_local")
        if whole is None:
            return []
        counts = tensors.get("num_local_patches")
        if counts is None:
            counts = torch.zeros(len(whole), dtype=torch.long)
        have = 0 if local is None else len(local)
        if counts.shape != (len(whole),) or int(counts.min()) < 0 or int(counts.sum()) != have:
            raise InputError(
                f"num_local_patches says {counts.tolist()}; there are {len(whole)} pixel_values "
                f"and {have} pixel_values_local"
            )
        media, used = [], 0
        for i, count in enumerate(counts.tolist()):
            part = {"pixel_values": whole[i : i + 1], "num_local_patches": counts[i : i + 1]}
            tokens = self._tokens(whole) + self.separators
            if count and local is not None:
                part["pixel_values_local"] = local[used : used + count]
                tokens += count * self._tokens(local)
                used += count
            media.append(self._pixels(part, (tokens,)))
        return media

    def join_pixels(self, media: Sequence[Pixels]) -> dict[str, torch.Tensor]:
        """Pack the pixels; only some images have local views."""
        names = sorted({name for medium in media for name in medium.tensors})
        return {n: torch.cat([m.tensors[n] for m in media if n in m.tensors]) for n in names}

    def _tokens(self, views: torch.Tensor) -> int:
        """The number of tokens of one view: patches, halved twice in each direction."""
        patch = int(self.core.vision_model.embeddings.patch_size)
        height, width = (-(-(side // patch) // 2) for side in views.shape[-2:])
        return -(-height // 2) * -(-width // 2)


class DeepseekOcr2(Cast, Step3p7):
    """A learned row follows the views of an image."""

    separators = 1

    def _tokens(self, views: torch.Tensor) -> int:
        """Patches halved twice in each direction; the tower has this many queries."""
        patch = int(self.model.config.vision_config.sam_config.patch_size)
        height, width = (-(-side // (4 * patch)) for side in views.shape[-2:])
        return height * width
