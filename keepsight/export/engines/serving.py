"""A store as another engine's encoder cache: which of its features may be given out, and in what
form.

All decisions are made here, independent of the engine. A request names features by `identifier`. A
feature id says what was seen, by which weights, under which settings and how it was computed, so
the features under it cannot be of anything else. Features that do not fit are not given out; the
reason is logged once each.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, fields

import torch

from keepsight.errors import FileError, InputError, UnknownOption, UnsupportedInput
from keepsight.formats import codecs, engine_inputs
from keepsight.formats.package import Package
from keepsight.kinds import Options
from keepsight.store import MemoryCache, Store

logger = logging.getLogger(__name__)

_LOGGED = 10_000  # names that are not logged again

_NAMED = re.compile(re.escape(engine_inputs.PREFIX) + r"([0-9a-f]{64})")
HELD = 256 << 20  # bytes of packages kept between lookup and use


@dataclass(frozen=True)
class Binding:
    """What the features of a store must be bound to; `connector_config` records it."""

    store: str
    weights: str
    settings: str
    checkpoint: str
    tenant: str | None = None
    lossy: bool = False

    @classmethod
    def of(cls, given: Options) -> Binding:
        """Read it from the engine's configuration; a missing or unknown field is named."""
        known = [field.name for field in fields(cls)]
        UnknownOption.refuse(given, known, "the connector")
        missing = [name for name in known[:4] if not isinstance(given.get(name), str)]
        if missing:
            raise InputError(
                f"the configuration of the connector lacks {', '.join(missing)}; make it with "
                "keepsight.export.engines.connector_config(checkpoint, store)"
            )
        return cls(**given)


def is_ours(name: str) -> bool:
    """Whether a name is one of ours."""
    return _NAMED.fullmatch(name) is not None


class Serving:
    """The features of one store for one checkpoint."""

    def __init__(self, store: Store, binding: Binding) -> None:
        self._store, self._binding = store, binding
        self._held: MemoryCache[Package] = MemoryCache(HELD, lambda package: package.nbytes)
        self._logged: set[str] = set()

    def find(self, name: str) -> Package | None:
        """The package under a name, if it may be given out."""
        match = _NAMED.fullmatch(name)
        if match is None:
            return None
        held = self._held.get("", name)
        if held is not None:
            return held
        found = self._store.get("package", match[1])
        if found is None:
            return None
        try:
            package = Package.from_record(*found, where=f"the store's package {match[1]}")
            why = self._why_not(package, match[1])
        except FileError as error:
            why = str(error)
        if why:
            self._tell(name, why)
            return None
        self._held.put("", name, package)
        return package

    def _why_not(self, package: Package, feature_id: str) -> str:
        if package.feature_id != feature_id:
            return "it is the package of something else"
        for field in ("weights", "settings"):
            if getattr(package, field) != getattr(self._binding, field):
                return f"it was made with other vision {field} than the checkpoint served here"
        codec = package.provenance.get("codec", codecs.EXACT)
        if codec != codecs.EXACT and not self._binding.lossy:
            return f"it was packed with loss ({codecs.describe(codec)}); lossy=True admits it"
        return ""

    def misfit(self, name: str, tokens: int, grid: list[int] | None) -> str:
        """Why a request cannot have these features at this place; empty if it can."""
        package = self.find(name)
        if package is None:
            return "the store has no features of that name that fit"
        if package.tokens != tokens:
            return f"the prompt has room for {tokens} tokens, the features are {package.tokens}"
        mine = package.grid.get("image_grid_thw")
        if grid is not None and mine is not None and mine != [grid]:
            return f"the request says grid {grid}, the features have {mine[0] if mine else mine}"
        return ""

    def rows(self, name: str) -> torch.Tensor | None:
        """The features under a name, one row per token."""
        package = self.find(name)
        if package is None:
            return None
        try:
            return engine_inputs.rows(package)
        except UnsupportedInput as error:
            self._tell(name, str(error))
            return None

    def _tell(self, name: str, why: str) -> None:
        if name not in self._logged:
            if len(self._logged) >= _LOGGED:
                self._logged.clear()
            self._logged.add(name)
            logger.warning("%s is not given out: %s", name, why)

    def close(self) -> None:
        """Close the store."""
        self._held.clear()
        self._store.close()
