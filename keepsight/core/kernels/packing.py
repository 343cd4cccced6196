"""Packed copies of weights of linear layers, which follow every change of the weights.

A copy takes as much memory as its weight. Layers that read one input share a copy, which one call
reads. A copy is made before the first pass that needs it, and dropped when its weight may have
changed. If memory is short no copies are made. Plain weights take more time and may round
differently, so they are tried and named separately.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import torch

from keepsight.core.kernels.linear import (
    Packed,
    Rows,
    Shape,
    fastest_few,
    kernels_for,
    rows_of,
)
from keepsight.system.memory import free_memory

logger = logging.getLogger(__name__)

_SHARE = 4  # copies may take one part in this many of the free memory
_SMALLEST = 16  # inputs x outputs; below this nothing is gained
_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

Group = tuple[torch.nn.Linear, ...]  # layers that read one input


class Packing:
    """The packed weights of one model."""

    def __init__(self, wanted: bool, sparing: bool = False) -> None:
        self._sparing = sparing  # no copies if they would take too much of the free memory
        self.wanted = wanted and bool(kernels_for(torch.float32))
        self.packed: dict[int, Packed] = {}
        self.rules: dict[Shape, Rows | None] = {}  # padding of rows, by shape
        self._few: dict[tuple[str, str, torch.dtype], int] = {}  # rows worth a call
        self.tried_in = ""  # the environment that found it
        self.is_behind = False  # whether copies were dropped since the last check

    @property
    def nbytes(self) -> int:
        return sum({id(one): one.nbytes for one in list(self.packed.values())}.values())

    def forget(self, weights: Iterable[torch.Tensor]) -> None:
        """Drop the copies of weights that may have changed."""
        for weight in weights:
            known = self.packed.get(id(weight))
            for one in () if known is None else known.weights:
                self.is_behind |= self.packed.pop(id(one), None) is not None

    def follow(self, groups: Iterable[Group], environment: str) -> None:
        """Keep a copy of the weights of exactly these layers."""
        if not self.wanted:
            return
        self.is_behind = False
        if environment != self.tried_in:  # MKL packs differently for another number of threads
            self.rules, self.packed, self.tried_in = {}, {}, environment
        wanted = [(group, kernel) for group in groups for group, kernel in self._packable(group)]
        kept = {tuple(id(layer.weight) for layer in group) for group, _ in wanted}
        self.packed = {
            name: one for name, one in self.packed.items() if tuple(map(id, one.weights)) in kept
        }
        missing = [one for one in wanted if id(one[0][0].weight) not in self.packed]
        needed = sum(layer.weight.nbytes for group, _ in missing for layer in group)
        free = free_memory(swap=False)
        if self._sparing and free is not None and needed * _SHARE > free:
            self._give_up(f"they would take {needed} bytes of memory, {free} are free")
            return
        try:
            made = [Packed.of(group, kernel) for group, kernel in missing]
            for packed in made:
                packed.few = self._few_of(packed, made)
                self.packed.update({id(weight): packed for weight in packed.weights})
        except (RuntimeError, MemoryError) as error:
            self._give_up(error)

    def _few_of(self, packed: Packed, made: Sequence[Packed]) -> int:
        kernel, dtype = packed.kernel, packed.weights[0].dtype
        name = self.tried_in, kernel, dtype
        if name not in self._few:  # what is packed later is too little to be timed
            alike = [x for x in made if (x.kernel, x.weights[0].dtype) == (kernel, dtype)]
            self._few[name] = fastest_few(alike)
        return self._few[name]

    def _give_up(self, why: object) -> None:
        self.wanted = False
        self.packed.clear()
        logger.warning("weights are not packed: %s", why)

    def _packable(self, group: Group) -> Iterator[tuple[Group, str]]:
        """The layers that can be packed, jointly or alone, with their kernel."""
        kernel = self.kernel_of(group)
        if kernel:
            yield group, kernel
        elif len(group) > 1:
            for layer in group:
                yield from self._packable((layer,))

    def kernel_of(self, group: Group) -> str:
        """The kernel to pack these layers for: the first that takes any number of rows, else the
        one that pads them least; empty if none gives equal bits."""
        weights = [layer.weight for layer in group]
        if any(type(w) is not torch.nn.Parameter or w.device.type != "cpu" for w in weights):
            return ""
        if len({id(weight) for weight in weights}) < len(weights):  # their biases may differ
            return ""
        alike = {(layer.weight.shape[1], layer.weight.dtype, layer.bias is None) for layer in group}
        if len(alike) > 1 or min(min(weight.shape) for weight in weights) < _SMALLEST:
            return ""
        width, dtype, plain = alike.pop()
        found: dict[str, Rows] = {}
        for kernel in kernels_for(dtype):
            shape = (sum(len(weight) for weight in weights), width, dtype, not plain, kernel)
            if shape not in self.rules:
                self.rules[shape] = _tried(shape)
            if (rule := self.rules[shape]) is not None:
                found[kernel] = rule
            if rule is not None and _padding(rule) == _padding(Rows()):
                return kernel
        return min(found, key=lambda one: _padding(found[one]), default="")


def _padding(rule: Rows) -> tuple[int, int, bool]:
    """Greater for rules that pad more."""
    return rule.step, rule.least, not rule.fine


def groups_in(module: torch.nn.Module) -> Iterator[Group]:
    """The linear layers in a module; those that read one input, by name, are one group."""
    if type(module) is torch.nn.Linear:
        yield (module,)
    for parent in module.modules():
        layers = {name: m for name, m in parent.named_children() if type(m) is torch.nn.Linear}
        for names in _ONE_INPUT:
            if layers.keys() >= set(names):
                yield tuple(layers.pop(name) for name in names)
        yield from ((layer,) for layer in layers.values())


def _tried(shape: Shape) -> Rows | None:
    try:
        return rows_of(shape)
    except (RuntimeError, MemoryError):  # missing on this machine
        return None
