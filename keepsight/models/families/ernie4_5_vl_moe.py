"""Families that route the tokens of pictures to separate experts (Ernie 4.5 VL).

A token's id decides its experts: placeholders of media, and the tokens that open and close a
medium, go to the vision experts. Transformers takes the routing from the processor; without it, all
tokens silently go to the text experts. Here it is computed from the ids. A decoded token always
goes to the text experts, as in Transformers' `generate`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from keepsight.kinds import Grid
from keepsight.models.families.paddleocr_vl import PaddleOcrVL

_KINDS = {"image": 1, "video": 2}
_PLACES = ("token_id", "start_token_id", "end_token_id")


class Ernie45VLMoe(PaddleOcrVL):
    """Passes the routing of each chunk's tokens to the model."""

    decodes_as_prefilled = False  # ids that frame a medium when they are decoded

    def _routes(self, ids: np.ndarray) -> torch.Tensor:
        """0 for the text experts, 1 or 2 for those of vision; shape (1, n)."""
        routes = np.zeros(len(ids), dtype=np.int64)
        for kind, value in _KINDS.items():
            own = [getattr(self.model.config, f"{kind}_{place}") for place in _PLACES]
            routes[np.isin(ids, own)] = value
        return torch.from_numpy(routes)[None]

    def chunk_inputs(
        self, ids: np.ndarray, types: np.ndarray, start: int, end: int
    ) -> dict[str, torch.Tensor]:
        return {"moe_mm_token_type_ids": self._routes(ids[start:end])}

    def prompt_inputs(
        self, ids: np.ndarray, types: np.ndarray, grids: Sequence[Grid]
    ) -> dict[str, torch.Tensor]:
        inputs = super().prompt_inputs(ids, types, grids)
        return {**inputs, "moe_mm_token_type_ids": self._routes(ids)}
