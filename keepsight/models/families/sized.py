"""Families whose images come with their sizes, padded to the largest of a call.

The padding is cut off before an image is named, so its name does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from keepsight.errors import InputError, PlaceholderMismatch
from keepsight.formats.package import Layout
from keepsight.kinds import Inputs
from keepsight.models import upstream
from keepsight.models.families.base import Family
from keepsight.models.families.pixels import Pixels, Tensors, joined, with_sizes


class LlavaNext(Family):
    """Families that cut an image into tiles by its shape, and pad each image to the most tiles.

    LLaVA-NeXT and LLaVA-OneVision. The tower sees the whole image and its tiles. The features of
    the tiles are joined, cropped to the image and marked at the end of each row. Tiles that only
    pad a batch are dropped before an image is named.

    `pixel_values` of shape (images, most tiles, channels, height, width), with `image_sizes`.

    LLaVA-OneVision shows each of several images of a prompt whole, without tiles, if
    `batch_num_images` says so. The exact number must not matter: 2 stands for several. Messages
    show every image in tiles, however many there are; otherwise a second image would change the
    first. (The processor does so with a flat list of images; its `apply_chat_template` nests them.)
    """

    def _pixels(self, processed: Inputs, layout: Layout) -> Pixels:
        tensors = {
            name: torch.as_tensor(processed[name]) for name in ("pixel_values", "image_sizes")
        }
        if "batch_num_images" in self._encoder_inputs:
            several = int(torch.as_tensor(processed.get("batch_num_images", 1)).max()) > 1
            tensors["batch_num_images"] = torch.tensor([2 if several else 1])
        return Pixels(tensors, {"image_sizes": tensors["image_sizes"].tolist()}, layout)

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
        """Split by image, each with its own tiles only."""
        given = with_sizes(tensors, "images", "tiles", "channels", "height", "width")
        if given is None:
            return []
        pixels, sizes = given
        media = []
        for row, size, among in zip(pixels, sizes, self._among(tensors, len(pixels)), strict=True):
            tiles = 1 if among > 1 else self._tiles(size)
            if tiles > len(row):
                raise PlaceholderMismatch(
                    f"an image of {size.tolist()} has {tiles} tiles, pixel_values only {len(row)}"
                )
            part = {"pixel_values": row[None, :tiles], "image_sizes": size[None]}
            layout = (self._tokens(tiles, size),)
            media.append(self._pixels({**part, "batch_num_images": among}, layout))
        return media

    def _among(self, tensors: Tensors, images: int) -> list[int]:
        """For each image, the number of images in its prompt, if the processor gives it."""
        given = tensors.get("batch_num_images")
        among = [1] * images if given is None else [n for n in given.tolist() for _ in range(n)]
        if len(among) != images:
            raise PlaceholderMismatch(
                f"batch_num_images says {len(among)} images, pixel_values holds {images}"
            )
        return among

    def _tiles(self, size: torch.Tensor) -> int:
        config = self.model.config
        side = config.vision_config.image_size
        return upstream.tiles_of(size, config.image_grid_pinpoints, side)

    def _tokens(self, tiles: int, size: torch.Tensor) -> int:
        """Tokens left of the tiles, counted by the model on features of width one."""
        config = self.model.config
        side = config.vision_config.image_size // config.vision_config.patch_size
        own = {"vision_aspect_ratio": getattr(config, "vision_aspect_ratio", None)}
        if "batch_num_images" not in self._encoder_inputs:
            own = {"vision_feature_select_strategy": config.vision_feature_select_strategy}
        _, counts = self.core.pack_image_features(
            [torch.zeros(tiles, side * side, 1)], size[None], image_newline=torch.zeros(1), **own
        )
        return int(counts[0])

    def join_pixels(self, media: Sequence[Pixels]) -> Tensors:
        """Pad each image to as many tiles as the largest has."""
        packed = joined(media)
        if media and int(packed.get("batch_num_images", torch.ones(1))[0]) > 1:
            packed["batch_num_images"] = torch.tensor([len(media)])
        return packed


class Mistral3(Family):
    """Families whose images keep their shape, padded to the largest of a batch (Pixtral's tower).

    The padding is cut off before an image is named. Each row of cells ends with an extra token, so
    an image has one run of placeholders per row.

    `pixel_values` of shape (images, channels, largest height, width), with `image_sizes`.
    """

    @property
    def _cell(self) -> int:
        """Pixels per side of the area that one token shows."""
        config = self.model.config
        patch = int(config.vision_config.patch_size)
        return patch * int(getattr(config, "spatial_merge_size", 1))

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
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

    def join_pixels(self, media: Sequence[Pixels]) -> Tensors:
        """Put each image into the upper left corner of the largest size."""
        return joined(media)
