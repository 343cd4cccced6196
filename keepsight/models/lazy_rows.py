"""Rows of an embedding that are looked up when needed, piece by piece.

Towers that resample their position grid look up four rows per patch, weight them and add them up.
That briefly takes eight times the memory of the sum. Here the lookup waits until the sum. Any other
use of the rows gets the plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from keepsight.kinds import Record
from keepsight.models.piecewise import ranges

_PIECE = 256  # rows that are looked up at once
Make = Callable[[int, int], torch.Tensor]  # rows from a to b
_MUL = torch.ops.aten.mul.Tensor
_SUM = torch.ops.aten.sum.dim_IntList


class LazyRows(torch.Tensor):
    """A three-dimensional tensor whose rows are computed on demand."""

    make: Make

    @staticmethod
    def of(shape: torch.Size, dtype: torch.dtype, make: Make) -> LazyRows:
        """Rows computed by `make`."""
        rows: LazyRows = torch.Tensor._make_wrapper_subclass(LazyRows, shape, dtype=dtype)
        rows.make = make
        return rows

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Record | None = None,
    ) -> object:
        """A product with a tensor of equally many rows is delayed, a sum over the second dimension
        is computed piece by piece, and everything else is computed as usual."""
        rows = args[0] if args else None
        if isinstance(rows, LazyRows) and not kwargs:
            other = args[1] if len(args) > 1 else None
            if func is _MUL and isinstance(other, torch.Tensor) and _is_weight(other, rows):
                return _weighed(rows, other)
            if func is _SUM and tuple(args[1:]) == ([1],):
                return _sum(rows)
        return func(*_plain(args), **{n: next(_plain([v])) for n, v in (kwargs or {}).items()})


def _is_weight(other: torch.Tensor, rows: LazyRows) -> bool:
    if isinstance(other, LazyRows) or other.dim() != 3:
        return False
    return other.shape[:2] == rows.shape[:2] and other.shape[2] in (1, rows.shape[2])


def _weighed(rows: LazyRows, weights: torch.Tensor) -> LazyRows:
    dtype = torch.promote_types(rows.dtype, weights.dtype)
    return LazyRows.of(rows.shape, dtype, lambda a, b: rows.make(a, b) * weights[a:b])


def _sum(rows: LazyRows) -> torch.Tensor:
    """The sum, in pieces if a trial on some rows shows equal bits."""
    make, count = rows.make, rows.shape[0]
    some = min(count, 2 * _PIECE + 17)
    if not torch.equal(make(0, some).sum(1), torch.cat(list(_sums(make, some)))):
        return make(0, count).sum(1)
    first = make(0, 1).sum(1)
    whole = first.new_empty(count, first.shape[1])
    start = 0
    for part in _sums(make, count):
        whole[start : start + len(part)] = part
        start += len(part)
    return whole


def _sums(make: Make, count: int) -> Iterator[torch.Tensor]:
    for start, stop in ranges(count, _PIECE, 1):
        yield make(start, stop).sum(1)


def _plain(values: Iterable[object]) -> Iterator[object]:
    """The values, with every lookup done."""
    for value in values:
        if isinstance(value, LazyRows):
            yield value.make(0, value.shape[0])
        elif isinstance(value, list):
            yield list(_plain(value))
        elif isinstance(value, tuple):
            yield tuple(_plain(value))
        else:
            yield value
