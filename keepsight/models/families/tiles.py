"""Families that cut one image into several tiles of one size.

A processor packs the tiles of all images one behind the other. What differs is how a prompt tells
where one image ends, and what the tower gives beside the features of tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from keepsight.errors import InputError, PlaceholderMismatch, UnsupportedInput, UnsupportedModel
from keepsight.kinds import Decoded, Options, Record
from keepsight.models.families.base import Family
from keepsight.models.families.pixels import Part, Pixels, Tensors, rows_of
from keepsight.models.renamed import EncoderOutput

if TYPE_CHECKING:
    from transformers import GotOcr2Processor


class InternVL(Family):
    """Families that cut one image into several tiles (InternVL).

    A processor's packed output holds the tiles of all images in sequence; only the runs of
    placeholders tell where one image ends.
    """

    def closing(self, row: np.ndarray, end: int) -> int | None:
        """The token that closes an image of several runs; none where each run is an image. The last
        placeholder of `row` is at `end` - 1."""
        return None

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
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


class GotOcr2(InternVL):
    """Families whose processor takes several pages for one image (GOT-OCR 2).

    Keepsight gives it one image at a time, so one image is one page, of one or more tiles.
    """

    casts = True

    def preprocess(self, processor: GotOcr2Processor, image: Decoded, options: Options) -> Pixels:
        """One page through the checkpoint's own image processor."""
        processed = processor.image_processor([image], **{**options, "return_tensors": "pt"})
        text = processor.replace_image_token(
            processed, 0, num_pages_per_batch=[1], num_image_tokens=processor.num_image_tokens
        )
        return self._pixels(dict(processed), self.layout_of(processor, text))


class AyaVision(InternVL):
    """Families whose image is several runs of placeholders, one per tile, with text between them.

    Aya Vision writes a tile's name before each tile, Cohere 2 Vision a line break after each. A
    token closes each image. Without it, each tile is taken for an image of its own: the answers are
    equal, less is shared.
    """

    behind = 0  # tokens between a tile and the one that closes its image

    def closing(self, row: np.ndarray, end: int) -> int | None:
        spot = end + self.behind
        return int(row[spot]) if spot < len(row) else None


class Cohere2Vision(AyaVision):
    """Each tile ends with a line break, including the last."""

    behind = 1


class Ovis2(AyaVision):
    """Families whose tower also makes the embeddings of the tokens that frame an image (Ovis 2).

    Transformers writes them over the embeddings of these tokens whenever a forward pass has
    features, and only then. A chunk with the last frame token of an image but none of its tiles
    would get another embedding than in one pass over the whole prompt. So here every chunk of a
    prompt gets them. Tensors with such tokens in a prompt without an image are refused.

    Tiles framed by tokens whose embeddings come from the tower.
    """

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

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
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


class Llama4(AyaVision):
    """Families that project an image's features inside each forward pass (Llama 4).

    The tower's output is stored in the tower's own width, and the model projects it in each forward
    pass. So the features are `last_hidden_state`, and nothing is pooled.
    """

    beside_the_tower = ("multi_modal_projector",)
    casts = True  # Transformers' processor gives bfloat16 for any model

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

    def features_of(self, inputs: Tensors) -> BaseModelOutputWithPooling:
        output = super().features_of(inputs)
        output.pooler_output = output.last_hidden_state
        return output

    def encoder_outputs(self, parts: Sequence[Part]) -> Record:
        """Rows of features in the field that this model reads."""
        device, dtype = self.model.device, self.model.dtype
        rows = [rows_of(p.tensors["features"], a, b).to(device, dtype) for p, a, b in parts]
        return {"image": EncoderOutput(last_hidden_state=torch.cat(rows)[None])}


class Step3p7(Family):
    """Families that show an image whole and, if it is large, its parts again.

    Step 3.7 and DeepSeek-OCR 2. The whole views of all images are one tensor, the local views of
    all images another, and `num_local_patches` gives each image's number of them. An image's
    features are those of its local views, then those of the whole.
    """

    separators = 0  # tokens after the views of an image

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
        """Each image's whole view, its local views and their number."""
        whole, local = tensors.get("pixel_values"), tensors.get("pixel_values_local")
        if whole is None:
            return []
        counts = tensors.get("num_local_patches")
        if counts is None:
            counts = torch.zeros(len(whole), dtype=torch.long)
        have = 0 if local is None else len(local)
        if counts.shape != (len(whole),) or int(counts.min()) < 0 or int(counts.sum()) != have:
            raise InputError(
                f"num_local_patches says {counts.tolist()}; there are {len(whole)} pixel_values "
                f"and {have} pixel_values_local"
            )
        media, used = [], 0
        for i, count in enumerate(counts.tolist()):
            part = {"pixel_values": whole[i : i + 1], "num_local_patches": counts[i : i + 1]}
            tokens = self._tokens(whole) + self.separators
            if count and local is not None:
                part["pixel_values_local"] = local[used : used + count]
                tokens += count * self._tokens(local)
                used += count
            media.append(self._pixels(part, (tokens,)))
        return media

    def join_pixels(self, media: Sequence[Pixels]) -> Tensors:
        """Pack the pixels; only some images have local views."""
        names = sorted({name for medium in media for name in medium.tensors})
        return {n: torch.cat([m.tensors[n] for m in media if n in m.tensors]) for n in names}

    def _tokens(self, views: torch.Tensor) -> int:
        """The number of tokens of one view: patches, halved twice in each direction."""
        patch = int(self.core.vision_model.embeddings.patch_size)
        height, width = (-(-(side // patch) // 2) for side in views.shape[-2:])
        return -(-height // 2) * -(-width // 2)


class DeepseekOcr2(Step3p7):
    """A learned row follows the views of an image."""

    separators = 1
    casts = True

    def _tokens(self, views: torch.Tensor) -> int:
        """Patches halved twice in each direction; the tower has this many queries."""
        patch = int(self.model.config.vision_config.sam_config.patch_size)
        height, width = (-(-side // (4 * patch)) for side in views.shape[-2:])
        return height * width
