"""Whether a tower gives a picture the same bits beside others of its form: tried, never assumed.

A tower's products choose their kernels, and with them the order of adding, by the number of rows,
the type and the threads. So before several pictures share a call, they are encoded alone and
together, and must come out equal. That may be luck where results are rounded to few digits, so each
operation that saw other sizes in company is tried by itself too: products on numbers whose sums
cancel, which leaves the rounding of the sum alone, all else on noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from keepsight.errors import UpstreamChanged
from keepsight.kinds import Record
from keepsight.models import upstream
from keepsight.models.families import Family, Pixels
from keepsight.models.families.tower_absent import tower_parts
from keepsight.models.tower_pieces import is_compiled

_ROUNDS = 4  # of noise, for each operation; a sum that cancels tells at once
# Where the arguments of a product stand, and along which axis of the second is summed.
_PRODUCTS = {
    "linear": (0, 1, -1),
    "convolution": (0, 1, 0),
    "mm": (0, 1, -2),
    "bmm": (0, 1, -2),
    "addmm": (1, 2, -2),
    "baddbmm": (1, 2, -2),
}
_LAYERS = {"linear", "convolution", "mm", "addmm"}
_ATTENTION = "_scaled_dot_product"
# These move numbers, and compute none.
_MOVES = {
    *("_to_copy", "_unsafe_view", "cat", "clone", "constant_pad_nd", "copy", "copy_", "embedding"),
    *("empty_like", "fill_", "flip", "gather", "index", "index_select", "masked_fill", "new_empty"),
    *("new_zeros", "ones_like", "repeat", "repeat_interleave", "roll", "stack", "where", "zero_"),
    "zeros_like",
}


@dataclass(frozen=True)
class TensorForm:
    """A tensor without its numbers."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def filled(self, numbers: torch.Tensor) -> torch.Tensor:
        """These numbers, as such a tensor lies in memory."""
        dense = all(
            stride or size < 2 for size, stride in zip(self.sizes, self.strides, strict=True)
        )
        strides = self.strides if dense else numbers.contiguous().stride()
        home = torch.empty_strided(self.sizes, strides, dtype=self.dtype, device=self.device)
        return home.copy_(numbers)


@dataclass(frozen=True)
class OpCall:
    """A call of one of torch's operations, without numbers."""

    function: upstream.TorchFunction
    args: tuple[object, ...]
    options: tuple[tuple[str, object], ...]

    @property
    def name(self) -> str:
        return str(self.function.overloadpacket.__name__)

    @property
    def shapes(self) -> list[TensorForm]:
        return [part for part in self.args if isinstance(part, TensorForm)]

    @property
    def rest(self) -> object:
        """What is the same in any company."""
        return [part for part in self.args if not isinstance(part, TensorForm)], self.options

    def run(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The first result, given these tensors."""
        given = iter(tensors)
        args = [next(given) if isinstance(part, TensorForm) else part for part in self.args]
        found = self.function(*args, **dict(self.options))
        first = found[0] if isinstance(found, tuple) else found
        return torch.as_tensor(first)


class OpCalls:
    """What operations a thread called."""

    def __init__(self) -> None:
        self.found: dict[OpCall, None] = {}
        self.unknown = ""  # an operation that cannot be tried by itself

    def run(self, func: upstream.TorchFunction, args: tuple[object, ...], given: Record) -> object:
        """Run an operation and note it."""
        options = tuple(zip(given, _without_numbers(given.values()), strict=True))
        call = OpCall(func, _without_numbers(args), options)
        found = func(*args, **given)
        if not func.is_view and call.name not in _MOVES and call.shapes:
            parts = found if isinstance(found, tuple) else (found,)
            floats = all(shape.dtype.is_floating_point for shape in call.shapes)
            if isinstance(parts[0], torch.Tensor) and parts[0].is_floating_point():
                if floats:
                    self.found[call] = None
                else:
                    self.unknown = call.name
        return found


def _without_numbers(parts: Iterable[object]) -> tuple[object, ...]:
    return tuple(
        TensorForm.of(part)
        if isinstance(part, torch.Tensor)
        else _without_numbers(part)
        if isinstance(part, list | tuple)
        else part
        for part in parts
    )


def why_not(family: Family) -> str:
    """Why no pictures share a call of this tower, whatever their sizes; empty where they may."""
    model = family.model
    if type(family).encode is not Family.encode:
        return "its pictures are prepared one by one"
    if not isinstance(model, torch.nn.Module) or getattr(model, "exported", None) is not None:
        return "it is exported"
    if torch.device(family.model.device).type != "cpu":
        return "trials were made on CPUs only"
    parts = (part for tower in tower_parts(family).values() for part in tower.modules())
    return "it is compiled" if any(map(is_compiled, parts)) else ""


def other_bits(family: Family, media: Sequence[Pixels], alone: Sequence[Record]) -> str:
    """What gives these pictures other bits in one call than they have alone; empty if nothing."""
    try:
        # What follows from sizes alone is made now, and once: no numbers of a picture reach it.
        family.tower_tensors.of(family.join_pixels(media), family.model.device)
        one, several = OpCalls(), OpCalls()
        with upstream.watched(one.run):
            first = family.encode(media[0])[0]
        with upstream.watched(several.run):
            together = [tensors for tensors, _ in family.encode_together(media)]
        if not _same(first, alone[0]) or not all(map(_same, together, alone)):
            return "the features"
        if several.unknown:
            return several.unknown
        known = list(one.found)
        for call in several.found:
            if call not in one.found and not _alike(call, known, len(media)):
                return call.name
    except (RuntimeError, ValueError, TypeError, LookupError, UpstreamChanged) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _same(a: Record, b: Record) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def _alike(call: OpCall, known: Sequence[OpCall], count: int) -> bool:
    """Whether an operation gives rows in company what one of these gives them alone."""
    for one in known:
        if one.function is not call.function or one.rest != call.rest:
            continue
        pairs = list(zip(one.shapes, call.shapes, strict=False))
        axes = [_axis(few.sizes, many.sizes, count) for few, many in pairs]
        # Pictures share the weights of a layer; only its input grows.
        wrong = call.name in _LAYERS and sum(axis != -1 for axis in axes) > 1
        if len(one.shapes) == len(call.shapes) and None not in axes and not wrong:
            telling = call.name in _PRODUCTS or call.name.startswith(_ATTENTION)
            return all(_agree(one, call, count, seed) for seed in range(1 if telling else _ROUNDS))
    return False


def _axis(few: Sequence[int], many: Sequence[int], count: int) -> int | None:
    """Along which axis several pictures lie; -1 where the sizes are those of one."""
    other = [axis for axis, sizes in enumerate(zip(few, many, strict=False)) if len({*sizes}) > 1]
    if len(few) != len(many) or len(other) > 1:
        return None
    return -1 if not other else other[0] if many[other[0]] == count * few[other[0]] else None


def _agree(one: OpCall, call: OpCall, count: int, seed: int) -> bool:
    numbers = list(_numbers(one, torch.Generator().manual_seed(seed)))
    shapes = list(zip(one.shapes, call.shapes, strict=True))
    few = one.run([a.filled(n) for (a, _), n in zip(shapes, numbers, strict=True)])
    each = [_repeated(n, b.sizes, count) for (_, b), n in zip(shapes, numbers, strict=True)]
    many = call.run([b.filled(n) for (_, b), n in zip(shapes, each, strict=True)])
    # A root of noise is often none.
    return torch.equal(many.nan_to_num(), _repeated(few, many.shape, count).nan_to_num())


def _repeated(numbers: torch.Tensor, sizes: Sequence[int], count: int) -> torch.Tensor:
    """The numbers of one picture as those of several that are alike."""
    axis = _axis(numbers.shape, sizes, count)
    return numbers if axis is None or axis < 0 else torch.cat([numbers] * count, axis)


def _numbers(call: OpCall, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Noise for an operation; for a product, such that sums cancel but for their rounding."""

    def noise(sizes: Sequence[int]) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    first, second, axis = _PRODUCTS.get(call.name, (0, -1, 0))
    places = [place for place, part in enumerate(call.args) if isinstance(part, TensorForm)]
    order = torch.Generator().manual_seed(0)
    for place, shape in zip(places, call.shapes, strict=True):
        if call.name.startswith(_ATTENTION):
            # Keys come in pairs, whose values cancel.
            sign = (None, 1, -1)[place] if place < 3 else 0
            yield (
                _paired(noise, shape.sizes, -2, sign, order)
                if sign
                else noise(shape.sizes) * (sign is None)
            )
        elif second < 0:
            yield noise(shape.sizes)
        elif place == second:
            if axis == 0:  # a convolution: one number for all of a picture
                flat = (shape.sizes[0], math.prod(shape.sizes[1:]))
                yield _paired(noise, flat, -1, -1, order).reshape(shape.sizes)
            else:
                yield _paired(noise, shape.sizes, axis, -1, order)
        elif place == first:
            if axis == 0:
                yield noise((shape.sizes[0], *[1] * (len(shape.sizes) - 1))).expand(shape.sizes)
            else:
                yield _paired(noise, shape.sizes, -1, 1, order)
        else:
            yield torch.zeros(shape.sizes)


def _paired(
    noise: Callable[[Sequence[int]], torch.Tensor],
    sizes: Sequence[int],
    axis: int,
    sign: int,
    order: torch.Generator,
) -> torch.Tensor:
    """Numbers of which each has its like, or its opposite, elsewhere on this axis."""
    half = sizes[axis] // 2
    left = noise([half if a == axis % len(sizes) else size for a, size in enumerate(sizes)])
    places = torch.randperm(half, generator=order.manual_seed(half))
    both = torch.cat([left, sign * left.index_select(axis, places)], axis)
    return (
        both
        if 2 * half == sizes[axis]
        else functional.pad(both.movedim(axis, -1), (0, 1)).movedim(-1, axis)
    )
