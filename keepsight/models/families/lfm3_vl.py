"""LFM3-VL: patches on a grid, and a tower that does not cast its pixels.

Users of stock Transformers cast the processor's output; so does this family.
"""

from __future__ import annotations

from keepsight.models.families.cast import Cast
from keepsight.models.families.qwen_vl import QwenVL


class Lfm3Vl(Cast, QwenVL):
    """Images and videos in the dtype of the model."""
