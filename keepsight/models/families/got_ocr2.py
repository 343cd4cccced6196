"""Families whose processor takes several pages for one image (GOT-OCR 2).

Keepsight gives it one image at a time, so one image is one page, of one or more tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from keepsight.kinds import Decoded, Options
from keepsight.models.families.internvl import InternVL
from keepsight.models.families.pixels import Pixels, parse_layout

if TYPE_CHECKING:
    from transformers import GotOcr2Processor


class GotOcr2(InternVL):
    """Tiled like InternVL; the text of an image depends on pages and on tokens per tile."""

    def preprocess(self, processor: GotOcr2Processor, image: Decoded, options: Options) -> Pixels:
        """One page through the checkpoint's own image processor."""
        processed = processor.image_processor([image], **{**options, "return_tensors": "pt"})
        text = processor.replace_image_token(
            processed,
            0,
            num_pages_per_batch=[1],
            num_image_tokens=processor.num_image_tokens,
        )
        placeholder = processor.tokenizer.convert_ids_to_tokens(self.image_token_id)
        return self._pixels(dict(processed), parse_layout(text, placeholder))

    @property
    def pixel_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.core.vision_tower.dtype
        return dtype
