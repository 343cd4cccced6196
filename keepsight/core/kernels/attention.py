"""Attention whose result for a row depends neither on the number of rows nor on the lane's length.

Torch's kernel may add in another order if it reads another number of keys. So how many it reads for
a row follows from the last key that this row sees: keys and values lie in buffers with zeros behind
the end, and a numeric mask says which keys a row sees. Rows that read the same keys go in one call,
padded to a multiple of a number found by trial; it depends on the processor and the width. On some
processors each such multiple is a batch entry of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from keepsight.core.kernels import flash

if TYPE_CHECKING:
    from keepsight.core.decoding.lane_layer import LaneLayer

_plain = _in_scripts = functional.scaled_dot_product_attention
BLOCK = 512  # keys the kernel reads at a time
_STEP, _FAR_STEP = 128, 256  # keys are read in multiples of these: near the first key, and far
_FAR = 2048  # keys from which on few calls are worth more than few keys
_QUERIES = 256  # rows per call, so that keys none of them sees are not read
_LEAST = 64  # rows per call where its mask would have more numbers than the next line allows
_NUMBERS = 1 << 20  # numbers in the mask of a call
_KEPT = 1 << 21  # numbers in masks that a pass keeps for its other layers; the rest is made again
KEYS_READ = f"keys read by {_STEP}, from {_FAR} on by {_FAR_STEP}"  # in namespaces, also on disk
# Passes of a trial, and pieces of them that must be equal. The second is as long as calls are.
_TRIED = {
    (0, 1100): (
        *((0, 1), (0, 2), (0, 7), (1, 9), (5, 300), (127, 128), (128, 129), (200, 203)),
        *((300, 301), (380, 388), (509, 514), (511, 512), (512, 513), (513, 516), (600, 777)),
        *((700, 701), (777, 1100), (890, 900), (1023, 1024), (1024, 1025), (1090, 1100)),
        *((1099, 1100),),
    ),
    (_FAR, _FAR + _QUERIES): (
        *((_FAR, _FAR + 1), (_FAR + 3, _FAR + 60), (_FAR + 50, _FAR + 250)),
        *((_FAR + 127, _FAR + 135), (_FAR + _QUERIES - 1, _FAR + _QUERIES)),
    ),
}
_WINDOWS = (64, 600)  # keys that rows of a trial see
_AMPLIFIED = 3e4  # scores of a trial are rounding errors: at least this large, and distinct


def keys_read(first: int, behind: int) -> tuple[int, int]:
    """Which keys the kernel reads for a row that sees some from `first` on and none from `behind`
    on. As nothing else decides this, the row's bits are the same in every pass."""
    step = _STEP if behind <= _FAR else _FAR_STEP
    return first // BLOCK * BLOCK, -(-behind // step) * step


Heads = tuple[int, int, int, torch.dtype]  # of queries, of keys, their width and dtype


@dataclass(frozen=True)
class RowPadding:
    """Pads rows of queries to a multiple of `step`. With `apart`, each `step` rows are one sequence
    of a batch, so the kernel always sees the same number of rows."""

    step: int = 4
    apart: bool = False

    def __str__(self) -> str:
        return f"Filling(step={self.step}, apart={self.apart})"  # in namespaces, also on disk

    def fill(self, rows: int) -> int:
        return -(-rows // self.step) * self.step


def heads_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Heads:
    """What decides the kernel; with `plain` keys and values have one width."""
    width = max(query.shape[-1], value.shape[-1])
    return query.shape[1], key.shape[1], width, query.dtype


USUAL = RowPadding()
ROW_PADDINGS = (
    *map(RowPadding, (4, 8, 16, 32, 64)),
    *(RowPadding(step, True) for step in (16, 8, 32, 4)),
)


Edges = Sequence[tuple[int, int]]


@dataclass(eq=False)
class _Piece:
    """Rows of queries that read the same keys, and the mask of what they see of these: made when it
    is asked for, and kept where it is small."""

    rows: slice
    keys: slice
    make: Callable[[], torch.Tensor]
    mask: torch.Tensor | None = None


def plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    filling: RowPadding,
) -> torch.Tensor:
    """Torch's own kernel, over padded rows."""
    _, heads, count, width = query.shape
    if (own := value.shape[-1]) != width:  # MLA: torch's kernel for it adds in another order
        scale, wide = scale or width**-0.5, max(own, width)
        query, key, value = (_widened(x, wide) for x in (query, key, value))
        return plain(query, key, value, mask, scale, filling)[..., :own]
    if not filling.apart or count == filling.step:
        return _plain(query.contiguous(), key, value, attn_mask=mask, scale=scale)
    blocks = count // filling.step
    query = query.reshape(heads, blocks, filling.step, width).transpose(0, 1).contiguous()
    key, value = (one.expand(blocks, -1, -1, -1) for one in (key, value))
    mask = mask.reshape(blocks, 1, filling.step, -1)
    found = _plain(query, key, value, attn_mask=mask, scale=scale)
    return found.transpose(0, 1).reshape(1, heads, count, width)


def _widened(rows: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - rows.shape[-1]
    return functional.pad(rows, (0, missing)) if missing else rows


class QueryRows:
    """How to pad rows of queries, per kind of attention; tried when a kind is first met. `windows`:
    whether layers see the last keys only."""

    def __init__(
        self, windows: bool = False, fillings: Mapping[Heads, RowPadding | None] | None = None
    ) -> None:
        self.windows = windows
        self.fillings: dict[Heads, RowPadding | None] = dict(fillings or {})

    def of(self, heads: Heads) -> RowPadding | None:
        """The padding for a kind, or None if no padding makes rows independent."""
        if heads not in self.fillings:
            self.fillings[heads] = _padding_for(heads, self.windows)
        return self.fillings[heads]


class OverLanes:
    """What the layers of one pass wrote to their lanes, by the keys that they returned. A later
    layer may share them (Gemma 4)."""

    def __init__(self) -> None:
        self._held: dict[torch.Tensor, tuple[torch.Tensor, Sequence[Any], Edges | None]] = {}

    def note(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        layers: Sequence[LaneLayer],
        edges: Edges | None = None,
    ) -> None:
        """Note the layers whose buffers the next call over these keys and values reads; `edges`:
        the rows of each sequence, laid end to end; None for one alone."""
        self._held[keys] = values, layers, edges

    def _noted(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[Sequence[Any], Edges | None] | None:
        held = self._held.get(key)
        return held[1:] if held is not None and held[0] is value else None

    def _apart(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> list[tuple[Any, torch.Tensor]]:
        """Sequences that lie end to end: the layer of each, and its rows."""
        layers, edges = self._noted(key, value) or ((), None)
        pairs = () if edges is None else zip(layers, edges, strict=True)
        return [(layer, query[:, :, start:stop]) for layer, (start, stop) in pairs]


class Attention(OverLanes):
    """The attention of one pass; layers with the same view share their masks."""

    def __init__(self, query_rows: QueryRows, doubts: list[str]) -> None:
        super().__init__()
        self._query_rows, self._doubts = query_rows, doubts
        self._seen: dict[tuple[object, ...], torch.Tensor] = {}
        self._pieces: dict[tuple[object, ...], list[_Piece]] = {}
        self._room = _KEPT

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """`scaled_dot_product_attention` over sequences that each have their own buffers."""
        if mask is not None and (mask.dim() != 4 or mask.shape[1] != 1):
            self._doubts.append("attention has a separate mask per head")
            return _plain(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=True)
        heads = heads_of(query, key, value)
        filling = self._query_rows.of(heads)
        if filling is None:
            self._doubts.append(
                f"attention of {heads[0]} heads of {heads[2]} depends on the number of rows"
            )
            filling = USUAL
        if lanes := self._apart(query, key, value):
            rows = [self._on_its_lane(own, layer, scale, filling) for layer, own in lanes]
            return rows[0] if len(rows) == 1 else torch.cat(rows, dim=2)
        sees_all = mask is None and not causal and query.shape[-2] > 1
        rows = []
        for row, rooms in enumerate(self._rooms(key, value)):
            own = mask if mask is None or mask.shape[0] == 1 else mask[row : row + 1]
            rows.append(self._row(query[row : row + 1], *rooms, own, sees_all, scale, filling))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _on_its_lane(
        self, query: torch.Tensor, layer: Any, scale: float | None, filling: RowPadding
    ) -> torch.Tensor:
        """The last tokens of one lane over all that they see of it."""
        seen, (count, length) = None, (query.shape[-2], layer.length)
        if layer.sight[0]:
            name = (layer.sight, length, count)
            if name not in self._seen:
                self._seen[name] = seen_by_the_last(layer, length, count)
            seen = self._seen[name]
        rooms = layer.key_buffer, layer.value_buffer, length
        return self._row(query, *rooms, seen, False, scale, filling)

    def _rooms(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """For each sequence: keys and values in whole blocks, and their number."""
        if noted := self._noted(key, value):
            layer = noted[0][0]
            return [(layer.key_buffer, layer.value_buffer, layer.length)]
        length = key.shape[-2]
        more = (0, 0, 0, -length % BLOCK)
        key, value = functional.pad(key, more), functional.pad(value, more)
        return [(key[i : i + 1], value[i : i + 1], length) for i in range(key.shape[0])]

    def _row(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        length: int,
        mask: torch.Tensor | None,
        sees_all: bool,
        scale: float | None,
        filling: RowPadding,
    ) -> torch.Tensor:
        _, heads, count, width = query.shape
        group, found = heads // keys.shape[1], []
        # Masks are told apart by which object they are.
        name = (mask, sees_all, count, length, group, query.dtype, filling.step)
        if name not in self._pieces:
            self._pieces[name] = _cut(*name)
        for piece in self._pieces[name]:
            rows = query[:, :, piece.rows].reshape(1, keys.shape[1], -1, width)
            wanted = rows.shape[2]
            if missing := filling.fill(wanted) - wanted:
                rows = functional.pad(rows, (0, 0, 0, missing))
            seen_keys, seen_values = (x[:, :, piece.keys] for x in (keys, values))
            rows = plain(rows, seen_keys, seen_values, self._mask_of(piece), scale, filling)
            found.append(rows[:, :, :wanted].reshape(1, heads, wanted // group, -1))
        return found[0] if len(found) == 1 else torch.cat(found, dim=2)

    def _mask_of(self, piece: _Piece) -> torch.Tensor:
        if piece.mask is not None:
            return piece.mask
        mask = piece.make()
        if mask.numel() <= self._room:
            self._room -= mask.numel()
            piece.mask = mask
        return mask


class LaneAttention(OverLanes):
    """Torch's attention for sequences laid end to end, each over its own lane: to rounding."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """`scaled_dot_product_attention` over sequences that each have their own buffers."""
        lanes = self._apart(query, key, value)
        if not lanes:
            return _plain(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=True)
        rows = [self._on_its_lane(own, layer, scale) for layer, own in lanes]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=2)

    def _on_its_lane(self, query: torch.Tensor, layer: Any, scale: float | None) -> torch.Tensor:
        """The last tokens of one lane over what they see of it."""
        count, length = query.shape[2], layer.length
        window, chunked = layer.sight
        first = layer.first_seen_by(length - count)
        keys, values = (x[:, :, first:length] for x in (layer.key_buffer, layer.value_buffer))
        if flash.fits(query, values) and not (chunked and count > 1):
            near = window if window and count > 1 else None
            return flash.at_the_end(query, keys, values, scale, near)
        if count == 1:
            return _plain(query, keys, values, scale=scale, enable_gqa=True)
        seen = seen_by_the_last(layer, length, count)[..., first:].to(query.device)
        if query.is_cuda:  # its kernels take no groups with masks
            group = query.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        return _plain(query, keys, values, seen, scale=scale, enable_gqa=not query.is_cuda)


def read_at_once(
    query_rows: QueryRows, heads: Heads, count: int, length: int
) -> tuple[int, torch.Tensor] | None:
    """Of the last `count` tokens of a lane of `length`: how many keys they read, and the mask of
    their filled rows; None if more than one call is needed."""
    filling, (queries, keys, _, dtype) = query_rows.of(heads), heads
    if filling is None:
        return None
    pieces = _cut(None, False, count, length, queries // keys, dtype, filling.step)
    if len(pieces) > 1:
        return None
    mask = pieces[0].make()
    if filling.apart and mask.shape[-2] != filling.step:
        return None
    return pieces[0].keys.stop, mask


def attend_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Torch's own kernel, for scripts."""
    return _in_scripts(query, key, value, mask, 0.0, False, scale=scale)


def seen_by_the_last(layer: LaneLayer, length: int, count: int) -> torch.Tensor:
    """Which keys of a lane its last tokens see."""
    places, own = torch.arange(length), torch.arange(length - count, length)[:, None]
    firsts = torch.tensor([layer.first_seen_by(int(place)) for place in own])[:, None]
    return ((places >= firsts) & (places <= own))[None, None]


def _cut(
    given: torch.Tensor | None,
    sees_all: bool,
    count: int,
    length: int,
    group: int,
    dtype: torch.dtype,
    step: int,
) -> list[_Piece]:
    """Cut rows of queries into pieces that read the same keys. `given`: a mask; `sees_all`: whether
    all keys are seen without one; `count` and `length`: the numbers of rows and of keys."""
    firsts = [0] * count
    behind = [length] * count if sees_all else list(range(length - count + 1, length + 1))
    if given is not None:
        given = given[..., :length]
        seen = _seen(given[0, 0])
        firsts = _first(seen).tolist()
        behind = [length - skipped for skipped in _first(seen.flip(-1)).tolist()]
    read = [keys_read(*both) for both in zip(firsts, behind, strict=True)]
    pieces, start = list[_Piece](), 0
    for stop in range(1, count + 1):
        most = max(_LEAST, min(_QUERIES, _NUMBERS // (group * (read[start][1] - read[start][0]))))
        if stop < count and read[stop] == read[start] and stop - start < most:
            continue
        rows, keys = slice(start, stop), slice(*read[start])
        make = partial(_mask, given, behind, rows, keys, group, dtype, step)
        pieces.append(_Piece(rows, keys, make))
        start = stop
    return pieces


def _mask(
    given: torch.Tensor | None,
    behind: list[int],
    rows: slice,
    keys: slice,
    group: int,
    dtype: torch.dtype,
    step: int,
) -> torch.Tensor:
    """What some rows see of some keys, as numbers to add; once for each head of a group."""
    count, width = rows.stop - rows.start, keys.stop - keys.start
    mask = torch.zeros(1, 1, -(-count * group // step) * step, width, dtype=dtype)
    own = mask[0, 0, : count * group].view(group, count, width)
    if given is None:
        least = behind[rows.start]
        places, ends = torch.arange(least, keys.stop), torch.tensor(behind[rows])
        own[..., least:].masked_fill_(places >= ends[:, None], -torch.inf)
        return mask
    one = given[0, 0, rows, keys]
    own[..., one.shape[-1] :] = -torch.inf
    if one.dtype == torch.bool:
        own[..., : one.shape[-1]].masked_fill_(~one, -torch.inf)
    else:
        own[..., : one.shape[-1]] = one
    return mask


def _seen(rows: torch.Tensor) -> torch.Tensor:
    """Which keys are seen, by a mask of truths or of numbers to add."""
    return rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min


def _first(found: torch.Tensor) -> torch.Tensor:
    """The place of the first True in the last dimension."""
    return found.to(torch.uint8).argmax(-1)


def _padding_for(heads: Heads, windows: bool) -> RowPadding | None:
    """The padding that makes rows of this kind independent of neighbouring rows and of the lane's
    length: tried in one call, in pieces and one by one. With `windows` also for rows that see the
    last keys only."""
    queries, keys, width, dtype = heads
    generator = torch.Generator().manual_seed(queries * 31 + width)

    order = torch.randperm(width // 2, generator=generator)

    def noise(count: int, sign: int) -> torch.Tensor:
        half = torch.randn(1, count, _FAR + _QUERIES, width // 2, generator=generator).to(dtype)
        odd = (0, width - 2 * (width // 2))
        return functional.pad(torch.cat([half, sign * half[..., order]], -1), odd)

    # Products cancel except for rounding.
    query, key, value = noise(queries, 1), noise(keys, -1), noise(keys, 1)

    def attended(start: int, stop: int, window: int | None, rows: QueryRows) -> torch.Tensor:
        """Some rows of queries over the keys they see: all up to their last, or a window."""
        own, mask = (query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop]), None
        if window is not None:
            back = torch.arange(start, stop)[:, None] - torch.arange(stop)[None]
            mask = ((back >= 0) & (back < window))[None, None]
        return Attention(rows, [])(*own, mask, mask is None, _AMPLIFIED)

    def are_equal(window: int | None, rows: QueryRows) -> bool:
        for (first, last), pieces in _TRIED.items():
            wanted = attended(first, last, window, rows)
            for start, stop in pieces:
                some = wanted[:, :, start - first : stop - first]
                if not torch.equal(attended(start, stop, window, rows), some):
                    return False
        return True

    for filling in ROW_PADDINGS:
        rows = QueryRows(windows, {heads: filling})
        if all(are_equal(window, rows) for window in (None, *(_WINDOWS if windows else ()))):
            return filling
    return None
