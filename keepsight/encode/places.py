"""Places for packages: a model's store, or a folder of files.

What is done with one image, in a thread and in its turn, is the same in both; each says how it
finds a package that it has, and keeps a new one.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from keepsight.encode.items import Item
from keepsight.errors import (
    FileError,
    InputError,
    KeepsightError,
    ModelError,
    NotStored,
    StoreError,
)
from keepsight.formats import tensorfile
from keepsight.formats.codecs import EXACT
from keepsight.formats.package import KIND, Package
from keepsight.kinds import Record
from keepsight.media.medium import Medium
from keepsight.media.naming import Inspected
from keepsight.media.sources import Source
from keepsight.store import About
from keepsight.store.contract import Name
from keepsight.system import digests, private_files
from keepsight.system.places import expanded
from keepsight.system.words import check_codec, check_count

if TYPE_CHECKING:
    from keepsight.vlm import VLM

_REMEMBERED = 1_000_000  # packages of a run, by which duplicates are known
_IN_NAME = 12  # hex digits of the digest in a file name; the identity is inside the file
_TOO_SMALL = "its budget, or the tenant's quota, is too small for these images"


@dataclass(frozen=True)
class Encoded:
    """The result of one image."""

    image: str  # name of the item
    status: str  # "encoded", "kept" (was there before), "duplicate" (of this run), or one of:
    # "skipped" (too many tokens), "refused" (by the store) and "broken", where `error` says why
    feature_id: str | None = None
    tokens: int = 0
    nbytes: int = 0  # bytes written for this image
    error: str | None = None
    package: Path | None = None  # if packages are files

    def to_dict(self) -> Record:
        """Plain data for JSON."""
        return {**vars(self), "package": None if self.package is None else str(self.package)}


@dataclass(frozen=True)
class Look:
    """What a thread found: the tower's inputs, or a result that needs no tower."""

    item: Item
    looked: Inspected | None = None
    result: Encoded | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the pixels waiting for the tower."""
        pixels = self.looked.pixels if self.looked is not None else None
        return pixels.nbytes if pixels is not None else 0


@dataclass(frozen=True)
class Making:
    """How packages are made, and whose they are; `batch` pictures share a pass of the tower."""

    tenant: str = ""
    codec: str = EXACT
    max_tokens: int | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        check_count(self.max_tokens, "max_tokens", "tokens")
        check_codec(self.codec)


class Place:
    """Where packages go."""

    def __init__(self, vlm: VLM, making: Making) -> None:
        self._runtime, self.making = vlm.runtime, making
        self._counted: dict[str, None] = {}  # packages of this run, by feature id
        self._refresh()

    def _refresh(self) -> None:
        with self._runtime.lock:
            self._runtime.refresh(tenant=self.making.tenant)
            vision = self._runtime.vision_of(self.making.tenant)
            self._vision = vision.batched(self.making.batch)

    def look(self, item: Item) -> Look:
        """In a thread: everything that needs no tower: open, name, decode and preprocess."""
        try:
            source = item.open()
            known = self.find_file(item, source)
            return self._look(item, source) if known is None else Look(item, None, known)
        except KeepsightError as error:
            return Look(item, None, Encoded(item.name, "broken", error=str(error)))

    def _look(self, item: Item, source: Source) -> Look:
        namer, most = self._vision.namer, self.making.max_tokens
        looked = namer.look(source, item.modality)
        medium = self._vision.medium_of(looked)
        result = self.find(item, medium)
        if result is None and most is not None and medium.tokens > most:
            error = f"{medium.tokens} tokens, more than {most}; --max-pixels would make it smaller"
            result = Encoded(item.name, "skipped", tokens=medium.tokens, error=error)
        if result is not None:
            looked.source.fresh.clear()
            looked = dataclasses.replace(looked, pixels=None)
        elif looked.pixels is None:
            # Known by name, but its package is gone: make the pixels here, in this thread.
            pixels = namer.run_processor(looked.source.decode(), looked.source)
            looked = dataclasses.replace(looked, pixels=pixels)
        return Look(item, looked, result)

    def settle(self, look: Look, beside: Sequence[Look] = ()) -> Encoded:
        """In its turn: run the tower and hand over the package. Those `beside` it come next, and
        may share its pass."""
        if look.result is not None:
            if look.looked is not None and look.looked.aliases:
                with self._runtime.lock:
                    self._vision.namer.learn(look.looked)
            return self._count(look.result)
        try:
            with self._runtime.lock:
                return self._count(self._encode(look.item, cast(Inspected, look.looked), beside))
        except InputError as error:
            return Encoded(look.item.name, "broken", error=str(error))

    def _encode(self, item: Item, looked: Inspected, beside: Sequence[Look]) -> Encoded:
        self._runtime.require_open()
        self._refresh()  # weights may change at any time; it is noticed here
        medium = self._vision.admit_looked(looked)
        known = self.find(item, medium)  # an equal image may have been encoded meanwhile
        if known is not None:
            return known
        waiting = [look.looked for look in beside if look.looked is not None]
        return self.make(item, looked.source, medium, self._vision.expect(waiting))

    def _count(self, result: Encoded) -> Encoded:
        made = result.feature_id
        if made is None:
            return result
        if made in self._counted:
            again = result.status == "kept"
            return dataclasses.replace(result, status="duplicate") if again else result
        if len(self._counted) >= _REMEMBERED:
            del self._counted[next(iter(self._counted))]
        self._counted[made] = None
        return result

    # -- what each place does in its way -----------------------------------------------------------

    def find_file(self, item: Item, source: Source) -> Encoded | None:
        """A package of the same bytes of a file. Called in a thread."""
        return None

    def find(self, item: Item, medium: Medium) -> Encoded | None:
        """The package that encoding would only repeat. Called in a thread too."""
        raise NotImplementedError

    def make(self, item: Item, source: Source, medium: Medium, beside: Sequence[Medium]) -> Encoded:
        """Run the tower and hand over the package."""
        raise NotImplementedError

    def flush(self) -> None:
        """Return when everything settled is safe, except what the place refused."""

    def confirm(self, result: Encoded) -> Encoded:
        """The final result of an image, after `flush`: whether its package really exists."""
        return result

    def look_back(self, most: int | None) -> None:
        """Raise if packages confirmed earlier are gone; checks the first `most`, or all."""


class ToStore(Place):
    """A model's store, for one tenant, with everything that `ks.load(store=...)` needs to find.

    Beside each package are the names that lead to it, from the bytes of the file and from its
    pixels. So a resumed run neither decodes nor preprocesses finished images: it hashes and looks
    up.
    """

    def __init__(self, vlm: VLM, making: Making) -> None:
        if making.codec == EXACT:  # what the model's own store keeps packed is looked for so
            making = dataclasses.replace(making, codec=vlm.runtime.settings.feature_codec)
        super().__init__(vlm, making)
        store = vlm.runtime.store_of(making.tenant)
        if store is None:
            raise InputError("this model has no store: load it with store=, or encode to files")
        self._store = store
        self._refused: dict[Name, str] = {}  # since the last flush

    def _refresh(self) -> None:
        super()._refresh()
        if not self._vision.shared:
            raise ModelError(
                "the model has hooks, replaced methods or other code that only this process knows, "
                "so a store cannot name what it computes; remove them, or encode to files"
            )

    def find(self, item: Item, medium: Medium) -> Encoded | None:
        """The package under its feature id; the note of a packed one has it."""
        made: object = medium.feature_id
        if self.making.codec != EXACT:
            note = self._store.note("made", self._packed_as(medium))
            made = note.get("feature_id") if note else None
        if not isinstance(made, str) or not self._store.has("package", made):
            return None
        return Encoded(item.name, "kept", made, medium.tokens)

    def _packed_as(self, medium: Medium) -> str:
        """The note with the feature id of a packed package; the id contains the error, which is
        measured later."""
        return digests.digest("packed as", medium.feature_id, self.making.codec)

    def make(self, item: Item, source: Source, medium: Medium, beside: Sequence[Medium]) -> Encoded:
        """Run the tower; the model puts exact packages into its store by itself."""
        if self.making.codec == EXACT:
            package, tier = self._vision.package(medium, beside=beside)
            if tier == "memory":  # the store lost what memory still holds
                self._put(package, 0.0)
        else:
            start = time.perf_counter()
            package = self._vision.encode_medium(medium, beside).pack(self.making.codec)
            about = self._put(package, 1e3 * (time.perf_counter() - start))
            note = {"feature_id": package.feature_id}
            self._store.put_note("made", self._packed_as(medium), note, about)
        size = sum(tensor.nbytes for tensor in package.stored.values())
        return Encoded(item.name, "encoded", package.feature_id, package.tokens, size)

    def _put(self, package: Package, cost: float) -> About:
        about = About(cost=cost, media=(package.key,))
        made = package.feature_id
        self._store.put("package", made, package.stored, package.record(), about)
        self._store.put_note("made", package.identity, {"feature_id": made}, about)
        return about

    def flush(self) -> None:
        """Return when everything settled is safe in the store, except what it refused. A store that
        accepts nothing ends the run."""
        self._refused = {}
        try:
            self._store.flush()
        except NotStored as error:
            if error.broken is not None:
                raise
            self._refused = error.reasons

    def confirm(self, result: Encoded) -> Encoded:
        """The result, or "refused" if the store refused the package or evicted it at once."""
        made = result.feature_id
        if made is None or self._store.has("package", made):
            return result
        self._counted.pop(made, None)
        why = self._refused.get(("package", made), f"not in the store any more: {_TOO_SMALL}")
        return Encoded(result.image, "refused", tokens=result.tokens, error=why)

    def look_back(self, most: int | None) -> None:
        """Raise if a budget or a quota evicted a package of this run."""
        if self._store.budget is None and self._store.quota is None:
            return
        counted = itertools.islice(self._counted, most)
        gone = [made for made in counted if not self._store.has("package", made)]
        if gone:
            error = NotStored(
                f"{len(gone)} packages that this run reported are not in the store any more, the "
                f"first: {gone[0]}; {_TOO_SMALL}"
            )
            error.reasons, error.count = {("package", made): _TOO_SMALL for made in gone}, len(gone)
            raise error


class ToFiles(Place):
    """A flat folder of `.sight` files, one per different image, named after it.

    Existing packages are found by the contents of their files (content, weights, settings and
    environment), never by name: a folder may be resumed, renamed, or shared by several models.
    """

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
