"""MiniCPM-V 4.7: tiles as in 4.6, with positions on three axes.

The position of a token follows from the sizes of all tiles before it and the marks between them. So
the sizes of a picture's tiles are its grid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from keepsight.kinds import Decoded, Grid, Options
from keepsight.models.families.idefics3 import MiniCpmV, Tensors
from keepsight.models.families.pixels import Pixels

if TYPE_CHECKING:
    from transformers import MiniCPMV4_6Processor

_SIZES = "target_sizes"


class MiniCpmV47(MiniCpmV):
    """A picture and its slices, with their sizes as its grid."""

    def preprocess(
        self, processor: MiniCPMV4_6Processor, image: Decoded, options: Options
    ) -> Pixels:
        return _with_sizes(super().preprocess(processor, image, options))

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
        return [_with_sizes(pixels) for pixels in super().split_tensors(tensors, rows)]

    def _grid_tokens(self, grid: Grid) -> int | None:
        tokens = 0
        for row in grid.get(_SIZES, []):
            match row:
                case [int(height), int(width)] if min(height, width) > 0:
                    tokens += height * width // self.patches_of_a_token()
                case _:
                    return None
        return tokens or None

    def rope_grid(self, grids: Sequence[Grid]) -> Grid:
        rows = [row for grid in grids for row in grid.get(_SIZES, [])]
        return {_SIZES: rows} if rows else {}


def _with_sizes(pixels: Pixels) -> Pixels:
    return dataclasses.replace(pixels, grid={_SIZES: pixels.tensors[_SIZES].tolist()})
