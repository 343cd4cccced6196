"""One huge picture in bounded memory: the layers of its tower compute some rows at a time.

In towers of packed patches (Qwen, GLM and their kin) the rows of a layer meet in attention alone.
So while a huge picture is encoded, each layer runs its own code on pieces of rows. Where all rows
attend to each other, a first round keeps the keys and values of each piece and stops there; a
second lets each piece look at those of all. A product of few rows may round otherwise than that of
all, so the provenance of such features names the size of the pieces.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from keepsight.kinds import Grid, Record
from keepsight.system.exchanged import exchanged

if TYPE_CHECKING:
    from keepsight.models.families import Family

PATCHES = 1 << 14  # of a picture, above which memory matters more than time: 2,048 x 2,048 pixels
ROWS = 1024  # of a piece; the last may have up to twice as many
_GRIDS = ("image_grid_thw", "video_grid_thw")
_ENDS = "cu_seqlens"  # where pictures, frames or windows end among the rows

_one_at_a_time = threading.Lock()
_Forward = Callable[..., Any]
_Way = Callable[..., object]  # runs a forward pass, given with its arguments, by rows


def is_huge(grid: Grid, by_step: bool = False) -> bool:
    """Whether one pass over a medium of this grid has so many patches; `by_step`: one pass for each
    step in time."""
    for row in (row for name in _GRIDS for row in grid.get(name, ())):
        match row:
            case [int(time), int(height), int(width)]:
                if (1 if by_step else time) * height * width > PATCHES:
                    return True
    return False


def can_go_by_rows(family: Family) -> bool:
    """Whether this tower runs by rows: all its layers attend with `sdpa` over packed rows, none is
    compiled, and no hook inside waits for whole calls."""
    if not family.proven or not isinstance(family.model, torch.nn.Module):
        return False
    layers = _layers(family.core)
    return bool(layers) and not any(_is_foreign(p) for layer in layers for p in layer.modules())


def _is_foreign(part: torch.nn.Module) -> bool:
    attention = getattr(getattr(part, "config", None), "_attn_implementation", "sdpa")
    compiled = part._compiled_call_impl is not None or hasattr(part, "dynamo_ctx")
    hooked = bool(part._forward_hooks or part._forward_pre_hooks)
    return attention != "sdpa" or compiled or hooked or isinstance(part, torch.jit.ScriptModule)


def _layers(core: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules around each attention over packed rows."""
    takes = {m for m in core.modules() if _ENDS in inspect.signature(type(m).forward).parameters}
    attentions = {m for m in takes if takes.isdisjoint({*m.modules()} - {m})}
    return [m for m in core.modules() if not attentions.isdisjoint(m.children())]


@contextmanager
def by_rows(family: Family) -> Iterator[None]:
    """Encode a huge picture here: this thread runs the layers of the tower by rows, others run them
    as they are."""
    ways: dict[torch.nn.Module, _Way] = dict.fromkeys(_layers(family.core), _layer)
    for module in family.core.modules():
        if type(module) is torch.nn.Embedding:
            ways[module] = _table
        elif type(module).__name__.endswith("PatchMerger"):
            ways[module] = _merger
    with _one_at_a_time:  # two would need the memory of both
        changes = [(m, "forward", _in_this_thread(m.forward, way)) for m, way in ways.items()]
        with exchanged(*changes):
            yield


def _in_this_thread(forward: _Forward, way: _Way) -> _Forward:
    thread = threading.get_ident()

    def run(*args: object, **options: object) -> object:
        if threading.get_ident() != thread:
            return forward(*args, **options)
        return way(forward, *args, **options)

    return run


def _layer(forward: _Forward, *args: Any, **options: Any) -> object:
    """A layer whose rows meet in one attention."""
    given = inspect.signature(forward).bind(*args, **options).arguments
    rows: torch.Tensor = next(iter(given.values()))
    ends: torch.Tensor = (given | options)[_ENDS]
    axis = rows.dim() - 2
    found = torch.empty_like(rows)

    def piece(start: int, stop: int, its_ends: list[int]) -> torch.Tensor:
        def cut(value: object) -> object:
            if isinstance(value, tuple):
                return tuple(map(cut, value))
            if isinstance(value, torch.Tensor) and value is ends:
                return ends.new_tensor(its_ends)
            if isinstance(value, torch.Tensor) and rows.shape[axis] in value.shape[:2]:
                place = value.shape.index(rows.shape[axis])
                return value.narrow(place, start, stop - start)
            return value

        parts = {name: cut(value) for name, value in options.items()}
        return torch.as_tensor(forward(*map(cut, args), **parts))

    for stretch in _stretches(ends.tolist()):
        first, last = stretch[0], stretch[-1]
        if last - first < 2 * ROWS:
            part = piece(first, last, [end - first for end in stretch])
            found.narrow(axis, first, last - first).copy_(part)
            continue
        pieces, keys = list(_pieces(first, last)), _Keys(last - first)
        for start, stop in pieces:
            keys.place = start - first
            with suppress(_Kept), keys:
                piece(start, stop, [0, stop - start])
                return forward(*args, **options)  # it attends in another way
        keys.are_kept = True
        for start, stop in pieces:
            with keys:
                part = piece(start, stop, [0, stop - start])
            found.narrow(axis, start, stop - start).copy_(part)
    return found


def _merger(forward: _Forward, *args: Any, **options: Any) -> object:
    """What makes one row of some neighbours."""
    if len(args) > 1 or options:  # HunYuan's merges by the shape of the picture
        return forward(*args, **options)
    return torch.cat([forward(some) for some in args[0].split(ROWS)])


def _table(forward: _Forward, *args: Any, **options: Any) -> object:
    """A table of positions. To fit it to a picture, a tower weighs several of its rows for each
    patch and adds them up."""
    (ids,) = (*args, *options.values())
    return _LookedUp(forward, ids) if ids.dim() == 2 else forward(ids)


def _stretches(ends: list[int]) -> Iterator[list[int]]:
    """Where rows end that attend to each other; short neighbours go together."""
    stretch = ends[:1]
    for end, then in pairwise([*ends[1:], ends[-1]]):
        stretch.append(end)
        if end - stretch[0] >= ROWS or then - end >= ROWS or end == ends[-1]:
            yield stretch
            stretch = [end]


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    while stop - start >= 2 * ROWS:
        yield start, start + ROWS
        start += ROWS
    yield start, stop


class _Kept(Exception):
    """The keys and values of a piece are kept: the rest of its first round is not needed."""


class _Keys(TorchFunctionMode):
    """The keys and values of all rows: kept in a first round, and looked at in a second."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.place, self.are_kept = 0, False
        self._count = count
        self._pair: list[torch.Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Record | None = None,
    ) -> object:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, *pair = args[:3]
        if self.are_kept:
            args = (query, *self._pair, *args[3:])
            return func(*args, **(kwargs or {}))
        for part in pair[len(self._pair) :]:
            _, heads, _, width = part.shape
            self._pair.append(part.new_empty(1, self._count, heads, width).transpose(1, 2))
        for whole, part in zip(self._pair, pair, strict=True):
            whole.narrow(2, self.place, part.shape[2]).copy_(part)
        raise _Kept


class _LookedUp:
    """Rows of a table, looked up when they are weighed and added up."""

    def __init__(self, table: Callable[..., Any], ids: torch.Tensor) -> None:
        self._table, self._ids = table, ids

    def __mul__(self, weights: torch.Tensor) -> _LookedUp:
        self._weights = weights
        return self

    def sum(self, axis: int) -> torch.Tensor:
        """Some of them at a time."""
        parts = zip(self._ids.split(ROWS), self._weights.split(ROWS), strict=True)
        return torch.cat([(self._table(ids) * weights).sum(axis) for ids, weights in parts])
