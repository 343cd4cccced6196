"""Packages as a flat folder of `.sight` files, one per different image, named after it.

Existing packages are found by the contents of their files (content, weights, settings and
environment), never by name: a folder may be resumed, renamed, or shared by several models.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from keepsight import digests
from keepsight.encode.items import Item
from keepsight.encode.results import Encoded, too_many
from keepsight.errors import FileError, InputError, KeepsightError, StoreError
from keepsight.formats import tensorfile
from keepsight.formats.codecs import EXACT, check_codec
from keepsight.formats.package import KIND, Package
from keepsight.kinds import Record
from keepsight.media.naming import Inspected
from keepsight.media.sources import Source
from keepsight.system import private_files
from keepsight.system.places import expanded

if TYPE_CHECKING:
    from keepsight.vlm import VLM

_IN_NAME = 12  # hex digits of the digest in a file name; the identity is inside the file


@dataclass(frozen=True)
class Opened:
    """What a thread found: a source that the folder may have, or the tower's inputs."""

    item: Item
    source: Source | None = None
    looked: Inspected | None = None
    error: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the pixels waiting for the tower."""
        pixels = self.looked.pixels if self.looked is not None else None
        return pixels.nbytes if pixels is not None else 0


class ToFiles:
    """A folder of package files as the place for packages."""

    def __init__(
        self,
        vlm: VLM,
        folder: str | os.PathLike[str],
        tenant: str = "",
        codec: str = EXACT,
        most: int | None = None,
        batch: int = 1,
    ) -> None:
        self._vlm, self._tenant, self._codec, self._most = vlm, tenant, check_codec(codec), most
        self.batch = batch
        self._folder = expanded(folder)
        try:
            private_files.make_folders(self._folder)
        except OSError as error:
            raise StoreError(f"{self._folder} cannot be made: {error.strerror}") from error
        self._refresh()
        self._index = _Files(self._folder, codec, lambda package: self._vision.fits(package))

    def _refresh(self) -> None:
        with self._vlm.runtime.lock:
            self._vlm.runtime.refresh(tenant=self._tenant)
            self._vision = self._vlm.runtime.vision_of(self._tenant).batched(self.batch)

    def look(self, item: Item) -> Opened:
        """Open the image; if no file has these bytes, decode and preprocess it."""
        try:
            source = item.open()
            if source.name in self._index.by_file:
                return Opened(item, source)
            return Opened(item, source, self._vision.namer.look(source, item.modality))
        except KeepsightError as error:
            return Opened(item, error=str(error))

    def settle(self, look: Opened, beside: Sequence[Inspected] = ()) -> Encoded:
        """Find a package by the file's bytes, then by its pixels; otherwise run the tower."""
        item, source = look.item, look.source
        if source is None:
            return Encoded(item.name, "broken", error=look.error)
        found = self._index.find(self._index.by_file, source.name)
        if found is not None:
            return _known(item, found)
        try:
            with self._vlm.runtime.lock:
                return self._encode(item, source, look.looked, beside)
        except InputError as error:
            return Encoded(item.name, "broken", error=str(error))

    def _encode(
        self, item: Item, source: Source, looked: Inspected | None, beside: Sequence[Inspected]
    ) -> Encoded:
        self._vlm.runtime.require_open()
        self._refresh()
        if looked is None:
            looked = self._vision.namer.look(source, item.modality)
        medium = self._vision.admit_looked(looked)
        found = self._index.find(self._index.by_key, medium.key)
        if found is not None:
            return _known(item, found)
        skipped = too_many(medium.tokens, self._most)
        if skipped is not None:
            return Encoded(item.name, "skipped", tokens=medium.tokens, error=skipped)
        package, _ = self._vision.package(medium, beside=self._vision.expect(beside))
        about = dict(package.about, file=source.name)
        return self._index.add(
            item, source, dataclasses.replace(package.pack(self._codec), about=about)
        )

    def flush(self) -> None:
        """Nothing to do: each file was complete when it got its name."""

    def confirm(self, result: Encoded) -> Encoded:
        """The result unchanged: a file that could not be written ended the run."""
        return result

    def look_back(self, most: int | None) -> None:
        """Nothing to do: this never removes files."""


def _known(item: Item, found: tuple[str, Path, Package]) -> Encoded:
    status, path, package = found
    return Encoded(item.name, status, package.feature_id, package.tokens, package=path)


@dataclass
class _Files:
    """The packages in one folder, by their contents."""

    folder: Path
    codec: str
    fits: Callable[[Package], bool]
    by_file: dict[str, list[Path]] = field(default_factory=dict)
    by_key: dict[str, list[Path]] = field(default_factory=dict)
    sound: dict[Path, Package] = field(default_factory=dict)  # read or written; without tensors
    kept: set[Path] = field(default_factory=set)  # packages already counted once

    def __post_init__(self) -> None:
        for path in sorted(self.folder.glob("*.sight")):
            if path.name.startswith("."):
                continue  # a partial file of a killed process
            try:
                record = tensorfile.read_record(path)
            except (FileError, OSError):
                continue  # foreign or damaged: its image is encoded again
            if record.get("kind") == KIND:
                self._list(path, record)

    def _list(self, path: Path, record: Record) -> None:
        about = record.get("about")
        file = about.get("file") if isinstance(about, dict) else None
        self.by_file.setdefault(str(file), []).append(path)
        self.by_key.setdefault(str(record.get("key")), []).append(path)

    def find(self, index: dict[str, list[Path]], name: str) -> tuple[str, Path, Package] | None:
        """(status, path, package) of an intact package that encoding would only repeat."""
        for path in index.get(name, []):
            if path not in self.sound and not self._check(path):
                continue
            status = "duplicate" if path in self.kept else "kept"
            self.kept.add(path)
            return status, path, self.sound[path]
        return None

    def _check(self, path: Path) -> bool:
        try:
            package = Package.load(path)  # every byte: a damaged package is made again
        except (FileError, OSError):
            return False
        fits = self._fits(package)
        if fits:
            self.sound[path] = dataclasses.replace(package, tensors={}, packed=None)
        return fits

    def _fits(self, package: Package) -> bool:
        """Whether encoding the same image now, with this codec, would give this package again."""
        codec = package.provenance.get("codec")
        if (codec["name"] if isinstance(codec, dict) else codec) != self.codec:
            return False
        if self.codec != EXACT:
            package = dataclasses.replace(
                package, provenance={**package.provenance, "codec": EXACT}
            )
        return self.fits(package)

    def add(self, item: Item, source: Source, package: Package) -> Encoded:
        """Write a package under a readable name without collisions."""
        digest = digests.digest("package file", source.name, package.feature_id)
        stem = _stem(item.name)
        path = self.folder / f"{stem}-{digest[:_IN_NAME]}.sight"
        if path in self.sound:
            path = path.with_stem(f"{stem}-{digest}")
        try:
            package.save(path)
            size = path.stat().st_size
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
        self._list(path, package.record())
        self.sound[path] = dataclasses.replace(package, tensors={}, packed=None)
        self.kept.add(path)
        return Encoded(item.name, "encoded", package.feature_id, package.tokens, size, package=path)


def _stem(name: str) -> str:
    """A file name from an item's name, which may hold anything: no folders, no hidden files."""
    last = re.split(r"[/\\]", name)[-1]
    base, spot = re.match(r"(.*?)(#.*)?$", last, re.S).groups()  # type: ignore[union-attr]
    text = os.path.splitext(base)[0] + re.sub(r"[^\w.=-]", "_", (spot or "").replace("#", "-"))
    text = "".join(c if c.isprintable() else "_" for c in text).lstrip(".")
    return text.encode(errors="replace")[:120].decode(errors="ignore") or "image"
