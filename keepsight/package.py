"""A package: what the tower saw in one medium, with proof of where it came from. One `.sight` file.

A bare feature tensor says nothing about the model, the processor settings or the image it came
from, and feeding it to the wrong model gives fluent nonsense. A package carries all of that, and
refuses by name where it does not fit. docs/package-format.md is the page; tests hold golden bytes.

`identity` names what was encoded and by which weights; `provenance` says how it was computed;
`feature_id` is both. Two packages with one feature id hold the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from keepsight import keys, tensorfile
from keepsight.errors import DamagedFile

FORMAT = 1
KIND = "package"
Layout = tuple[str | int, ...]  # the prompt text of a medium; an int stands for that many tokens


@dataclass(frozen=True, eq=False)
class Package:
    """The features of one medium. `tensors` holds `features` and, where the family has them,
    `deepstack.0..n`; each has one row per visual token, or (tiles, rows per tile). `indicator`
    holds the embeddings of the tokens that frame the medium, where the tower makes those."""

    tensors: dict[str, torch.Tensor]
    key: str  # digest of what the tower took in
    weights: str  # fingerprint of the vision weights
    settings: str  # digest of the configuration that the tower runs under
    provenance: dict[str, Any]  # device class, dtype, attention, versions, codec, maker
    grid: dict[str, list[Any]]  # what the processor said beside pixels, e.g. image_grid_thw
    layout: Layout
    container: str = "list"  # how the model wants several of these: "list" or "tensor"
    modality: str = "image"
    source: str | None = None
    about: dict[str, Any] = field(default_factory=dict)  # for people: model type, hub id, settings

    @property
    def tokens(self) -> int:
        """How many prompt tokens the medium takes."""
        return sum(part for part in self.layout if isinstance(part, int))

    @property
    def identity(self) -> str:
        """What was encoded, by which weights, under which settings, in which format."""
        return identity(self.key, self.weights, self.settings)

    @property
    def feature_id(self) -> str:
        """Identity and provenance: packages with one feature id hold the same bits."""
        return feature_id(self.identity, self.provenance)

    @property
    def nbytes(self) -> int:
        """Unique storage bytes: a view pins all of the tensor it looks into."""
        return storage_bytes(self.tensors.values())

    def save(self, path: str | Path) -> Path:
        """Write one `.sight` file, atomically."""
        path = Path(path)
        tensorfile.save(path, KIND, FORMAT, self.tensors, self.record())
        return path

    def record(self) -> dict[str, Any]:
        """All but the tensors, as JSON."""
        return {
            "key": self.key,
            "weights": self.weights,
            "settings": self.settings,
            "provenance": self.provenance,
            "grid": self.grid,
            "layout": list(self.layout),
            "container": self.container,
            "modality": self.modality,
            "source": self.source,
            "about": self.about,
            "tokens": self.tokens,
        }

    @classmethod
    def load(cls, path: str | Path) -> Package:
        """Read a `.sight` file; every byte is checked, and a wrong file gets a named error."""
        tensors, record = tensorfile.read(Path(path), KIND, FORMAT)
        return cls.from_record(tensors, record, str(path))

    @classmethod
    def from_record(
        cls, tensors: dict[str, torch.Tensor], record: dict[str, Any], where: str
    ) -> Package:
        """A package from its parts, after checking that they agree with each other."""
        _check_record(record, where)
        package = cls(
            tensors=tensors,
            key=record["key"],
            weights=record["weights"],
            settings=record["settings"],
            provenance=record["provenance"],
            grid=record["grid"],
            layout=tuple(record["layout"]),
            container=record["container"],
            modality=record["modality"],
            source=record["source"],
            about=record["about"],
        )
        check_shapes(package, where)
        return package

    def __repr__(self) -> str:
        shape = tuple(self.tensors["features"].shape) if "features" in self.tensors else ()
        return f"Package({self.modality}, {self.tokens} tokens, {shape}, key {self.key[:12]}…)"


def identity(key: str, weights: str, settings: str) -> str:
    """The digest of what a package is about."""
    return keys.digest("identity", key, weights, settings, FORMAT)


def feature_id(identity: str, provenance: dict[str, Any]) -> str:
    """The digest of one making of the features of one identity."""
    return keys.digest("feature", identity, provenance)


def storage_bytes(tensors: Any) -> int:
    """Bytes of the distinct storages behind some tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


_FIELDS: dict[str, type | tuple[type, ...]] = {
    "key": str,
    "weights": str,
    "settings": str,
    "provenance": dict,
    "grid": dict,
    "layout": list,
    "container": str,
    "modality": str,
    "source": (str, type(None)),
    "about": dict,
    "tokens": int,
}


def _check_record(record: dict[str, Any], where: str) -> None:
    for name, kind in _FIELDS.items():
        if name not in record or not isinstance(record[name], kind):
            raise DamagedFile(f"{where}: the record's {name!r} is missing or of the wrong type")
    layout = record["layout"]
    if not all(
        (isinstance(part, int) and not isinstance(part, bool) and part > 0) or isinstance(part, str)
        for part in layout
    ):
        raise DamagedFile(f"{where}: the record's layout is not a list of texts and token counts")
    if sum(part for part in layout if isinstance(part, int)) != record["tokens"]:
        raise DamagedFile(f"{where}: the record's layout and its token count disagree")
    if record["tokens"] < 1 or record["container"] not in ("list", "tensor"):
        raise DamagedFile(f"{where}: the record has no tokens, or an unknown container")
    if not all(isinstance(rows, list) for rows in record["grid"].values()):
        raise DamagedFile(f"{where}: the record's grid is not made of lists of numbers")


def check_shapes(package: Package, where: str) -> None:
    """Features and deepstack levels have one row for every token, all tensors one width."""
    levels = sum(name.startswith("deepstack.") for name in package.tensors)
    wanted = {"features", *(f"deepstack.{level}" for level in range(levels))}
    if not wanted <= package.tensors.keys():
        missing = ", ".join(sorted(wanted - package.tensors.keys()))
        raise DamagedFile(f"{where}: there is no tensor called {missing}")
    width = package.tensors["features"].shape[-1] if package.tensors["features"].dim() else 0
    for name, tensor in package.tensors.items():
        rows = tensor.numel() // tensor.shape[-1] if tensor.dim() >= 2 and tensor.shape[-1] else 0
        counted = rows == package.tokens or (name == "indicator" and rows > 0)
        if not counted or tensor.shape[-1] != width:
            raise DamagedFile(
                f"{where}: {name!r} has shape {tuple(tensor.shape)}, expected one row of {width} "
                f"for each of {package.tokens} tokens"
            )
        if not tensor.is_floating_point():
            raise DamagedFile(f"{where}: {name!r} is {tensor.dtype}, expected a floating dtype")
