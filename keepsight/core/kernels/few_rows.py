"""Finds the number of rows with which packed linear layers take the least time.

A call with few rows takes the time to read the weights, and a library may read them faster for four
rows than for one. Which number is best depends on the processor, so calls are timed over weights
that caches do not hold. Bits are the same for all numbers tried here; only time differs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial

import torch

from keepsight.core.kernels.linear import Packed, Rows, Shape

NUMBERS = (1, 2, 4, 8)
_READ = 256 << 20  # bytes of weights that are read in a pass, if there are as many
_CACHED = 32 << 20  # fewer bytes stay in caches, and time tells nothing
_PASSES = 6  # of each number, in turn; the shortest counts
_WORTH = 0.97  # more rows must take less than this share of the time

_Layer = tuple[Packed, Rows]


def fewest_rows(packed: Iterable[Packed], rules: Mapping[Shape, Rows | None]) -> int:
    """The fewest rows that are worth a call of these layers."""
    layers, read = [], 0
    for one in dict.fromkeys(packed):  # layers that read one input share a copy
        rule = rules.get(one.shape)
        if rule is not None and read < _READ:
            layers.append((one, rule))
            read += one.nbytes
    return 1 if read < _CACHED else _fastest(layers)


def _fastest(layers: list[_Layer]) -> int:
    seconds = dict.fromkeys(NUMBERS, float("inf"))
    for _ in range(_PASSES):
        for number in NUMBERS:
            seconds[number] = min(seconds[number], _seconds(layers, number))
    best = NUMBERS[0]
    for number in NUMBERS[1:]:
        if seconds[number] < _WORTH * seconds[best]:
            best = number
    return best


@torch.no_grad()
def _seconds(layers: list[_Layer], number: int) -> float:
    """The time of one row through all layers, with at least this number of rows in a call."""
    start = time.perf_counter()
    for layer, rule in layers:
        weight = layer.weights[0]
        row = weight.new_ones(1, weight.shape[1])
        rule.run(partial(layer.run, bias=layer.bias), row, number)
    return time.perf_counter() - start
