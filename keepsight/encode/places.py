"""A place for packages: what is done with one image, in a thread and in its turn, and its result.

`store.py` and `files.py` say how a place finds a package that it has, and keeps a new one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

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
        package = None if self.package is None else str(self.package)
        return {**vars(self), "package": package}


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


class Place:
    """Where packages go. `batch` pictures share a pass of the tower."""

    def __init__(
        self,
        vlm: VLM,
        tenant: str = "",
        codec: str = EXACT,
        max_tokens: int | None = None,
        batch: int = 1,
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise InputError(f"max_tokens={max_tokens}; expected at least 1")
        self._runtime, self._tenant, self._codec = vlm.runtime, tenant, check_codec(codec)
        self._max_tokens, self.batch = max_tokens, batch
        self._counted: dict[str, None] = {}  # packages of this run, by feature id
        self._refresh()

    def _refresh(self) -> None:
        with self._runtime.lock:
            self._runtime.refresh(tenant=self._tenant)
            self._vision = self._runtime.vision_of(self._tenant).batched(self.batch)

    # -- in a thread -------------------------------------------------------------------------------

    def look(self, item: Item) -> Look:
        """Do everything that needs no tower: open, name, decode and preprocess."""
        try:
            source = item.open()
            known = self.find_file(item, source)
            return Look(item, None, known) if known is not None else self._look(item, source)
        except KeepsightError as error:
            return Look(item, None, Encoded(item.name, "broken", error=str(error)))

    def _look(self, item: Item, source: Source) -> Look:
        namer = self._vision.namer
        looked = namer.look(source, item.modality)
        medium = self._vision.medium_of(looked)
        result = self.find(item, medium) or self._skipped(item, medium.tokens)
        if result is not None:
            looked.source.fresh.clear()
            looked = dataclasses.replace(looked, pixels=None)
        elif looked.pixels is None:
            # Known by name, but its package is gone: make the pixels here, in this thread.
            pixels = namer.run_processor(looked.source.decode(), looked.source)
            looked = dataclasses.replace(looked, pixels=pixels)
        return Look(item, looked, result)

    def _skipped(self, item: Item, tokens: int) -> Encoded | None:
        most = self._max_tokens
        if most is None or tokens <= most:
            return None
        error = f"{tokens} tokens, more than {most}; --max-pixels would make it smaller"
        return Encoded(item.name, "skipped", tokens=tokens, error=error)

    # -- in its turn -------------------------------------------------------------------------------

    def settle(self, look: Look, beside: Sequence[Look] = ()) -> Encoded:
        """Do the rest, in the order of the items: run the tower and hand over the package. Those
        `beside` it come next, and may share its pass."""
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
