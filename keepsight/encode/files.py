"""Packages as a flat folder of `.sight` files, one per different image, named after it.

Existing packages are found by the contents of their files (content, weights, settings and
environment), never by name: a folder may be resumed, renamed, or shared by several models.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keepsight.encode.items import Item
from keepsight.encode.places import Encoded, Making, Place
from keepsight.errors import FileError, StoreError
from keepsight.formats import tensorfile
from keepsight.formats.codecs import EXACT
from keepsight.formats.package import KIND, Package
from keepsight.kinds import Record
from keepsight.media.medium import Medium
from keepsight.media.sources import Source
from keepsight.system import digests, private_files
from keepsight.system.places import expanded

if TYPE_CHECKING:
    from keepsight.vlm import VLM

_IN_NAME = 12  # hex digits of the digest in a file name; the identity is inside the file


class ToFiles(Place):
    """A folder of package files as the place for packages."""

    def __init__(self, vlm: VLM, making: Making, folder: str | os.PathLike[str]) -> None:
        super().__init__(vlm, making)
        self._folder = expanded(folder)
        try:
            private_files.make_folders(self._folder)
        except OSError as error:
            raise StoreError(f"{self._folder} cannot be made: {error.strerror}") from error
        self._there: dict[str, list[Path]] = defaultdict(list)  # by digests of bytes and of pixels
        self._sound: dict[Path, Package] = {}  # read or written; without tensors
        for path in sorted(self._folder.glob("*.sight")):
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
        self._there[str(about.get("file") if isinstance(about, dict) else None)].append(path)
        self._there[str(record.get("key"))].append(path)

    def find_file(self, item: Item, source: Source) -> Encoded | None:
        """An intact package of the same bytes: nothing is decoded."""
        return self._first(item, source.name)

    def find(self, item: Item, medium: Medium) -> Encoded | None:
        """An intact package of the same pixels."""
        return self._first(item, medium.key)

    def _first(self, item: Item, digest: str) -> Encoded | None:
        for path in self._there.get(digest, ()):
            if path in self._sound or self._check(path):
                package = self._sound[path]
                made, tokens = package.feature_id, package.tokens
                return Encoded(item.name, "kept", made, tokens, package=path)
        return None

    def _check(self, path: Path) -> bool:
        """Whether encoding the same image now, with this codec, would give this package again."""
        try:
            package = Package.load(path)  # every byte: a damaged package is made again
        except (FileError, OSError):
            return False
        codec = package.provenance.get("codec")
        if (codec["name"] if isinstance(codec, dict) else codec) != self.making.codec:
            return False
        exact = {**package.provenance, "codec": EXACT}
        if not self._vision.fits(dataclasses.replace(package, provenance=exact)):
            return False
        self._sound[path] = dataclasses.replace(package, tensors={}, packed=None)
        return True

    def make(self, item: Item, source: Source, medium: Medium, beside: Sequence[Medium]) -> Encoded:
        """Write the package under a readable name without collisions."""
        package, _ = self._vision.package(medium, beside=beside)
        about = dict(package.about, file=source.name)
        package = dataclasses.replace(package.pack(self.making.codec), about=about)
        made = package.feature_id
        digest = digests.digest("package file", source.name, made)
        stem = _stem(item.name)
        path = self._folder / f"{stem}-{digest[:_IN_NAME]}.sight"
        if path in self._sound:
            path = path.with_stem(f"{stem}-{digest}")
        try:
            package.save(path)
            size = path.stat().st_size
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
        self._sound[path] = dataclasses.replace(package, tensors={}, packed=None)
        self._list(path, package.record())
        return Encoded(item.name, "encoded", made, package.tokens, size, package=path)


def _stem(name: str) -> str:
    """A file name from an item's name, which may hold anything: no folders, no hidden files."""
    base, _, spot = re.split(r"[/\\]", name)[-1].partition("#")
    text = os.path.splitext(base)[0] + re.sub(r"[^\w.=-]", "_", f"-{spot}".replace("#", "-"))
    text = "".join(c if c.isprintable() else "_" for c in text.rstrip("-")).lstrip(".")
    return text.encode(errors="replace")[:120].decode(errors="ignore") or "image"
