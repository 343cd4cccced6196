"""Images to packages: named first, looked up, and encoded by the tower only if unknown.

Naming a known image is cheap (naming.py). Each image gets its own forward pass, so no other image
and no budget changes a bit, and the tower's memory is that of one image; only who asks for a batch
gets several in a pass. The budget limits what is kept: half for pixel values waiting for the tower,
half for packages.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

from keepsight.errors import FileError, ImageError, InputError, UnsupportedInput, WrongIdentity
from keepsight.formats.package import Package, check_shapes
from keepsight.kinds import Grid, Record
from keepsight.media import video_steps
from keepsight.media.caches import MediaCaches
from keepsight.media.medium import Medium, VideoStep, entry_of, medium_in, opened
from keepsight.media.naming import Inspected, Namer
from keepsight.media.sources import Source
from keepsight.media.tower import Tower
from keepsight.models import huge
from keepsight.models.families import Family, Pixels
from keepsight.models.families.qwen_vl import videos_by_step
from keepsight.models.families.tower_absent import LEFT_OUT
from keepsight.store import About, Store
from keepsight.system import digests

_VIDEOS = 8  # videos whose step names are remembered
_COUNTED = {"tower": "encoded", "memory": "memory"}  # where they came from, for videos
Looked = tuple[str, Medium | Package | Inspected]  # a medium and its modality, not yet named
COUNTS = ("named", "encoded", "by_rows", "memory", "disk", "preprocessed")


class Vision:
    """The namer and the encoder of one model, for one tenant."""

    def __init__(
        self,
        family: Family,
        namer: Namer,
        caches: MediaCaches,
        store: Store | None,
        accept_features: str = "same",
        tenant: str = "",
        ttl: float | None = None,
        codec: str = "exact",
    ) -> None:
        self._codec, self._accept = codec, accept_features
        self._family, self.namer, self._caches = family, namer, caches
        self.tower = Tower(family, namer, caches, tenant)
        self._store, self._tenant, self._ttl = store, tenant, ttl
        self._counts = dict.fromkeys(COUNTS[:-1], 0)
        self._steps: dict[str, tuple[VideoStep, ...]] = {}  # of recent videos, by feature id
        self.shared = True

    @property
    def counts(self) -> dict[str, int]:
        """How often each event happened."""
        return {**self._counts, "preprocessed": self.namer.preprocessed}

    def bind(
        self, weights: str, settings: str, provenance: Record, shared: bool = True, code: str = ""
    ) -> None:
        """Set weights and provenance; called before each use. Features that are not `shared` belong
        to a model that only this process knows, and stay in memory."""
        self.namer.bind(provenance, code, shared)
        by_step = videos_by_step(self._family)
        self.tower.origin = video_steps.FeatureOrigin(
            weights, settings, provenance, by_step, lambda: huge.can_go_by_rows(self._family)
        )
        self.shared = shared

    def batched(self, count: int) -> Vision:
        """The same encoder, with so many pictures in a pass."""
        if not isinstance(count, int) or count < 1:
            raise InputError(
                f"batch={count!r}; expected pictures in a pass of the vision encoder: 1 or more"
            )
        if count == 1:
            return self
        other = copy.copy(self)
        other.tower = copy.copy(self.tower)
        other.tower.origin = dataclasses.replace(self.tower.origin, batch=count)
        return other

    # -- naming ----------------------------------------------------------------------------------

    def name(self, image: object, modality: str = "image") -> Medium:
        """The medium of any form of image, video or sound."""
        self._counts["named"] += 1
        image = opened(image)
        if isinstance(image, Medium | Package) and image.modality != modality:
            raise ImageError(f"this is a package of {image.modality!r}, given as {modality!r}")
        if isinstance(image, Medium):
            return self.again(image)
        if isinstance(image, Package):
            return self._medium_of_package(image)
        return self.admit_looked(self.namer.look(image, modality))

    def admit_looked(self, looked: Inspected) -> Medium:
        """The medium of a look made by some thread; it is known from now on."""
        self.expect([looked])
        self.namer.learn(looked)
        return self.medium_of(looked)

    def expect(self, looks: Iterable[Inspected]) -> list[Medium]:
        """Media that come next, whose pixels wait. They are learnt each in its turn."""
        media = []
        for looked in looks:
            if looked.pixels is not None:
                self._caches.pixels.put(self._tenant, looked.entry["key"], looked.pixels)
                media.append(self.medium_of(looked))
        return media

    def medium_of(self, looked: Inspected) -> Medium:
        """The medium of a look, without remembering it. Thread-safe."""
        return self._medium_of(looked.source, looked.entry)

    def _medium_of(self, source: Source, entry: Record) -> Medium:
        medium = self._medium(entry, lambda: self.namer.preprocess(source))
        makers = self.namer.makers(source.modality)
        return dataclasses.replace(medium, opened=source, makers=makers)

    def name_pixels(self, pixels: Pixels) -> Medium:
        """The medium behind a processor's output for one image."""
        return self._medium(self.namer.entry_of(pixels), lambda: pixels)

    def again(self, medium: Medium) -> Medium:
        """A medium named earlier, under the present weights and provenance."""
        if isinstance(medium.recall, Package):
            try:
                named = self._medium_of_package(medium.recall, medium.feature_id)
            except WrongIdentity:  # another model
                if medium.opened is None:
                    raise
                return self.admit_looked(self.namer.look(medium.opened, medium.modality))
            return dataclasses.replace(named, opened=medium.opened)
        entry = entry_of(medium, source=medium.source)
        if medium.opened is None:
            return self._medium(entry, medium.recall)
        if medium.makers != self.namer.makers(medium.modality):  # other pixels come of it here
            return self.admit_looked(self.namer.look(medium.opened, medium.modality))
        return self._medium_of(medium.opened, entry)

    def admit(self, package: Package, handed_in: bool = False) -> Medium:
        """The medium of a package from a file that also has its snapshots, with their digests.

        If a caller had given the package before it was saved, it still counts as given: a file
        proves no more than its maker.
        """
        return self._medium_of_package(package, None if handed_in else package.feature_id)

    def _own_or_handed(self, package: Package) -> str:
        """The feature id of a caller's package: its claim, if these are the bits that we made.

        Otherwise tensors changed under an old provenance would take the place of ours in a path.
        """
        content = _content(package)
        if self._caches.given.get(self._tenant, package.feature_id) == content:
            return package.feature_id
        return digests.digest("handed in", package.feature_id, content)

    def _medium_of_package(self, package: Package, named: str | None = None) -> Medium:
        for field, mine, its in (
            ("vision weights", self.tower.origin.weights, package.weights),
            ("vision settings", self.tower.origin.settings, package.settings),
        ):
            if mine != its:
                raise WrongIdentity(field, mine, its)
        made_with = package.about.get("processor_settings")
        mine = self.namer.settings(package.modality, must=False) if made_with else ""
        if mine and made_with != mine:
            raise WrongIdentity("processor settings", mine, made_with)
        check_shapes(package, "the package")
        self._family.check_package(package)
        made = named or self._own_or_handed(package)
        # Only our own videos are split: the steps of others are theirs to name.
        keys = video_steps.keys_in(package) if made == package.feature_id else []
        steps = video_steps.steps_from(keys, package.grid, self.tower.origin, package.provenance)
        return Medium(
            key=package.key,
            identity=package.identity,
            feature_id=made,
            grid=package.grid,
            layout=package.layout,
            source=package.source,
            recall=package,
            modality=package.modality,
            steps=steps,
        )

    def _medium(self, entry: Record, recall: Callable[[], Pixels]) -> Medium:
        modality = entry.get("modality", "image")
        what, made = self.tower.origin.names(entry["key"], modality, entry["grid"])
        keys = entry.get(video_steps.STEPS, ())
        if self._accept == "any" and self._store is not None:
            made, keys = self._any_made(what, made), ()
        return Medium(
            key=entry["key"],
            identity=what,
            feature_id=made,
            grid=entry["grid"],
            layout=tuple(entry["layout"]),
            source=entry.get("source"),
            recall=recall,
            modality=modality,
            steps=self._steps_of(made, keys, entry["grid"]),
        )

    def _steps_of(self, video: str, keys: Sequence[str], grid: Grid) -> tuple[VideoStep, ...]:
        if keys and video not in self._steps:
            while len(self._steps) >= _VIDEOS:
                self._steps.pop(next(iter(self._steps)))
            self._steps[video] = video_steps.steps_from(keys, grid, self.tower.origin)
        return self._steps[video] if keys else ()

    def _any_made(self, what: str, made: str) -> str:
        """Our own features if they exist, otherwise any others in the store."""
        if self._holds(made) or self._store is None or self._store.has("package", made):
            return made
        note = self._store.note("made", what)
        found = note.get("feature_id") if note else None
        return found if isinstance(found, str) else made

    def made_elsewhere(self, medium: Medium) -> bool:
        """Whether the store has features of this image, but none made as ours."""
        if self._store is None or self._store.has("package", medium.feature_id):
            return False
        note = self._store.note("made", medium.identity)
        return note is not None and note.get("feature_id") != medium.feature_id

    def note(self, number: int, package: Package, where: str) -> str:
        """A report's note on how features were made, if unusual."""
        if where == "tower":
            rows = package.provenance.get("rows")
            return (
                f"medium {number}: the encoder's layers ran {rows} rows at a time" if rows else ""
            )
        kept = "" if package.packed is None else f"; kept as {package.codec}"
        elsewhere = self.differences(package)
        return elsewhere and f"features of medium {number} made elsewhere: {elsewhere}{kept}"

    def differences(self, package: Package) -> str:
        """How a package's making differs from ours, for people; empty if it does not."""
        there = package.provenance
        here = self.tower.origin.of(package.modality, package.grid)
        names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        said = [f"{name} {there.get(name)!r}, here {here.get(name)!r}" for name in sorted(names)]
        return "; ".join(said)

    def fits(self, package: Package) -> bool:
        """Whether encoding the same image now would give this package again."""
        ours, made = self.tower.origin.names(package.key, package.modality, package.grid)
        if self._accept != "any":
            ours = made
        same = ours in (package.identity, package.feature_id)
        return same and package.about.get("processor_settings") == self.namer.settings(
            package.modality
        )

    # -- features --------------------------------------------------------------------------------

    def _holds(self, feature_id: str) -> bool:
        return self._caches.packages.has(self._tenant, feature_id)

    def where(self, medium: Medium) -> str:
        """Where the features would come from, without getting them."""
        if isinstance(medium.recall, Package):
            return "caller"
        where = self._tier(medium.feature_id)
        if where != "tower" or not medium.steps:
            return where
        return video_steps.farthest({self._tier(step.feature_id) for step in medium.steps})

    def _tier(self, feature_id: str) -> str:
        if self._holds(feature_id):
            return "memory"
        tier = self._store.tier("package", feature_id) if self._store is not None else None
        return tier or "tower"

    def stored_as(self, medium: Medium) -> list[str]:
        """The names of a medium's features in a store: those of a video are stored step by step."""
        return [medium.feature_id, *dict.fromkeys(step.feature_id for step in medium.steps)]

    def require(self, media: list[Medium]) -> None:
        """Refuse features that cannot be made: no tower, or a picture too large for an export."""
        if not media:
            return  # a warm turn walks over no modules
        exported = getattr(self._family.model, "exported", None)
        absent = self._family.tower_absent
        for medium in media if absent or exported is not None else ():
            if self.where(medium) != "tower":
                continue
            if absent:
                name = f"{medium.modality} {medium.key[:12]}…"
                raise UnsupportedInput(f"{name} is not known: {LEFT_OUT}")
            if exported is not None:
                exported.require(medium.grid)

    def package(
        self, medium: Medium, keep: Callable[[], bool] = lambda: True, beside: Iterable[Medium] = ()
    ) -> tuple[Package, str]:
        """The features of a medium on the model's device, and their origin. New ones are remembered
        if `keep`, called after the tower, returns True."""
        if isinstance(medium.recall, Package):
            return medium.recall.on(self._family.model.device), "caller"
        if (known := self._known(medium.feature_id, medium.tokens)) is not None:
            self._counts[_COUNTED.get(known[1], "disk")] += 1
            return known
        if medium.steps:
            return self._video(medium, keep)
        package = self.encode_medium(medium, beside)
        self._remember([package], self.tower.milliseconds, keep)
        return package, "tower"

    def _video(self, video: Medium, keep: Callable[[], bool]) -> tuple[Package, str]:
        """The features of a video from those of its steps; new steps are encoded first."""
        known: dict[str, Package] = {}
        where = video_steps.farthest({self._find_step(video, step, known) for step in video.steps})
        self._counts[_COUNTED.get(where, "disk")] += 1
        if where == "tower":
            start = time.perf_counter()
            self.require([video])
            made = self.tower.encode_steps(video, known)
            self._count_rows(made[:1])
            self._remember(made, 1e3 * (time.perf_counter() - start), keep)
        steps = [known[step.feature_id] for step in video.steps]
        return self.tower.join(video, steps), where

    def _find_step(self, video: Medium, step: VideoStep, known: dict[str, Package]) -> str:
        name = step.feature_id
        if name in known:
            return "memory"
        found = self._known(name, video.tokens // len(video.steps))
        if found is None:
            return "tower"
        known[name], tier = found
        return tier

    def _known(self, feature_id: str, tokens: int) -> tuple[Package, str] | None:
        """Features that exist, on the model's device, and where they were."""
        package, tier = self._caches.packages.get(self._tenant, feature_id), "memory"
        if package is None:
            tier = self._tier(feature_id)
            if (package := self._from_store(feature_id, tokens)) is None:
                return None
            self._keep(package)
        return package.on(self._family.model.device), tier

    def _remember(self, made: list[Package], cost: float, keep: Callable[[], bool]) -> None:
        """Remember features that took so long in memory and store, if the caller still wants."""
        if not keep():
            self.tower.forget()  # what shared the pass is no better
            return
        for package in made:
            self._keep(package)
            if self.shared:
                self.store_package(package, cost / len(made))

    def store_package(self, package: Package, cost: float) -> Package:
        """Hand the package to the store, in the caller's chosen codec."""
        kept = package.pack(self._codec)  # unchanged if the codec is exact
        if self._store is not None:
            shown = dict.fromkeys((kept.key, kept.about.get(video_steps.VIDEO_KEY, kept.key)))
            about = About(cost=cost, media=tuple(shown), ttl=self._ttl)
            self._store.put("package", kept.feature_id, kept.stored, kept.record(), about)
            self._store.put_note("made", kept.identity, {"feature_id": kept.feature_id}, about)
        return kept

    def _keep(self, package: Package) -> None:
        self._caches.packages.put(self._tenant, package.feature_id, package)

    def _from_store(self, feature_id: str, tokens: int) -> Package | None:
        found = self._store.get("package", feature_id) if self._store is not None else None
        if found is None:
            return None
        # Computing again is always right, so a wrong file is only set aside.
        why = "it is the package of something else"
        try:
            package = Package.from_record(*found, where="the store")
            if package.feature_id == feature_id and package.tokens == tokens:
                return package.on(self._family.model.device)
        except FileError as error:
            why = str(error)
        self._store.reject("package", feature_id, why)  # type: ignore[union-attr]
        return None

    def encode_medium(self, medium: Medium, beside: Iterable[Medium] = ()) -> Package:
        """The features, computed now and not stored: the caller stores them in another form."""
        if medium.steps:
            return self._video(medium, lambda: False)[0]
        self.require([medium])
        self._counts["encoded"] += 1
        others = {one.feature_id: one for one in beside if self.where(one) == "tower"}
        others.pop(medium.feature_id, None)
        package = self.tower.encode(medium, others.values())
        self._count_rows([package])
        return package

    def _count_rows(self, made: Sequence[Package]) -> None:
        self._counts["by_rows"] += any("rows" in package.provenance for package in made)

    def look_any(self, image: object) -> Looked:
        """Look at what `encode` takes: a picture, a medium, or a part of a message. Thread-safe."""
        image = opened(image)
        modality = image.modality if isinstance(image, Medium | Package) else "image"
        if isinstance(image, dict):
            modality, image = medium_in(image)
            image = opened(image)
        if isinstance(image, Medium | Package):
            return modality, image
        return modality, self.namer.look(image, modality)

    def name_looked(self, looked: Looked) -> Medium:
        """The medium behind a look; it is known from now on."""
        modality, thing = looked
        if not isinstance(thing, Inspected):
            return self.name(thing, modality)
        self._counts["named"] += 1
        return self.admit_looked(thing)

    def name_any(self, image: object) -> Medium:
        """The medium behind what `encode` takes."""
        return self.name_looked(self.look_any(image))

    def encode(self, image: object) -> Package:
        """The package of an image in any form, with the processor's prompt text for it."""
        return self.handed_out(self.name_any(image))

    def encode_all(self, images: Sequence[object]) -> list[Package]:
        """The packages of several images, a batch at a time."""
        found, batch = [], self.tower.origin.batch
        for start in range(0, len(images), batch):
            media = [self.name_any(image) for image in images[start : start + batch]]
            found += [self.handed_out(one, media[n + 1 :]) for n, one in enumerate(media)]
        return found

    def handed_out(self, medium: Medium, beside: Iterable[Medium] = ()) -> Package:
        """The package of a medium, for a caller who may do with it what he likes."""
        # A copy: the caller's changes must not reach other answers.
        package = self.package(medium, beside=beside)[0].copied()
        if isinstance(medium.recall, Package):
            return package
        given = dataclasses.replace(package, layout=medium.layout, grid=medium.grid)
        self._caches.given.put(self._tenant, package.feature_id, _content(given))
        return given

    def pin(self, medium: Medium, pinned: bool = True) -> bool:
        """Pin a medium's package in memory, whatever the budget."""
        return self._caches.packages.pin(self._tenant, medium.feature_id, pinned)

    def is_pinned(self, medium: Medium) -> bool:
        """Whether a medium's package is pinned in memory."""
        return self._caches.packages.pinned(self._tenant, medium.feature_id)

    def forget(self, medium: Medium) -> int:
        """Drop everything in memory about an image, from any making; return the bytes freed."""
        packages, freed = self._caches.packages, 0
        for made, package in packages.items(self._tenant):
            if video_steps.shows(package, medium.key, medium.steps):
                freed += packages.pop(self._tenant, made)
                self._caches.given.pop(self._tenant, made)
        self.tower.forget()
        freed += self._caches.pixels.pop(self._tenant, medium.key)
        self.namer.forget(medium.key)
        return freed

    def clear(self) -> None:
        """Forget everything held in memory for this tenant."""
        self.tower.forget()
        self._caches.pixels.clear(self._tenant)
        self._caches.packages.clear(self._tenant)
        self._caches.given.clear(self._tenant)
        self.namer.clear()


def _content(package: Package) -> str:
    # The grid too: positions follow it, so the same rows with another grid are another prompt.
    tensors = [[name, package.tensors[name]] for name in sorted(package.tensors)]
    steps = package.about.get(video_steps.STEPS, [])
    return digests.digest("content", tensors, package.grid, steps)
