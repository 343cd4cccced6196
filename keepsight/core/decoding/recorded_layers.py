"""The inputs of a recorded step from its lanes, and the scratch lanes it is recorded over.

Each step gets the blocks of keys and values that its tokens see, the tokens' places in these
blocks, and masks. Of a layer with fixed-size state it gets that state, and the list writes into it
in place. The last inputs of a convolution are written beside the old ones and swapped in when the
whole list has run. So a list that fails leaves nothing that the model would not write again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from keepsight.core.decoding.lane_layer import LaneLayer, WindowLayer
from keepsight.core.decoding.lane_mixer import MixerLayer
from keepsight.core.decoding.state import Lane
from keepsight.core.kernels import attention
from keepsight.core.kernels.attention import (
    BLOCK,
    LaneBuffers,
    QueryRows,
    RowPadding,
    keys_read,
)
from keepsight.core.kernels.delta import BLOCK as RULE_BLOCK
from keepsight.core.kernels.delta import GRID, DeltaHeads, OpenSequence, PlacedSequence
from keepsight.core.kernels.passes import attention_here
from keepsight.core.kernels.recording import CannotRecord, Name

IDS, POSITIONS = ("ids", 0, None), ("positions", 0, None)
_INPUTS, _NEXT, _ROWS = "inputs", "next inputs", ("rows", 0, None)
_SCRATCH_ROWS = 11  # rows in the open block of a scratch lane; the other has none

Given = dict[Name, torch.Tensor]
Tokens = Sequence[Sequence[int]]


class Decoded(Protocol):
    """A sequence that decodes."""

    lane: Lane
    next_positions: torch.Tensor


def layers_of(lane: Lane) -> dict[int, LaneLayer]:
    """The layers of a lane with keys and values, by index."""
    found = {}
    for index, layer in enumerate(lane.cache.layers):
        if type(layer) in (LaneLayer, WindowLayer):
            found[index] = layer
        elif type(layer) is not MixerLayer:
            raise CannotRecord(f"a layer keeps its state in a {type(layer).__name__}")
    return found


def mixers_of(lane: Lane) -> dict[int, MixerLayer]:
    """The layers of a lane with a state of fixed size, by index."""
    layers = enumerate(lane.cache.layers)
    return {index: layer for index, layer in layers if type(layer) is MixerLayer}


def open_block(runs: Sequence[Decoded], count: int) -> int | None:
    """Where the open blocks of the rules begin; a list is valid for one such place. None if a step
    does more than extend them, or its tokens read different numbers of keys; then the model runs
    it."""
    if count > 1 and not all(_reads_at_once(run.lane, count) for run in runs):
        return None
    mixers = mixers_of(runs[0].lane).values()
    if len(runs) > 1:
        return None if mixers else 0
    begins = {mixer.block(count) for mixer in mixers}
    if None in begins:
        return None
    rules = {mixer.sequence.block for mixer in mixers if mixer.sequence is not None}
    return rules.pop() if rules else 0


def _reads_at_once(lane: Lane, count: int) -> bool:
    """Whether all tokens of a step read the same keys."""
    sights = {layer.sight: layer for layer in layers_of(lane).values()}
    first, last = lane.length, lane.length + count - 1
    return all(_keys_read(one, first) == _keys_read(one, last) for one in sights.values())


def _keys_read(layer: LaneLayer, place: int) -> tuple[int, int]:
    """Where the keys that the token at a place reads begin and end."""
    return keys_read(layer.first_seen_by(place) or 0, place + 1)


def blocks_of(lane: Lane) -> int:
    """The number of such places."""
    has_rule = any(mixer.sequence is not None for mixer in mixers_of(lane).values())
    return GRID // RULE_BLOCK if has_rule else 1


# -- inputs of a step -----------------------------------------------------------------------------


def step_inputs(
    runs: Sequence[Decoded], tokens: Tokens, names: Collection[Name], copied: bool
) -> Given:
    """The inputs of a step; with `copied`, states that it writes into are copies."""
    count = len(tokens[0])
    given: Given = {IDS: torch.tensor(tokens)}
    positions = [run.next_positions for run in runs]
    together = positions[0] if len(runs) == 1 else torch.cat(positions, dim=-2)
    given[POSITIONS] = together if count == 1 else together + torch.arange(count)
    for row, run in enumerate(runs):
        layers = layers_of(run.lane)
        rooms = {index: layer.make_room(count) for index, layer in layers.items()}
        _add_row(given, row, layers, rooms, run.lane.length, count, names)
    for index, mixer in mixers_of(runs[0].lane).items():
        inputs = mixer.inputs()
        if inputs is None:
            raise CannotRecord("a layer holds nothing yet")
        given[_INPUTS, 0, index], given[_NEXT, 0, index] = inputs, torch.empty_like(inputs)
        if mixer.sequence is not None:
            for what, tensor in mixer.sequence.tensors.items():
                given[what, 0, index] = tensor.clone() if copied else tensor
            first = mixer.sequence.count - mixer.sequence.block
            given.setdefault(_ROWS, torch.arange(first, first + count))
    return given


def advance(runs: Sequence[Decoded], given: Given, count: int) -> None:
    """Update the lanes after the list has run: they hold its tokens."""
    for run in runs:
        for layer in layers_of(run.lane).values():
            layer.advance(count)
        for index, mixer in mixers_of(run.lane).items():
            mixer.take(given[_NEXT, 0, index])
            if mixer.sequence is not None:
                mixer.sequence.count += count


def written(runs: Sequence[Decoded], given: Given | None, count: int) -> list[torch.Tensor]:
    """Keys and values of the new tokens, and the states that changed with them: from the list's
    inputs if given, otherwise from the model. Keys are copied."""
    found = []
    for run in runs:
        start = run.lane.length
        for layer in layers_of(run.lane).values():
            rooms = [room for room in (layer.key_buffer, layer.value_buffer) if room is not None]
            found += [room[:, :, start : start + count].clone() for room in rooms]
        for index, mixer in mixers_of(run.lane).items():
            inputs = given[_NEXT, 0, index] if given is not None else mixer.inputs()
            states = {} if mixer.sequence is None else mixer.sequence.tensors
            if given is not None:
                states = {what: given[what, 0, index] for what in states}
            found += [one for one in (inputs, *states.values()) if one is not None]
    return found


def _add_row(
    given: Given,
    row: int,
    layers: Mapping[int, LaneLayer],
    rooms: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    length: int,
    count: int,
    names: Collection[Name] | None,
) -> None:
    """Add the inputs of one sequence: the blocks that its new tokens see, their places in these
    blocks, and the masks."""
    ranges: dict[object, tuple[int, int]] = {}
    for index, layer in layers.items():
        keys, values = rooms[index]
        if layer.sight not in ranges:
            begin, _ = ranges[layer.sight] = _keys_read(layer, length)
            given["places", row, layer.sight] = torch.arange(length, length + count) - begin
        begin, end = ranges[layer.sight]
        given["k", row, index] = keys[:, :, begin:end]
        given["v", row, index] = values[:, :, begin:end]
    for name in names or ():
        _, of, kind = name
        if isinstance(kind, _Seen) and of == row:
            layer = layers[kind.layer]
            given[name] = _mask(layer, length, count, *ranges[layer.sight], kind)


@dataclass(frozen=True)
class _Seen:
    """Which layers share a mask: those with the same view, per number of queries in a group."""

    layer: int
    group: int
    dtype: torch.dtype
    filling: RowPadding


def _mask(
    layer: LaneLayer, length: int, count: int, begin: int, end: int, of: _Seen
) -> torch.Tensor:
    """Which keys each new token sees, one row per query of a group. Padding rows see all."""
    group, dtype = of.group, of.dtype
    rows = of.filling.fill(group * count)
    values = torch.zeros(1, 1, rows, end - begin, dtype=dtype)
    for number in range(count):
        place = length + number
        own = values[0, 0, number : group * count : count]
        own[:, place + 1 - begin :] = -torch.inf
        if (first := layer.first_seen_by(place)) is not None and first > begin:
            own[:, : first - begin] = -torch.inf
    return values


# -- scratch lanes --------------------------------------------------------------------------------


class Scratch:
    """Empty lanes that resemble those of some sequences, to record a step over."""

    def __init__(
        self,
        runs: Sequence[Decoded],
        count: int,
        query_rows: QueryRows,
        place: int,
        claimed: int,
    ) -> None:
        layers, mixers = layers_of(runs[0].lane), mixers_of(runs[0].lane)
        positions, rows = runs[0].next_positions, len(runs)
        self.given: Given = {
            IDS: torch.full((rows, count), place % 2),
            POSITIONS: positions.new_zeros(*positions.shape[:-2], rows, count)
            + torch.arange(place, place + count),
        }
        rooms = _scratch_buffers(layers)
        groups = {
            (heads // keys, dtype, filling)
            for (heads, keys, _, dtype), filling in query_rows.fillings.items()
            if filling is not None
        }
        sights = {layer.sight: index for index, layer in reversed(layers.items())}
        for row in range(rows):
            masks = [("mask", row, _Seen(i, *group)) for i in sights.values() for group in groups]
            _add_row(self.given, row, layers, rooms, place, count, masks)
        if mixers:
            self.given[_ROWS] = torch.arange(count) + place % _SCRATCH_ROWS
        self.attending = _RecordedAttention(self.given, rows, sights, query_rows)
        self.layers: list[_Layer | _Mixer] = [
            _Layer(index, layers[index], self.given, rows, claimed)
            if index in layers
            else _Mixer(index, mixers[index], self.given)
            for index in sorted([*layers, *mixers])
        ]


def _scratch_buffers(
    layers: Mapping[int, LaneLayer],
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Buffers of two blocks; layers of one kind share a buffer."""
    memory: dict[tuple[object, ...], torch.Tensor] = {}

    def room(like: torch.Tensor | None) -> torch.Tensor:
        if like is None:
            raise CannotRecord("a layer holds nothing yet")
        shape = (*like.shape[:2], 2 * BLOCK, like.shape[-1])
        return memory.setdefault((*shape, like.dtype), like.new_zeros(shape))

    return {
        index: (room(layer.key_buffer), room(layer.value_buffer)) for index, layer in layers.items()
    }


class _Layer(LaneLayer):
    """One layer of all lanes while a step is recorded."""

    def __init__(self, index: int, like: LaneLayer, given: Given, rows: int, claimed: int) -> None:
        super().__init__()
        self.index, self.like = index, like
        self._given, self._rows, self._claimed = given, rows, claimed
        self.is_initialized, self.is_sliding = True, like.is_sliding

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a row for each token into the buffer of each lane."""
        for row in range(self._rows):
            places = self._given["places", row, self.like.sight]
            for what, states in (("k", key_states), ("v", value_states)):
                self._given[what, row, self.index].index_copy_(2, places, states[row : row + 1])
        here = attention_here()
        if here is not None:
            here.note(key_states, value_states, [self])
        return key_states, value_states

    def get_seq_length(self, *more: object, **options: object) -> int:
        """The number of tokens that the lanes claim to hold."""
        return self._claimed

    def get_mask_sizes(self, query_length: int, *more: object, **named: object) -> tuple[int, int]:
        """That number, plus the new tokens."""
        return self._claimed + query_length, 0


class _Mixer(MixerLayer):
    """A layer with a state of fixed size while a step is recorded."""

    def __init__(self, index: int, like: MixerLayer, given: Given) -> None:
        super().__init__()
        self._index, self._given = index, given
        inputs, sequence = like.inputs(), like.sequence
        if inputs is None:
            raise CannotRecord("a layer holds nothing yet")
        for what in (_INPUTS, _NEXT):
            given[what, 0, index] = torch.zeros_like(inputs)
        self.has_previous_state[0] = True
        if sequence is not None:
            own = {what: torch.zeros_like(one) for what, one in sequence.tensors.items()}
            given.update({(what, 0, index): tensor for what, tensor in own.items()})
            rows = given[_ROWS]
            self._placed = PlacedSequence(sequence.heads, own, sequence.block, rows)

    def opened(self, heads: DeltaHeads) -> OpenSequence:
        """The recorded sequence."""
        return self._placed

    def inputs(self) -> torch.Tensor:
        """The last inputs of the convolution."""
        return self._given[_INPUTS, 0, self._index]

    def take(self, inputs: torch.Tensor) -> None:
        """Write the new inputs beside the old ones."""
        self._given[_NEXT, 0, self._index].copy_(inputs)


class _RecordedAttention:
    """Attention over the buffers and masks that each step is given."""

    def __init__(
        self, given: Given, rows: int, sights: dict[tuple[int, bool], int], query_rows: QueryRows
    ) -> None:
        self._given, self._count, self._sights = given, rows, sights
        self._query_rows = query_rows
        self._noted: dict[int, tuple[torch.Tensor, torch.Tensor, _Layer]] = {}

    def note(self, keys: torch.Tensor, values: torch.Tensor, layers: Sequence[LaneBuffers]) -> None:
        """Note the layer of these keys and values."""
        if isinstance(layers[0], _Layer):
            self._noted[id(keys)] = keys, values, layers[0]

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        noted = self._noted.get(id(key))
        if noted is None or noted[1] is not value or (mask is not None and mask.shape[1] != 1):
            raise CannotRecord("attention is called with other keys, or with a mask per head")
        layer = noted[2]
        rows = [self._row(query[row : row + 1], row, layer, scale) for row in range(self._count)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _row(
        self, query: torch.Tensor, row: int, layer: _Layer, scale: float | None
    ) -> torch.Tensor:
        """Attention over one lane, as in `kernels.attention`."""
        keys, values = (self._given[what, row, layer.index] for what in "kv")
        _, heads, count, width = query.shape
        filling = self._query_rows.of(attention.heads_of(query, keys, values))
        mask = None
        if filling is not None:
            sight, group = self._sights[layer.like.sight], heads // keys.shape[1]
            mask = self._given.get(("mask", row, _Seen(sight, group, query.dtype, filling)))
        if filling is None or mask is None:
            raise CannotRecord("its queries are grouped differently than was tried")
        rows = query.reshape(1, keys.shape[1], -1, width)
        wanted = rows.shape[2]
        if missing := filling.fill(wanted) - wanted:
            rows = functional.pad(rows, (0, 0, 0, missing))
        found = attention.plain(rows, keys, values, mask, scale, filling)
        return found[:, :, :wanted].reshape(1, heads, count, -1)
