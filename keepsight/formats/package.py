"""A package: the features of one medium, with proof of their origin. One `.sight` file.

A bare feature tensor says nothing about the model, the processor settings or the image it came
from; in the wrong model it gives fluent nonsense. A package carries all of that, and is refused by
name where it does not fit. docs/package-format.md describes the format; tests hold golden bytes.

`identity` names what was encoded and by which weights; `provenance` says how it was computed;
`feature_id` covers both. Two packages with one feature id hold the same bits. A package of a lossy
codec (codecs.py) is another making of the same image: its features are floats as usual, and its
file holds the packed form.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from keepsight.errors import DamagedFile, InputError
from keepsight.formats import codecs, engine_inputs, tensorfile
from keepsight.kinds import Grid, Record
from keepsight.system import digests, html
from keepsight.system.devices import to_devices
from keepsight.system.places import expanded
from keepsight.system.words import check_codec

FORMAT = 1
KIND = "package"
Layout = tuple[str | int, ...]  # prompt text of a medium; an int stands for that many tokens


@dataclass(frozen=True, eq=False)
class Package:
    """The features of one image, video or sound. `tensors` holds `features` and, in some families,
    `deepstack.0..n`; each has one row per visual token, or (tiles, rows per tile). `indicator`
    holds the embeddings of the tokens that frame it, if the encoder makes those."""

    tensors: dict[str, torch.Tensor]
    key: str  # digest of the tower's input
    weights: str  # fingerprint of the vision weights
    settings: str  # digest of the tower's configuration
    provenance: Record  # device class, dtype, attention, versions, codec, maker
    grid: Grid  # processor outputs besides pixels, e.g. image_grid_thw
    layout: Layout
    container: str = "list"  # how the model takes several of these: "list" or "tensor"
    modality: str = "image"
    source: str | None = None
    about: Record = field(default_factory=dict)  # for people: model type, hub id, settings
    packed: dict[str, torch.Tensor] | None = None  # packed form of `tensors`, if lossy

    @property
    def tokens(self) -> int:
        """The number of prompt tokens that it takes."""
        return sum(part for part in self.layout if isinstance(part, int))

    @property
    def identity(self) -> str:
        """Digest of what was encoded, by which weights, under which settings, in which format."""
        return identity(self.key, self.weights, self.settings)

    @property
    def feature_id(self) -> str:
        """Digest of identity and provenance: packages with one feature id hold the same bits."""
        return feature_id(self.identity, self.provenance)

    @property
    def nbytes(self) -> int:
        """Bytes of storage, each counted once: a view keeps its whole tensor in memory."""
        return storage_bytes([*self.tensors.values(), *(self.packed or {}).values()])

    @property
    def codec(self) -> str:
        """The codec's name, with its measured error if it is lossy."""
        return codecs.describe(self.provenance.get("codec", codecs.EXACT))

    def pack(self, codec: str) -> Package:
        """The same features in fewer bytes: `"exact"`, `"bf16"`, or `"int8"` with a scale per row.

        If the codec is lossy, the result records the error and has its own feature id. If the codec
        does not make the features smaller, the package is returned unchanged.
        """
        check_codec(codec)
        before = self.provenance.get("codec", codecs.EXACT)
        if before != codecs.EXACT:
            if codec == (before["name"] if codecs.is_lossy(before) else before):
                return self
            raise InputError(
                f"this package is packed already ({codecs.describe(before)}), so the error of "
                f"packing it as {codec} could not be measured; encode the image again"
            )
        tensors_packed, claims = codecs.pack(self.tensors, codec)
        if not claims:
            return self
        floats = codecs.unpack(tensors_packed, claims, "the package")
        placed = {name: floats[name].to(tensor.device) for name, tensor in self.tensors.items()}
        provenance = dict(self.provenance, codec=claims)
        return replace(self, tensors=placed, provenance=provenance, packed=tensors_packed)

    @property
    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors for files and stores, besides `record()`."""
        codec = self.provenance.get("codec")
        if not codecs.is_lossy(codec):
            return self.tensors
        true = codecs.unpack(self.packed or {}, codec, "the package")
        same = true.keys() == self.tensors.keys()
        if not same or not all(_same_bits(true[name], t) for name, t in self.tensors.items()):
            raise InputError(
                "the features were changed after they were packed; give the package the provenance "
                "of what made them (codec 'exact') and pack it again"
            )
        return self.packed or {}

    def save(self, path: str | Path) -> Path:
        """Write one `.sight` file, atomically."""
        path = expanded(path)
        tensorfile.save(path, KIND, FORMAT, self.stored, self.record())
        return path

    def on(self, device: torch.device | str) -> Package:
        """The package with its features on a device; itself if they are there."""
        device = torch.device(device)
        if all(tensor.device == device for tensor in self.tensors.values()):
            return self
        return replace(self, tensors=to_devices(self.tensors, lambda name: device))

    def copied(self) -> Package:
        """The package with tensors of its own, which no change of the others reaches."""
        return replace(self, tensors={name: one.clone() for name, one in self.tensors.items()})

    def to_vllm(self) -> Record:
        """The `multi_modal_data` of a vLLM request with this image (several: `engines.to_vllm`)."""
        return engine_inputs.to_vllm([self])

    def to_sglang(self) -> Record:
        """The `image_data` of an SGLang request with this image (several: `engines.to_sglang`)."""
        return engine_inputs.to_sglang([self])

    def record(self) -> Record:
        """Everything except the tensors, as JSON."""
        return {name: getattr(self, name) for name in _FIELDS} | {"layout": list(self.layout)}

    @classmethod
    def load(cls, path: str | Path) -> Package:
        """Read a `.sight` file; every byte is checked, and an invalid file raises a named error."""
        tensors, record = tensorfile.load(expanded(path), KIND, FORMAT)
        return cls.from_record(tensors, record, str(path))

    @classmethod
    def from_record(cls, tensors: dict[str, torch.Tensor], record: Record, where: str) -> Package:
        """A package from its parts, after checking that they agree."""
        _check_record(record, where)
        codec, packed = record["provenance"].get("codec"), None
        if codecs.is_lossy(codec):
            tensors, packed = codecs.unpack(tensors, codec, where), tensors
        own = {name: record[name] for name in _FIELDS if name != "tokens"}
        own["layout"] = tuple(own["layout"])
        package = cls(tensors=tensors, packed=packed, **own)
        check_shapes(package, where)
        return package

    def __repr__(self) -> str:
        shape = tuple(self.tensors["features"].shape) if "features" in self.tensors else ()
        return f"<Package {self.modality}, {self.tokens} tokens, {shape}, key {self.key[:12]}…>"

    def _repr_html_(self) -> str:
        made = self.provenance
        model = self.about.get("model_type") or "a model without a name"
        rows = [
            ("tokens", self.tokens),
            ("tensors", ", ".join(f"{n} {tuple(t.shape)}" for n, t in self.tensors.items())),
            ("bytes", f"{self.nbytes:,}"),
            ("made for", f"{model}, vision weights {self.weights[:12]}…"),
            ("made by", ", ".join(f"{n} {made[n]}" for n in ("device", "dtype") if n in made)),
            ("codec", self.codec),
            ("image key", self.key),
        ]
        return html.paragraph(f"Package of one {self.modality}") + html.table(rows)


def identity(key: str, weights: str, settings: str) -> str:
    """The digest of what a package is about."""
    return digests.digest("identity", key, weights, settings, FORMAT)


def feature_id(identity: str, provenance: Record) -> str:
    """The digest that names features: what they show (identity) and how they were made."""
    return digests.digest("feature", identity, provenance)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    storages = ((tensor.device, tensor.untyped_storage()) for tensor in tensors)
    distinct = {(device, storage.data_ptr()): storage.nbytes() for device, storage in storages}
    return sum(distinct.values())


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    same = one.dtype == two.dtype and one.shape == two.shape
    return same and bool(digests.tensor_bytes(one) == digests.tensor_bytes(two))


# What the record has, and of which type.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("key", "weights", "settings", "container", "modality"), str),
    **dict.fromkeys(("provenance", "grid", "about"), dict),
    "layout": list,
    "source": (str, type(None)),
    "tokens": int,
}


def _check_record(record: Record, where: str) -> None:
    wrong = [name for name, of in _FIELDS.items() if not isinstance(record.get(name, ...), of)]
    if wrong:
        raise DamagedFile(f"{where}: the record's {wrong[0]!r} is missing or of the wrong type")
    numbers = [part for part in record["layout"] if type(part) is int and part > 0]
    texts = [part for part in record["layout"] if isinstance(part, str)]
    if len(numbers) + len(texts) != len(record["layout"]):
        raise DamagedFile(f"{where}: the record's layout is not a list of texts and token counts")
    if sum(numbers) != record["tokens"] or not numbers:
        raise DamagedFile(f"{where}: the record's layout and its token count disagree")
    if record["container"] not in ("list", "tensor"):
        raise DamagedFile(f"{where}: the record has an unknown container")
    if not all(isinstance(rows, list) for rows in record["grid"].values()):
        raise DamagedFile(f"{where}: the record's grid is not made of lists of numbers")


def check_shapes(package: Package, where: str) -> None:
    """Require one row per token in features and deepstack levels, and one width in all tensors."""
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
