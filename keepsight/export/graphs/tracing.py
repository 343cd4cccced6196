"""How a decoder looks to a tracer: states come in as tensors, and go out as tensors.

A model's own forward is traced as it stands, with a few things put in its way: a cache that hands
out the graph's inputs and collects its outputs, and functions for attention and rotary positions
whose rows come out the same however many there are. Keys and values lie in rooms that are longer
than what they hold. The graph puts new rows in their places there; where a runtime can do that in
the caller's own memory, the whole room is an output, else the new rows alone.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from keepsight.kinds import Options
from keepsight.models import upstream
from keepsight.models.tested import refuse_unknown

_EVEN = 16  # tokens whose angles fill whole vectors, however wide a head is
_BLOCK = 64  # tokens that a linear layer takes at once, as upstream's own chunks
_tracing: list[TracedCache] = []  # the cache of the forward that is being traced


class AttentionModule(Protocol):
    """What upstream's attention functions are given first: the module that attends."""

    layer_idx: int


class TracedCache:
    """Hands out the states that a graph takes and collects those it gives, layer by layer."""

    is_compileable = False

    def __init__(
        self, states: list[dict[str, Tensor]], places: list[Tensor], appends: bool
    ) -> None:
        self._states = states
        self.places, self.appends = places, appends
        self.given: list[dict[str, Tensor]] = [{} for _ in states]

    def of(self, layer: int) -> dict[str, Tensor]:
        """The states of a layer as they came."""
        return self._states[layer]

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """The new rows only; attention looks up the past itself. What else upstream hands over
        its own layers pass over too."""
        self.given[layer] = {"k": keys, "v": values}
        return keys, values

    def get_seq_length(self, layer: int = 0, *more: object, **options: object) -> int:
        """Nothing may be derived from it: positions and masks are inputs of the graph."""
        refuse_unknown("get_seq_length of a traced cache", more, options, ("layer_idx",))
        return 0

    def get_conv_state(
        self, layer: int, state_idx: int = 0, *more: object, **options: object
    ) -> Tensor:
        """The last inputs of a convolution."""
        _refuse("get_conv_state", state_idx, more, options)
        return self._states[layer]["conv"]

    def get_recurrent_state(
        self, layer: int, state_idx: int = 0, *more: object, **options: object
    ) -> Tensor:
        """The state of a linear layer."""
        _refuse("get_recurrent_state", state_idx, more, options)
        return self._states[layer]["recurrent"]

    def is_recording_past(self, layer: int, *more: object, **options: object) -> bool:
        """True, so that upstream takes the path that does not write into its inputs."""
        _refuse("is_recording_past", 0, more, options)
        return True

    def update_conv_state(
        self, new: Tensor, layer: int, state_idx: int = 0, *more: object, **options: object
    ) -> Tensor:
        """What was and what comes; the last of it goes out."""
        _refuse("update_conv_state", state_idx, more, options, ("conv_kernel_size",))
        before = self._states[layer]["conv"]
        both = torch.cat([before, new], dim=-1)
        self.given[layer]["conv"] = both[..., -before.shape[-1] :].clone()
        return both

    def update_recurrent_state(
        self, state: Tensor, layer: int, state_idx: int = 0, *more: object, **options: object
    ) -> Tensor:
        """The state that goes out."""
        _refuse("update_recurrent_state", state_idx, more, options)
        self.given[layer]["recurrent"] = state
        return state


def _refuse(
    name: str,
    state_idx: int,
    more: tuple[object, ...],
    options: Options,
    known: tuple[str, ...] = (),
) -> None:
    """Refuse what a traced cache does not know; a layer has one state of each kind in it."""
    given = {**options, "state_idx": state_idx or None}
    refuse_unknown(f"{name} of a traced cache", more, given, known)


@contextmanager
def traced(decoder: PreTrainedModel) -> Iterator[None]:
    """Let a decoder's layers attend as its graph shall."""
    config = decoder.config
    before = config._attn_implementation
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    module = sys.modules[type(decoder).__module__]
    rules = {name: getattr(module, name) for name in names if hasattr(module, name)}
    try:
        config._attn_implementation = "keepsight_rooms"
        for name in rules:
            setattr(module, name, delta_rule)
        # A graph gets them as a row for each token, zeros where no picture is.
        upstream.replace_deepstack(decoder, operator.add)
        with _even_angles(decoder):
            yield
    finally:
        config._attn_implementation = before
        for name, rule in rules.items():
            setattr(module, name, rule)
        upstream.restore_deepstack(decoder)
        _tracing.clear()


def begin(cache: TracedCache) -> None:
    """Note whose forward runs now; attention functions do not get it."""
    _tracing[:] = [cache]


# What attention is handed and has no part in it: its mask and the module say all of it. Layers in
# evaluation mode drop nothing.
_NEUTRAL = ("dropout", "sliding_window", "position_ids", "use_cache", "is_causal")


def _in_rooms(
    module: AttentionModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *more: object,
    scaling: float,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention over whole rooms; the bias says who sees whom, and hides what means nothing."""
    refuse_unknown("attention in a graph", more, options, _NEUTRAL)
    cache, layer = _tracing[0], module.layer_idx
    past, places = cache.of(layer), cache.places[layer]
    keys, values = (_put(past[n], places, new) for n, new in (("k", key), ("v", value)))
    cache.given[layer] = {"k": keys, "v": values} if cache.appends else {"k": key, "v": value}
    rows, heads, tokens, width = query.shape
    # The queries of a group stand one behind the other before their one head of keys: nothing is
    # repeated. The products are written out, as runtimes fuse them each in its own way.
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
    """The room with new rows in their places."""
    return room.scatter(2, places[:, None, :, None].expand_as(new), new)


def _product(rows: Tensor, by: Tensor, groups: int) -> Tensor:
    """A matrix product of two rows at least: one alone is computed by another kernel, and comes out
    otherwise than in company."""
    if groups > 1:
        return rows @ by
    return (functional.pad(rows, (0, 0, 0, 1)) @ by)[:, :, :-1]


AttentionInterface.register("keepsight_rooms", _in_rooms)


@contextmanager
def _even_angles(decoder: PreTrainedModel) -> Iterator[None]:
    """Let sines and cosines be made of whole vectors: numbers behind the last one are computed by
    another function, and come out otherwise."""
    rotary = decoder.rotary_emb
    made = rotary.forward

    def forward(x: Tensor, position_ids: Tensor, *more: object, **options: object) -> object:
        tokens = position_ids.shape[-1]
        count = (tokens + _EVEN - 1) // _EVEN
        filled = functional.pad(position_ids, (0, count * _EVEN - tokens))
        cos, sin = made(x, filled, *more, **options)
        return cos[..., :tokens, :], sin[..., :tokens, :]

    rotary.forward = forward
    try:
        yield
    finally:
        del rotary.forward


# -- linear layers -------------------------------------------------------------------------------


# A graph gives its last state in any case, and its chunks are its own.
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
    """The gated delta rule for any number of tokens, in a form that a graph of fixed size can hold.

    Upstream loops over the blocks of a prompt, and inverts a matrix row by row: a trace of that
    holds one length only, and sixty copies of it. Here the blocks are a scan, and one token alone
    goes its short way.
    """
    given = {**options, "use_qk_l2norm_in_kernel=False": not use_qk_l2norm_in_kernel}
    refuse_unknown("the delta rule in a graph", more, given, _OF_THE_RULE)
    repeat = value.shape[2] // key.shape[2]
    if repeat > 1:
        query, key = (x.repeat_interleave(repeat, dim=2) for x in (query, key))
    query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    # One tensor of all, cut into blocks out here: inside a branch each tensor's length would be an
    # unknown of its own. Padding changes nothing: a key of zeros writes nothing, and no decay
    # leaves the state alone.
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
    # As many rows as the other way has; those behind the first are cut off.
    zeros = torch.zeros_like(blocks[..., : state.shape[-1]])
    return (query @ state + zeros).contiguous(), state.contiguous()


def _all_blocks(blocks: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state, out = upstream.scan(_block, state, blocks)
    return out.contiguous(), state.contiguous()


def _block(state: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """One block of tokens: the state behind it, and what they read."""
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
    """The inverse of a lower triangle with ones on its diagonal (what stands there is not read).

    Two neighbouring blocks at a time: with both inverted, the part below them is a product.
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
