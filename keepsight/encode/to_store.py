"""Packages into the model's own store, with everything that `ks.load(store=...)` needs to find
them.

Beside each package are the names that lead to it, from the bytes of the file and from its pixels.
So a resumed run neither decodes nor preprocesses finished images: it hashes and looks up.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keepsight import digests
from keepsight.encode.items import Item
from keepsight.encode.results import CountedPackages, Encoded, too_many
from keepsight.errors import InputError, KeepsightError, ModelError, NotStored
from keepsight.formats.codecs import EXACT, check_codec
from keepsight.formats.package import Package
from keepsight.media.medium import Medium
from keepsight.media.naming import Inspected
from keepsight.store import About
from keepsight.store.contract import Name

if TYPE_CHECKING:
    from keepsight.vlm import VLM


_TOO_SMALL = "its budget, or the tenant's quota, is too small for these images"


@dataclass(frozen=True)
class LookResult:
    """What a thread found: the medium and whether its package exists, or why it cannot be used."""

    item: Item
    looked: Inspected | None = None
    medium: Medium | None = None
    there: str | None = None  # its feature id
    error: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the pixels waiting for the tower."""
        pixels = self.looked.pixels if self.looked is not None else None
        return pixels.nbytes if pixels is not None else 0


class ToStore:
    """A model's store as the place for packages, for one tenant."""

    def __init__(
        self,
        vlm: VLM,
        tenant: str = "",
        codec: str = EXACT,
        most: int | None = None,
        batch: int = 1,
    ) -> None:
        self._vlm, self._tenant, self._most, self.batch = vlm, tenant, most, batch
        # If the model's own store keeps packages packed, look for that form.
        self._codec = vlm.runtime.settings.feature_codec if codec == EXACT else check_codec(codec)
        store = vlm.runtime.store_of(tenant)
        if store is None:
            raise InputError("this model has no store: load it with store=, or encode to files")
        self._store = store
        self._once = CountedPackages()
        self._refused: dict[Name, str] = {}  # since the last flush
        self._refresh()

    def _refresh(self) -> None:
        with self._vlm.runtime.lock:
            self._vlm.runtime.refresh(tenant=self._tenant)
            self._vision = self._vlm.runtime.vision_of(self._tenant).batched(self.batch)
        if not self._vision.shared:
            raise ModelError(
                "the model has hooks, replaced methods or other code that only this process knows, "
                "so a store cannot name what it computes; remove them, or encode to files"
            )

    # -- in a thread -------------------------------------------------------------------------------

    def look(self, item: Item) -> LookResult:
        """Open and name the image; if it has no package yet, decode and preprocess it."""
        try:
            return self._look(item)
        except KeepsightError as error:
            return LookResult(item, error=str(error))

    def _look(self, item: Item) -> LookResult:
        namer = self._vision.namer
        looked = namer.look(item.open(), item.modality)
        medium = self._vision.medium_of(looked)
        there = self._there(medium)
        wanted = there is None and too_many(medium.tokens, self._most) is None
        if wanted and looked.pixels is None:
            # Known by name, but its package is gone: make the pixels here, in this thread.
            pixels = namer.run_processor(looked.source.decode(), looked.source)
            looked = dataclasses.replace(looked, pixels=pixels)
        if not wanted:
            looked.source.fresh.clear()
            looked = dataclasses.replace(looked, pixels=None)
        return LookResult(item, looked, medium, there)

    def _there(self, medium: Medium) -> str | None:
        if self._codec == EXACT:
            made = medium.feature_id
        else:
            note = self._store.note("made", self._packed_as(medium))
            found = note.get("feature_id") if note else None
            if not isinstance(found, str):
                return None
            made = found
        return made if self._store.has("package", made) else None

    def _packed_as(self, medium: Medium) -> str:
        """The note with the feature id of a packed package; the id contains the error, which is
        measured later."""
        return digests.digest("packed as", medium.feature_id, self._codec)

    # -- in its turn -------------------------------------------------------------------------------

    def settle(self, look: LookResult, beside: Sequence[Inspected] = ()) -> Encoded:
        """Count it if it exists, otherwise run the tower and hand over the package."""
        name = look.item.name
        if look.looked is None or look.medium is None:
            return Encoded(name, "broken", error=look.error)
        if look.there is None:
            skipped = too_many(look.medium.tokens, self._most)
            if skipped is not None:
                return Encoded(name, "skipped", tokens=look.medium.tokens, error=skipped)
            try:
                with self._vlm.runtime.lock:
                    return self._encode(name, look.looked, beside)
            except InputError as error:
                return Encoded(name, "broken", error=str(error))
        if look.looked.aliases:
            with self._vlm.runtime.lock:
                self._vision.namer.learn(look.looked)
        return self._known(name, look.there, look.medium.tokens)

    def _known(self, name: str, feature_id: str, tokens: int) -> Encoded:
        status = "kept" if self._once.first(feature_id) else "duplicate"
        return Encoded(name, status, feature_id, tokens)

    def _encode(self, name: str, looked: Inspected, beside: Sequence[Inspected]) -> Encoded:
        self._vlm.runtime.require_open()
        self._refresh()  # weights may change at any time; it is noticed here
        medium = self._vision.admit_looked(looked)
        there = self._there(medium)  # an equal image may have been encoded meanwhile
        if there is not None:
            return self._known(name, there, medium.tokens)
        waiting = self._vision.expect(beside)
        if self._codec == EXACT:
            package, tier = self._vision.package(medium, beside=waiting)
            if tier == "memory":  # the store lost what memory still holds
                self._put(package, 0.0)
        else:
            package = self._packed(medium, waiting)
        self._once.first(package.feature_id)
        size = sum(tensor.nbytes for tensor in package.stored.values())
        return Encoded(name, "encoded", package.feature_id, package.tokens, size)

    def _packed(self, medium: Medium, beside: Sequence[Medium]) -> Package:
        start = time.perf_counter()
        package = self._vision.encode_medium(medium, beside).pack(self._codec)
        about = self._put(package, 1e3 * (time.perf_counter() - start))
        note = {"feature_id": package.feature_id}
        self._store.put_note("made", self._packed_as(medium), note, about)
        return package

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

    # -- afterwards --------------------------------------------------------------------------------

    def confirm(self, result: Encoded) -> Encoded:
        """The result, or "refused" if the store refused the package or evicted it at once."""
        made = result.feature_id
        if made is None or self._store.has("package", made):
            return result
        self._once.forget(made)
        why = self._refused.get(("package", made), f"not in the store any more: {_TOO_SMALL}")
        return Encoded(result.image, "refused", tokens=result.tokens, error=why)

    def look_back(self, most: int | None) -> None:
        """Raise if a budget or a quota evicted a package of this run."""
        if self._store.budget is None and self._store.quota is None:
            return
        gone = [made for made in self._once.earliest(most) if not self._store.has("package", made)]
        if gone:
            error = NotStored(
                f"{len(gone)} packages that this run reported are not in the store any more, the "
                f"first: {gone[0]}; {_TOO_SMALL}"
            )
            error.reasons, error.count = {("package", made): _TOO_SMALL for made in gone}, len(gone)
            raise error
