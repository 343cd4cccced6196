"""Traces a decoder with its states as tensors, in and out.

A model's own forward is traced unchanged, except for replacements: a cache that returns the graph's
inputs and collects its outputs, and functions for attention and rotary positions whose rows do not
depend on their number. Keys and values lie in buffers longer than their contents. The graph puts
new rows into their places. If a runtime can do that in the caller's memory, the whole buffer is an
output, otherwise the new rows alone.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from keepsight.models import upstream
from keepsight.models.tested import refuse_unknown
from keepsight.system.exchanged import exchanged

_EVEN = 16  # tokens whose angles fill whole vectors, for any width of heads
_BLOCK = 64  # tokens per chunk of a linear layer, as in Transformers
_tracing: list[TracedCache] = []  # cache of the forward being traced


class AttentionModule(Protocol):
    """The first argument of Transformers' attention functions: the attention module."""

    layer_idx: int


class TracedCache:
    """Returns the states that a graph takes and collects those it gives, layer by layer."""

    is_compileable = False

    def __init__(
        self, states: list[dict[str, Tensor]], places: list[Tensor], appends: bool
    ) -> None:
        self._states = states
        self.places, self.appends = places, appends
        self.given: list[dict[str, Tensor]] = [{} for _ in states]

    def of(self, layer: int) -> dict[str, Tensor]:
        """The input states of a layer."""
        return self._states[layer]

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Collect the new rows; attention reads the past itself. Further arguments are ignored, as
        in Transformers' layers."""
        self.given[layer] = {"k": keys, "v": values}
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions and masks are inputs of the graph, and must not be derived from it."""
        return 0

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor:
        """The last inputs of a convolution; each layer has one state of each kind."""
        return self._states[layer]["conv"]

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor:
        """The state of a linear layer."""
        return self._states[layer]["recurrent"]

    def is_recording_past(self, layer: int) -> bool:
        """True, so that Transformers takes the path that does not write into its inputs."""
        return True

    def update_conv_state(
        self, new: Tensor, layer: int, conv_kernel_size: int | None = None
    ) -> Tensor:
        """The earlier inputs and the new ones; the last of them become an output."""
        before = self._states[layer]["conv"]
        both = torch.cat([before, new], dim=-1)
        self.given[layer]["conv"] = both[..., -before.shape[-1] :].clone()
        return both

    def update_recurrent_state(self, state: Tensor, layer: int) -> Tensor:
        """Collect the new state as an output."""
        self.given[layer]["recurrent"] = state
        return state


@contextmanager
def traced(decoder: PreTrainedModel) -> Iterator[None]:
    """Let a decoder's layers attend as its graph shall."""
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    module = sys.modules[type(decoder).__module__]
    changes: list[tuple[object, str, object]] = [
        (decoder.config, "_attn_implementation_internal", "keepsight_rooms"),
        *((module, name, delta_rule) for name in names if hasattr(module, name)),
        # In a graph they are a row for each token, zeros without a picture.
        *upstream.deepstack_with(decoder, operator.add),
        (decoder.rotary_emb, "forward", _even_angles(decoder.rotary_emb.forward)),
    ]
    try:
        with exchanged(*changes):
            yield
    finally:
        _tracing.clear()


def begin(cache: TracedCache) -> None:
    """Note whose forward runs now, because attention functions do not get it."""
    _tracing[:] = [cache]


# Arguments of attention that do not matter: the mask and the module determine everything, and
# layers in evaluation mode drop nothing.
_NEUTRAL = ("dropout", "sliding_window", "position_ids", "use_cache", "is_causal")


def _in_buffers(
    module: AttentionModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *more: object,
    scaling: float,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention over whole buffers; the bias says who sees whom, and hides undefined rows."""
    refuse_unknown("attention in a graph", more, options, _NEUTRAL)
    cache, layer = _tracing[0], module.layer_idx
    past, places = cache.of(layer), cache.places[layer]
    keys, values = (_put(past[n], places, new) for n, new in (("k", key), ("v", value)))
    cache.given[layer] = {"k": keys, "v": values} if cache.appends else {"k": key, "v": value}
    rows, heads, tokens, width = query.shape
    # The queries of a group are placed one after another before their one head of keys, so nothing
    # is repeated. The products are written out, because each runtime fuses them in its own way.
    groups = heads // keys.shape[1]
    grouped = query.reshape(rows, keys.shape[1], groups, tokens, width).flatten(2, 3)
    scores = _product(grouped, keys.transpose(2, 3), groups) * scaling
    scores = scores.view(rows, keys.shape[1], groups, tokens, -1)
    if mask is not None:
        scores = scores + mask[:, :, None]
    weights = functional.softmax(scores, dim=-1).flatten(2, 3)
    out = _product(weights, values, groups).view(rows, heads, tokens, width)
    return out.transpose(1, 2), None


def _put(room: Tensor, places: Tensor, new: Tensor) -> Tensor:
    """The buffer with new rows in their places."""
    return room.scatter(2, places[:, None, :, None].expand_as(new), new)


def _product(rows: Tensor, by: Tensor, groups: int) -> Tensor:
    """A matrix product with at least two rows: a single row is computed by another kernel, with
    other bits."""
    if groups > 1:
        return rows @ by
    return (functional.pad(rows, (0, 0, 0, 1)) @ by)[:, :, :-1]


AttentionInterface.register("keepsight_rooms", _in_buffers)


def _even_angles(made: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., object]:
    """Pad angles to whole vectors for sines and cosines: remaining numbers are computed by another
    function, with other bits."""

    def forward(x: Tensor, position_ids: Tensor, *more: object, **options: object) -> object:
        tokens = position_ids.shape[-1]
        count = (tokens + _EVEN - 1) // _EVEN
        filled = functional.pad(position_ids, (0, count * _EVEN - tokens))
        cos, sin = made(x, filled, *more, **options)
        return cos[..., :tokens, :], sin[..., :tokens, :]

    return forward


# -- linear layers -------------------------------------------------------------------------------


# A graph always returns its last state, and has its own chunks.
_OF_THE_RULE = ("chunk_size", "output_final_state", "use_cache")


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *more: object,
    initial_state: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule for any number of tokens, in a form that a fixed graph can hold.

    Transformers loops over the blocks of a prompt and inverts a matrix row by row; a trace of that
    is valid for one length, and holds sixty copies. Here the blocks are a scan, and a single token
    takes a short path.
    """
    given = {**options, "use_qk_l2norm_in_kernel=False": not use_qk_l2norm_in_kernel}
    refuse_unknown("the delta rule in a graph", more, given, _OF_THE_RULE)
    repeat = value.shape[2] // key.shape[2]
    if repeat > 1:
        query, key = (x.repeat_interleave(repeat, dim=2) for x in (query, key))
    query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    # One tensor of all inputs, cut into blocks outside: inside a branch each tensor's length would
    # be an unknown of its own. Padding changes nothing: a key of zeros writes nothing, and no decay
    # keeps the state.
    packed = torch.cat([query, key, value, beta[..., None], g[..., None]], dim=-1).transpose(1, 2)
    rows, heads, tokens, width = packed.shape
    count = (tokens + _BLOCK - 1) // _BLOCK
    padded = functional.pad(packed, (0, 0, 0, count * _BLOCK - tokens))
    blocks = padded.reshape(rows, heads, count, _BLOCK, width).movedim(2, 0).contiguous()
    one = _tracing[0].places[0].new_ones(()) == tokens
    out, state = torch.cond(one, _one_token, _all_blocks, (blocks, initial_state))
    return out.movedim(0, 2).flatten(2, 3)[:, :, :tokens].transpose(1, 2), state


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _unpacked(packed: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    """Query, key, value, beta and decay of some tokens."""
    width, deep = state.shape[-2:]
    *wide, beta, decay = packed.split([width, width, deep, 1, 1], dim=-1)
    return *wide, beta, decay[..., 0]


def _one_token(blocks: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value, beta, decay = _unpacked(blocks[0, :, :, :1], state)
    state = state * decay[..., None].exp()
    state = state + key.transpose(-1, -2) @ ((value - key @ state) * beta)
    # As many rows as the other path has; those after the first are cut off.
    zeros = torch.zeros_like(blocks[..., : state.shape[-1]])
    return (query @ state + zeros).contiguous(), state.contiguous()


def _all_blocks(blocks: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state, out = upstream.scan(_block, state, blocks)
    return out.contiguous(), state.contiguous()


def _block(state: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """One block of tokens: the state after it, and what they read."""
    query, key, value, beta, decay = _unpacked(packed, state)
    summed = decay.cumsum(-1)
    lower = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool).tril()
    pair = (summed[..., :, None] - summed[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    seen = (query @ key.transpose(-1, -2)) * pair
    written = key * beta
    inverse = _inverse_of_unit_lower((written @ key.transpose(-1, -2)) * pair)
    grown = summed.exp()[..., None]
    change = inverse @ (value * beta - (written * grown) @ state)
    out = (query * grown) @ state + seen @ change
    last = summed[..., -1:]
    kept = key * (last - summed).exp()[..., None]
    state = state * last.exp()[..., None] + kept.transpose(-1, -2) @ change
    return state, out


def _inverse_of_unit_lower(matrix: Tensor) -> Tensor:
    """The inverse of a lower triangle with ones on its diagonal (whose values are not read).

    Two neighbouring blocks at a time: once both are inverted, the part below them is a product.
    """
    row = torch.arange(_BLOCK)
    inverse = torch.eye(_BLOCK, dtype=matrix.dtype)
    size = 1
    while size < _BLOCK:
        pair = row // (2 * size)
        below = (pair[:, None] == pair) & (row[:, None] // size > row // size)
        inverse = inverse - inverse @ (matrix * below) @ inverse
        size *= 2
    return inverse
