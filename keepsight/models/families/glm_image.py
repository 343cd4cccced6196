"""GLM-Image: reads pictures and draws one. Keepsight makes the features, stock code draws.

Its language model outputs only tokens of the picture it draws, and keeps their positions on the
model between calls. So it answers nothing here, and no prefix is remembered; stock `generate` gets
features for the pictures to read. A processor's grids have an extra row per prompt, for the picture
to draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from keepsight.errors import PlaceholderMismatch
from keepsight.formats.package import Package
from keepsight.kinds import Record
from keepsight.models.families.base import Family
from keepsight.models.families.pixels import Part, Pixels
from keepsight.models.renamed import EncoderOutput

_GRIDS = "image_grid_thw"


class GlmImage(Family):
    """Patches on a grid, one row of features for each."""

    packages_only = (
        "a model that draws: its answers are tokens of a picture, whose positions it keeps between "
        "calls"
    )

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._encoder_inputs = {"pixel_values", _GRIDS}

    def split_tensors(
        self, tensors: dict[str, torch.Tensor], rows: Sequence[np.ndarray]
    ) -> list[Pixels]:
        """The pictures to read: the first grids of each prompt, as its placeholders need."""
        if tensors.get("pixel_values") is None:
            return []
        given, seen = tensors[_GRIDS].tolist(), []
        for ids in rows:
            left = int((ids == self.image_token_id).sum())
            while left > 0 and given:
                grid = given.pop(0)
                seen.append(grid)
                left -= self._tokens_of(grid)
            if left or not given:
                raise PlaceholderMismatch(
                    f"{_GRIDS} has no row for each picture of a prompt and one for what is drawn"
                )
            given.pop(0)  # the picture to draw
        return super().split_tensors({**tensors, _GRIDS: torch.tensor(seen)}, rows)

    def features_of(self, inputs: dict[str, torch.Tensor]) -> BaseModelOutputWithPooling:
        """One row for each patch, where Transformers gives channels on a grid."""
        output = super().features_of(inputs)
        output.pooler_output = [picture.flatten(1).T for picture in output.pooler_output]
        return output

    def feature_width(self) -> int:
        return int(self.model.config.vision_config.hidden_size)

    def encoder_outputs(self, parts: Sequence[Part]) -> Record:
        """Channels first, on the grid of each picture, as Transformers' quantiser takes them."""
        return {"image": EncoderOutput(pooler_output=[self._on_grid(p) for p, _, _ in parts])}

    def _on_grid(self, package: Package) -> torch.Tensor:
        (grid,) = torch.tensor(package.grid[_GRIDS]).tolist()
        features = package.tensors["features"].to(self.model.device, self.model.dtype)
        return features.T.reshape(-1, *grid[1:]).contiguous()
