"""Families that project an image's features inside each forward pass (Llama 4).

The tower's output is stored in the tower's own width, and the model projects it in each forward
pass. So the features are `last_hidden_state`, and nothing is pooled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from keepsight.kinds import Record
from keepsight.models.families.aya_vision import AyaVision
from keepsight.models.families.pixels import Part, rows_of
from keepsight.models.renamed import EncoderOutput


class Llama4(AyaVision):
    """Tiles of unprojected features."""

    beside_the_tower = ("multi_modal_projector",)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        # Transformers takes the positions of its attention temperature from the cache length, which
        # includes the padding of a shorter row.
        self.decodes_together = not model.config.get_text_config().attn_temperature_tuning

    def closing(self, row: np.ndarray, end: int) -> int | None:
        return int(self.model.config.eoi_token_index)  # type: ignore[attr-defined]

    def feature_width(self) -> int:
        """The width of the tower, not of the decoder."""
        config = self.model.config
        return int(config.vision_config.vision_output_dim)

    @property
    def pixel_dtype(self) -> torch.dtype:
        """Transformers' processor gives bfloat16 for any model."""
        dtype: torch.dtype = self.core.vision_model.dtype
        return dtype

    def features_of(self, inputs: dict[str, torch.Tensor]) -> BaseModelOutputWithPooling:
        output = super().features_of(inputs)
        output.pooler_output = output.last_hidden_state
        return output

    def encoder_outputs(self, parts: Sequence[Part]) -> Record:
        """Rows of features in the field that this model reads."""
        device, dtype = self.model.device, self.model.dtype
        rows = [rows_of(p.tensors["features"], a, b).to(device, dtype) for p, a, b in parts]
        return {"image": EncoderOutput(last_hidden_state=torch.cat(rows)[None])}
