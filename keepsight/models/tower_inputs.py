"""Tower inputs that follow from sizes alone, for people who run a tower themselves: compiled,
exported, or in another engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from keepsight.errors import InputError
from keepsight.kinds import Record
from keepsight.models.families import family_of

Grids = torch.Tensor | Sequence[Sequence[int]] | Mapping[str, torch.Tensor]


def tower_tensors(
    model: PreTrainedModel, grids: Grids, device: torch.device | str | None = None
) -> Record:
    """The precomputed tensors that `get_image_features` of this model accepts, by name.

    `grids` are rows of `image_grid_thw`, or a processor's own outputs by name, as for videos
    (`video_grid_thw`), `target_sizes` or sound (`input_features`, `feature_attention_mask`). Empty
    for towers that compute nothing from sizes; docs/compiling.md has the table.
    """
    given = dict(grids) if isinstance(grids, Mapping) else {"image_grid_thw": _rows(grids)}
    where = model.device if device is None else device
    family = family_of(model)
    if not hasattr(family, "tower_tensors"):  # cross attention: nothing follows from grids
        return {}
    try:
        return family.tower_tensors.of(given, where)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        shapes = {name: tuple(getattr(value, "shape", ())) for name, value in given.items()}
        raise InputError(
            f"these are not sizes from this model's processor ({error}): {shapes}"
        ) from error


def _rows(grids: torch.Tensor | Sequence[Sequence[int]]) -> torch.Tensor:
    try:
        rows = torch.as_tensor(grids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"grids cannot be read as rows of numbers: {error}") from None
    wanted = rows.dim() == 2 and rows.shape[1] == 3 and not rows.is_floating_point()
    if not wanted or not len(rows) or int(rows.min()) < 1:
        raise InputError(
            f"grids has shape {tuple(rows.shape)} of {rows.dtype}, expected rows of three whole "
            "numbers from 1 on: frames, height and width in patches"
        )
    return rows
