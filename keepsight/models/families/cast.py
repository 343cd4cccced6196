"""Families whose tower takes pixels in the model's own dtype, and casts none itself (Aria).

Users of stock Transformers cast what the processor gives. An unlisted type is
taken for one of these: where a tower casts, it changes nothing.

An image of Aria is one row of pixels, or several crops, each with a mask that says where padding
begins. No tensor tells crops from images, so `generate` takes each crop for an image of its own:
the same answers, less shared.
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
