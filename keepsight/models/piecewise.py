"""Computes one call of a module piece by piece: equal bits in less memory.

A call maps rows (patches, or tiles of patches) to rows. If every row depends on itself alone,
pieces of rows run through the module one after the other. If rows attend to each other in a single
`scaled_dot_product_attention`, keys and values of all pieces are collected first, then each piece
queries them. The module's own code runs; only this one function is replaced. The caller must try
whether the bits are equal (`Plan.of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from keepsight.kinds import Record

Forward = Callable[..., object]
Given = tuple[object, ...]
# Rows per piece. Attention kernels on CPUs choose their query blocks by the number of queries: 256
# per block from 768 queries on. So pieces begin at multiples of 256, and none is shorter than
# `LEAST`.
PIECE = 1024
LEAST = 1024
PLAIN = (type(None), bool, int, float, str, torch.dtype)


class CannotCut(Exception):
    """A call that cannot be split; nothing was changed."""


class _StopPass(Exception):
    """Keys and values of a piece are known; its pass can stop."""


@dataclass(frozen=True)
class RowCall:
    """The arguments of one call of a module, by rows."""

    args: tuple[object, ...]
    options: Mapping[str, object]
    axis: int  # dimension of the rows in the first floating tensor
    count: int
    each: int  # patches per row: more than 1 if rows are tiles
    bounds: tuple[int, ...]  # offsets that delimit rows attending to each other

    @classmethod
    def of(cls, args: tuple[object, ...], options: Mapping[str, object]) -> RowCall | None:
        """The call, or None if its rows cannot be identified."""
        values = (*args, *options.values())
        given = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
        if not given or given[0].dim() not in (2, 3) or given[0].device.type != "cpu":
            return None
        x = given[0]
        axis = 1 if x.dim() == 3 and x.shape[0] == 1 else 0
        count = x.shape[axis]
        each = x.shape[1] if x.dim() == 3 and axis == 0 else 1
        whole = cls(args, options, axis, count, each, (0, count))
        found = [b for b in map(whole._bounds, values) if b]
        return replace(whole, bounds=found[0]) if found and each == 1 else whole

    @property
    def x(self) -> torch.Tensor:
        """The rows."""
        values = (*self.args, *self.options.values())
        return next(v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())

    def _bounds(self, value: object) -> tuple[int, ...]:
        """The ends of pictures or windows among the rows, if an argument gives them."""
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.dim() != 1:
            return ()
        if len(value) < 2 or value.dtype not in (torch.int32, torch.int64):
            return ()
        if int(value[0]) != 0 or int(value[-1]) != self.count or bool((value.diff() < 0).any()):
            return ()
        return tuple(value.tolist())

    def part(self, start: int, stop: int) -> RowCall:
        """The same call for some of its rows."""
        inner = tuple(b - start for b in self.bounds if start < b < stop)
        bounds = (0, *inner, stop - start)
        args = tuple(self._cut(value, start, stop, bounds) for value in self.args)
        options = {n: self._cut(value, start, stop, bounds) for n, value in self.options.items()}
        return RowCall(args, options, self.axis, stop - start, self.each, bounds)

    def _cut(self, value: object, start: int, stop: int, bounds: tuple[int, ...]) -> object:
        if isinstance(value, PLAIN):
            return value
        if type(value) in (tuple, list):
            return type(value)(self._cut(part, start, stop, bounds) for part in value)  # type: ignore[attr-defined,call-arg]
        if not isinstance(value, torch.Tensor):
            raise CannotCut(f"it is given a {type(value).__name__}")
        if self._bounds(value):
            return value.new_tensor(bounds)
        axes = [axis for axis, size in enumerate(value.shape) if size == self.count]
        if len(axes) > 1 and value is not self.x:
            raise CannotCut("it is given a tensor with as many columns as rows")
        if value is self.x:
            axes = [self.axis]
        return value.narrow(axes[0], start, stop - start) if axes else value

    def random(self) -> RowCall:
        """The same call with random rows; they are equal each time."""
        noise = torch.Generator().manual_seed(0)
        x = self.x
        other = torch.randn(x.shape, generator=noise).to(x.dtype)
        args = tuple(other if value is x else value for value in self.args)
        options = {n: other if value is x else value for n, value in self.options.items()}
        return replace(self, args=args, options=options)

    def to(self, forward: Forward) -> object:
        """The result of a module for this call."""
        return forward(*self.args, **self.options)


class JoinedRows:
    """The output of a module, joined from its pieces."""

    def __init__(self, call: RowCall) -> None:
        self._call = call
        self._whole: torch.Tensor | None = None
        self._shape: type | None = None
        self._more = 0

    def put(self, start: int, stop: int, output: object) -> None:
        """Store the output for some rows; a module may merge several into one."""
        first, more = _first_of(output)
        axis = self._call.axis
        if first.dim() <= axis or not first.shape[axis] or (stop - start) % first.shape[axis]:
            raise CannotCut("its output has other rows than its input")
        ratio = (stop - start) // first.shape[axis]
        if start % ratio or self._call.count % ratio:
            raise CannotCut("a piece ends inside a group of rows")
        if self._whole is None:
            shape = list(first.shape)
            shape[axis] = self._call.count // ratio
            self._whole = first.new_empty(shape)
            self._shape, self._more = type(output), more
        elif more != self._more or type(output) is not self._shape:
            raise CannotCut("its outputs differ in kind")
        self._whole.narrow(axis, start // ratio, first.shape[axis]).copy_(first)

    def whole(self) -> object:
        """The whole output, in the form of the pieces."""
        if self._shape is tuple:
            return (self._whole, *[None] * self._more)
        return self._whole


def _first_of(output: object) -> tuple[torch.Tensor, int]:
    """The first tensor of an output, and the number of Nones after it."""
    if isinstance(output, torch.Tensor):
        return output, 0
    first, more = (output[0], output[1:]) if type(output) is tuple and output else (None, ())
    if isinstance(first, torch.Tensor) and all(part is None for part in more):
        return first, len(more)
    raise CannotCut(f"it returns a {type(output).__name__}")


def same(one: object, other: object) -> bool:
    """Whether two outputs are equal, bit for bit."""
    (a, more), (b, others) = _first_of(one), _first_of(other)
    return more == others and a.dtype == b.dtype and torch.equal(a, b)


# -- attention ---------------------------------------------------------------------------------


class AttentionCalls(TorchFunctionMode):
    """Counts calls of attention in this thread while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def __torch_function__(
        self, func: Forward, types: object, args: Given = (), kwargs: Record | None = None
    ) -> object:
        self.looks += func is scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


class _AttentionCall:
    """The arguments of one attention call that can be split: all rows see all rows."""

    def __init__(self, rows: int, args: Given, options: Record) -> None:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        self.given: Record = {**dict(zip(names, args, strict=False)), **options}
        masked = self.given.get("attn_mask") is not None
        if masked or self.given.get("dropout_p") or self.given.get("is_causal"):
            raise CannotCut("its attention has a mask")
        sizes = {tuple(self.given[name].shape[i] for i in (0, -2)) for name in names[:3]}
        if sizes != {(1, rows)}:
            raise CannotCut("its attention has other rows")


class _CollectKeys(TorchFunctionMode):
    """Collects keys and values of each piece, and stops its pass there."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.start, self.rows, self._length = 0, 0, length
        self.kept: dict[str, torch.Tensor] = {}

    def __torch_function__(
        self, func: Forward, types: object, args: Given = (), kwargs: Record | None = None
    ) -> object:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        look = _AttentionCall(self.rows, args, kwargs or {})
        for name in ("key", "value"):
            part = look.given[name]
            if name not in self.kept:
                _, heads, _, width = part.shape
                room = part.new_empty(1, self._length, heads, width)
                self.kept[name] = room.transpose(1, 2)
            self.kept[name].narrow(2, self.start, self.rows).copy_(part)
        raise _StopPass


class _QueryAllKeys(TorchFunctionMode):
    """Lets each piece attend to the keys and values of all."""

    def __init__(self, kept: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.rows, self.looks, self._kept = 0, 0, kept

    def __torch_function__(
        self, func: Forward, types: object, args: Given = (), kwargs: Record | None = None
    ) -> object:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        look = _AttentionCall(self.rows, args, kwargs or {})
        self.looks += 1
        if self.looks > 1:
            raise CannotCut("its rows attend to each other more than once")
        return func(**{**look.given, **self._kept})


def in_pieces(forward: Forward, call: RowCall, looks: bool, piece: int) -> object:
    """Result of `forward` for the whole call; `looks` says whether rows attend to each other."""
    rows = JoinedRows(call)
    for start, stop in _spans(call, looks, piece):
        part = call.part(start, stop)
        if looks and call.each == 1 and len(part.bounds) == 2 and stop - start >= 2 * piece:
            for begin, end, output in _with_all(forward, part, piece):
                rows.put(start + begin, start + end, output)
        else:
            rows.put(start, stop, part.to(forward))
    return rows.whole()


def _spans(call: RowCall, looks: bool, piece: int) -> Iterator[tuple[int, int]]:
    """Stretches of rows that need nothing from outside."""
    if call.each > 1:
        yield from ranges(call.count, -(-piece // call.each), -(-LEAST // call.each))
    elif not looks:
        yield from ranges(call.count, piece, LEAST)
    else:
        start = 0
        for stop, then in zip(call.bounds[1:], [*call.bounds[2:], call.count], strict=True):
            full = then - start > piece and call.count - stop >= LEAST
            if stop > start and (stop == call.count or full):
                yield start, stop
                start = stop


def _with_all(forward: Forward, call: RowCall, piece: int) -> Iterator[tuple[int, int, object]]:
    """The rows of one picture, which attend to each other."""
    parts = list(ranges(call.count, piece, LEAST))
    with _CollectKeys(call.count) as gathering:
        for start, stop in parts:
            gathering.start, gathering.rows = start, stop - start
            try:
                call.part(start, stop).to(forward)
            except _StopPass:
                continue
            raise CannotCut("its rows attend to each other in another way")
    asking = _QueryAllKeys(gathering.kept)
    for start, stop in parts:
        asking.rows, asking.looks = stop - start, 0
        with asking:  # stop replacing: the consumer may run other code
            output = call.part(start, stop).to(forward)
        yield start, stop, output


def ranges(count: int, piece: int, least: int) -> Iterator[tuple[int, int]]:
    """Ranges from 0 to `count`; the last may be longer, so that none is too short."""
    start = 0
    while start < count:
        stop = start + piece if count - start - piece >= least else count
        yield start, stop
        start = stop
