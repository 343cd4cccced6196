"""Families whose tower takes pixels in the model's own dtype and does not cast them (Aria).

Users of stock Transformers cast the processor's output. Unlisted types use this family: if a tower
casts, it changes nothing.

An image of Aria is one row of pixels, or several crops, each with a padding mask. No tensor tells
crops from images, so `generate` takes each crop for an image: the answers are equal, less is
shared.
"""

from __future__ import annotations

import dataclasses

import torch

from keepsight.models.families.base import Family
from keepsight.models.families.pixels import Pixels


class Cast(Family):
    """Pixels in the dtype of the model."""

    def encode(self, pixels: Pixels) -> tuple[dict[str, torch.Tensor], str]:
        tensors = {
            name: tensor.to(self.model.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in pixels.tensors.items()
        }
        return super().encode(dataclasses.replace(pixels, tensors=tensors))
