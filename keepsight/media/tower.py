"""Runs one medium through the tower: its pixels are kept or made again, its features packed with
proof.

One medium, or one time step of a film, is one pass, so no other medium and no budget changes a bit.
"""

from __future__ import annotations

import torch

from keepsight.errors import FileError, ImageError, TowerRan
from keepsight.formats.package import Package, check_shapes
from keepsight.kinds import Record
from keepsight.media.caches import MediaCaches
from keepsight.media.films import FILM, STEPS, Making, Tensors, joined
from keepsight.media.medium import Medium
from keepsight.media.naming import Namer
from keepsight.models.blindfold import refuse_blindfolded
from keepsight.models.families import Family, Pixels
from keepsight.models.families.qwen_vl import steps_of
from keepsight.models.tower_pieces import TowerParts, tower_in_pieces


class Tower:
    """The tower of one model, for one tenant. It remembers nothing."""

    def __init__(self, family: Family, namer: Namer, caches: MediaCaches, tenant: str) -> None:
        self._family, self._namer = family, namer
        self._caches, self._tenant = caches, tenant
        self.making = Making()
        self.about: Record = {}  # for people: part of every package's record
        self.parts = TowerParts()  # how modules ran in the last pass

    def encode(self, medium: Medium) -> Package:
        """The features of a medium, computed now."""
        made = [self._run(step) for step in steps_of(self._family, self._pixels_of(medium))]
        if len(made) == 1:
            return self.packed(medium, *made[0])
        return self.packed(medium, joined([tensors for tensors, _ in made]), made[0][1])

    def encode_steps(self, film: Medium, known: dict[str, Package]) -> list[Package]:
        """Encode those steps of a film that are not known yet, each in its own pass."""
        made = []
        parts = steps_of(self._family, self._pixels_of(film))
        for step, pixels in zip(film.steps, parts, strict=True):
            if step.feature_id in known:
                continue
            if pixels.key != step.key:
                raise ImageError(
                    "the video has other frames than when it was first read; ask again"
                )
            package = self.packed(_alone(step.key, pixels, self.making), *self._run(pixels))
            package.about[FILM] = film.key
            known[step.feature_id] = package
            made.append(package)
        return made

    def join(self, film: Medium, steps: list[Package]) -> Package:
        """The package of a film, joined from those of its steps."""
        return self.packed(film, joined([one.tensors for one in steps]), steps[0].container)

    def packed(self, medium: Medium, tensors: Tensors, container: str) -> Package:
        """The package of features that were just computed."""
        settings = self._namer.settings(medium.modality, must=False)
        steps = {STEPS: [step.key for step in medium.steps]} if medium.steps else {}
        package = Package(
            tensors=tensors,
            key=medium.key,
            weights=self.making.weights,
            settings=self.making.settings,
            provenance=dict(self.making.of(medium.modality)),
            grid=medium.grid,
            layout=medium.layout,
            container=container,
            modality=medium.modality,
            source=medium.source,
            about=dict(self.about, processor_settings=settings, **steps),
        )
        try:
            check_shapes(package, "the features")
        except FileError as error:
            raise ImageError(f"the vision tower gave other features than expected: {error}") from (
                error
            )
        return package

    def _pixels_of(self, medium: Medium) -> Pixels:
        """The pixels kept for this medium, or made again; then they must have the same key."""
        refuse_blindfolded(self._family.model, medium.key)
        pixels = self._caches.pixels.get(self._tenant, medium.key)
        self._caches.pixels.pop(self._tenant, medium.key)
        if pixels is not None:
            return pixels
        if isinstance(medium.recall, Package):
            raise ImageError("a package was handed in: there are no pixels to encode")
        pixels = medium.recall()
        if pixels.key != medium.key:
            raise ImageError("the image processor gave other pixels than when it was named")
        return pixels

    def _run(self, pixels: Pixels) -> tuple[Tensors, str]:
        try:
            with torch.no_grad(), tower_in_pieces(self._family, pixels) as self.parts:
                return self._family.encode(pixels)
        except (torch.OutOfMemoryError, TowerRan):
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            shapes = {name: tuple(tensor.shape) for name, tensor in pixels.tensors.items()}
            raise ImageError(f"the vision tower refused pixels of shape {shapes}: {error}") from (
                error
            )


def _alone(key: str, pixels: Pixels, making: Making) -> Medium:
    """One step of a film as a medium."""
    names = making.names(key, pixels.modality)
    layout, kind = pixels.layout, pixels.modality
    return Medium(key, *names, pixels.grid, layout, None, lambda: pixels, kind)
