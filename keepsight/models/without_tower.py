"""Loads checkpoints without their vision tower: for training, and for answering from packages.

The tower's modules are removed before any weight is read, so its weights are neither read nor
allocated. Packages are still bound to those weights. If no store remembers their digests, the files
are read once, weight by weight; each is hashed in the dtype it would have been loaded in, and
dropped. Transformers' loader reads both times, so renamed, split or merged weights are the same as
in the whole model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock

import torch
import transformers
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedConfig, PreTrainedModel

from keepsight import digests
from keepsight.errors import UnreadableWeights, UnsupportedModel
from keepsight.kinds import DeviceMap, Dtype, Record
from keepsight.models import upstream
from keepsight.models.families import Family, family_of
from keepsight.models.families.tower_absent import AbsentTower, AbsentWeight, tower_parts
from keepsight.models.loading import (
    commit_of,
    files_digest,
    files_name,
    files_of,
    load_options,
    named_refusal,
    thinking,
)
from keepsight.models.silence import without_short_bars

_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # without it Transformers reads ahead
_reading = RLock()


def load_named(
    path: str, dtype: Dtype, device_map: DeviceMap, revision: str | None
) -> tuple[PreTrainedModel, str | None]:
    """The model in eval mode with placeholders for its tower, and the name of its files."""
    options = load_options(dtype, device_map, revision)
    before = files_of(path, revision)
    with named_refusal(path), without_short_bars(path):
        config = _config_of(path, revision)
        kind = _class_of(config)
        model, found = _shaped(kind, _leave_out).from_pretrained(
            path, config=config, output_loading_info=True, **options
        )
    model.__class__ = kind
    files = files_name(path, model, before, found, revision)
    model = thinking(model).eval()
    read = commit_of(path, revision) or revision  # a branch of the Hub may move on
    now = files_digest(path, model.dtype, read)
    source = TowerFiles(path, kind, dtype, read, now, model.dtype)
    for part in model.modules():
        if isinstance(part, AbsentTower):
            part.source = source
    return model, files


@dataclass(eq=False)
class TowerFiles:
    """The weights of an absent tower in its files, read when their names are needed."""

    path: str
    kind: type[PreTrainedModel]
    dtype: Dtype
    revision: str | None
    files: str | None  # size, time and inode of the files when the model was loaded
    loaded: torch.dtype
    _found: list[AbsentWeight] | None = None

    def weights(self) -> list[AbsentWeight]:
        """The name, digest and dtype of each weight; read once."""
        if self._found is None:
            if files_digest(self.path, self.loaded, self.revision) != self.files:
                raise UnreadableWeights(
                    f"the files of {self.path!r} changed since the model was loaded without its "
                    "tower, so the tower cannot be fingerprinted; load the model again"
                )
            self._found = self._read()
        return self._found

    def _read(self) -> list[AbsentWeight]:
        found: dict[str, tuple[str, str]] = {}
        wanted: list[str] = []

        def watch(model: PreTrainedModel) -> None:
            wanted.extend(_watch(thinking(model), found))
            model.all_tied_weights_keys = {}

        quiet = without_short_bars(self.path)
        with named_refusal(self.path), _reading, quiet, _sequential(), torch.no_grad():
            options = load_options(self.dtype, None, self.revision)
            _shaped(self.kind, watch, unfinished=True).from_pretrained(
                self.path, config=_config_of(self.path, self.revision), **options
            )
        if missing := sorted(set(wanted) - found.keys()):
            raise UnreadableWeights(
                f"the checkpoint lacks {len(missing)} weights of the tower, such as "
                f"{missing[0]}; so the tower cannot be fingerprinted"
            )
        return [(name, *about) for name, about in sorted(found.items())]


def _config_of(path: str, revision: str | None) -> PreTrainedConfig:
    """The checkpoint's configuration; shared classes read it as their own type."""
    options = {} if revision is None else {"revision": revision}
    config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(path, **options)
    return config


def _class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class as which Transformers would load this checkpoint."""
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ValueError(
            f"{type(config).__name__} is not the configuration of an image-text-to-text model"
        )
    found: type[PreTrainedModel] | Sequence[type[PreTrainedModel]] = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    )
    if isinstance(found, type):
        return found
    named: dict[str, type[PreTrainedModel]] = {kind.__name__: kind for kind in found}
    wanted = [named[name] for name in config.architectures or () if name in named]
    return (wanted or found)[0]


def _shaped(
    kind: type[PreTrainedModel], change: Callable[[PreTrainedModel], None], unfinished: bool = False
) -> type[PreTrainedModel]:
    """A subclass whose objects are changed after they are built and before they are filled."""

    def build(
        self: PreTrainedModel, config: PreTrainedConfig, *arguments: object, **options: object
    ) -> None:
        kind.__init__(self, config, *arguments, **options)
        change(self)

    body: Record = {"__init__": build, "__module__": kind.__module__}
    if unfinished:  # the result is not used, so initialise, tie and report nothing
        body |= upstream.unfinished()
    return type(kind.__name__, (kind,), body)


def _leave_out(model: PreTrainedModel) -> None:
    """Replace each module of the tower by a placeholder."""
    family = _proven_family(model)
    parts = tower_parts(family)
    for name, part in parts.items():
        home, _, own_name = name.rpartition(".")
        setattr(family.model.get_submodule(home), own_name, AbsentTower(part))
    # Transformers reports skipped weights unless told not to.
    last = sorted({re.escape(name.rpartition(".")[2]) for name in parts})
    ignored = {rf"(^|\.){name}\." for name in last}
    upstream.ignore_weights(model, ignored)


def _proven_family(model: PreTrainedModel) -> Family:
    family = family_of(thinking(model))
    if not family.proven or family.packages_only:
        raise UnsupportedModel(
            f"model type {model.config.model_type!r} cannot be loaded without its tower: no test "
            "has shown that its answers are exact from packages alone; load it whole"
        )
    return family


class _Named(Record):
    """Stands for the weights of one module: each weight stored in it is hashed and dropped."""

    def __init__(self, weights: Record, prefix: str, found: Record) -> None:
        super().__init__(weights)
        self._prefix, self._found = prefix, found

    def __setitem__(self, name: str, weight: torch.Tensor) -> None:
        value = weight.detach()
        dtype = str(value.dtype) if value.is_floating_point() else ""
        self._found[self._prefix + name] = (digests.weight_digest(value), dtype)


def _watch(model: PreTrainedModel, found: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Hash the tower's weights as they arrive, read nothing else; return their names."""
    parts = tower_parts(_proven_family(model))
    inside = {id(module) for part in parts.values() for module in part.modules()}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for kind in ("_parameters", "_buffers"):
            homes: dict[str, torch.Tensor | None] = vars(module)[kind]
            if id(module) not in inside:
                homes.update(dict.fromkeys(homes))  # a weight that is None is never loaded
                continue
            derived = module._non_persistent_buffers_set
            yield from (prefix + n for n in homes if n not in derived and homes[n] is not None)
            vars(module)[kind] = _Named(homes, prefix, found)


@contextmanager
def _sequential() -> Iterator[None]:
    """Load weights one after another: reading ahead would hold the whole tower at once."""
    before = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ONE_BY_ONE]
        else:
            os.environ[_ONE_BY_ONE] = before
