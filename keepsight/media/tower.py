"""Runs one medium through the tower: its pixels are kept or made again, its features packed with
proof.

One medium, or one time step of a video, is one pass, so no other medium and no budget changes a
bit. Only who asks for a batch gets several pictures in one pass, and their provenance says so, as
that of a huge picture does, whose layers compute some rows at a time (models/huge.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch

from keepsight.errors import FileError, ImageError, TowerRan
from keepsight.formats.package import Package, check_shapes
from keepsight.kinds import Record
from keepsight.media.caches import MediaCaches
from keepsight.media.medium import Medium
from keepsight.media.naming import Namer
from keepsight.media.video_steps import STEPS, VIDEO_KEY, FeatureOrigin, Tensors, joined
from keepsight.models import huge
from keepsight.models.blindfold import refuse_blindfolded
from keepsight.models.families import Family, Pixels
from keepsight.models.families.qwen_vl import steps_of
from keepsight.system.interrupts import LATER

Made = tuple[Tensors, str]  # features, and the form in which the model takes several


class Tower:
    """The tower of one model, for one tenant. It remembers only what shared the last pass."""

    def __init__(self, family: Family, namer: Namer, caches: MediaCaches, tenant: str) -> None:
        self._family, self._namer = family, namer
        self._caches, self._tenant = caches, tenant
        self.origin = FeatureOrigin()
        self.about: Record = {}  # for people: part of every package's record
        self.milliseconds = 0.0  # of the pass before, for each picture in it
        self._ready: dict[str, Package] = {}  # of pictures that shared that pass

    def encode(self, medium: Medium, beside: Iterable[Medium] = ()) -> Package:
        """The features of a medium, computed now. New pictures `beside` it share the pass of a
        batch; their features are there when they are asked for next."""
        ready = self._ready.pop(medium.feature_id, None)
        if ready is not None:
            self._caches.pixels.pop(self._tenant, medium.key)
            return ready
        start = time.perf_counter()
        batch = [medium, *(other for other in beside if self.origin.is_batched(other))]
        made = self._run_batch(batch) if self.origin.is_batched(medium) else []
        if not made:
            batch = batch[:1]
            made = [self._run(step) for step in steps_of(self._family, self._pixels_of(medium))]
            if len(made) > 1:
                made = [(joined([tensors for tensors, _ in made]), made[0][1])]
        packages = [self.packed(one, *its) for one, its in zip(batch, made, strict=True)]
        self.milliseconds = 1e3 * (time.perf_counter() - start) / len(packages)
        self._ready.clear()
        self._ready.update({package.feature_id: package for package in packages[1:]})
        return packages[0]

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
            provenance=dict(self.origin.of(medium.modality, medium.grid)),
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
            raise ImageError(
                f"the vision encoder gave other features than expected: {error}"
            ) from error
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

    def _run(self, pixels: Pixels) -> Made:
        by_rows = "rows" in self.origin.of(pixels.modality, pixels.grid)
        with huge.by_rows(self._family) if by_rows else nullcontext():
            return self._guarded([pixels], lambda: [self._family.encode(pixels)])[0]

    def _run_batch(self, media: Sequence[Medium]) -> list[Made]:
        """The features of several pictures; nothing if one of them cannot be used, which goes on
        one by one."""
        try:
            pixels = [self._pixels_of(one) for one in media]
            return self._guarded(pixels, lambda: self._family.encode_together(pixels))
        except ImageError:
            if len(media) == 1:
                raise
            return []

    def _guarded(self, media: Sequence[Pixels], run: Callable[[], list[Made]]) -> list[Made]:
        LATER.check()
        try:
            with torch.no_grad():
                return run()
        except (torch.OutOfMemoryError, TowerRan):
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            shapes = [
                {name: tuple(tensor.shape) for name, tensor in pixels.tensors.items()}
                for pixels in media
            ]
            what = shapes[0] if len(shapes) == 1 else shapes
            raise ImageError(
                f"the vision encoder refused pixels of shape {what}: {error}"
            ) from error


def _alone(key: str, pixels: Pixels, origin: FeatureOrigin) -> Medium:
    """One step of a video as a medium."""
    names = origin.names(key, pixels.modality, pixels.grid)
    layout, kind = pixels.layout, pixels.modality
    return Medium(key, *names, pixels.grid, layout, None, lambda: pixels, kind)
