"""HunyuanVL: each row of an image ends with an extra token, and two tokens frame the image.

All of them use the image's placeholder id, and their features come from the tower. Its rope has
four axes; the first counts tokens as plain positions do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from keepsight.errors import UnsupportedModel
from keepsight.kinds import Grid
from keepsight.models.families.base import Family

_FRAME = 2  # one before the image, one after it
_AXES = 4


class HunyuanVL(Family):
    """Patches on a grid, with an extra token per row."""

    def _grid_tokens(self, grid: Grid) -> int | None:
        merge = self.merge_size()
        match grid.get("image_grid_thw"):
            case [[1, int(h), int(w)]] if min(h, w) > 0 and not (h % merge or w % merge):
                return h // merge * (w // merge + 1) + _FRAME
        return None

    def positions(self, ids: np.ndarray, types: np.ndarray, grids: Sequence[Grid]) -> torch.Tensor:
        """Transformers' rows alone: it refuses an extra row of plain positions."""
        axes = len(self.model.config.text_config.rope_parameters.get("mrope_section") or ())
        if axes != _AXES:
            raise UnsupportedModel(
                f"hunyuan_vl with rope of {axes} axes: only {_AXES} axes are supported, the first "
                "of which counts tokens; use it with Transformers alone"
            )
        return super().positions(ids, types, grids)[-_AXES:]
