"""Packages into the model's own store, with everything that `ks.load(store=...)` needs to find
them.

Beside each package are the names that lead to it, from the bytes of the file and from its pixels.
So a resumed run neither decodes nor preprocesses finished images: it hashes and looks up.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keepsight.encode.items import Item
from keepsight.encode.places import Encoded, Making, Place
from keepsight.errors import InputError, ModelError, NotStored
from keepsight.formats.codecs import EXACT
from keepsight.formats.package import Package
from keepsight.media.medium import Medium
from keepsight.media.sources import Source
from keepsight.store import About
from keepsight.store.contract import Name
from keepsight.system import digests

if TYPE_CHECKING:
    from keepsight.vlm import VLM

_TOO_SMALL = "its budget, or the tenant's quota, is too small for these images"


class ToStore(Place):
    """A model's store as the place for packages, for one tenant."""

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
