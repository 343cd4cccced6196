"""Linear layers whose result for a row does not depend on the number of rows.

A library chooses its kernel by the number of rows, and another kernel adds in another order. A
trial finds which numbers of rows give equal bits. A call with fewer rows is padded to the next such
number; a call with more is split. Packed weights are also read faster.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import List, Optional, Tuple  # noqa: UP035 (scripts know these names)

import torch
from torch.nn import functional

_plain = functional.linear
_ROWS = 512  # rows per call: kernels of large matrices change the order again
# Only these numbers of rows are used: 11 rows are padded to twelve. Where the numbers in between
# give the same bits too, 101 rows are padded to 104.
COARSE: tuple[int, ...] = (*range(1, 9), *range(12, 33, 4), *range(64, _ROWS + 1, 32))
_BETWEEN = (*range(36, 64, 4), *range(72, 128, 8), *range(144, 256, 16))
FINE = tuple(sorted({*COARSE, *_BETWEEN}))
_FEW = 32  # rows that are tried at more places
_NARROW = 32  # numbers that are added
# Rows per call of a packed layer: machines differ in which of them read the weights fastest.
_WORTH = (4, 1)
_SWEEPS, _SWEPT = 3, 512 << 20  # how often, and how many bytes, to find out
# Outputs, also for each input, that only an output head has. It has few rows at a time, and more in
# a call would take most of the time of a trial.
_OF_HEADS, _RATIO, _HEAD_ROWS = 1 << 14, 16, 128
_TINY, _PLAIN = 2**-18, 3  # a factor, and one row of this many
_LOOK, _LOOKED_AT = 24, (1, 3)  # rows

_HOOKS_ON_ALL = ("_global_forward_pre_hooks", "_global_forward_hooks")
PLAIN, MKL, ONEDNN = "", "mkl", "onednn"  # weights unchanged, and packed for a kernel
Shape = tuple[int, int, torch.dtype, bool, str]  # out, in, dtype, with a bias, kernel
_KERNELS = (PLAIN, MKL, ONEDNN)
# For a script: weights that are read with the same rows, for MKL tensors of their sizes, biases,
# rows of a call, and the number of the kernel.
Read = Tuple[  # noqa: UP006
    List[torch.Tensor], List[torch.Tensor], List[Optional[torch.Tensor]], List[int], int  # noqa: UP006, UP045
]
OfRows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """Numbers of rows that give equal bits: at least `least`, a multiple of `step`, `most` per
    call; all of `FINE`, or of `COARSE` only."""

    least: int = 1
    step: int = 1
    most: int = _ROWS
    fine: bool = True

    def fill(self, rows: int) -> int:
        found: int = _padded(self.least, self.step, self.fine, rows)
        return found

    @property
    def counts(self) -> list[int]:
        known = FINE if self.fine else COARSE
        return [c for c in known if self.least <= c <= self.most and c % self.step == 0]

    def run(self, function: OfRows, rows: torch.Tensor, few: int = 1) -> torch.Tensor:
        """Call a function of rows with any number of them; `few` is the smallest worth a call."""
        count = len(rows)
        if count > self.most:
            return torch.cat([self.run(function, piece, few) for piece in rows.split(self.most)])
        wanted = self.fill(max(count, few))
        if count == wanted:
            return function(rows)
        if count == 1:  # to repeat it takes less time than to pad it
            return function(rows.expand(wanted, -1).contiguous())[:1]
        return function(functional.pad(rows, (0, 0, 0, wanted - count)))[:count]


@functools.cache
def _padded(least: int, step: int, fine: bool, rows: int) -> int:
    known = FINE if fine else COARSE
    return min(c for c in known if c >= max(least, rows) and c % step == 0)


# First the row counts at which reading weights dominates, then those that add to the work of a
# token. With many rows another kernel may run, so the largest counts are dropped first.
_SMALL = ((1, 1), (2, 1), (4, 1), (4, 4), (8, 8), (16, 16))
_FIRST = (
    *(Rows(least, step, most) for most in (_ROWS, _ROWS // 2) for least, step in _SMALL),
    Rows(most=_HEAD_ROWS),
    *(Rows(most=_FEW), Rows(2, 2, _FEW)),  # matrix units (AMX) take this many in one way
    *(Rows(32), Rows(64), Rows(128), Rows(64, 64, 64)),
)
CANDIDATES = tuple(replace(rule, fine=fine) for rule in _FIRST for fine in (True, False))


class Linears:
    """The linear layers of one model. The padding for each shape is found when it is first met."""

    def __init__(
        self,
        packed: Callable[[], dict[int, Packed]] = dict,
        tried: Mapping[Shape, Rows | None] | None = None,
    ) -> None:
        self.rows: dict[Shape, Rows | None] = {}
        self._tried = tried or {}  # shapes tried earlier
        self.doubts: list[str] = []
        self.is_watched = False  # whether to check that inputs stay unchanged
        self.packed = packed
        self._held: _NotCalledYet | None = None

    def __call__(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`functional.linear` with bits that do not depend on the number of rows."""
        known = self.packed().get(id(weight))
        if known is None or not known.has(weight, bias):
            return self._run(None, input, weight, bias)
        if len(known.layers) == 1:
            return self._run(known, input, weight, bias)
        if known.has_guests:  # a hook may change the input before the next layer reads it
            return self._run(None, input, weight, bias)
        return self._piece(known, input, weight, bias)

    def _run(
        self,
        known: Packed | None,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        out = weight.shape[0] if known is None else known.out
        kernel = PLAIN if known is None else known.kernel
        rule = self._rule((out, weight.shape[1], weight.dtype, bias is not None, kernel))
        if rule is None or input.dtype != weight.dtype:
            return _plain(input, weight, bias)
        # Contiguous rows, as in the trial: others may take another path.
        flat = input.reshape(-1, input.shape[-1]).contiguous()
        if known is None:
            result = rule.run(lambda rows: _plain(rows, weight, bias), flat)
        else:
            packed = known
            result = rule.run(lambda rows: packed.run(rows, bias), flat, packed.few)
        return result.view(*input.shape[:-1], out)

    def _piece(
        self, known: Packed, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The result of one of several layers that read this input. The first call computes all of
        them and keeps the others' results."""
        held = self._held
        if held is not None and held.packed is known and held.input is input:
            piece = held.pieces.pop(id(weight), None)
            if piece is not None:
                if not held.pieces:
                    self._held = None
                if held.copy is not None and not torch.equal(held.copy, input):
                    self.doubts.append("an input changes between layers that read it")
                return piece
        if input.dtype != weight.dtype:
            return _plain(input, weight, bias)
        pieces = known.split(self._run(known, input, weight, known.bias))
        found = pieces.pop(id(weight))
        copy = input.clone() if self.is_watched else None
        self._held = _NotCalledYet(known, input, pieces, copy)
        return found

    def read(self, layers: Sequence[torch.nn.Linear], count: int) -> Read | None:
        """How a script computes layers that read the same `count` rows; None if it cannot."""
        known = self.packed().get(id(layers[0].weight))
        if known is not None and len(known.weights) == len(layers):
            rule = self._rule(known.shape)
            if rule is None or count > rule.most or known.weights[-1] is not layers[-1].weight:
                return None
            rows, kernel = rule.fill(max(count, known.few)), _KERNELS.index(known.kernel)
            return [known.tensor], [known.sized], [known.bias], [rows], kernel
        weights: list[torch.Tensor] = [one.weight for one in layers]
        biases: list[torch.Tensor | None] = [one.bias for one in layers]
        if any(id(weight) in self.packed() for weight in weights):
            return None
        rules = [
            self._rule((len(w), w.shape[1], w.dtype, b is not None, PLAIN))
            for w, b in zip(weights, biases, strict=True)
        ]
        if any(rule is None or count > rule.most for rule in rules):
            return None
        filled = [rule.fill(count) for rule in rules if rule is not None]
        return weights, weights, biases, filled, 0

    def grouped(self, rows: torch.Tensor, weights: torch.Tensor, ends: list[int]) -> torch.Tensor:
        """`functional.grouped_mm`: rows sorted by expert, each group times its own weights; zeros
        after the last group."""
        found = rows.new_zeros(len(rows), weights.shape[-1])
        for expert, (start, end) in enumerate(pairwise([0, *ends])):
            if end > start:
                weight = weights[expert].t()
                if not weight.is_contiguous():
                    self.doubts.append("weights of experts have another layout than was tried")
                found[start:end] = self(rows[start:end], weight, None)
        return found

    def _rule(self, shape: Shape) -> Rows | None:
        try:
            return self.rows[shape]
        except KeyError:
            rule = self._tried[shape] if shape in self._tried else rows_of(shape)
            self.rows[shape] = rule
            if rule is None:
                self.doubts.append(
                    f"linear layers of shape {shape[1]}x{shape[0]} depend on the number of rows"
                )
            return rule


@dataclass(frozen=True)
class _NotCalledYet:
    """Results of layers that were not called yet."""

    packed: Packed
    input: torch.Tensor
    pieces: dict[int, torch.Tensor]
    copy: torch.Tensor | None  # of the input when it was read


@dataclass(eq=False)
class Packed:
    """The packed weight of one layer, or of several layers that read one input, one after another.
    The original weights are kept for comparison."""

    layers: tuple[torch.nn.Linear, ...]
    weights: tuple[torch.Tensor, ...]
    kernel: str
    tensor: torch.Tensor
    few: int = _WORTH[0]  # the smallest number of rows worth a call

    @classmethod
    def of(cls, layers: Sequence[torch.nn.Linear], kernel: str) -> Packed:
        """Pack weights for a kernel. MKL packs for a row count: packed for the most rows of a call,
        it adds in one order for fewer rows too."""
        weights = tuple(layer.weight for layer in layers)
        plain = [weight.detach() for weight in weights]
        whole = torch.cat(plain) if len(plain) > 1 else plain[0].contiguous()
        if kernel == MKL:
            packed = torch.ops.mkl._mkl_reorder_linear_weight(whole, _ROWS)
        else:
            packed = torch.ops.mkldnn._reorder_linear_weight(whole, 64)
        return cls(tuple(layers), weights, kernel, packed)

    def has(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether this weight is packed here, and has its own bias if it is one of several."""
        if len(self.layers) == 1:
            return weight is self.weights[0]
        pairs = zip(self.weights, self.layers, strict=True)
        return any(weight is one and bias is layer.bias for one, layer in pairs)

    @property
    def has_guests(self) -> bool:
        """Whether foreign code runs with one of the layers: a hook or a replaced method."""
        return hooks_on_all() or any(
            layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
            for layer in self.layers
        )

    @functools.cached_property
    def out(self) -> int:
        return sum(len(weight) for weight in self.weights)

    @property
    def shape(self) -> Shape:
        """What decides which numbers of rows give equal bits."""
        weight, biased = self.weights[0], self.bias is not None
        return self.out, weight.shape[1], weight.dtype, biased, self.kernel

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    @property
    def bias(self) -> torch.Tensor | None:
        """The current bias of all layers, or None."""
        found: list[torch.Tensor] = [one.bias for one in self.layers if one.bias is not None]
        if len(found) < 2:
            return found[0] if found else None
        return torch.cat(found)

    def split(self, given: torch.Tensor) -> dict[int, torch.Tensor]:
        parts = given.split([len(weight) for weight in self.weights], dim=-1)
        pairs = zip(self.weights, parts, strict=True)
        return {id(weight): part.contiguous() for weight, part in pairs}

    def run(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product = mkl_product if self.kernel == MKL else onednn_product
        return product(rows, self.tensor, self.sized, bias)

    @functools.cached_property
    def sized(self) -> torch.Tensor:
        """An empty weight of the total size; the kernel reads only its size."""
        weight = self.weights[0]
        return weight.new_full((1, 1), torch.nan).expand(self.out, weight.shape[1])


@torch.no_grad()
def fastest_few(packed: Sequence[Packed]) -> int:
    """The number of rows with which this machine reads these weights fastest."""
    swept, taken = list[Packed](), 0
    for one in packed:
        if taken <= _SWEPT:
            swept.append(one)
            taken += one.nbytes
    best = dict.fromkeys(_WORTH, math.inf)
    for few in _WORTH * _SWEEPS:
        start = time.perf_counter()
        for one in swept:
            one.run(one.weights[0].new_ones(few, one.weights[0].shape[1]), one.bias)
        best[few] = min(best[few], time.perf_counter() - start)
    return min(best, key=lambda few: best[few])


def plain_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    sized: torch.Tensor,
    bias: Optional[torch.Tensor],  # noqa: UP045
) -> torch.Tensor:
    return _plain(rows, weight, bias)


def _by_mkl(
    rows: torch.Tensor,
    weight: torch.Tensor,
    sized: torch.Tensor,
    bias: Optional[torch.Tensor],  # noqa: UP045
) -> torch.Tensor:
    # Without the row count it would use the plain weight.
    found: torch.Tensor = torch.ops.mkl._mkl_linear(rows, weight, sized, bias, rows.shape[0])
    return found


def _by_onednn(
    rows: torch.Tensor,
    weight: torch.Tensor,
    sized: torch.Tensor,
    bias: Optional[torch.Tensor],  # noqa: UP045
) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found


# Scripts cannot name what this torch was built without.
mkl_product = _by_mkl if hasattr(torch.ops.mkl, "_mkl_linear") else plain_product
onednn_product = _by_onednn if hasattr(torch.ops.mkldnn, "_linear_pointwise") else plain_product


def hooks_on_all() -> bool:
    return any(vars(torch.nn.modules.module).get(name) for name in _HOOKS_ON_ALL)


def kernels_for(dtype: torch.dtype) -> list[str]:
    """The kernels of this torch that take packed weights, the fastest first."""
    known = {
        MKL: (torch.ops.mkl, "_mkl_reorder_linear_weight", "_mkl_linear"),
        ONEDNN: (torch.ops.mkldnn, "_reorder_linear_weight", "_linear_pointwise"),
    }
    wanted = {torch.float32: (MKL, ONEDNN), torch.bfloat16: (ONEDNN,)}.get(dtype, ())
    return [k for k in wanted if all(hasattr(known[k][0], name) for name in known[k][1:])]


def has_bfloat16() -> bool:
    """Whether this CPU has bfloat16 instructions. Without them bfloat16 is several times slower
    than float32, in stock code too."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or bool(supported())


def rows_of(shape: Shape) -> Rows | None:
    """Numbers of rows that give equal bits for a shape of linear layer here, or None."""
    out, width, dtype, biased, kernel = shape
    generator = torch.Generator().manual_seed(out * 31 + width)
    weight, inputs = _cancelling(out, width, dtype, generator)
    bias = torch.randn(out, generator=generator).mul(_TINY).to(dtype) if biased else None
    layer = torch.nn.Linear(1, 1)
    layer.weight = torch.nn.Parameter(weight)
    packed = Packed.of([layer], kernel) if kernel else None

    def run(rows: torch.Tensor) -> torch.Tensor:
        return packed.run(rows, bias) if packed else _plain(rows, weight, bias)

    wanted: dict[int, torch.Tensor] = {}
    known: dict[tuple[int, int], bool] = {}

    def equal(count: int, most: int) -> bool:
        if most not in wanted:
            wanted[most] = _in_calls(run, inputs, most)
        if (count, most) not in known:
            known[count, most] = all(
                torch.equal(run(inputs[at : at + count].clone()), wanted[most][at : at + count])
                for at in _places(count, width)
            )
        return known[count, most]

    is_head = out > _OF_HEADS and out > _RATIO * width
    for rule in CANDIDATES:
        if rule.most > _HEAD_ROWS and is_head:
            continue
        if all(equal(count, rule.most) for count in rule.counts):
            return rule
    return None


def _in_calls(run: OfRows, inputs: torch.Tensor, most: int) -> torch.Tensor:
    return torch.cat([run(piece) for piece in inputs.split(most)])


def _places(count: int, width: int) -> Iterable[int]:
    """Where to cut out rows for comparison. Short sums seldom reveal their order."""
    last = _ROWS - count
    if count > _FEW:
        return (last // 2,)
    return range(0, last, 5) if width <= _NARROW else (0, 1, 37, last)


def rows_agree(linears: Linears, layer: torch.nn.Linear) -> bool:
    """Whether rows of a layer are still independent of other rows: a quick check, not a full
    trial."""
    weight, bias = layer.weight, layer.bias
    rows = torch.randn(_LOOK, weight.shape[1], generator=torch.Generator().manual_seed(0))
    rows = rows.to(weight.dtype)
    wanted = linears(rows, weight, bias)
    return all(
        torch.equal(linears(rows[:count].clone(), weight, bias), wanted[:count])
        for count in _LOOKED_AT
    )


def _cancelling(
    out: int, width: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and inputs whose products cancel, so that only rounding remains of a sum. Another
    order of adding then changes nearly every number, even if results have few digits. They use all
    digits of their type: an exact product would hide whether it was rounded before it was added,
    which is the only difference if sums are short (adapters of low rank)."""
    half, odd = width // 2, width % 2
    order = torch.randperm(half, generator=generator)
    left = torch.randn(out, half, generator=generator)
    rows = torch.randn(_ROWS, half, generator=generator)
    # Terms that cancel with no other are as small as the rounding error of the rest.
    alone = torch.randn(out, odd, generator=generator), torch.randn(_ROWS, odd, generator=generator)
    weight = torch.cat([left, -left[:, order], alone[0]], dim=1)
    inputs = torch.cat([rows, rows[:, order], alone[1] * (_TINY if half else 1)], dim=1)
    # Some sums are of uncancelled numbers: short sums of two products look alike in any order.
    inputs[::_PLAIN] = torch.randn(inputs[::_PLAIN].shape, generator=generator)
    return weight.to(dtype), inputs.to(dtype)
