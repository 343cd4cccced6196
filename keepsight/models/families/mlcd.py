"""A vision encoder without a language model (MLCD): it makes packages and gives no answers.

Its features are what a model like LLaVA takes from it: one row per patch, after one for the class
token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keepsight.kinds import Decoded, Options, Processor
from keepsight.models.families.base import Family
from keepsight.models.families.pixels import Pixels, Tensors, all_tensors
from keepsight.models.families.tower_tensors import TowerTensors

if TYPE_CHECKING:
    from transformers.modeling_outputs import BaseModelOutputWithPooling


class Mlcd(Family):
    """`last_hidden_state` of one image; this model has no prompts."""

    packages_only = "a vision encoder without a language model"
    casts = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.core = model, model
        self.image_token_id, self.video_token_id, self.mrope = -1, None, False
        self._encoder_inputs = {"pixel_values"}
        self.tower_tensors = TowerTensors(model)

    @property
    def encoder(self) -> Callable[..., BaseModelOutputWithPooling]:
        forward: Callable[..., BaseModelOutputWithPooling] = self.model.forward
        return forward

    def vision_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from all_tensors(self.model)

    def text_modules(self) -> Iterator[torch.nn.Module]:
        return iter(())

    def turn_ends(self, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
        return frozenset()

    def processor(self, given: Processor | None) -> Processor | None:
        """Such a checkpoint has only an image processor."""
        if given is None or hasattr(given, "image_processor"):
            return given
        return SimpleNamespace(image_processor=given, tokenizer=None)

    def preprocess(self, processor: Processor, image: Decoded, options: Options) -> Pixels:
        processed = processor.image_processor([image], **{**options, "return_tensors": "pt"})
        side = int(self.model.config.patch_size)
        height, width = processed["pixel_values"].shape[-2:]
        return self._pixels(dict(processed), ((height // side) * (width // side) + 1,))

    def features_of(self, inputs: Tensors) -> BaseModelOutputWithPooling:
        output = super().features_of(inputs)
        output.pooler_output = output.last_hidden_state
        return output

    def feature_width(self) -> int:
        return int(self.model.config.hidden_size)
