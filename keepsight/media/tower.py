"""Runs one medium through the tower: its pixels are kept or made again, its features packed with
proof.

One medium, or one time step of a video, is one pass, so no other medium and no budget changes a
bit. Small pictures share one where it is shown that this changes none either (shared_passes.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from keepsight.errors import FileError, ImageError, TowerRan
from keepsight.formats.package import Package, check_shapes
from keepsight.kinds import Record
from keepsight.media.caches import MediaCaches
from keepsight.media.medium import Medium
from keepsight.media.naming import Namer
from keepsight.media.shared_passes import MOST, SharedPasses
from keepsight.media.video_steps import STEPS, VIDEO_KEY, FeatureOrigin, Tensors, joined
from keepsight.models.blindfold import refuse_blindfolded
from keepsight.models.families import Family, Pixels
from keepsight.models.families.qwen_vl import steps_of
from keepsight.models.tower_pieces import TowerParts, tower_in_pieces
from keepsight.system.interrupts import LATER


class Tower:
    """The tower of one model, for one tenant. It remembers only what shared the last pass."""

    def __init__(self, family: Family, namer: Namer, caches: MediaCaches, tenant: str) -> None:
        self._family, self._namer = family, namer
        self._caches, self._tenant = caches, tenant
        self.origin = FeatureOrigin()
        self.about: Record = {}  # for people: part of every package's record
        self.parts = TowerParts()  # how modules ran in the last pass
        self.shared_passes = SharedPasses(family)
        self.milliseconds = 0.0  # of the pass before, for each picture in it
        self._ready: dict[str, Package] = {}  # of pictures that shared that pass

    def encode(
        self,
        medium: Medium,
        beside: Iterable[Medium] = (),
        is_new: Callable[[Medium], bool] = lambda other: True,
    ) -> Package:
        """The features of a medium, computed now. New pictures beside it that wait too may share
        the pass; their features are there when they are asked for next."""
        self.parts = TowerParts()
        ready = self._ready.pop(medium.feature_id, None)
        if ready is not None:
            self._caches.pixels.pop(self._tenant, medium.key)
            return ready
        start = time.perf_counter()
        pixels = self._pixels_of(medium)
        steps = steps_of(self._family, pixels)
        form = self.shared_passes.form(pixels, self.origin) if len(steps) == 1 else ""
        if form:
            media = [(medium, pixels), *self._waiting(medium, form, beside, is_new)]
            made = self.shared_passes.run(form, [one for _, one in media], self._run)
        else:
            media, made = [(medium, pixels)], [self._run(step) for step in steps]
            if len(made) > 1:
                made = [(joined([tensors for tensors, _ in made]), made[0][1])]
        packages = [self.packed(one, *its) for (one, _), its in zip(media, made, strict=False)]
        self.milliseconds = 1e3 * (time.perf_counter() - start) / len(packages)
        self._ready = {package.feature_id: package for package in packages[1:]}
        return packages[0]

    def _waiting(
        self,
        medium: Medium,
        form: str,
        beside: Iterable[Medium],
        is_new: Callable[[Medium], bool],
    ) -> list[tuple[Medium, Pixels]]:
        """The next new pictures beside this one that have its form, and whose pixels are there."""
        found: dict[str, tuple[Medium, Pixels]] = {}
        for other in beside:
            if len(found) == MOST - 1:
                break  # asking about all of a long prompt for each pass would be quadratic
            pixels = self._caches.pixels.get(self._tenant, other.key)
            if pixels is None or other.feature_id in (*found, medium.feature_id):
                continue
            if self.shared_passes.form(pixels, self.origin) == form and is_new(other):
                found[other.feature_id] = other, pixels
        return list(found.values())

    def expect(self, medium: Medium, pixels: Pixels) -> None:
        """Let pixels wait that will be asked for soon, as far as there is room."""
        self._caches.pixels.put(self._tenant, medium.key, pixels)

    def forget(self) -> None:
        """Let go of features that nobody asked for."""
        self._ready.clear()

    def encode_steps(self, video: Medium, known: dict[str, Package]) -> list[Package]:
        """Encode those steps of a video that are not known yet, each in its own pass."""
        made = []
        parts = steps_of(self._family, self._pixels_of(video))
        for step, pixels in zip(video.steps, parts, strict=True):
            if step.feature_id in known:
                continue
            if pixels.key != step.key:
                raise ImageError(
                    "the video has other frames than when it was first read; ask again"
                )
            package = self.packed(_alone(step.key, pixels, self.origin), *self._run(pixels))
            package.about[VIDEO_KEY] = video.key
            known[step.feature_id] = package
            made.append(package)
        return made

    def join(self, video: Medium, steps: list[Package]) -> Package:
        """The package of a video, joined from those of its steps."""
        return self.packed(video, joined([one.tensors for one in steps]), steps[0].container)

    def packed(self, medium: Medium, tensors: Tensors, container: str) -> Package:
        """The package of features that were just computed."""
        settings = self._namer.settings(medium.modality, must=False)
        steps = {STEPS: [step.key for step in medium.steps]} if medium.steps else {}
        package = Package(
            tensors=tensors,
            key=medium.key,
            weights=self.origin.weights,
            settings=self.origin.settings,
            provenance=dict(self.origin.of(medium.modality)),
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
        LATER.check()
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


def _alone(key: str, pixels: Pixels, origin: FeatureOrigin) -> Medium:
    """One step of a video as a medium."""
    names = origin.names(key, pixels.modality)
    layout, kind = pixels.layout, pixels.modality
    return Medium(key, *names, pixels.grid, layout, None, lambda: pixels, kind)
