"""Packed copies of the weights of linear layers, which follow every change of the weights.

A copy takes as much memory as its weight. It is made before the first pass that needs it, dropped
when its weight may have changed, and none is made where memory is short: then weights are read as
they are, which takes more time and may round otherwise, so it is tried and named on its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from keepsight.core.kernels.linear import Packed, Rows, Shape, kernels_for, rows_of
from keepsight.system.memory import free_memory

logger = logging.getLogger(__name__)

_SHARE = 4  # of the memory that is free, copies may take one part in so many
_SMALLEST = 16  # numbers in and out, below which nothing is gained


class Packing:
    """The packed weights of one model."""

    def __init__(self, wanted: bool, sparing: bool = False) -> None:
        self._sparing = sparing  # none, where they would take much of the memory that is free
        self.wanted = wanted and bool(kernels_for(torch.float32))
        self.packed: dict[int, Packed] = {}
        self.rules: dict[Shape, Rows | None] = {}  # how rows are filled up, by shape
        self.tried_in = ""  # the environment that found it
        self.is_behind = False  # whether copies were dropped since the last look

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(one.nbytes for one in self.packed.values())

    def forget(self, weights: Iterable[torch.Tensor]) -> None:
        """Drop the copies of weights that may have changed."""
        for weight in weights:
            self.is_behind |= self.packed.pop(id(weight), None) is not None

    def follow(self, layers: Iterable[torch.nn.Linear], environment: str) -> None:
        """Have a copy of each of these weights, and of no others."""
        if not self.wanted:
            return
        self.is_behind = False
        if environment != self.tried_in:  # MKL packs otherwise with other threads
            self.rules, self.packed, self.tried_in = {}, {}, environment
        weights = {
            id(x.weight): (x.weight, kernel) for x in layers if (kernel := self.kernel_of(x))
        }
        self.packed = {name: one for name, one in self.packed.items() if name in weights}
        missing = sum(w.nbytes for name, (w, _) in weights.items() if name not in self.packed)
        free = free_memory(swap=False)
        if self._sparing and free is not None and missing * _SHARE > free:
            self._give_up(f"they would take {missing} bytes of memory, of {free} that are free")
            return
        try:
            for name, (weight, kernel) in weights.items():
                if name not in self.packed:
                    self.packed[name] = Packed.of(weight, kernel)
        except (RuntimeError, MemoryError) as error:
            self._give_up(error)

    def _give_up(self, why: object) -> None:
        self.wanted = False
        self.packed.clear()
        logger.warning("weights are not packed, they are read as they are: %s", why)

    def kernel_of(self, layer: torch.nn.Linear) -> str:
        """The kernel to pack it for: the first that takes any number of rows, else the first that
        gives equal bits in some way; empty for none."""
        weight = layer.weight
        if type(weight) is not torch.nn.Parameter or weight.device.type != "cpu":
            return ""
        if min(weight.shape) < _SMALLEST:
            return ""
        out, width = weight.shape
        found: dict[str, Rows] = {}
        for kernel in kernels_for(weight.dtype):
            shape = (out, width, weight.dtype, layer.bias is not None, kernel)
            if shape not in self.rules:
                self.rules[shape] = _tried(shape)
            if (rule := self.rules[shape]) is not None:
                found[kernel] = rule
            if rule == Rows():
                return kernel
        return next(iter(found), "")


def _tried(shape: Shape) -> Rows | None:
    try:
        return rows_of(shape)
    except (RuntimeError, MemoryError):  # not on this machine
        return None
