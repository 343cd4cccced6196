"""A table of images to packages: one `.sight` file for each different image.

A plain function, so a loop, the command line and a cluster's workers call the same thing. What is
already in the folder is found by what the files say of themselves (content, weights, settings and
circumstances), never by their names: a folder may be resumed, renamed, or shared by several models.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepsight import keys, tensorfile
from keepsight.errors import FileError, InputError, StoreError
from keepsight.media import Source, open_source
from keepsight.package import KIND, Package

if TYPE_CHECKING:
    from keepsight.vlm import VLM

# What is taken from a folder; a file named by itself or by a glob is always tried.
_IMAGE = re.compile(
    r"\.(avif|bmp|gif|heic|heif|jfif|jpe|jpeg|jpg|pbm|pgm|png|pnm|ppm|tga|tif|tiff|webp)", re.I
)
_IN_NAME = 12  # hex characters of the digest in a file's name; identity is inside the file


@dataclass(frozen=True)
class Found:
    """The images behind some sources, each path once, and how many other files lay there."""

    images: list[Path]
    left_out: int = 0


@dataclass(frozen=True)
class Encoded:
    """What became of one image."""

    image: Path
    status: str  # "encoded", "kept" (was there before), "duplicate" (of this run) or "broken"
    package: Path | None = None
    tokens: int = 0
    nbytes: int = 0  # written by this image
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = dict(vars(self), image=str(self.image))
        return dict(plain, package=None if self.package is None else str(self.package))


def find_images(sources: Sequence[str | os.PathLike[str]]) -> Found:
    """Files, folders (with all that is in them) and globs to image files, in a stable order."""
    images: dict[Path, None] = {}
    left_out = 0
    for source in sources:
        paths = _expand(os.fspath(source))
        if not paths:
            raise InputError(f"{source}: there is no such file or folder, and nothing matches it")
        for path in paths:
            if path.is_dir():
                inside, others = _inside(path)
                images |= dict.fromkeys(inside)
                left_out += others
            else:
                images[path] = None
    return Found(list(images), left_out)


def _expand(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.exists():
        return [path]
    return sorted(map(Path, glob.glob(str(path), recursive=True)))


def _inside(folder: Path) -> tuple[list[Path], int]:
    """All images in a folder, hidden files aside, and the number of other files."""
    images, others = [], 0
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if name.startswith("."):
                continue
            if _IMAGE.fullmatch(Path(name).suffix):
                images.append(Path(root) / name)
            else:
                others += 1
    return images, others


def encode(
    sources: Sequence[str | os.PathLike[str]], vlm: VLM, to: str | os.PathLike[str]
) -> Iterator[Encoded]:
    """One `.sight` file in `to` for each different image behind `sources`; results as they come.

    An image that cannot be used is a result like any other, and the rest goes on.
    """
    return encode_paths(find_images(sources).images, vlm, to)


def encode_paths(images: Sequence[Path], vlm: VLM, to: str | os.PathLike[str]) -> Iterator[Encoded]:
    """The same for image files that were found already."""
    folder = Path(to).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder} cannot be made: {error.strerror}") from error
    with vlm._lock:
        vlm.memory.refresh()
    shelf = _Shelf(vlm, folder)
    for image in images:
        try:
            yield _one(image, vlm, shelf)
        except InputError as error:
            yield Encoded(image, "broken", error=str(error))


def _one(image: Path, vlm: VLM, shelf: _Shelf) -> Encoded:
    """Look by the file's bytes, then by its pixels, then encode."""
    source = open_source(image, {})
    found = shelf.find(shelf.by_file, source.name)
    if found is None:
        with vlm._lock:
            medium = vlm.memory.vision.name(source)
        found = shelf.find(shelf.by_key, medium.key)
    if found is not None:
        return Encoded(image, *found)
    package = vlm.encode(medium)
    if isinstance(package, list):
        raise TypeError("one image gave several packages")
    return shelf.add(image, source, package)


@dataclass
class _Shelf:
    """The packages in one folder, by what they say of themselves."""

    vlm: VLM
    folder: Path
    by_file: dict[str, list[Path]] = field(default_factory=dict)
    by_key: dict[str, list[Path]] = field(default_factory=dict)
    sound: dict[Path, int] = field(default_factory=dict)  # read or written in this run: tokens
    kept: set[Path] = field(default_factory=set)  # those that were counted once

    def __post_init__(self) -> None:
        for path in sorted(self.folder.glob("*.sight")):
            if path.name.startswith("."):
                continue  # half of a file, from a process that was killed
            try:
                record = tensorfile.read_record(path)
            except (FileError, OSError):
                continue  # not ours or damaged: whatever it was of is encoded again
            if record.get("kind") == KIND:
                self._list(path, record)

    def _list(self, path: Path, record: dict[str, Any]) -> None:
        about = record.get("about")
        file = about.get("file") if isinstance(about, dict) else None
        self.by_file.setdefault(str(file), []).append(path)
        self.by_key.setdefault(str(record.get("key")), []).append(path)

    def find(self, index: dict[str, list[Path]], name: str) -> tuple[str, Path, int] | None:
        """(status, path, tokens) of a sound package that encoding would only make again."""
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
        fits = self.vlm.memory.vision.fits(package)
        if fits:
            self.sound[path] = package.tokens
        return fits

    def add(self, image: Path, source: Source, package: Package) -> Encoded:
        """Write a package, named for people and without collisions."""
        package = dataclasses.replace(package, about=dict(package.about, file=source.name))
        digest = keys.digest("package file", source.name, package.feature_id)
        stem = image.stem.encode()[:120].decode(errors="ignore")
        path = self.folder / f"{stem}-{digest[:_IN_NAME]}.sight"
        if path in self.sound:
            path = path.with_stem(f"{stem}-{digest}")
        try:
            package.save(path)
            size = path.stat().st_size
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
        self._list(path, package.record())
        self.sound[path] = package.tokens
        self.kept.add(path)
        return Encoded(image, "encoded", path, package.tokens, size)
