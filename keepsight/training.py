"""Packages in place of pixels for a training loop. May import vlm and below.

Encoding inside a training loop runs the tower in every epoch, and most loops wait for it. So
packages are made beforehand (`keepsight encode`, or `vlm.encode`), and the loop reads them: the
tower never runs and need not be loaded (`ks.load(..., vision=False)`). Prompts are laid out once,
when the dataset is made. Its workers read packages and pad, and hold nothing of the model.

    data = PackageDataset(vlm, [(messages, answer), ...], packages="packages/")
    loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=data.collator())
    loss = vlm.model(**batch).loss
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import torch
from torch.utils.data import Dataset

from keepsight.core.decoding.sampling import check_length
from keepsight.errors import (
    FileError,
    InputError,
    MessagesError,
    StoreError,
    UnsupportedInput,
    WrongIdentity,
)
from keepsight.formats import tensorfile
from keepsight.formats.package import KIND, Package, feature_id, identity
from keepsight.kinds import Inputs, Message, Options, Record
from keepsight.media.medium import Medium
from keepsight.media.sources import open_source
from keepsight.models.families import Family
from keepsight.models.families.tower_absent import LEFT_OUT
from keepsight.models.renamed import EncoderOutput
from keepsight.prefix.prompt import Prompt
from keepsight.store import Store, open_store
from keepsight.system.places import expanded, path_text
from keepsight.vlm import VLM

IGNORED = -100  # ignored by Transformers' losses
Labelled = tuple[list[Message], str]  # a conversation, and the answer to learn
# One value per token of a row; all other tensors describe media, and are concatenated.
_PER_TOKEN = ("mm_token_type_ids", "moe_mm_token_type_ids", "position_ids", "token_type_ids")
_NOT_SHOWN = {
    "mllama": "its features go into every layer, and stock forward has no way to take them",
    "ovis2": "its table of visual words is trained with the rest, and features are made with it",
    "paligemma": "its attention mask in training depends on where the answer begins",
}


@dataclass(frozen=True)
class PackageLocation:
    """Where the package of one medium is: in a file, in the store, or in memory."""

    identity: str
    path: str | None = None
    feature_id: str | None = None  # its key in the store
    package: Package | None = None


@dataclass(frozen=True)
class Example:
    """One prompt with its answer, laid out completely: the model is not needed for it again."""

    ids: np.ndarray
    answer: int  # where the answer starts; it lasts to the end
    places: tuple[PackageLocation, ...]
    inputs: dict[str, torch.Tensor]  # inputs of forward besides ids and features


@dataclass(frozen=True)
class Loaded:
    """An example and the packages of its media, in the form for the collator."""

    example: Example
    packages: list[Package]


class Features(EncoderOutput):
    """Stands for the tower's output in a batch; it moves like a tensor."""

    def to(self, device: torch.device | str, **options: Any) -> Features:
        """A copy on another device."""
        return self._each(lambda tensor: tensor.to(device, **options))

    def pin_memory(self) -> Features:
        """A copy in page-locked memory, which an accelerator reads faster."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Features:
        def changed(value: object) -> object:
            if isinstance(value, torch.Tensor):
                return change(value)
            if isinstance(value, list | tuple):
                return type(value)(map(changed, value))
            return value

        return Features(**{name: changed(value) for name, value in vars(self).items()})


class PackageDataset(Dataset[Loaded]):
    """(messages, answer) records whose images come from packages.

    An image is a `.sight` file, a `Package`, or a picture that has one: in the folder `packages` or
    below it, in the store at the address `store`, or in `vlm`'s memory. An image without a package
    is an error here, not a pause in the middle of an epoch.
    """

    def __init__(
        self,
        vlm: VLM,
        records: Iterable[Labelled],
        *,
        packages: str | os.PathLike[str] | None = None,
        store: str | os.PathLike[str] | None = None,
        tenant: str | None = None,
        template_kwargs: Options | None = None,
    ) -> None:
        if not isinstance(vlm, VLM):
            raise InputError(
                f"a {type(vlm).__name__} is no model of ks.load, ks.wrap or ks.install"
            )
        if not isinstance(records, Iterable):
            raise MessagesError(
                f"a {type(records).__name__} is no list of (messages, answer) pairs"
            )
        _check_family(vlm.runtime.family)
        self._address = (None if store is None else path_text(store, "store"), tenant)
        self._opened: Store | None = None
        layout = _Layout(vlm, PackageIndex.of(packages), self._store(), template_kwargs or {})
        with vlm.runtime.lock:
            vlm.runtime.refresh()
            self._examples = [layout.example(i, record) for i, record in enumerate(records)]
        self._close()
        pad = vlm.runtime.tokenizer().pad_token_id
        self._collator = Collator(_alone(vlm.runtime.family), 0 if pad is None else int(pad))

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Loaded:
        if not isinstance(index, SupportsIndex):
            raise InputError(
                f"{index!r} is not the number of one example; for a part of the data use "
                "torch.utils.data.Subset"
            )
        example = self._examples[index]
        return Loaded(example, [self._package(place) for place in example.places])

    def collator(self) -> Collator:
        """The function that makes batches of these examples."""
        return self._collator

    def lengths(self) -> list[int]:
        """Tokens of each example, for samplers that group by length."""
        return [len(example.ids) for example in self._examples]

    def _package(self, place: PackageLocation) -> Package:
        if place.package is not None:
            return place.package.copied()  # what changes a batch must not reach the next
        if place.path is not None:
            package = Package.load(place.path)  # every byte is checked
        else:
            store, made = self._store(), place.feature_id
            found = store.get("package", made) if store is not None and made is not None else None
            if found is None:
                raise StoreError(
                    f"the store lost the package {str(place.feature_id)[:12]}… since the dataset "
                    "was made; encode the images again"
                )
            package = Package.from_record(found[0], found[1], "the store")
        if package.identity != place.identity:
            raise WrongIdentity("identity", place.identity, package.identity)
        return package

    def _store(self) -> Store | None:
        """The store, opened by each process for itself."""
        address, tenant = self._address
        if self._opened is None and address is not None:
            opened = open_store(address)
            self._opened = opened if tenant is None else opened.tenant(tenant)
        return self._opened

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def __getstate__(self) -> Record:
        return {**vars(self), "_opened": None}


@dataclass
class PackageIndex:
    """The packages in a folder, by the contents of their headers; nothing else is read."""

    by_identity: dict[str, Path] = field(default_factory=dict)
    by_file: dict[str, Path] = field(default_factory=dict)
    records: dict[Path, Record] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: str | os.PathLike[str] | None) -> PackageIndex:
        """All intact `.sight` files in and below a folder."""
        index = cls()
        if folder is None:
            return index
        root = expanded(folder)
        if not root.is_dir():
            raise InputError(f"packages={os.fspath(folder)!r} is no folder")
        for path in sorted(root.rglob("*.sight")):
            if path.name.startswith("."):
                continue  # a partial file of a killed process
            try:
                index.read(path)
            except FileError:
                continue  # damaged or foreign: an image that needs it is reported as missing
        return index

    def read(self, path: Path) -> Record:
        """The record of one file, after adding its names to the index."""
        if path not in self.records:
            record = tensorfile.read_record(path)
            if record.get("kind") != KIND:
                raise InputError(f"{path} is no package")
            self.records[path] = record
            what = identity(record["key"], record["weights"], record["settings"])
            self.by_identity.setdefault(what, path)
            file = record["about"].get("file")
            if isinstance(file, str):
                self.by_file.setdefault(file, path)
        return self.records[path]


class _Layout:
    """Turns records into examples; the only code that uses the model."""

    def __init__(
        self, vlm: VLM, index: PackageIndex, store: Store | None, template: Options
    ) -> None:
        self._vlm, self._index, self._store, self._template = vlm, index, store, template
        self._family, self._vision = vlm.runtime.family, vlm.runtime.vision
        self._fits: set[str] = set()  # kinds of making already compared with the model

    def example(self, number: int, record: Labelled) -> Example:
        """One record, laid out."""
        try:
            messages, answer = record
            messages = list(messages)
        except (TypeError, ValueError):
            raise MessagesError(f"record {number} is not a pair (messages, answer)") from None
        if not isinstance(answer, str) or not answer:
            raise MessagesError(f"record {number} has no text to learn as its answer")
        prompt = self._render(messages, True)
        said = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
        whole = self._render([*messages, said], False)
        begin = len(prompt)
        if len(whole) <= begin or not np.array_equal(whole.ids[:begin], prompt.ids):
            raise MessagesError(
                f"record {number}: the chat template writes the prompt differently once it is "
                "answered; set template_kwargs so that both agree, such as enable_thinking=False"
            )
        end = self._end(whole.ids, begin)
        whole = Prompt(whole.ids[:end], whole.media, whole.ranges)
        check_length(self._vlm.model, len(whole))
        places = tuple(self._place(medium, number) for medium in whole.media)
        inputs = self._family.prompt_inputs(whole.ids, whole.types, whole.grids)
        return Example(whole.ids.astype(np.int32), begin, places, inputs)

    def _render(self, messages: list[Message], generate: bool) -> Prompt:
        renderer = self._vlm.runtime.renderer
        if renderer is None:
            raise InputError("this model was wrapped without a processor, which renders prompts")
        return renderer.render(messages, self._name, generate, **self._template)

    def _end(self, ids: np.ndarray, begin: int) -> int:
        """Where the answer's turn ends; what a template writes after it is not learned."""
        ends = np.flatnonzero(np.isin(ids[begin:], list(self._vlm.runtime.rule.turn_ends)))
        return begin + int(ends[0]) + 1 if len(ends) else len(ids)

    # -- finding packages ------------------------------------------------------------------------

    def _name(self, image: object, modality: str) -> Medium:
        """The medium; what has a package of its own carries it, or its file."""
        path = self._file_of(image, modality)
        return self._vision.name(image, modality) if path is None else self._of_file(path, modality)

    def _file_of(self, image: object, modality: str) -> Path | None:
        if isinstance(image, str | os.PathLike) and os.fspath(image).endswith(".sight"):
            return Path(image)
        if modality != "image" or not self._index.by_file or isinstance(image, Medium):
            return None
        return self._index.by_file.get(open_source(image).name)

    def _of_file(self, path: Path, modality: str) -> Medium:
        """The medium that a package's header describes; its tensors are read in training."""
        record = self._index.read(path)
        if record["modality"] != modality:
            raise InputError(
                f"{path} is a package of {record['modality']!r}, given as {modality!r}"
            )
        made = repr([record["weights"], record["settings"], record["about"], record["provenance"]])
        if made not in self._fits:
            self._vision.name(Package.load(path), modality)  # refuses by field if it is not ours
            self._fits.add(made)
        what = identity(record["key"], record["weights"], record["settings"])
        made = feature_id(what, record["provenance"])
        return Medium(
            record["key"],
            what,
            made,
            record["grid"],
            tuple(record["layout"]),
            record["source"],
            _PackageFile(str(path.absolute())),
            modality,
        )

    def _place(self, medium: Medium, number: int) -> PackageLocation:
        if medium.modality == "audio":
            raise UnsupportedInput(
                f"record {number} has sound, which no test has shown in training"
            )
        own = medium.recall
        if isinstance(own, Package):
            return PackageLocation(medium.identity, package=own)
        if isinstance(own, _PackageFile):
            return PackageLocation(medium.identity, path=own.path)
        path = self._index.by_identity.get(medium.identity)
        if path is not None:
            return PackageLocation(medium.identity, path=str(path.absolute()))
        if self._store is not None and self._store.has("package", medium.feature_id):
            return PackageLocation(medium.identity, feature_id=medium.feature_id)
        if self._vision.where(medium) == "tower":
            raise InputError(
                f"record {number}: its {medium.modality} {medium.key[:12]}… has no package; make "
                "all packages first, with keepsight encode or vlm.encode"
            )
        return PackageLocation(medium.identity, package=self._vision.package(medium)[0])


@dataclass(frozen=True)
class _PackageFile:
    """Stands for the pixels of a medium whose package is in a file; training reads it there."""

    path: str

    def __call__(self) -> NoReturn:
        raise UnsupportedInput(LEFT_OUT)


@dataclass
class Collator:
    """Turns examples into one batch: padded on the right, with the prompt masked in the labels."""

    family: Family  # without its model
    pad: int

    def __call__(self, rows: Sequence[Loaded]) -> Record:
        """The inputs of `model(**batch)`, with labels for a loss."""
        listed = isinstance(rows, Sequence) and all(isinstance(row, Loaded) for row in rows)
        if not listed or not rows:
            raise InputError(
                "a batch is made of a list of one or more examples of a PackageDataset"
            )
        examples = [row.example for row in rows]
        length = max(len(example.ids) for example in examples)
        ids = torch.full((len(rows), length), self.pad)
        labels = torch.full((len(rows), length), IGNORED)
        mask = torch.zeros((len(rows), length), dtype=torch.long)
        for i, example in enumerate(examples):
            n = len(example.ids)
            ids[i, :n] = torch.from_numpy(example.ids.astype(np.int64))
            labels[i, example.answer : n] = ids[i, example.answer : n]
            mask[i, :n] = 1
        batch: Inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        batch |= _joined([example.inputs for example in examples], length)
        parts = [(package, 0, package.tokens) for row in rows for package in row.packages]
        given = self.family.feature_inputs(parts, ids) if parts else {}
        for name, outputs in given.items():
            batch[name] = {kind: Features(**vars(value)) for kind, value in outputs.items()}
        return batch


def _joined(inputs: list[dict[str, torch.Tensor]], length: int) -> dict[str, torch.Tensor]:
    """Values per token in one rectangle; media descriptions concatenated."""
    found: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for row in inputs for name in row):
        tensors = [row[name] for row in inputs if name in row]
        if name in _PER_TOKEN:
            pad = torch.nn.functional.pad
            rows = [pad(tensor, (0, length - tensor.shape[-1])) for tensor in tensors]
            found[name] = torch.cat(rows, dim=-2)
        else:
            found[name] = torch.cat(tensors)
    return found


def _check_family(family: Family) -> None:
    """Refuse families that no test has trained, with the reason."""
    kind = family.model.config.model_type
    if kind in _NOT_SHOWN:
        raise UnsupportedInput(f"{kind} cannot be trained from packages: {_NOT_SHOWN[kind]}")
    if not family.proven or family.packages_only or not family.feeds_stock:
        raise UnsupportedInput(
            f"{kind} cannot be trained from packages: no test has shown that it works"
        )


def _alone(family: Family) -> Family:
    """The family without its model, to be sent to other processes."""
    alone = copy.copy(family)
    place = SimpleNamespace(device=torch.device("cpu"), dtype=family.model.dtype)
    alone.model, alone.core = place, None
    for name, value in list(vars(alone).items()):
        if callable(value) or name == "tower_tensors":
            setattr(alone, name, None)  # bound methods and tables of the model
    return alone
