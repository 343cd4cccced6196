"""Families that pack patches on a grid, as Qwen's do, with something of their own.

One merges patches otherwise, one routes tokens to experts, one marks the end of each row, one uses
the same placeholder for images and videos, and one draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from keepsight.errors import InputError, PlaceholderMismatch, UnsupportedModel
from keepsight.formats.package import Package
from keepsight.kinds import Grid, Record
from keepsight.models.families.base import Family
from keepsight.models.families.pixels import Part, Pixels, Tensors
from keepsight.models.families.qwen_vl import QwenVL
from keepsight.models.renamed import EncoderOutput


class PaddleOcrVL(Family):
    """Families that merge packed patches (Ernie 4.5 VL, PaddleOCR, Kimi K2.5, VideoLLaMA 3).

    `image_grid_thw` counts patches, and a token stands for a square of several. Qwen and GLM keep
    the size of the square on the tower; these keep it in the vision settings or beside each grid.

    Most of these models cast pixels to the tower's dtype themselves, and Kimi's expects it done.
    """

    casts = True

    def merge_size(self) -> int:
        vision = self.model.config.vision_config
        side = getattr(vision, "spatial_merge_size", None)
        return int(vision.merge_kernel_size[0] if side is None else side)

    def _split_rows(self, pixels: torch.Tensor, ids: np.ndarray) -> list[Pixels]:
        raise InputError("pixel_values came without image_grid_thw")


class VideoLlama3(PaddleOcrVL):
    """The processor chooses for each image, in `image_merge_sizes` (VideoLLaMA 3)."""

    def merge_size(self) -> int:
        return 1

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
        media = super().split_tensors(tensors, rows)
        if not media:
            return []
        sides = tensors.get("image_merge_sizes", torch.empty(0))
        if sides.shape != (len(media),) or sides.is_floating_point() or (sides < 1).any():
            raise InputError(
                f"image_merge_sizes must be {len(media)} whole numbers, one for each image"
            )
        return [
            self._pixels({**pixels.tensors, "image_merge_sizes": side}, (count // int(side) ** 2,))
            for pixels, side in zip(media, sides.split(1), strict=True)
            for count in pixels.layout
            if isinstance(count, int)
        ]


_KINDS = {"image": 1, "video": 2}
_PLACES = ("token_id", "start_token_id", "end_token_id")


class Ernie45VLMoe(PaddleOcrVL):
    """Families that route the tokens of pictures to separate experts (Ernie 4.5 VL).

    A token's id decides its experts: placeholders of media, and the tokens that open and close a
    medium, go to the vision experts. Transformers takes the routing from the processor; without it,
    all tokens silently go to the text experts. Here it is computed from the ids. A decoded token
    always goes to the text experts, as in Transformers' `generate`.
    """

    decodes_as_prefilled = False  # ids that frame a medium when they are decoded

    def _routes(self, ids: np.ndarray) -> torch.Tensor:
        """0 for the text experts, 1 or 2 for those of vision; shape (1, n)."""
        routes = np.zeros(len(ids), dtype=np.int64)
        for kind, value in _KINDS.items():
            own = [getattr(self.model.config, f"{kind}_{place}") for place in _PLACES]
            routes[np.isin(ids, own)] = value
        return torch.from_numpy(routes)[None]

    def chunk_inputs(self, ids: np.ndarray, types: np.ndarray, start: int, end: int) -> Tensors:
        return {"moe_mm_token_type_ids": self._routes(ids[start:end])}

    def prompt_inputs(self, ids: np.ndarray, types: np.ndarray, grids: Sequence[Grid]) -> Tensors:
        inputs = super().prompt_inputs(ids, types, grids)
        return {**inputs, "moe_mm_token_type_ids": self._routes(ids)}


_FRAME = 2  # one before the image, one after it
_AXES = 4


class HunyuanVL(Family):
    """HunyuanVL: each row of an image ends with an extra token, and two tokens frame the image.

    All of them use the image's placeholder id, and their features come from the tower. Its rope has
    four axes; the first counts tokens as plain positions do.
    """

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


class Lfm3Vl(QwenVL):
    """LFM3-VL: patches on a grid, and a tower that does not cast its pixels.

    Users of stock Transformers cast the processor's output; so does this family.
    """

    casts = True


class Glm4v(QwenVL):
    """Families that write videos with the placeholders of images (GLM-4V and similar).

    Placeholders between the marks of a video belong to it: one run per time step, followed by its
    time in seconds. All others are images. Transformers counts all placeholders for both kinds, so
    a stock prompt cannot hold both. Here features of both are inserted together, in prompt order.
    """

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


_GRIDS = "image_grid_thw"


class GlmImage(Family):
    """GLM-Image: reads pictures and draws one. Keepsight makes the features, stock code draws.

    Its language model outputs only tokens of the picture it draws, and keeps their positions on the
    model between calls. So it answers nothing here, and no prefix is remembered; stock `generate`
    gets features for the pictures to read. A processor's grids have an extra row per prompt, for
    the picture to draw.
    """

    packages_only = (
        "a model that draws: its answers are tokens of a picture, whose positions it keeps between "
        "calls"
    )

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._encoder_inputs = {"pixel_values", _GRIDS}

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
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

    def features_of(self, inputs: Tensors) -> BaseModelOutputWithPooling:
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
