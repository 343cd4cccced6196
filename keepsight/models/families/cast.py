"""Families whose tower takes pixels in the model's own dtype and does not cast them (Aria).

Users of stock Transformers cast the processor's output. Unlisted types use this family: if a tower
casts, it changes nothing.

An image of Aria is one row of pixels, or several crops, each with a padding mask. No tensor tells
crops from images, so `generate` takes each crop for an image: the answers are equal, less is
shared.
"""

from __future__ import annotations

import torch

from keepsight.models.families.base import Family


class Cast(Family):
    """Pixels in the dtype of the model."""

    @property
    def pixel_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype
