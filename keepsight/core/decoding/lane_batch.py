"""Sequences that decode together, each on its own lane, with the bits that each has alone.

Linear layers read their weights once for all rows; attention runs per lane. So joining and leaving
copy nothing, nothing is padded, and no row depends on the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from keepsight.core.decoding.batch import Batch, TokenSampler
from keepsight.core.decoding.lane_layer import LaneLayer
from keepsight.core.decoding.lane_mixer import MixerLayer, MixerRows
from keepsight.core.decoding.recorded_steps import decode
from keepsight.core.engine import Run
from keepsight.core.kernels.grouped import grouped_queries
from keepsight.core.kernels.passes import attention_here, running
from keepsight.models.families import Family
from keepsight.models.no_gradients import quietly
from keepsight.models.renamed import with_cache


class _Rows(LaneLayer):
    """One layer of several lanes."""

    def __init__(self, layers: list[LaneLayer]) -> None:
        super().__init__()
        self._layers = layers
        self._copied: list[int] = []  # the write counter of each lane when it was last copied
        self.is_initialized, self.is_sliding = True, layers[0].is_sliding

    @property
    def lengths(self) -> list[int]:
        """Tokens of each lane."""
        return [layer.length for layer in self._layers]

    def stretch(
        self, tokens: int, like_k: torch.Tensor, like_v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The lanes side by side for a graph, with space for more tokens; lanes that changed since
        the last call are copied again."""
        if len(self._layers) == 1:
            return self._layers[0].stretch(tokens, like_k, like_v)
        rooms = [layer.stretch(tokens, like_k[:1], like_v[:1]) for layer in self._layers]
        most = max(keys.shape[-2] for keys, _ in rooms)
        if self.key_buffer is None or self.value_buffer is None or self.key_buffer.shape[-2] < most:
            size = (len(rooms), *rooms[0][0].shape[1:2], most)
            self.key_buffer = like_k.new_zeros(*size, like_k.shape[-1])
            self.value_buffer = like_v.new_zeros(*size, like_v.shape[-1])
            self._copied = []
        for row, layer in enumerate(self._layers):
            if self._copied[row : row + 1] != [layer.changes]:
                self.key_buffer[row, :, : layer.length] = layer.keys[0]
                self.value_buffer[row, :, : layer.length] = layer.values[0]
        return self.key_buffer, self.value_buffer

    def advance(self, tokens: int) -> None:
        """Copy the tokens written here back to their lanes."""
        for row, layer in enumerate(self._layers):
            if len(self._layers) > 1:
                rows, new = slice(row, row + 1), slice(layer.length, layer.length + tokens)
                layer.append(self.key_buffer[rows, :, new], self.value_buffer[rows, :, new])  # type: ignore[index]
            else:
                layer.advance(tokens)
        self._copied = [layer.changes for layer in self._layers]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a token to each lane; attention finds the lanes by the returned keys."""
        for row, layer in enumerate(self._layers):
            layer.append(key_states[row : row + 1], value_states[row : row + 1])
        attention = attention_here()
        if attention is not None:
            attention.note(key_states, value_states, self._layers)
        return key_states, value_states

    def get_seq_length(self, *more: object, **options: object) -> int:
        """Tokens of the longest lane."""
        return max(layer.length for layer in self._layers)

    def get_mask_sizes(self, query_length: int, *more: object, **named: object) -> tuple[int, int]:
        """Of the longest lane; attention makes its own masks per lane."""
        return self.get_seq_length() + query_length, 0


def batch_of(
    model: PreTrainedModel, family: Family, runs: Sequence[Run], room: int
) -> Batch | LaneBatch:
    """The sequences in one batch: on their own lanes if that is exact, otherwise padded."""
    kind = Batch if runs[0].kernels is None else LaneBatch
    return kind(model, family, runs, room)


class LaneBatch:
    """The sequences that decode together, and their next positions."""

    def __init__(
        self, model: PreTrainedModel, family: Family, runs: Sequence[Run] = (), room: int = 0
    ) -> None:
        self._model, self._family = model, family
        self.runs: list[Run] = []
        self.copies = 0
        self.join(runs, room)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((run.lane.length for run in self.runs), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all lanes, and of their copy for a graph."""
        beside = sum(one.nbytes for one in self._cache.layers if isinstance(one, _Rows))
        return beside + sum(run.lane.nbytes for run in self.runs)

    def join(self, runs: Sequence[Run], room: int = 0) -> None:
        """Take in sequences, each in the state of its lane."""
        self.runs += runs
        self._lay()

    def leave(self, run: Run) -> None:
        """Remove a sequence."""
        self.runs.remove(run)
        self._lay()

    def put_back(self, run: Run) -> None:
        """Nothing to copy: its lane already holds everything."""

    def _lay(self) -> None:
        self._cache = DynamicCache(config=self._model.config)
        if not self.runs:
            return
        for index, layer in enumerate(self.runs[0].lane.cache.layers):
            rows = [run.lane.cache.layers[index] for run in self.runs]
            if isinstance(layer, LaneLayer):
                self._cache.layers[index] = _Rows(rows)
            elif isinstance(layer, MixerLayer):
                self._cache.layers[index] = MixerRows(rows)

    def decode(self, samplers: Sequence[TokenSampler], logits: torch.Tensor) -> int:
        """Decode until every sequence has ended; return the number of steps."""
        running = list(zip(self.runs, samplers, strict=True))
        steps = 0
        while True:
            tokens, going_on = [], []
            for row, (run, sampler) in enumerate(running):
                token = sampler.take(logits[row : row + 1])
                if sampler.over:
                    self.leave(run)
                else:
                    tokens.append(token)
                    going_on.append((run, sampler))
            if not going_on:
                return steps
            running, logits = going_on, self.step(tokens)
            steps += 1

    @quietly
    def prefill(self) -> torch.Tensor:
        """Read what is left of each prompt in one pass: words that need no further inputs. Return
        the logits after each, one row each."""
        starts = [run.lane.length for run in self.runs]
        counts = [len(run.prompt) - start for run, start in zip(self.runs, starts, strict=True)]
        most, device = max(counts), self._model.device
        ids = torch.zeros(len(counts), most, dtype=torch.long)
        places = []
        for row, (run, start) in enumerate(zip(self.runs, starts, strict=True)):
            ids[row, : counts[row]] = torch.from_numpy(run.prompt.ids[start:])
            own = run.positions[..., start:]
            # Padding stands behind the prompt, where no token of it looks.
            behind = own[..., -1:].expand(*own.shape[:-1], most - counts[row])
            places.append(torch.cat([own, behind], dim=-1))
        ends_within = most - min(counts) + 1
        with grouped_queries(device), running(self.runs[0].kernels):
            output = self._model(
                input_ids=ids.to(device),
                position_ids=torch.cat(places, dim=-2).to(device),
                **with_cache(self._model, self._cache),
                use_cache=True,
                logits_to_keep=ends_within,
            )
        for run in self.runs:
            run.lane.rewind(len(run.prompt))
        last = [count - 1 - most for count in counts]
        return torch.stack([output.logits[row, place] for row, place in enumerate(last)])

    @quietly
    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Run one token of each sequence through the model; return the logits, one row each."""
        runs = self.runs
        if len(runs) == 1 and runs[0].drafts is not None:
            return runs[0].drafts.step(tokens[0])
        for run, token in zip(runs, tokens, strict=True):
            if run.drafts is not None:
                run.drafts.note(token)
        extra = self._family.step_inputs(len(runs), self.longest + 1)
        model = (self._model, self._family, runs[0].kernels)
        found = decode(*model, runs, [[token] for token in tokens], self._cache, extra)
        for run in runs:
            run.lane.length += 1
            run.next_positions = run.next_positions + 1
        return found[:, -1]
