"""Linear layers whose rows come out the same however many there are.

A library chooses its kernel by the number of rows, and another kernel adds in another order. Which
numbers of rows give the same bits is found by trying; a call with fewer is filled up to the next
such number. Packed weights, where there are any, are also read faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional

_plain = functional.linear
OFFSETS = (0, 1, 37)
_ROWS = 512  # of the pass that others are compared with
_SAMPLE = (*range(1, 34), 40, 48, 63, 64, 65, 100, 127, 128, 200, 256, 300, 384, 475)
_LARGE_SAMPLE = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17, 24, 33, 64, 100, 200, 257)
_LOOK, _LOOKED_AT = 24, (1, 3)  # rows
_LARGE = 1 << 22  # weights, from which on fewer numbers of rows are tried

Shape = tuple[int, int, torch.dtype, bool, bool]  # out, in, dtype, with a bias, packed


@dataclass(frozen=True)
class Rows:
    """Numbers of rows that give equal bits: at least `least`, and a multiple of `step`."""

    least: int = 1
    step: int = 1

    def fill(self, rows: int) -> int:
        """The smallest such number that has room."""
        return max(self.least, -(-rows // self.step) * self.step)


# The last two are for layers of few numbers: with few rows, these go another way altogether.
CANDIDATES = (
    *(Rows(), Rows(2), Rows(4), Rows(4, 4), Rows(8, 8), Rows(16, 16)),
    *(Rows(32), Rows(128)),
)


class Linears:
    """Linear layers of one model. How rows of each shape are filled up is found when it is met."""

    def __init__(
        self,
        packed: Callable[[], dict[int, Packed]] = dict,
        tried: Mapping[Shape, Rows | None] | None = None,
    ) -> None:
        self.rows: dict[Shape, Rows | None] = {}
        self._tried = tried or {}  # shapes that were tried for another reason
        self.doubts: list[str] = []
        self._packed = packed

    def __call__(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`functional.linear`, row by row the same bits."""
        known = self._packed().get(id(weight))
        if known is not None and known.weight is not weight:
            known = None
        rule = self._rule(weight, bias, known)
        if rule is None or input.dtype != weight.dtype:
            return _plain(input, weight, bias)
        flat = input.reshape(-1, input.shape[-1])
        count = flat.shape[0]
        missing = rule.fill(count) - count
        if missing:
            flat = functional.pad(flat, (0, 0, 0, missing))
        if known is not None:
            result = run_packed(flat, known.tensor, bias)
        else:
            result = _plain(flat, weight, bias)
        if missing:
            result = result[:count]
        return result.view(*input.shape[:-1], weight.shape[0])

    def grouped(self, rows: torch.Tensor, weights: torch.Tensor, ends: list[int]) -> torch.Tensor:
        """`functional.grouped_mm`: rows sorted by expert, each group times the weights of its own;
        zeros behind the last group."""
        found = rows.new_zeros(len(rows), weights.shape[-1])
        for expert, (start, end) in enumerate(pairwise([0, *ends])):
            if end > start:
                weight = weights[expert].t()
                if not weight.is_contiguous():
                    self.doubts.append("weights of experts lie another way than was tried")
                found[start:end] = self(rows[start:end], weight, None)
        return found

    def _rule(
        self, weight: torch.Tensor, bias: torch.Tensor | None, packed: Packed | None
    ) -> Rows | None:
        shape = (*weight.shape, weight.dtype, bias is not None, packed is not None)
        try:
            return self.rows[shape]  # type: ignore[index]
        except KeyError:
            known = shape in self._tried
            rule = self._tried[shape] if known else rows_of(shape)  # type: ignore[index,arg-type]
            self.rows[shape] = rule  # type: ignore[index]
            if rule is None:
                self.doubts.append(
                    f"linear layers of shape {shape[1]}x{shape[0]} depend on their rows"
                )
            return rule


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight as the kernel reads it fastest. The weight itself is held, to be compared with."""

    weight: torch.Tensor
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return self.weight.numel() * self.weight.element_size()


def packs_weights() -> bool:
    """Whether this torch has linear layers with packed weights."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return all(hasattr(torch.ops.mkldnn, name) for name in names)


def has_bfloat16() -> bool:
    """Whether this CPU multiplies in bfloat16; others are several times slower in it than in
    float32, in stock code too."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or bool(supported())


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight as its kernel reads it fastest."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 64)
    return packed


def run_packed(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer with a packed weight."""
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return found


def rows_of(shape: Shape) -> Rows | None:
    """Which numbers of rows give equal bits for linear layers of a shape here; None for none."""
    out, width, dtype, biased, packed = shape
    generator = torch.Generator().manual_seed(out * 31 + width)
    weight, inputs = _telling(out, width, dtype, generator)
    bias = torch.zeros(out, dtype=dtype) if biased else None
    tensor = pack(weight) if packed else weight

    def run(rows: torch.Tensor) -> torch.Tensor:
        return run_packed(rows, tensor, bias) if packed else _plain(rows, tensor, bias)

    wanted = run(inputs)
    sample = _SAMPLE if out * width < _LARGE else _LARGE_SAMPLE
    known: dict[int, bool] = {}

    def equal(count: int) -> bool:
        if count not in known:
            known[count] = all(
                torch.equal(run(inputs[at : at + count].clone()), wanted[at : at + count])
                for at in OFFSETS
                if at + count <= _ROWS
            )
        return known[count]

    for rule in CANDIDATES:
        if all(equal(rule.fill(count)) for count in sample):
            return rule
    return None


def rows_agree(linears: Linears, layer: torch.nn.Linear) -> bool:
    """Whether a layer still gives rows the same bits in other company: a look, and no trial."""
    weight, bias = layer.weight, layer.bias
    rows = torch.randn(_LOOK, weight.shape[1], generator=torch.Generator().manual_seed(0))
    rows = rows.to(weight.dtype)
    wanted = linears(rows, weight, bias)
    return all(
        torch.equal(linears(rows[:count].clone(), weight, bias), wanted[:count])
        for count in _LOOKED_AT
    )


def _telling(
    out: int, width: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and inputs whose products cancel, so that what is left of a sum is its rounding: sums
    in another order differ in nearly every number, also where results are rounded to few digits.
    They have all digits of their type: a product that is exact hides whether it was rounded before
    it was added, which is all that differs where sums are short (adapters of a low rank)."""
    half = width // 2
    order = torch.randperm(half, generator=generator)
    left = torch.randn(out, half, generator=generator).to(dtype)
    rows = torch.randn(_ROWS, half, generator=generator).to(dtype)
    odd = (0, width - 2 * half)
    weight = functional.pad(torch.cat([left, -left[:, order]], dim=1), odd)
    inputs = functional.pad(torch.cat([rows, rows[:, order]], dim=1), odd)
    return weight, inputs
