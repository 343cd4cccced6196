"""LFM3-VL: patches on a grid, and a tower that casts none of its pixels itself.

Users of stock Transformers cast what the processor gives; so does this family.
"""

from __future__ import annotations

from keepsight.models.families.cast import Cast
from keepsight.models.families.qwen_vl import QwenVL


class Lfm3Vl(Cast, QwenVL):
    """Images and videos in the dtype of the model."""
