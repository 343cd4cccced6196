"""The parts in which a model is exported; inputs and outputs of each module are plain tensors.

Four graphs make a model that sees and remembers: the tower (one picture of any size), the token
embedding with features in place of pictures, the decoder (embeddings, explicit positions and states
in; hidden states and states out), and the head. Each part has sample inputs, with the sizes that
may vary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from keepsight.core.decoding.state import Shape
from keepsight.export.graphs import tracing
from keepsight.kinds import Inputs
from keepsight.models.families import Family
from keepsight.models.renamed import with_cache
from keepsight.runtimes.states import (
    BIAS,
    PLACES,
    PRESENT,
    SLIDING_BIAS,
    SLIDING_PLACES,
    deepstack,
    new_state,
    state,
    state_names,
    state_sizes,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AUTO = torch.export.Dim.AUTO
_TOKENS, _PAST, _ROOM, _SMALLER = 7, 5, 32, 24  # sizes in a sample: all different, none of them one
_ROWS = 2


@dataclass
class Sample:
    """Inputs for tracing, and their variable sizes."""

    inputs: Inputs
    varies: Inputs

    def add(self, name: str, tensor: Tensor, *axes: int) -> None:
        """Add an input with these variable axes."""
        self.inputs[name] = tensor
        self.varies[name] = dict.fromkeys(axes, AUTO)


class GraphPart(nn.Module):
    """A part of a model as its graph computes it, with inputs for tracing."""

    def sample(self) -> Sample:
        """Inputs, and which of their sizes vary."""
        raise NotImplementedError


class Embedding(GraphPart):
    """Ids to embeddings, with features in order at the places that `spots` marks."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.embed = family.model.get_input_embeddings()

    def forward(self, input_ids: Tensor, features: Tensor, spots: Tensor) -> Inputs:
        found = self.embed(input_ids)
        number = (spots.flatten().long().cumsum(0) - 1).clamp(min=0).view_as(input_ids)
        # One more row, so that there is something to look up without a picture.
        rows = torch.cat([features, features.new_zeros(1, features.shape[-1])])
        return {"inputs_embeds": torch.where(spots[..., None], rows[number], found)}

    def sample(self) -> Sample:
        """Some tokens with some features among them."""
        width = self.embed.embedding_dim
        sample = Sample({}, {})
        sample.add("input_ids", torch.ones(_ROWS, _TOKENS, dtype=torch.long), 0, 1)
        sample.add("features", torch.zeros(4, width), 0)
        spots = torch.zeros(_ROWS, _TOKENS, dtype=torch.bool)
        spots[0, 1:3] = spots[1, 4:6] = True
        sample.add("spots", spots, 0, 1)
        return sample


class OutputHead(GraphPart):
    """Hidden states to logits."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.head = family.model.get_output_embeddings()
        self.width = family.feature_width()

    def forward(self, hidden: Tensor) -> Inputs:
        return {"logits": self.head(hidden)}

    def sample(self) -> Sample:
        """Hidden states of some tokens."""
        sample = Sample({}, {})
        sample.add("hidden", torch.randn(_ROWS, _TOKENS, self.width), 0, 1)
        return sample


class Decoder(GraphPart):
    """The decoder as a graph: it takes embeddings, positions, an attention bias and all states, and
    returns the last hidden states and all new states.

    With `appends` it returns whole keys and values including the new rows; otherwise only the new
    rows.
    """

    def __init__(self, family: Family, shape: Shape, appends: bool) -> None:
        super().__init__()
        self.decoder: PreTrainedModel = family.model.get_decoder()
        self.family, self.kinds, self.appends = family, shape.kinds, appends
        self.levels = family.levels()
        self.sliding = any("sliding" in kind for kind in self.kinds)

    def forward(self, inputs_embeds: Tensor, position_ids: Tensor, **inputs: Tensor) -> Inputs:
        states = [
            {name: inputs[state(name, layer)] for name in state_names(kind)}
            for layer, kind in enumerate(self.kinds)
        ]
        places = [inputs[SLIDING_PLACES if kind == "sliding" else PLACES] for kind in self.kinds]
        cache = tracing.TracedCache(states, places, self.appends)
        tracing.begin(cache)
        output = self.decoder(
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            attention_mask=self._masks(inputs),
            **with_cache(self.decoder, cache),
            use_cache=True,
            **self._deepstack(inputs),
        )
        found = {"hidden": output.last_hidden_state}
        for layer, kind in enumerate(self.kinds):
            for name in state_names(kind):
                found[new_state(name, layer)] = cache.given[layer][name]
        return found

    def _masks(self, inputs: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Masks in the form in which Transformers' decoder takes finished ones."""
        bias = inputs[BIAS]
        if self.sliding:
            return {"full_attention": bias, "sliding_attention": inputs[SLIDING_BIAS]}
        if "linear" in self.kinds:
            return {"full_attention": bias, "linear_attention": inputs[PRESENT]}
        return bias

    def _deepstack(self, inputs: Inputs) -> Inputs:
        """Features to add after the first layers: a row for each token, zeros for text."""
        if not self.levels:
            return {}
        levels = [inputs[deepstack(level)] for level in range(self.levels)]
        return {"visual_pos_masks": levels[0], "deepstack_visual_embeds": levels}

    def sample(self) -> Sample:
        """A few tokens after a few others."""
        rows, width = _ROWS, self.family.feature_width()
        sample = Sample({}, {})
        sample.add("inputs_embeds", torch.randn(rows, _TOKENS, width), 0, 1)
        places = torch.arange(_PAST, _PAST + _TOKENS).expand(rows, -1)
        if self.family.mrope:
            sample.add("position_ids", places.expand(4, -1, -1).clone(), 1, 2)
        else:
            sample.add("position_ids", places.clone(), 0, 1)
        sample.add(BIAS, torch.zeros(rows, 1, _TOKENS, _ROOM), 0, 2, 3)
        sample.add(PLACES, places.clone(), 0, 1)
        if self.sliding:
            sample.add(SLIDING_BIAS, torch.zeros(rows, 1, _TOKENS, _SMALLER), 0, 2, 3)
            sample.add(SLIDING_PLACES, places.clone(), 0, 1)
        if "linear" in self.kinds:
            sample.add(PRESENT, torch.ones(rows, _TOKENS), 0, 1)
        for level in range(self.levels):
            sample.add(deepstack(level), torch.zeros(rows, _TOKENS, width), 0, 1)
        for layer, kind in enumerate(self.kinds):
            self._add_states(sample, layer, kind)
        return sample

    def _add_states(self, sample: Sample, layer: int, kind: str) -> None:
        for name, sizes in state_sizes(self.decoder, layer, kind).items():
            axes = (0, 2) if name in ("k", "v") else (0,)
            tokens = _SMALLER if kind == "sliding" else _ROOM
            tensor = torch.zeros(_ROWS, *(size or tokens for size in sizes))
            sample.add(state(name, layer), tensor, *axes)
