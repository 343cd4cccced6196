"""Images to packages: named first, looked up, and encoded by the tower only when nobody has.

Naming is cheap for a known image: its bytes are hashed and nothing is decoded or preprocessed.
Encoding is one image to one forward pass, so no neighbour and no budget changes a bit, and so the
tower's memory is that of one image. `budget` bounds what is kept between: half for pixel values
that wait for the tower, half for packages.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from keepsight import keys
from keepsight.clips import open_clip
from keepsight.errors import (
    FileError,
    ImageError,
    KeepsightError,
    UnsupportedInput,
    WrongIdentity,
)
from keepsight.families import Family, Pixels
from keepsight.media import Source, open_source
from keepsight.medium import (
    PROCESSORS,
    Medium,
    entry_of,
    is_entry,
    is_plain,
    medium_in,
    without_arrays,
)
from keepsight.package import Package, check_shapes, feature_id, identity
from keepsight.store import DiskStore, Recent

_MAX_ALIASES = 200_000  # an alias is a few hundred bytes


class Vision:
    """The namer and the encoder of one model."""

    def __init__(
        self,
        family: Family,
        processor: Any,
        options: dict[str, Any],
        budget: int,
        store: DiskStore | None,
        accept_features: str = "same",
    ) -> None:
        self._family, self._processor, self._options = family, processor, options
        self._store, self._accept = store, accept_features
        self._pixels: Recent[Pixels] = Recent(budget // 2, lambda p: p.nbytes)
        self.packages: Recent[Package] = Recent(budget - budget // 2, lambda p: p.nbytes)
        self._aliases: dict[str, dict[str, Any]] = {}
        self._fetched: dict[str, bytes] = {}
        self._made: dict[str, str] = {}  # feature id -> content, of packages that we gave out
        self.counts = {"named": 0, "preprocessed": 0, "encoded": 0, "memory": 0, "disk": 0}
        self._weights = self._vision_settings = ""
        self._settings: dict[str, str] = {}  # modality -> digest, as they are asked for
        self._provenance: dict[str, Any] = {}
        self._bound: Any = None  # what the processor's settings were when they were digested
        self.about: dict[str, Any] = {}

    def bind(self, weights: str, provenance: dict[str, Any]) -> None:
        """Say whose features these are; called before each use with the current truth."""
        if weights != self._weights:
            self._vision_settings = self._family.vision_settings()
        now: Any = None
        if self._processor is not None:
            parts = [getattr(self._processor, name, None) for name in PROCESSORS.values()]
            seen = [(type(part), without_arrays(part)) for part in parts if part is not None]
            now = (seen, self._own_settings(), provenance)
        if now != self._bound:
            self._settings.clear()
            self._bound = copy.deepcopy(now)
        self._weights, self._provenance = weights, provenance

    def settings(self, modality: str = "image", must: bool = True) -> str:
        """The digest of everything that changes what the processor makes of a medium.

        Empty where there is no processor and none is needed: tensors need none.
        """
        if self._processor is None:
            return ""
        if modality not in self._settings:
            part = getattr(self._processor, PROCESSORS[modality], None)
            if part is None or not hasattr(part, "to_dict"):
                if not must:
                    return ""
                raise UnsupportedInput(
                    f"the processor has no {PROCESSORS[modality]} (upstream's need torchvision); "
                    f"{modality} cannot be prepared here"
                )
            self._settings[modality] = keys.digest(
                "processor settings",
                type(part).__name__,
                part.to_dict(),
                self._own_settings(),
                self._options if modality == "image" else {},
                self._provenance["transformers"],
                self._provenance["image_backend"],
            )
        return self._settings[modality]

    def _own_settings(self) -> dict[str, Any]:
        """Plain settings of the composite processor: some shape pixels, some an image's text."""
        own = vars(self._processor).items()
        return {k: v for k, v in own if k != "chat_template" and is_plain(v)}

    # -- naming ----------------------------------------------------------------------------------

    def name(self, image: Any, modality: str = "image") -> Medium:
        """The medium behind any form of image, or of video or sound."""
        self.counts["named"] += 1
        if isinstance(image, Medium | Package) and image.modality != modality:
            raise ImageError(f"this is a package of {image.modality!r}, given as {modality!r}")
        if isinstance(image, Medium):
            return self._medium_again(image)
        if isinstance(image, Package):
            return self._medium_of_package(image)
        if self._processor is None:
            raise ImageError("this model was wrapped without a processor: pass tensors to generate")
        settings = self.settings(modality)
        if modality == "image":
            source = open_source(image, self._fetched)
        else:
            source = open_clip(image, modality, self._fetched)
        alias = self._alias(keys.digest("alias", source.name, settings))
        if alias is None:
            alias = self._look_closer(source)
        source.fresh.clear()
        return self._medium(alias, lambda: self._preprocess(source))

    def name_pixels(self, pixels: Pixels) -> Medium:
        """The medium behind a processor's output for one image."""
        return self._medium(entry_of(pixels), lambda: pixels)

    def _medium_again(self, medium: Medium) -> Medium:
        """A medium named before, under the weights and provenance of now."""
        if isinstance(medium.recall, Package):
            return self._medium_of_package(medium.recall, medium.feature_id)
        return self._medium(entry_of(medium, source=medium.source), medium.recall)

    def admit(self, package: Package) -> Medium:
        """The medium of a package that came with its snapshots, in one file with their digests."""
        return self._medium_of_package(package, package.feature_id)

    def _own_or_handed(self, package: Package) -> str:
        """The feature id of a package handed in: its claim, if these are the bits that we made.

        Whoever changed the tensors and left the provenance would else stand in the path of ours.
        """
        content = _content(package)
        if self._made.get(package.feature_id) == content:
            return package.feature_id
        return keys.digest("handed in", package.feature_id, content)

    def _medium_of_package(self, package: Package, named: str | None = None) -> Medium:
        for field, mine, its in (
            ("vision weights", self._weights, package.weights),
            ("vision settings", self._vision_settings, package.settings),
        ):
            if mine != its:
                raise WrongIdentity(field, mine, its)
        made_with = package.about.get("processor_settings")
        mine = self.settings(package.modality, must=False) if made_with else ""
        if mine and made_with != mine:
            raise WrongIdentity("processor settings", mine, made_with)
        check_shapes(package, "the package")
        self._family.check_package(package)
        return Medium(
            package.key,
            package.identity,
            named or self._own_or_handed(package),
            package.grid,
            package.layout,
            package.source,
            package,
            package.modality,
        )

    def _medium(self, entry: dict[str, Any], recall: Callable[[], Pixels]) -> Medium:
        what = identity(entry["key"], self._weights, self._vision_settings)
        made = feature_id(what, self._provenance)
        if self._accept == "any" and self._store is not None:
            made = self._any_made(what, made)
        layout = tuple(entry["layout"])
        source, modality = entry.get("source"), entry.get("modality", "image")
        return Medium(entry["key"], what, made, entry["grid"], layout, source, recall, modality)

    def _any_made(self, what: str, made: str) -> str:
        """Our own making where it exists, else any making in the store."""
        if made in self.packages or self._store is None or self._store.has("package", made):
            return made
        note = self._store.note("made", what)
        found = note.get("feature_id") if note else None
        return found if isinstance(found, str) else made

    def made_elsewhere(self, medium: Medium) -> bool:
        """Whether the store holds this image only in another making than ours."""
        if self._store is None or self._store.has("package", medium.feature_id):
            return False
        note = self._store.note("made", medium.identity)
        return note is not None and note.get("feature_id") != medium.feature_id

    def fits(self, package: Package) -> bool:
        """Whether encoding the same image now would give this package again."""
        ours = identity(package.key, self._weights, self._vision_settings)
        if self._accept != "any":
            ours = feature_id(ours, self._provenance)
        same = ours in (package.identity, package.feature_id)
        return same and package.about.get("processor_settings") == self.settings(package.modality)

    def _look_closer(self, source: Source) -> dict[str, Any]:
        """Decode an image whose bytes are new; its pixels may still be known."""
        decoded = source.decode()
        settings = self.settings(source.modality)
        digest = source.digest(decoded, settings)
        alias = self._alias(digest)
        if alias is None:
            pixels = self._run_processor(decoded, source)
            self._pixels.put(pixels.key, pixels)
            alias = entry_of(pixels, source=digest)
            self._remember_alias(digest, alias)
        self._remember_alias(keys.digest("alias", source.name, settings), alias)
        return alias

    def _alias(self, digest: str) -> dict[str, Any] | None:
        entry = self._aliases.get(digest)
        if entry is None and self._store is not None:
            entry = self._store.note("alias", digest)
            if entry is not None and not is_entry(entry):
                self._store.reject("alias", digest, "it does not describe an image")
                entry = None
            if entry is not None:
                self._aliases[digest] = entry
        return entry

    def _remember_alias(self, digest: str, entry: dict[str, Any]) -> None:
        if len(self._aliases) >= _MAX_ALIASES:
            del self._aliases[next(iter(self._aliases))]
        self._aliases[digest] = entry
        if self._store is not None:
            self._store.put_note("alias", digest, entry)

    def _preprocess(self, source: Source) -> Pixels:
        return self._run_processor(source.decode(), source)

    def _run_processor(self, decoded: Any, source: Source) -> Pixels:
        self.counts["preprocessed"] += 1
        try:
            if source.modality != "image":
                return self._family.preprocess_other(self._processor, decoded, {}, source.modality)
            return self._family.preprocess(self._processor, decoded, self._options)
        except KeepsightError:
            raise
        except Exception as error:  # processors raise whatever their arithmetic runs into
            size = getattr(decoded, "size", None) or getattr(decoded, "shape", None)
            raise ImageError(
                f"{source.label} ({size}): the image processor refused it: {error}"
            ) from error

    # -- features --------------------------------------------------------------------------------

    def where(self, medium: Medium) -> str:
        """Where the features would come from, without getting them."""
        if isinstance(medium.recall, Package):
            return "caller"
        if medium.feature_id in self.packages:
            return "memory"
        if self._store is not None and self._store.has("package", medium.feature_id):
            return "disk"
        return "tower"

    def package(self, medium: Medium) -> tuple[Package, str]:
        """The features of a medium and where they came from."""
        if isinstance(medium.recall, Package):
            return medium.recall, "caller"
        package = self.packages.get(medium.feature_id)
        if package is not None:
            self.counts["memory"] += 1
            return package, "memory"
        package = self._from_store(medium)
        if package is not None:
            self.counts["disk"] += 1
            self.packages.put(medium.feature_id, package)
            return package, "disk"
        package = self._encode(medium)
        self.packages.put(package.feature_id, package)
        if self._store is not None:
            self._store.put("package", package.feature_id, package.tensors, package.record())
            self._store.put_note("made", package.identity, {"feature_id": package.feature_id})
        return package, "tower"

    def _from_store(self, medium: Medium) -> Package | None:
        found = self._store.get("package", medium.feature_id) if self._store is not None else None
        if found is None:
            return None
        # Computing again is always right, so a file that lies is only set aside.
        why = "it is the package of something else"
        try:
            package = Package.from_record(*found, where="the store")
            if package.feature_id == medium.feature_id and package.tokens == medium.tokens:
                return package
        except FileError as error:
            why = str(error)
        self._store.reject("package", medium.feature_id, why)  # type: ignore[union-attr]
        return None

    def _encode(self, medium: Medium) -> Package:
        pixels = self._pixels.get(medium.key) or medium.recall()  # type: ignore[operator]
        self._pixels.pop(medium.key)
        if pixels.key != medium.key:
            raise ImageError("the image processor gave other pixels than when it was named")
        self.counts["encoded"] += 1
        tensors, container = self._run_tower(pixels)
        package = Package(
            tensors=tensors,
            key=medium.key,
            weights=self._weights,
            settings=self._vision_settings,
            provenance=dict(self._provenance),
            grid=medium.grid,
            layout=medium.layout,
            container=container,
            modality=medium.modality,
            source=medium.source,
            about=dict(self.about, processor_settings=self.settings(medium.modality, must=False)),
        )
        try:
            check_shapes(package, "the features")
        except FileError as error:
            raise ImageError(f"the vision tower gave other features than expected: {error}") from (
                error
            )
        return package

    def _run_tower(self, pixels: Pixels) -> tuple[dict[str, torch.Tensor], str]:
        try:
            with torch.no_grad():
                return self._family.encode(pixels)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            shapes = {name: tuple(tensor.shape) for name, tensor in pixels.tensors.items()}
            raise ImageError(f"the vision tower refused pixels of shape {shapes}: {error}") from (
                error
            )

    def encode(self, image: Any) -> Package:
        """The package of an image in any form, with the prompt text the processor gives it."""
        modality = image.modality if isinstance(image, Package) else "image"
        if isinstance(image, dict):
            modality, image = medium_in(image)
        medium = self.name(image, modality)
        package, _ = self.package(medium)
        # A copy: what the caller does to it must not reach the answers of others.
        tensors = {name: tensor.clone() for name, tensor in package.tensors.items()}
        if isinstance(medium.recall, Package):
            return dataclasses.replace(package, tensors=tensors)
        given = dataclasses.replace(
            package, tensors=tensors, layout=medium.layout, grid=medium.grid
        )
        self._made[package.feature_id] = _content(given)
        return given

    def clear(self) -> None:
        """Forget everything held in memory."""
        self._pixels.clear()
        self.packages.clear()
        self._aliases.clear()
        self._fetched.clear()


def _content(package: Package) -> str:
    # The grid too: positions follow it, and with another one the same rows are another prompt.
    tensors = [[name, package.tensors[name]] for name in sorted(package.tensors)]
    return keys.digest("content", tensors, package.grid)
