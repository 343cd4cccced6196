"""Several sequences that decode together: one forward pass for all of them each step.

Each was prefilled alone, on its own lane (law 2). Here their states are laid side by side, aligned
at the right, as one left-padded prefill would have left them. Sums over padded rows are ordered in
another way, so a batch promises the greedy tokens of float32 and not the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicSlidingWindowLayer

from keepsight.engine import Run, grouped_queries
from keepsight.families import Family
from keepsight.state import CrossLayer, LaneLayer, restore_linear


class Taker(Protocol):
    """Takes the tokens of one sequence."""

    over: bool

    def take(self, logits: torch.Tensor) -> int:
        """The next token; `over` is true after the last."""


class Batch:
    """The memory of some sequences and their next positions."""

    def __init__(
        self, model: PreTrainedModel, family: Family, runs: Sequence[Run], room: int
    ) -> None:
        self._model, self._family = model, family
        lengths = torch.tensor([run.lane.length for run in runs])
        self._positions = torch.cat([run.next_positions for run in runs], dim=-2)
        self.length = int(lengths.max())
        padded = self.length - lengths[:, None]
        self._mask = (torch.arange(self.length + room) >= padded).long().to(model.device)
        self._media = _padded([self._seen(run) for run in runs])
        self.cache = DynamicCache(config=model.config)
        for index, layer in enumerate(runs[0].lane.cache.layers):
            lanes = [run.lane.cache.layers[index] for run in runs]
            if isinstance(layer, DummyLayer):
                continue
            if isinstance(layer, CrossLayer):
                self.cache.layers[index] = _cross(lanes)
            elif isinstance(layer, LaneLayer):
                self.cache.layers[index] = _full(lanes, self.length + room)
            else:
                _fixed(self.cache.layers[index], lanes, self.length)

    def _seen(self, run: Run) -> dict[str, torch.Tensor]:
        """What the tokens behind a prompt see of its media."""
        end = run.lane.length
        return self._family.media_inputs(run.prompt.ids, run.prompt.grids, end, end + 1)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """One token of each sequence through the model; the logits behind them, a row for each."""
        device = self._model.device
        self.length += 1
        if self.length > self._mask.shape[1]:
            longer = self._mask.new_ones(len(self._mask), self._mask.shape[1])
            self._mask = torch.cat([self._mask, longer], dim=1)
        extra = self._family.step_inputs(len(tokens), self.length)
        with grouped_queries(device):
            output = self._model(
                **{n: tensor.to(device) for n, tensor in {**extra, **self._media}.items()},
                input_ids=torch.tensor([[token] for token in tokens], device=device),
                position_ids=self._positions,
                attention_mask=self._mask[:, : self.length],
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self._positions = self._positions + 1
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def _aligned(rows: Sequence[torch.Tensor], length: int, room: int) -> torch.Tensor:
    """Keys or values of several sequences below each other, aligned at `length`, zeros around."""
    first = rows[0]
    joined = first.new_zeros(len(rows), first.shape[1], room, first.shape[3])
    for number, row in enumerate(rows):
        joined[number, :, length - row.shape[-2] : length] = row[0]
    return joined


def _full(lanes: Sequence[Any], room: int) -> LaneLayer:
    length = max(lane.length for lane in lanes)
    layer = LaneLayer()
    layer.hold(
        _aligned([lane.keys for lane in lanes], length, room),
        _aligned([lane.values for lane in lanes], length, room),
        length,
    )
    return layer


def _cross(lanes: Sequence[Any]) -> CrossLayer:
    """The media of several sequences, aligned at the left; nobody sees the zeros behind them."""
    layer = CrossLayer()
    longest = max(lane.length for lane in lanes)
    filled = next((lane for lane in lanes if lane.length), None)
    if filled is None:
        return layer
    keys, values = (
        x.new_zeros(len(lanes), x.shape[1], longest, x.shape[3])
        for x in (filled.keys, filled.values)
    )
    for row, lane in enumerate(lanes):
        if lane.length:
            keys[row, :, : lane.length] = lane.keys[0]
            values[row, :, : lane.length] = lane.values[0]
    layer.hold(keys, values, longest)
    return layer


def _padded(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One tensor of each name for all rows, zeros where a row has less or nothing."""
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


def _fixed(layer: Any, lanes: Sequence[Any], length: int) -> None:
    """Sliding, convolution and recurrent states side by side."""
    if isinstance(layer, DynamicSlidingWindowLayer) and lanes[0].is_initialized:
        width = max(lane.keys.shape[-2] for lane in lanes)
        keys = _aligned([lane.keys for lane in lanes], width, width)
        values = _aligned([lane.values for lane in lanes], width, width)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values, layer.cumulative_length = keys, values, length
    for what in ("conv", "recurrent"):
        for number, state in getattr(lanes[0], f"{what}_states", {}).items():
            if state is not None:
                states = [getattr(lane, f"{what}_states")[number] for lane in lanes]
                restore_linear(layer, what, number, torch.cat(states))


def decode_together(batch: Batch, takers: Sequence[Taker], logits: torch.Tensor) -> int:
    """Let each row take tokens until all have ended; the number of steps that took.

    The row of a sequence that has ended goes on with a token that nobody reads.
    """
    steps = 0
    running = dict(enumerate(takers))
    tokens = [0] * len(takers)
    while True:
        for row in list(running):
            tokens[row] = running[row].take(logits[row : row + 1])
            if running[row].over:
                del running[row]
        if not running:
            return steps
        logits = batch.step(tokens)
        steps += 1
