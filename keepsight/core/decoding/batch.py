"""A padded batch of sequences that decode together, one forward pass per step.

Each sequence was prefilled alone, on its own lane (law 2). Here the states are aligned at the
right, as one left-padded prefill would have left them. Sums over padded rows are added in another
order, so a batch promises the greedy tokens of float32, not equal bits.

Joining or leaving costs one copy; a step copies nothing. The rows in use come first, so a step
works on a view of the buffers. When a row leaves, the last row moves into its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from keepsight.core.decoding.lane_layer import CrossLayer, LaneLayer
from keepsight.core.decoding.state import restore_linear
from keepsight.core.engine import Run
from keepsight.core.kernels.grouped import grouped_queries
from keepsight.formats.package import storage_bytes
from keepsight.kinds import CacheLayer
from keepsight.models.families import Family
from keepsight.models.no_gradients import quietly
from keepsight.models.renamed import with_cache
from keepsight.models.upstream import DummyLayer, DynamicSlidingWindowLayer
from keepsight.system.interrupts import LATER

_WASTE = 4  # compact when more than one column in this many is unused
_ROUND = 64


class TokenSampler(Protocol):
    """Chooses the tokens of one sequence."""

    over: bool

    def take(self, logits: torch.Tensor) -> int:
        """Return the next token, and whether it is the last."""


@dataclass(frozen=True)
class _SequenceStates:
    """Where the states of one sequence are: a row in some layers."""

    layers: Sequence[CacheLayer]
    row: int
    length: int  # tokens of the sequence
    beside: int  # rows of its media in cross attention

    def tail(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer without padding: (heads, n, width)."""
        layer = self.layers[index]
        if isinstance(layer, CrossLayer):
            return layer.keys[self.row, :, : self.beside], layer.values[self.row, :, : self.beside]
        first = max(0, layer.keys.shape[-2] - self.length)
        return layer.keys[self.row, :, first:], layer.values[self.row, :, first:]


class _BatchedLayer(LaneLayer):
    """A full-attention layer of several sequences, with free rows behind the rows in use."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self._all = keys, values

    def use_rows(self, rows: int, length: int) -> None:
        """Use the first `rows` rows in the next steps."""
        keys, values = self._all
        self.hold(keys[:rows], values[:rows], length)

    def put(self, row: int, end: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one sequence into a row, aligned at `end`, and zero everything before it."""
        for room, states in zip(self._all, (keys, values), strict=True):
            room[row, :, : end - states.shape[-2]] = 0
            room[row, :, end - states.shape[-2] : end] = states


class Batch:
    """The states of all sequences that decode together, and their next positions."""

    def __init__(
        self, model: PreTrainedModel, family: Family, runs: Sequence[Run] = (), room: int = 0
    ) -> None:
        self._model, self._family = model, family
        self.runs: list[Run] = []
        self.length = 0  # columns in use
        self.columns = self.capacity = 0  # allocated
        self.copies = 0  # how often all rows were copied
        self._lengths: list[int] = []
        self._beside: list[int] = []
        self._seen: list[dict[str, torch.Tensor]] = []
        self._positions = torch.empty(0)
        self.cache = DynamicCache(config=model.config)
        if runs:
            self.join(runs, room)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self._lengths, default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all states, including free rows and columns."""
        tensors: list[torch.Tensor | None] = []
        for layer in self.cache.layers:
            tensors += [getattr(layer, "keys", None), getattr(layer, "values", None)]
            tensors += [state for _, _, state in _linear(layer)]
        return storage_bytes(t for t in tensors if t is not None and t.numel())

    # -- joining and leaving ---------------------------------------------------------------------

    @quietly
    def join(self, runs: Sequence[Run], room: int) -> None:
        """Add sequences with the states of their lanes. `room`: tokens that will follow."""
        came = [_on_lane(run) for run in runs]
        count = len(self.runs) + len(runs)
        longest = max(source.length for source in came)
        fits = count <= self.capacity and self.length + min(room, _ROUND) <= self.columns
        if fits and longest <= self.length:
            for row, source in enumerate(came, len(self.runs)):
                self._put(row, source)
            self._rearrange([*self._sources(), *came])
        else:
            self._lay([*self._sources(), *came], count, room)
        self._note(runs, came)
        self._follow()

    @quietly
    def absorb(self, other: Batch, room: int) -> None:
        """Add all rows of another batch, which cannot be used afterwards."""
        came = other._sources()
        self._lay([*self._sources(), *came], len(self.runs) + len(came), room)
        positions = torch.cat([self._positions, other._positions], dim=-2)
        self._note(other.runs, came, other._seen)
        self._positions = positions
        self._follow()

    @quietly
    def leave(self, run: Run) -> None:
        """Remove a sequence; the last row moves into its place."""
        row = self.runs.index(run)
        order = list(range(len(self.runs)))
        order[row] = order[-1]
        order.pop()
        sources = self._sources()
        if order and row < len(order):
            self._put(row, sources[order[row]])
        for name in ("runs", "_lengths", "_beside", "_seen"):
            held = getattr(self, name)
            setattr(self, name, [held[number] for number in order])
        self._positions = self._positions[..., order, :]
        if not order:
            return
        kept = [sources[number] for number in order]
        if (self.length - self.longest) * _WASTE > self.length:
            self._lay(kept, len(kept), self.columns - self.length)
        else:
            self._rearrange(kept)
        self._follow()

    @quietly
    def put_back(self, run: Run) -> None:
        """Copy everything this sequence has become back to its lane."""
        source = self._sources()[self.runs.index(run)]
        lane, end = run.lane, source.length
        for index, layer in enumerate(lane.cache.layers):
            theirs = source.layers[index]
            if isinstance(layer, CrossLayer | DummyLayer):
                continue
            if isinstance(layer, LaneLayer):
                keys, values = source.tail(index)
                start = layer.length
                layer.write(start, keys[None, :, start:], values[None, :, start:])
            elif isinstance(layer, DynamicSlidingWindowLayer):
                keys, values = source.tail(index)
                layer.keys, layer.values = keys[None].clone(), values[None].clone()
                layer.cumulative_length = end
            for what, number, state in _linear(theirs):
                restore_linear(layer, what, number, state[source.row : source.row + 1])
        lane.length = end

    def _sources(self) -> list[_SequenceStates]:
        both = zip(self._lengths, self._beside, strict=True)
        # Copy the list: its layers are replaced while rows move.
        layers = list(self.cache.layers)
        return [
            _SequenceStates(layers, row, length, beside)
            for row, (length, beside) in enumerate(both)
        ]

    def _note(
        self,
        runs: Iterable[Run],
        came: Sequence[_SequenceStates],
        seen: list[dict[str, torch.Tensor]] | None = None,
    ) -> None:
        runs = list(runs)
        have = [self._positions] if self.runs else []
        self._positions = torch.cat([*have, *(run.next_positions for run in runs)], dim=-2)
        self.runs += runs
        self._lengths += [source.length for source in came]
        self._beside += [source.beside for source in came]
        self._seen += seen if seen is not None else [self._see(run) for run in runs]

    def _see(self, run: Run) -> dict[str, torch.Tensor]:
        """The masks and media inputs that tokens after a prompt need."""
        end = len(run.prompt)
        return self._family.media_inputs(run.prompt.ids, run.prompt.grids, end, end + 1)

    # -- layout -----------------------------------------------------------------------------------

    def _put(self, row: int, source: _SequenceStates) -> None:
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, _BatchedLayer):
                layer.put(row, self.length, *source.tail(index))

    def _lay(self, sources: Sequence[_SequenceStates], capacity: int, room: int) -> None:
        """Copy all rows into larger buffers. If that fails, everything stays as it is."""
        before = self.length, self.columns, self.capacity
        self.copies += 1
        self.length = max(source.length for source in sources)
        self.columns = -(-(self.length + max(1, room)) // _ROUND) * _ROUND
        self.capacity = 1 << (capacity - 1).bit_length() if self.runs else capacity
        try:
            layers = list(self.cache.layers)
            for index, layer in enumerate(sources[0].layers):
                if isinstance(layer, LaneLayer) and not isinstance(layer, CrossLayer):
                    layers[index] = self._batched_layer(index, sources)
            self._rearrange(sources, layers)
        except BaseException:
            self.length, self.columns, self.capacity = before
            raise

    def _batched_layer(self, index: int, sources: Sequence[_SequenceStates]) -> _BatchedLayer:
        """A full-attention layer of all sequences, in new buffers."""
        keys, values = sources[0].layers[index].keys, sources[0].layers[index].values
        rooms = (
            x.new_zeros(self.capacity, x.shape[1], self.columns, x.shape[3]) for x in (keys, values)
        )
        layer = _BatchedLayer(*rooms)
        for row, source in enumerate(sources):
            layer.put(row, self.length, *source.tail(index))
        return layer

    def _rearrange(
        self, sources: Sequence[_SequenceStates], layers: list[CacheLayer] | None = None
    ) -> None:
        """Rebuild the states that have exactly one row per sequence and no free rows."""
        fresh = DynamicCache(config=self._model.config).layers
        layers = list(self.cache.layers) if layers is None else layers
        for index, layer in enumerate(layers):
            theirs = sources[0].layers[index]
            if isinstance(theirs, CrossLayer):
                layers[index] = _cross(index, sources)
            elif not isinstance(layer, _BatchedLayer) and not isinstance(theirs, DummyLayer):
                layers[index] = _fixed(fresh[index], index, sources, self.length)
        for layer in layers:  # assigned last: nothing below can fail
            if isinstance(layer, _BatchedLayer):
                layer.use_rows(len(sources), self.length)
        self.cache.layers = layers

    def _follow(self) -> None:
        """Reorder masks and media inputs like the rows."""
        padded = self.length - torch.tensor(self._lengths)[:, None]
        device = self._model.device
        self._mask = (torch.arange(self.columns) >= padded).long().to(device)
        media = _padded(self._seen)
        self._media = {name: tensor.to(device) for name, tensor in media.items()}

    # -- stepping --------------------------------------------------------------------------------

    @quietly
    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Run one token of each sequence through the model; return the logits, one row each."""
        device = self._model.device
        if self.length == self.columns:
            self._lay(self._sources(), len(self.runs), self.length // 2)
            self._follow()
        self.length += 1
        extra = self._family.step_inputs(len(tokens), self.length)
        with grouped_queries(device):
            output = self._model(
                **{name: tensor.to(device) for name, tensor in extra.items()},
                **self._media,
                input_ids=torch.tensor([[token] for token in tokens], device=device),
                position_ids=self._positions,
                attention_mask=self._mask[:, : self.length],
                **with_cache(self._model, self.cache),
                use_cache=True,
                logits_to_keep=1,
            )
        self._lengths = [length + 1 for length in self._lengths]
        self._positions = self._positions + 1
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def decode(self, samplers: Sequence[TokenSampler], logits: torch.Tensor) -> int:
        """Decode until every row has ended; return the number of steps.

        The row of a sequence that has ended is still computed; its token is not read.
        """
        steps = 0
        running = dict(enumerate(samplers))
        tokens = [0] * len(samplers)
        while True:
            LATER.check()
            for row in list(running):
                tokens[row] = running[row].take(logits[row : row + 1])
                if running[row].over:
                    del running[row]
            if not running:
                return steps
            logits = self.step(tokens)
            steps += 1


def _on_lane(run: Run) -> _SequenceStates:
    lane = run.lane
    beside = max((layer.length for layer in lane.cross), default=0)
    return _SequenceStates(lane.cache.layers, 0, lane.length, beside)


def _linear(layer: CacheLayer) -> Iterable[tuple[str, int, torch.Tensor]]:
    """The convolution and recurrent states of a layer."""
    for what in ("conv", "recurrent"):
        for number, state in getattr(layer, f"{what}_states", {}).items():
            if state is not None:
                yield what, number, state


def _cross(index: int, sources: Sequence[_SequenceStates]) -> CrossLayer:
    """Cross-attention states of several sequences, aligned at the left; padding is masked."""
    layer = CrossLayer()
    longest = max(source.beside for source in sources)
    filled = next((source for source in sources if source.beside), None)
    if filled is None:
        return layer
    keys, values = (
        x.new_zeros(len(sources), x.shape[0], longest, x.shape[2]) for x in filled.tail(index)
    )
    for row, source in enumerate(sources):
        if source.beside:
            keys[row, :, : source.beside], values[row, :, : source.beside] = source.tail(index)
    layer.hold(keys, values, longest)
    return layer


def _padded(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack tensors by name over all rows, with zeros where a row has less or nothing."""
    joined: dict[str, torch.Tensor] = {}
    for name in {name for row in rows for name in row}:
        have = [row[name] for row in rows if name in row]
        shape = [max(sizes) for sizes in zip(*(t.shape[1:] for t in have), strict=True)]
        joined[name] = have[0].new_zeros(len(rows), *shape)
        for number, row in enumerate(rows):
            if name in row:
                spot = joined[name][number]
                for axis, size in enumerate(row[name].shape[1:]):
                    spot = spot.narrow(axis, 0, size)
                spot.copy_(row[name][0])
    return joined


def _fixed(
    layer: CacheLayer, index: int, sources: Sequence[_SequenceStates], length: int
) -> CacheLayer:
    """Put sliding, convolution and recurrent states side by side in a new layer."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        tails = [source.tail(index) for source in sources]
        width = min(length, layer.sliding_window - 1)
        keys, values = (t.new_zeros(len(sources), t.shape[0], width, t.shape[2]) for t in tails[0])
        for row, (some_keys, some_values) in enumerate(tails):
            first = width - some_keys.shape[-2]
            keys[row, :, first:], values[row, :, first:] = some_keys, some_values
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values, layer.cumulative_length = keys, values, length
    for what, number, _ in _linear(sources[0].layers[index]):
        states = [getattr(s.layers[index], f"{what}_states")[number] for s in sources]
        rows = [x[s.row : s.row + 1] for x, s in zip(states, sources, strict=True)]
        restore_linear(layer, what, number, torch.cat(rows))
    return layer
