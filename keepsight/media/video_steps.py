"""Videos whose towers process each time step alone: each step is a medium of its own.

The key of a step does not depend on the video around it, and its package is kept separately in
memory and in stores. So for a growing video, or a sliding window, the tower runs only for new
steps, and its memory is that of one step, however long the video is. In a prompt each step has its
own name too, so nothing before the first new step is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from keepsight.formats.package import Package, feature_id, identity
from keepsight.kinds import Grid, Record
from keepsight.media.medium import Medium, VideoStep
from keepsight.models import huge
from keepsight.system import digests

Tensors = dict[str, torch.Tensor]
VIDEO_KEY = "film"  # in `about` of a step's package: the key of its video
STEPS = "steps"  # in `about` of a video's package, and in a video's entry: the keys of its steps
_MADE = {"film": "one step a pass"}  # part of the provenance of such features
_DISTANCE = {"memory": 0, "disk": 1, "remote": 2, "tower": 3}
_GRID = "video_grid_thw"


@dataclass(frozen=True)
class FeatureOrigin:
    """The weights, settings and method by which features are made now."""

    weights: str = ""
    settings: str = ""
    provenance: Record | None = None
    by_step: bool = False  # whether videos go through the tower step by step
    by_rows: Callable[[], bool] = lambda: False  # whether the tower can run by rows
    batch: int = 1  # pictures in a pass

    def of(self, modality: str, grid: Grid) -> Record:
        """How features of such a medium are made."""
        made = self.provenance or {}
        by_step = self.by_step and modality == "video"
        if by_step:
            made = {**made, **_MADE}
        if huge.is_huge(grid, by_step) and self.by_rows():
            return {**made, "rows": huge.ROWS}
        if self.batch > 1 and modality == "image":
            return {**made, "batch": self.batch}
        return made

    def is_batched(self, medium: Medium) -> bool:
        """Whether others may share the pass of this medium."""
        return "batch" in self.of(medium.modality, medium.grid)

    def names(self, key: str, modality: str, grid: Grid) -> tuple[str, str]:
        """The identity and the feature id for this key."""
        what = identity(key, self.weights, self.settings)
        return what, feature_id(what, self.of(modality, grid))


def steps_from(
    keys: Sequence[str], grid: Grid, origin: FeatureOrigin, provenance: Record | None = None
) -> tuple[VideoStep, ...]:
    """The steps of a video by their keys; positions also depend on the rest of its grid."""
    speed = {name: value for name, value in grid.items() if name != _GRID}
    made = origin.of("video", grid) if provenance is None else provenance
    found = []
    for number, key in enumerate(keys):
        what = identity(key, origin.weights, origin.settings)
        name = feature_id(what, made)
        found.append(
            VideoStep(key, what, name, digests.digest("step in time", number, speed, name))
        )
    return tuple(found)


def keys_in(package: Package) -> list[str]:
    """The keys of a video's steps, as its package lists them."""
    keys = package.about.get(STEPS, [])
    fits = isinstance(keys, list) and keys and package.tokens % len(keys) == 0
    return keys if fits and all(isinstance(key, str) for key in keys) else []


def joined(steps: Sequence[Tensors]) -> Tensors:
    """The features of a video, joined from those of its steps."""
    return {name: torch.cat([one[name] for one in steps], dim=-2) for name in steps[0]}


def farthest(tiers: set[str]) -> str:
    """Where features come from that have several origins: the slowest of them."""
    return max(tiers, key=lambda tier: _DISTANCE.get(tier, 2))


def shows(package: Package, key: str, steps: Sequence[VideoStep] = ()) -> bool:
    """Whether a package is of a medium, or of one of its steps."""
    about = package.about.get(VIDEO_KEY)
    return key in (package.key, about) or package.key in {step.key for step in steps}
