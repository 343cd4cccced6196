"""Positions of a prompt that continues the one its lane held before.

For multimodal rope, Transformers walks over the whole prompt to place its tokens. If only text was
added after text, each row simply counts on by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from keepsight.kinds import Grid
from keepsight.models.families import Family
from keepsight.prefix.prompt import Prompt


@dataclass(frozen=True, eq=False)
class PromptPositions:
    """What positions depend on in a prompt, and its positions."""

    ids: np.ndarray
    types: np.ndarray
    grids: list[Grid]
    positions: torch.Tensor


def place(family: Family, prompt: Prompt, before: PromptPositions | None) -> PromptPositions:
    """The positions of a prompt: counted on from `before` if only text was added, otherwise from
    the family."""
    ids, types, grids = prompt.ids, prompt.types, prompt.grids
    positions = None
    if before is not None and type(family).positions is Family.positions:
        positions = _counted_on(family, prompt, before)
    if positions is None:
        positions = family.positions(ids, types, grids)
    return PromptPositions(ids, types, grids, positions)


def _counted_on(family: Family, prompt: Prompt, before: PromptPositions) -> torch.Tensor | None:
    start, end = len(before.ids), len(prompt.ids)
    if start > end or not start or before.types[-1] or prompt.types[start:].any():
        return None
    marks = [*family.placeholders.values(), *family.media_ends]
    if np.isin(prompt.ids[start:], marks).any():  # Transformers may look for them among the ids
        return None
    same = np.array_equal(prompt.ids[:start], before.ids)
    same = same and np.array_equal(prompt.types[:start], before.types)
    if not same or prompt.grids != before.grids:
        return None
    last = before.positions[..., -1:]
    return torch.cat([before.positions, last + torch.arange(1, end - start + 1)], dim=-1)
