"""Image processors in place of those that need torchvision: the same tensors and counts.

That is all that the processor of a family and its model ever see of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)
from transformers.processing_utils import ImagesKwargs


class LfmKwargs(ImagesKwargs, total=False):  # type: ignore[misc]
    """What upstream's processor passes on."""

    return_row_col_info: bool


class LfmTiles(PilBackend):  # type: ignore[misc]
    """Tiles and patches in the layout of LFM2-VL's image processor.

    Upstream's own needs torchvision. This one knows four grids and a fixed bound of patches.
    """

    encoder_patch_size, downsample_factor, tile_size, use_thumbnail = 8, 2, 32, True
    longest = 64  # patches that each row is padded to
    model_input_names = ["pixel_values", "pixel_attention_mask", "spatial_shapes"]  # noqa: RUF012
    valid_kwargs = LfmKwargs

    def preprocess(self, images: Any, **kwargs: Any) -> BatchFeature:
        """Rows of patches with mask and shape, one for each tile of each image."""
        rows: list[np.ndarray] = []
        info: list[tuple[int, int, list[int]]] = []
        for image in self._flat(images):
            tiles, *shape = self._tiles(image.convert("RGB"))
            rows += tiles
            info.append(tuple(shape))
        pixels = torch.zeros(len(rows), self.longest, 3 * self.encoder_patch_size**2)
        mask = torch.zeros(len(rows), self.longest, dtype=torch.int32)
        for i, row in enumerate(rows):
            count = row.shape[0] * row.shape[1]
            pixels[i, :count] = torch.from_numpy(row.reshape(count, -1))
            mask[i, :count] = 1
        shapes = torch.tensor([row.shape[:2] for row in rows])
        names = ("image_rows", "image_cols", "image_sizes")
        data = {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}
        wanted = names if kwargs.get("return_row_col_info") else ()
        more = {name: [row[i] for row in info] for i, name in enumerate(wanted)}
        return BatchFeature({**data, **more})

    def _flat(self, images: Any) -> list[Any]:
        if not isinstance(images, list):
            return [images]
        return [one for image in images for one in self._flat(image)]

    def _tiles(self, image: Any) -> tuple[list[np.ndarray], int, int, list[int]]:
        ratio = image.width / image.height
        columns, rows = min(
            ((1, 1), (2, 1), (1, 2), (2, 2)), key=lambda g: abs(g[0] / g[1] - ratio)
        )
        if max(image.size) > 64 and columns == rows:
            columns = rows = 2
        side, cell = self.tile_size, self.encoder_patch_size * self.downsample_factor
        whole = [max(cell, round(edge / 40) * cell) for edge in (image.height, image.width)]
        small = self._patches(image.resize((whole[1], whole[0])))
        if columns * rows == 1:
            return [small], 1, 1, whole
        large = image.resize((columns * side, rows * side))
        boxes = [(c * side, r * side) for r in range(rows) for c in range(columns)]
        parts = [self._patches(large.crop((x, y, x + side, y + side))) for x, y in boxes]
        return [*parts, small], rows, columns, whole

    def _patches(self, image: Any) -> np.ndarray:
        side = self.encoder_patch_size
        pixels = np.asarray(image, dtype=np.float32) / 127.5 - 1
        height, width = pixels.shape[0] // side, pixels.shape[1] // side
        cells = pixels.reshape(height, side, width, side, 3).transpose(0, 2, 1, 3, 4)
        return cells.reshape(height, width, -1)


class Cohere2Tiles(GotOcr2ImageProcessorPil):
    """The tiles of cohere2_vision are those of got_ocr2; `patch_size` is tokens per tile side."""

    patch_size = 4
    crop_to_patches = True


class Llama4Tiles(GotOcr2ImageProcessorPil):
    """Tiles row by row, then the whole picture; `aspect_ratios` are tiles down and across."""

    def _preprocess(self, images: list[Any], size: SizeDict, **kwargs: Any) -> BatchFeature:
        kwargs["crop_to_patches"] = True
        found = super()._preprocess(images, size=size, **kwargs)
        found.pop("num_patches")
        found["aspect_ratios"] = [
            get_optimal_tiled_canvas(
                image.shape[-2:],
                (size.height, size.width),
                kwargs["min_patches"],
                kwargs["max_patches"],
            )[::-1]
            for image in images
        ]
        return found


class Step3p7Tiles(GotOcr2ImageProcessorPil):
    """The whole picture at one size, and where it is long its tiles at another."""

    patch_size = 32
    vision_patch_size = 4
    downsampler_stride = 4

    def _preprocess(self, images: list[Any], size: SizeDict, **kwargs: Any) -> BatchFeature:
        finish = {**kwargs, "return_tensors": "np"}
        whole = super()._preprocess(images, size=size, **{**finish, "crop_to_patches": False})
        found: dict[str, Any] = {"pixel_values": whole["pixel_values"]}
        tiles = [_cut(image) for image in images]
        found["num_local_patches"] = [len(cut) for cut in tiles]
        result = BatchFeature(found, tensor_type=kwargs.get("return_tensors"))
        flat = [tile for cut in tiles for tile in cut]
        if flat:
            small = SizeDict(height=self.patch_size, width=self.patch_size)
            local = super()._preprocess(flat, size=small, **{**finish, "crop_to_patches": False})
            values = BatchFeature(
                {"pixel_values": local["pixel_values"]}, tensor_type=kwargs.get("return_tensors")
            )
            result["pixel_values_local"] = values["pixel_values"]
            most = max(map(len, tiles))
            result["patch_newline_masks"] = [_newlines(len(cut), most) for cut in tiles]
        return result


def _cut(image: np.ndarray) -> list[np.ndarray]:
    """Two rows of two tiles for a picture that is longer than it is wide, or wider."""
    height, width = image.shape[-2:]
    if max(height, width) / min(height, width) <= 1.5:
        return []
    y, x = height // 2, width // 2
    return [image[:, :y, :x], image[:, :y, x:], image[:, y:, :x], image[:, y:, x:]]


def _newlines(tiles: int, length: int) -> list[bool]:
    return [tiles == 4 and i == 1 for i in range(length)]


class KimiPatches(PilBackend):  # type: ignore[misc]
    """Patches and grids in the layout of Kimi's image processor.

    Upstream's own needs torchvision. This one resizes to whole cells instead of padding.
    """

    patch_size, merge_size = 14, 2
    model_input_names = ["pixel_values", "image_grid_thw"]  # noqa: RUF012

    def preprocess(self, images: Any, **kwargs: Any) -> BatchFeature:
        """Rows of patches, and a grid for each image."""
        images = images if isinstance(images, list) else [images]
        patches, grids = zip(*(self._patches(image) for image in images), strict=True)
        data = {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
        return BatchFeature(data)

    def _patches(self, image: Any) -> tuple[torch.Tensor, list[int]]:
        side, unit = self.patch_size, self.patch_size * self.merge_size
        width, height = (-(-length // unit) * unit for length in image.size)
        pixels = np.asarray(image.convert("RGB").resize((width, height)), dtype=np.float32)
        h, w = height // side, width // side
        cells = torch.from_numpy(pixels / 127.5 - 1).reshape(h, side, w, side, 3)
        return cells.permute(0, 2, 4, 1, 3).reshape(h * w, 3, side, side), [1, h, w]


class Molmo2Crops(PilBackend):  # type: ignore[misc]
    """Crops, patches and pooling indices in the layout of Molmo 2's image processor.

    Upstream's own needs torchvision. This one has crops that do not overlap.
    """

    size = {"height": 32, "width": 32}  # noqa: RUF012
    patch_size = 8
    max_crops = 6
    model_input_names = [  # noqa: RUF012
        "pixel_values",
        "image_token_pooling",
        "image_grids",
        "image_num_crops",
    ]

    def preprocess(self, images: Any, **kwargs: Any) -> BatchFeature:
        """All crops one after another; pooling indices count patches from the first image on."""
        images = images if isinstance(images, list) else [images]
        images = [i for part in images for i in (part if isinstance(part, list) else [part])]
        crops, pooling, grids, offset = [], [], [], 0
        for image in images:
            patches, indices, grid = self._one(image)
            crops.append(patches)
            pooling.append(torch.where(indices >= 0, indices + offset, indices))
            grids.append(grid)
            offset += patches.shape[0] * patches.shape[1]
        data = {
            "pixel_values": torch.cat(crops),
            "image_token_pooling": torch.cat(pooling),
            "image_grids": torch.tensor(grids),
            "image_num_crops": torch.tensor([len(part) for part in crops]),
        }
        return BatchFeature(data)

    def _one(self, image: Image.Image) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        side = self.size["height"]
        rows, columns = (min(3, max(1, n // 48)) for n in (image.height, image.width))
        rows = min(rows, self.max_crops // columns)
        small = self._patches(image, 1, 1)
        large = self._patches(image, rows, columns)
        n = side // self.patch_size
        index = torch.arange(rows * columns * n * n).view(rows, columns, n, n)
        index = index.permute(0, 2, 1, 3).reshape(rows * n, columns * n)
        low, (a, b) = _pools(torch.arange(n * n).view(n, n))
        high, (c, d) = _pools(index)
        return torch.cat([small, large]), torch.cat([low, high + n * n]), [a, b, c, d]

    def _patches(self, image: Image.Image, rows: int, columns: int) -> torch.Tensor:
        """(crops, patches, numbers of a patch)"""
        side, p = self.size["height"], self.patch_size
        n = side // p
        resized = image.convert("RGB").resize((columns * side, rows * side))
        pixels = torch.from_numpy(np.asarray(resized, dtype=np.float32) / 127.5 - 1)
        crops = pixels.view(rows, n, p, columns, n, p, 3).permute(0, 3, 1, 4, 2, 5, 6)
        return crops.reshape(rows * columns, n * n, p * p * 3)


def _pools(index: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
    """Windows of 2 x 2 patches: which patches each pooled token is made of."""
    rows, columns = index.shape[0] // 2, index.shape[1] // 2
    windows = index.view(rows, 2, columns, 2).permute(0, 2, 1, 3).reshape(rows * columns, 4)
    return windows, (rows, columns)
