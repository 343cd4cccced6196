"""Bound to weights, not to names: fingerprints, and noticing on each call that they still hold.

A fingerprint covers every value of every weight, once; the dtypes that hold them are kept beside
it, as circumstances. After that a call only looks: is each module the same object with the same
children, each tensor the same object at the same address with the same version counter, and do a
few bytes of it read the same? The bytes are there because writing through `.data` moves no version
counter. Adapters count as weights; which one is active is looked at too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from keepsight import keys
from keepsight.errors import UnreadableWeights
from keepsight.families import Family
from keepsight.families.absent import AbsentWeight, Source, absent_parts

_PROBE = 16  # bytes read at the head, the middle and the tail of a weight


class Weights:
    """The fingerprints of one live model, recomputed when the model changed."""

    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        self._model, self._family = model, family
        self._seen: tuple[Any, ...] = ()
        self._adapters: list[Any] = []
        self.all = self.vision = self.config = ""
        self.dtype = self.vision_dtype = ""
        self._source: Source | None = None

    def refresh(self, remembered: dict[str, str] | None = None) -> bool:
        """Look; recompute what changed. True when the fingerprints are new.

        `remembered` are fingerprints that the caller knows to be those of the loaded files.
        """
        if self._seen and self._look() == self._seen:
            return False
        self._watch()
        # An exported model has its weights in graphs, and says whose they are.
        remembered = getattr(getattr(self._model, "exported", None), "weights", remembered)
        if remembered:
            self.all, self.vision = remembered["all"], remembered["vision"]
        else:
            adapters = repr(self._adapter_states())
            digests = {name: keys.weight_digest(tensor) for name, tensor in self._named()}
            absent = [(name, digest) for name, digest, _ in self._absent()]
            vision = [(name, digests[name]) for name, _ in self._vision()]
            whole = keys.fingerprint_of([*digests.items(), *absent])
            self.all = keys.digest("model", whole, adapters)
            self.vision = keys.digest("vision", keys.fingerprint_of([*vision, *absent]), adapters)
        self._note_dtypes(remembered or {})
        config = self._model.config.to_dict()
        drop = ("transformers_version", "_name_or_path")
        self.config = keys.digest("config", {k: v for k, v in config.items() if k not in drop})
        self._seen = self._look()
        return True

    def record(self) -> dict[str, str]:
        """What `refresh` takes as remembered."""
        names = ("all", "vision", "dtype", "vision_dtype")
        return {name: getattr(self, name) for name in names}

    def _note_dtypes(self, remembered: dict[str, str]) -> None:
        """Which dtypes hold the weights. Those of an absent tower stand in its files."""
        if self._source is not None and {"dtype", "vision_dtype"} <= remembered.keys():
            self.dtype, self.vision_dtype = remembered["dtype"], remembered["vision_dtype"]
            return
        absent = [(name, dtype) for name, _, dtype in self._absent() if dtype]
        self.dtype = _dtype(self._named(), absent)
        self.vision_dtype = _dtype(self._vision(), absent)

    def _vision(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from _persistent(self._model, self._family.vision_weights())

    def _absent(self) -> list[AbsentWeight]:
        """The weights of a tower that was left out, named without being here."""
        return [] if self._source is None else self._source.weights()

    def _watch(self) -> None:
        """Collect what `_look` goes over, so that looking costs no walk over the model."""
        modules = [module for _, module in self._model.named_modules()]
        self._children = [module._modules for module in modules]
        self._homes = [home for m in modules for home in (m._parameters, m._buffers) if home]
        self._tensors = [tensor for _, tensor in self._named()]
        self._adapters = [module for module in modules if hasattr(module, "_active_adapter")]
        self._source = next((part.source for part in absent_parts(self._model)), None)
        for tensor in self._tensors:
            if tensor.is_meta:
                raise UnreadableWeights(
                    "some weights are on the meta device (offloaded, or never loaded): they cannot "
                    "be fingerprinted, so nothing could be remembered safely. Load the model whole."
                )
        self._probes = [view for tensor in self._tensors for view in _probe(tensor)]

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters(remove_duplicate=False)
        yield from _persistent(self._model, self._model.named_buffers(remove_duplicate=False))

    def _look(self) -> tuple[Any, ...]:
        return (
            [[id(child) for child in home.values()] for home in self._children],
            [[id(tensor) for tensor in home.values()] for home in self._homes],
            [t.data_ptr() for t in self._tensors],
            [0 if t.is_inference() else t._version for t in self._tensors],
            [bytes(view) for view in self._probes],
            self._adapter_states(),
        )

    def _adapter_states(self) -> list[str]:
        """Which adapters each layer of PEFT's kind applies right now."""
        names = ("_active_adapter", "_disable_adapters", "merged_adapters")
        return [repr([getattr(m, name, None) for name in names]) for m in self._adapters]


def _dtype(named: Iterator[tuple[str, torch.Tensor]], absent: list[tuple[str, str]]) -> str:
    """The dtype that all floating weights have, or a digest of which has which."""
    here = ((name, str(t.dtype)) for name, t in named if t.is_floating_point())
    held = sorted([*here, *absent])
    dtypes = {dtype for _, dtype in held}
    return dtypes.pop() if len(dtypes) == 1 else keys.digest("dtypes", held)


def _persistent(
    model: PreTrainedModel, named: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Leave out buffers that are derived, not loaded: rope tables change with prompt length."""
    derived = {
        id(module._buffers[name])
        for module in model.modules()
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    }
    for name, tensor in named:
        if id(tensor) not in derived:
            yield name, tensor


def _probe(tensor: torch.Tensor) -> list[memoryview]:
    """Live views of a few bytes of a weight; reading them is cheap enough for every call."""
    size = tensor.nbytes
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or size < _PROBE:
        return []
    raw: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    data = memoryview(raw)
    places = {0, (size - _PROBE) // 2, size - _PROBE}
    return [data[place : place + _PROBE] for place in sorted(places)]
