"""The device on which each layer keeps its state, and how remembered tensors get there.

A model may be spread over several devices; then each layer has its own tensors in a snapshot. A
snapshot from elsewhere with all rows in one tensor is split when it arrives.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from keepsight.core.decoding.state import Shape, Tensors, layered
from keepsight.system.devices import to_devices


class Placement:
    """Where the states of one model live."""

    def __init__(self, model: PreTrainedModel, shape: Shape) -> None:
        self._main: torch.device = model.device
        layers = getattr(model.get_decoder(), "layers", None) or ()
        found = [next(_devices(layer), self._main) for layer in layers]
        self._of_layer = found or [self._main] * len(shape.kinds)
        both = list(zip(self._of_layer, shape.kinds, strict=True))
        self._all_rows = [d for d, kind in both if kind == "full" or "sliding" in kind]
        self._cross = [device for device, kind in both if kind == "cross"]

    def __eq__(self, other: object) -> bool:
        """Whether every layer is on the same device in both."""
        if not isinstance(other, Placement):
            return NotImplemented
        return (self._main, self._of_layer) == (other._main, other._of_layer)

    @property
    def devices(self) -> set[torch.device]:
        return {self._main, *self._of_layer}

    def rows(self, rows: Tensors) -> Tensors:
        """Keys, values and last logits, each on its layer's device."""
        apart = layered(rows) if len({*self._all_rows}) > 1 else rows
        return to_devices(apart, self._of_rows)

    def fixed(self, states: Tensors) -> Tensors:
        """States of fixed size, each on its layer's device."""
        return to_devices(states, lambda name: self._of_layer[int(name.split(".")[0])])

    def _of_rows(self, name: str) -> torch.device:
        match name.split("."):
            case ["cross", index, _]:
                return self._cross[int(index)]
            case [index, _]:
                return self._all_rows[int(index)]
        return self._all_rows[0] if name == "kv" and self._all_rows else self._main


def _devices(layer: torch.nn.Module) -> Iterator[torch.device]:
    return (tensor.device for tensor in layer.parameters())
