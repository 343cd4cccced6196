"""Families that see videos like images: patches on a grid that also runs through time.

The times of frames are part of a video's name if the family computes positions from seconds: the
same frames at another speed are another prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from keepsight.errors import InputError
from keepsight.formats.package import Layout, Package
from keepsight.kinds import Clip, Grid, Options, Processor, Record
from keepsight.models import upstream
from keepsight.models.families.base import Family
from keepsight.models.families.pixels import Part, Pixels, Tensors

if TYPE_CHECKING:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

VIDEO = ("pixel_values_videos", "video_grid_thw")
# Types whose towers process each time step of a video alone (tests/media/test_video_steps.py).
_BY_STEP = {
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "cosmos3_omni"),
}


def videos_by_step(family: Family) -> bool:
    """Whether the tower processes each time step of a video alone."""
    return family.model.config.model_type in _BY_STEP


def steps_of(family: Family, pixels: Pixels) -> list[Pixels]:
    """What goes through the tower separately: the medium, or each time step of a video."""
    if VIDEO[1] not in pixels.tensors or not videos_by_step(family):
        return [pixels]
    count, height, width = pixels.tensors[VIDEO[1]][0].tolist()
    tokens = height * width // family.merge_size() ** 2
    one = torch.tensor([[1, height, width]])
    parts = pixels.tensors[VIDEO[0]].chunk(count)
    return [
        Pixels({VIDEO[0]: part, VIDEO[1]: one}, {VIDEO[1]: one.tolist()}, (tokens,), "video")
        for part in parts
    ]


class QwenVL(Family):
    """Images and videos, both packed patch by patch."""

    times_name = "second_per_grid_ts"  # a processor's name for the seconds of a time step
    also_takes: tuple[str, ...] = (*VIDEO, times_name)

    @property
    def placeholders(self) -> dict[str, int]:
        if self.video_token_id is None:
            return super().placeholders
        return {**super().placeholders, "video": self.video_token_id}

    def preprocess_other(
        self, processor: Processor, medium: Clip, options: Options, modality: str
    ) -> Pixels:
        if modality != "video" or self.video_token_id is None:
            return super().preprocess_other(processor, medium, options, modality)
        frames, about = medium
        about = dict(about)
        if about.pop("sampled", False):
            options = {**options, "do_sample_frames": False}
        processed, text = self._process_video(processor, frames, about, options)
        layout = self.layout_of(processor, text, "video")
        pixels, grid = (processed[name] for name in VIDEO)
        seconds = [float(value) for value in processed.get(self.times_name, [])]
        return self._video(pixels, grid, layout, seconds)

    def _process_video(
        self, processor: Processor, frames: np.ndarray, about: Record, options: Options
    ) -> tuple[Record, str]:
        """Preprocess with the processor, because it computes the seconds of a time step."""
        given = {**options, "return_tensors": "pt", "return_metadata": True}
        processed, texts = upstream.processed(
            processor, "videos", [frames], video_metadata=[about], **given
        )
        return dict(processed), texts[0]

    def _video(
        self, pixels: torch.Tensor, grid: torch.Tensor, layout: Layout, seconds: list[float]
    ) -> Pixels:
        tensors = {VIDEO[0]: pixels, VIDEO[1]: torch.as_tensor(grid)}
        described: Grid = {VIDEO[1]: tensors[VIDEO[1]].tolist()}
        if seconds:
            described[self.times_name] = seconds
        return Pixels(
            tensors, described, layout, "video", {self.times_name: seconds} if seconds else {}
        )

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
        images = super().split_tensors(tensors, rows)
        pixels, grids = (tensors.get(name) for name in VIDEO)
        if pixels is None:
            return images
        if grids is None:
            raise InputError(f"{VIDEO[0]} came without {VIDEO[1]}")
        parts = self._split_patches(pixels, grids, *VIDEO)
        seconds = self._given_seconds(tensors.get(self.times_name), len(parts))
        timed = zip(parts, seconds, strict=True)
        return [*images, *(self._video(p, g, (n,), s) for (p, g, n), s in timed)]

    def _given_seconds(self, given: torch.Tensor | None, count: int) -> list[list[float]]:
        if given is None:
            return [[] for _ in range(count)]
        values = torch.as_tensor(given).flatten().tolist()
        if len(values) != count:
            raise InputError(f"{self.times_name} has {len(values)} values for {count} videos")
        return [[float(value)] for value in values]

    def features_of(self, inputs: Tensors) -> BaseModelOutputWithPooling:
        if VIDEO[0] in inputs:
            return self.core.get_video_features(**inputs, return_dict=True)
        return super().features_of(inputs)

    def _grid_tokens(self, grid: Grid) -> int | None:
        if VIDEO[1] in grid:
            grid = {"image_grid_thw": grid[VIDEO[1]]}
        return super()._grid_tokens(grid)

    def rope_grid(self, grids: Sequence[Grid]) -> Grid:
        found = super().rope_grid(grids)
        for name in (VIDEO[1], self.times_name):
            rows = [row for grid in grids for row in grid.get(name, [])]
            if rows:
                found[name] = rows
        return found

    def encoder_outputs(self, parts: Sequence[Part]) -> Record:
        """Images and videos separately, as Transformers scatters them separately."""
        by_kind: dict[str, list[tuple[Package, int, int]]] = {}
        for part in parts:
            by_kind.setdefault(part[0].modality, []).append(part)
        return {
            kind: super(QwenVL, self).encoder_outputs(own)["image"] for kind, own in by_kind.items()
        }
