"""Families whose image is several runs of placeholders, one per tile, with text between them.

Aya Vision writes a tile's name before each tile, Cohere 2 Vision a line break after each. A
processor's packed output holds the tiles of all images in sequence, without a tensor that says
where an image ends. The prompt says it: a token closes each image. Without that token, each tile is
taken for an image of its own: the answers are equal, less is shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from keepsight.errors import PlaceholderMismatch
from keepsight.models.families.base import Family
from keepsight.models.families.pixels import Pixels


class AyaVision(Family):
    """An image is every run up to the token that closes it."""

    behind = 0  # tokens between a tile and the one that closes its image

    def closing(self, row: np.ndarray, end: int) -> int | None:
        """The token that closes an image; the last placeholder of `row` is at `end` - 1."""
        spot = end + self.behind
        return int(row[spot]) if spot < len(row) else None

    def split_tensors(
        self, tensors: dict[str, torch.Tensor], rows: Sequence[np.ndarray]
    ) -> list[Pixels]:
        pixels = tensors.get("pixel_values")
        if pixels is None:
            return []
        per_tile = self.tokens_per_row(pixels.shape[0], np.concatenate(rows))
        media, used = [], 0
        for tokens in (count for row in rows for count in self._images(row)):
            tiles, rest = divmod(tokens, per_tile)
            if rest:
                raise PlaceholderMismatch(
                    f"an image of {tokens} placeholders is not made of tiles of {per_tile}"
                )
            part = pixels[used : used + tiles]
            media.append(self._pixels({"pixel_values": part}, (tokens,)))
            used += tiles
        return media

    def _images(self, row: np.ndarray) -> Iterator[int]:
        """The number of placeholders of each image of one prompt."""
        spots = np.flatnonzero(row == self.image_token_id)
        if not len(spots):
            return
        closing = self.closing(row, int(spots[-1]) + 1)
        first = 0
        for last in np.flatnonzero(np.diff(spots) != 1).tolist():
            gap = row[spots[last] + 1 : spots[last + 1]]
            if closing is None or closing in gap:
                yield last + 1 - first
                first = last + 1
        yield len(spots) - first


class Cohere2Vision(AyaVision):
    """Each tile ends with a line break, including the last."""

    behind = 1
