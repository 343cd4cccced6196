"""Families whose tower also makes the embeddings of the tokens that frame an image (Ovis 2).

Transformers writes them over the embeddings of these tokens whenever a forward pass has features,
and only then. A chunk with the last frame token of an image but none of its tiles would get another
embedding than in one pass over the whole prompt. So here every chunk of a prompt gets them. Tensors
with such tokens in a prompt without an image are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from keepsight.errors import UnsupportedInput, UnsupportedModel
from keepsight.kinds import Record
from keepsight.models.families.aya_vision import AyaVision
from keepsight.models.families.pixels import Part, Pixels
from keepsight.models.renamed import EncoderOutput


class Ovis2(AyaVision):
    """Tiles framed by tokens whose embeddings come from the tower."""

    beside_the_tower = ("visual_embeddings_table",)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        config = model.config
        if config.vision_config.tokenize_function == "gumbel_argmax":
            raise UnsupportedModel(
                "tokenize_function 'gumbel_argmax' draws features at random, so remembered "
                "features would differ; use the model without Keepsight"
            )
        self._frame = torch.tensor(config.visual_indicator_token_ids)
        self._rows = int(config.vision_config.num_visual_indicator_tokens)

    def closing(self, row: np.ndarray, end: int) -> int | None:
        """The last of the frame tokens; after an image of a single tile it is another one."""
        return int(self._frame[-1])

    def split_tensors(
        self, tensors: dict[str, torch.Tensor], rows: Sequence[np.ndarray]
    ) -> list[Pixels]:
        """Split as for all framed tiles; frame tokens must belong to a prompt with an image."""
        for row in rows:
            framed = np.isin(row, self._frame.numpy()).any()
            if framed and not (row == self.image_token_id).any():
                raise UnsupportedInput("input_ids has tokens that frame an image, but no image")
        return super().split_tensors(tensors, rows)

    def feature_inputs(self, parts: Sequence[Part], ids: torch.Tensor) -> Record:
        """Features of the tiles in this chunk and of its frame tokens, with or without tiles."""
        if not parts and not torch.isin(ids.cpu(), self._frame).any():
            return {}
        return {"mm_encoder_outputs": self.encoder_outputs(parts)}

    def encoder_outputs(self, parts: Sequence[Part]) -> Record:
        """The usual outputs, plus the embeddings of the frame tokens."""
        table = self.core.visual_embeddings_table.weight
        outputs = super().encoder_outputs(parts) if parts else {"image": EncoderOutput()}
        if not parts:
            outputs["image"].pooler_output = table.new_empty(1, 0, table.shape[-1])
        outputs["image"].visual_indicator_features = table[-self._rows :]
        return outputs
