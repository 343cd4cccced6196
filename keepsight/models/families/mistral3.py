"""Families whose images keep their shape, padded to the largest of a batch (Pixtral's tower).

The padding is cut off before an image is named. Each row of cells ends with an extra token, so an
image has one run of placeholders per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from keepsight.errors import InputError
from keepsight.formats.package import Layout
from keepsight.kinds import Decoded, Inputs, Options
from keepsight.models import upstream
from keepsight.models.families.base import Family
from keepsight.models.families.pixels import Pixels, parse_layout, with_sizes

if TYPE_CHECKING:
    from transformers import ProcessorMixin


class Mistral3(Family):
    """`pixel_values` of shape (images, channels, largest height, width), with `image_sizes`."""

    @property
    def _cell(self) -> int:
        """Pixels per side of the area that one token shows."""
        config = self.model.config
        patch = int(config.vision_config.patch_size)
        return patch * int(getattr(config, "spatial_merge_size", 1))

    def preprocess(self, processor: ProcessorMixin, image: Decoded, options: Options) -> Pixels:
        """Preprocess with the processor, because it passes the cell size to its image processor."""
        given = {**processor.images_kwargs, **options, "return_tensors": "pt"}
        processed, texts = upstream.processed(processor, "images", [image], **given)
        placeholder = processor.tokenizer.convert_ids_to_tokens(self.image_token_id)
        return self._pixels(dict(processed), parse_layout(texts[0], placeholder))

    def _pixels(self, processed: Inputs, layout: Layout) -> Pixels:
        names = ("pixel_values", "image_sizes")
        tensors = {name: torch.as_tensor(processed[name]) for name in names}
        return Pixels(tensors, {"image_sizes": tensors["image_sizes"].tolist()}, layout)

    def split_tensors(
        self, tensors: dict[str, torch.Tensor], rows: Sequence[np.ndarray]
    ) -> list[Pixels]:
        """Split by image, each cropped to its own size."""
        given = with_sizes(tensors, "images", "channels", "height", "width")
        if given is None:
            return []
        pixels, sizes = given
        media, cell = [], self._cell
        for image, (height, width) in zip(pixels, sizes.tolist(), strict=True):
            fits = 0 < height <= image.shape[1] and 0 < width <= image.shape[2]
            if not fits or height % cell or width % cell:
                raise InputError(
                    f"an image of {height} by {width} pixels is not made of cells of {cell} that "
                    f"fit into {tuple(image.shape[1:])}"
                )
            part = {"pixel_values": image[None, :, :height, :width]}
            part["image_sizes"] = torch.tensor([[height, width]])
            media.append(self._pixels(part, (width // cell,) * (height // cell)))
        return media

    def join_pixels(self, media: Sequence[Pixels]) -> dict[str, torch.Tensor]:
        """Put each image into the upper left corner of the largest size."""
        if not media:
            return {}
        parts = [m.tensors["pixel_values"] for m in media]
        sizes = torch.cat([m.tensors["image_sizes"] for m in media])
        height, width = sizes.max(0).values.tolist()
        room = parts[0].new_zeros(len(parts), parts[0].shape[1], height, width)
        for i, part in enumerate(parts):
            room[i, :, : part.shape[2], : part.shape[3]] = part[0]
        return {"pixel_values": room, "image_sizes": sizes}
