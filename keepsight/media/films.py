"""Films through the tower one step in time a pass, for towers that see no more than one at a time.

Each step is a medium of its own, under a key that knows nothing of the film around it: a film that
grows, or a window that slides over one, runs the tower for the steps that are new. The tower's
memory is that of one step, however long the film is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from keepsight.formats.package import Package
from keepsight.kinds import Record
from keepsight.models.families import Pixels

Tensors = dict[str, torch.Tensor]
MADE = {"film": "one step a pass"}  # part of the provenance of features that were made so


class FilmSteps:
    """The steps of one film: those that are remembered, and those that go through the tower."""

    def __init__(
        self,
        known: Callable[[str], Package | None],
        run: Callable[[Pixels], tuple[Tensors, str]],
    ) -> None:
        self._known, self._run = known, run
        self.made: list[tuple[Pixels, Tensors, str]] = []  # by the tower, in order

    def encode(self, steps: Sequence[Pixels]) -> tuple[Tensors, str]:
        """The features of all steps, joined; a step that stands twice goes through once."""
        found: dict[str, tuple[Tensors, str]] = {}
        order = [pixels.key for pixels in steps]
        for key, pixels in zip(order, steps, strict=True):
            if key not in found:
                found[key] = self._step(key, pixels)
        parts = [found[key][0] for key in order]
        joined = {name: torch.cat([part[name] for part in parts], dim=-2) for name in parts[0]}
        return joined, found[order[0]][1]

    def _step(self, key: str, pixels: Pixels) -> tuple[Tensors, str]:
        known = self._known(key)
        if known is not None:
            return known.tensors, known.container
        tensors, container = self._run(pixels)
        self.made.append((pixels, tensors, container))
        return tensors, container


def provenance_of(made: Record, modality: str, by_step: bool) -> Record:
    """How features of a modality are made, where everything else is made so."""
    return {**made, **MADE} if by_step and modality == "video" else made
