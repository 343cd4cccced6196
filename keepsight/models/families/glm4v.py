"""Families that write videos with the placeholders of images (GLM-4V and similar).

Placeholders between the marks of a video belong to it: one run per time step, followed by its time
in seconds. All others are images. Transformers counts all placeholders for both kinds, so a stock
prompt cannot hold both. Here features of both are inserted together, in prompt order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keepsight.kinds import Record
from keepsight.models.families.base import Family
from keepsight.models.families.pixels import Part
from keepsight.models.families.qwen_vl import QwenVL


class Glm4v(QwenVL):
    """One placeholder for images and videos; marks tell them apart."""

    @property
    def placeholders(self) -> dict[str, int]:
        return {"image": self.image_token_id, "video": self.image_token_id}

    def spots(self, row: np.ndarray, kind: str) -> np.ndarray:
        config = self.model.config
        opened = np.cumsum(row == config.video_start_token_id)
        inside = opened > np.cumsum(row == config.video_end_token_id)
        return np.flatnonzero((row == self.image_token_id) & (inside == (kind == "video")))

    def encoder_outputs(self, parts: Sequence[Part]) -> Record:
        return Family.encoder_outputs(self, parts)
