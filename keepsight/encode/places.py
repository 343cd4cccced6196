"""A place for packages: what is done with one image, in a thread and in its turn, and its result.

`store.py` and `files.py` say how a place finds a package that it has, and keeps a new one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keepsight.encode.items import Item
from keepsight.errors import InputError, KeepsightError
from keepsight.formats.codecs import EXACT, check_codec
from keepsight.kinds import Record
from keepsight.media.medium import Medium
from keepsight.media.naming import Inspected
from keepsight.media.sources import Source

if TYPE_CHECKING:
    from keepsight.vlm import VLM

_REMEMBERED = 1_000_000  # packages of a run, by which duplicates are known


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
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError(f"max_tokens={self.max_tokens}; expected at least 1")
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
        result, looked = look.result, look.looked
        with self._runtime.lock:
            if result is not None:
                if looked is not None and looked.aliases:
                    self._vision.namer.learn(looked)
                return self._count(result)
            try:
                self._runtime.require_open()
                self._refresh()  # weights may change at any time; it is noticed here
                if looked is None:
                    raise InputError(f"{look.item.name} was not looked at")
                medium = self._vision.admit_looked(looked)
                result = self.find(look.item, medium)  # an equal one may be encoded meanwhile
                if result is None:
                    waiting = [other.looked for other in beside if other.looked is not None]
                    expected = self._vision.expect(waiting)
                    result = self.make(look.item, looked.source, medium, expected)
                return self._count(result)
            except InputError as error:
                return Encoded(look.item.name, "broken", error=str(error))

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
