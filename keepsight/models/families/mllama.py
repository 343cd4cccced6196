"""Families that reach images by cross attention (Mllama).

An image is one token in the text, and in some layers one row of keys and values per patch. A token
sees the image before it, or all of a row of adjacent images. A token before the first image sees
none: its mask is empty, and Transformers then attends evenly to everything, including padding and
later images. So a prompt is remembered only after its last image, and padded tiles are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from keepsight.errors import PlaceholderMismatch, UnsupportedInput, UnsupportedModel, WrongIdentity
from keepsight.formats.package import Layout, Package
from keepsight.kinds import Decoded, Grid, Inputs, Options, Processor, Record
from keepsight.models.families.base import Family
from keepsight.models.families.pixels import Part, Pixels, Tensors, joined
from keepsight.models.families.tower_tensors import TowerTensors
from keepsight.models.renamed import EncoderOutput

_MASK = "cross_attention_mask"


class Mllama(Family):
    """A package has one row that holds all of an image: its tiles and patches, flattened."""

    reuse = "same media"
    also_takes = (_MASK,)
    feeds_stock = False  # otherwise the features would be passed again with each token

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.core = model, model.base_model
        if not hasattr(self.core, "vision_model"):
            raise UnsupportedModel(f"{type(model).__name__} has no vision encoder")
        self.image_token_id, self.video_token_id = self._image_token(), None
        self.mrope, self.tower_tensors = False, TowerTensors(self.core)
        self._encoder_inputs = {"pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"}
        vision = model.config.vision_config
        self._tiles = int(vision.max_num_tiles)
        self._patches = int(self.core.vision_model.num_patches)

    # -- images ----------------------------------------------------------------------------------

    @property
    def encoder(self) -> Callable[..., torch.Tensor]:
        return self._look

    def _look(self, **inputs: torch.Tensor) -> torch.Tensor:
        seen = self.core.vision_model(**inputs).last_hidden_state
        projected: torch.Tensor = self.core.multi_modal_projector(seen)
        return projected

    def features_of(self, inputs: Tensors) -> EncoderOutput:
        """One row for each picture of one prompt."""
        pictures = inputs["pixel_values"].shape[1]
        return EncoderOutput(pooler_output=self._look(**inputs).reshape(pictures, -1))

    def preprocess(self, processor: Processor, image: Decoded, options: Options) -> Pixels:
        processed = processor.image_processor([image], **{**options, "return_tensors": "pt"})
        return self._pixels(dict(processed), (1,))

    def _pixels(self, processed: Inputs, layout: Layout) -> Pixels:
        tensors = {name: torch.as_tensor(processed[name]) for name in sorted(self._encoder_inputs)}
        tiles = int(tensors["aspect_ratio_mask"].sum())
        return Pixels(tensors, {"num_tiles": [tiles]}, layout)

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
        """Images are nested in prompts; a prompt with fewer images has empty ones at its end."""
        if tensors.get("pixel_values") is None:
            return []
        missing = self._encoder_inputs - tensors.keys()
        if missing:
            raise PlaceholderMismatch(f"pixel_values came without {', '.join(sorted(missing))}")
        media = []
        for number, row in enumerate(rows):
            count = int((row == self.image_token_id).sum())
            if count > tensors["pixel_values"].shape[1]:
                raise PlaceholderMismatch("there are more image placeholders than images")
            mine = [
                self._pixels(
                    {n: tensors[n][number, i][None, None] for n in self._encoder_inputs}, (1,)
                )
                for i in range(count)
            ]
            self._check_mask(tensors, number, row, [medium.grid for medium in mine])
            media += mine
        return media

    def _check_mask(
        self, tensors: Tensors, number: int, row: np.ndarray, grids: Sequence[Grid]
    ) -> None:
        """What each token sees must follow from the places of the images."""
        given = tensors.get(_MASK)
        if given is None or not grids:
            return
        mine = given[number, -len(row) :, : len(grids)].cpu()
        if not torch.equal(mine.long(), self._mask(row, grids, 0, len(row))[0]):
            raise UnsupportedInput(f"{_MASK} does not match the places of the images")

    def join_pixels(self, media: Sequence[Pixels]) -> Tensors:
        return joined(media, 1)

    def check_package(self, package: Package) -> None:
        self.check_width(package, self.feature_width() * self._tiles * self._patches)
        match package.grid.get("num_tiles"):
            case [int(tiles)] if 0 < tiles <= self._tiles:
                return
        raise WrongIdentity("number of tiles", f"1 to {self._tiles}", package.grid)

    # -- text ------------------------------------------------------------------------------------

    def prompt_text(self, processor: Processor, text: str, written: re.Pattern[str]) -> str:
        bos: str = processor.tokenizer.bos_token
        behind = 0
        while (spot := written.match(text, behind)) is not None:
            behind = spot.end()
        if text.startswith(bos) or text.startswith(bos, behind):
            return text
        return f"{text[:behind]}{bos}{text[behind:]}"

    def feature_inputs(self, parts: Sequence[Part], ids: torch.Tensor) -> Record:
        if not parts:
            return {}
        device, dtype = self.model.device, self.model.dtype
        states = torch.cat([package.tensors["features"] for package, _, _ in parts])
        width = self.feature_width()
        states = states.reshape(-1, self._patches, width)
        return {"cross_attention_states": states.to(device, dtype)}

    def media_inputs(self, ids: np.ndarray, grids: Sequence[Grid], start: int, end: int) -> Tensors:
        return {_MASK: self._mask(ids, grids, start, end)} if grids else {}

    def prompt_inputs(self, ids: np.ndarray, types: np.ndarray, grids: Sequence[Grid]) -> Tensors:
        return self.media_inputs(ids, grids, 0, len(ids))

    def _mask(self, ids: np.ndarray, grids: Sequence[Grid], start: int, end: int) -> torch.Tensor:
        """1 where a token sees a tile of an image; shape (1, tokens, images, tiles)."""
        spots = np.flatnonzero(ids == self.image_token_id).tolist()
        mask = torch.zeros(1, end - start, len(grids), self._tiles, dtype=torch.long)
        over = end
        for i in reversed(range(len(spots))):
            # An image is seen up to the next one; adjacent images are seen as long as the last of
            # them.
            next_spot = spots[i + 1] if i + 1 < len(spots) else None
            if next_spot is not None and next_spot > spots[i] + 1:
                over = next_spot
            first, last = max(spots[i], start) - start, max(over, start) - start
            mask[0, first:last, i, : grids[i]["num_tiles"][0]] = 1
        return mask
