"""Graph modules in place of a model's tower, embedding, decoder and head.

The model around them is Transformers' own, without weights: it inserts features in place of
pictures, routes deepstack features, and makes masks. So engine, families and memory see a usual
model, with states in the usual lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, DynamicLayer, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from keepsight.core.decoding.lane_layer import LaneLayer
from keepsight.core.decoding.lane_mixer import MixerLayer
from keepsight.core.decoding.state import Shape, restore_linear
from keepsight.errors import ImageError, ModelError, UnsupportedInput
from keepsight.kinds import CacheLayer, Options
from keepsight.models.families.tower_tensors import FOLLOWS_FROM_SIZES, TowerTensors
from keepsight.models.renamed import RETURNED, EncoderOutput
from keepsight.models.tested import refuse_unknown
from keepsight.models.upstream import DynamicSlidingWindowLayer, LinearAttentionLayer
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

_WHOLE = 64  # the number of keys in a buffer is a multiple of this
_FEW = 32  # up to this many tokens a lane's whole buffer is read; for more, only its filled part
_OUTPUTS = ("return_dict", "use_cache", "cache_position")  # options that do not change the output
_MASKED = ("full_attention", "sliding_attention")  # Transformers' names for masks of several kinds
# Transformers' layers that grow when new rows are appended.
_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)

# One mask, or one per kind of layer.
Mask = Tensor | dict[str, Tensor | None] | None

# Inputs besides states and features.
_DECODER = (
    *("inputs_embeds", "position_ids", PRESENT),
    *(BIAS, SLIDING_BIAS, PLACES, SLIDING_PLACES),
)


class GraphSession(Protocol):
    """A graph that can be run."""

    inputs: frozenset[str]
    version: str

    def run(
        self, feeds: dict[str, Tensor], into: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The outputs by name; those named in `into` are written there."""


class EmbeddingStandIn:
    """Token ids to embeddings."""

    def __init__(self, session: GraphSession, width: int) -> None:
        _check_inputs(session, {"input_ids", "features", "spots"}, "embedding")
        self._session, self._nothing = session, torch.zeros(0, width)

    def __call__(self, input: Tensor, *more: object, **options: object) -> Tensor:
        refuse_unknown("an exported embedding", more, options)
        ids = input if input.ndim == 2 else input.reshape(1, -1)
        spots = torch.zeros_like(ids, dtype=torch.bool)
        feeds = {"input_ids": ids, "features": self._nothing, "spots": spots}
        return self._session.run(feeds)["inputs_embeds"].view(*input.shape, -1)


class HeadStandIn:
    """Hidden states to logits."""

    def __init__(self, session: GraphSession) -> None:
        _check_inputs(session, {"hidden"}, "head")
        self._session = session

    def __call__(self, input: Tensor, *more: object, **options: object) -> Tensor:
        refuse_unknown("an exported head", more, options)
        return self._session.run({"hidden": input})["logits"]


class PackedTowerStandIn:
    """Patches of pictures, or of the frames of a video, each through the graph alone."""

    def __init__(
        self, session: GraphSession, tower: PreTrainedModel, tensors: TowerTensors, most: int
    ) -> None:
        self._session, self._tower, self._tensors, self._most = session, tower, tensors, most
        self._levels = len(getattr(tower, "deepstack_visual_indexes", None) or ())

    def __call__(
        self, hidden_states: Tensor, grid_thw: Tensor, *more: object, **options: object
    ) -> EncoderOutput:
        _refuse_outputs("tower", options)
        refuse_unknown("an exported tower", more, options, {*FOLLOWS_FROM_SIZES, *_OUTPUTS})
        # Frames attend only to themselves, so a video is as many pictures.
        frames = [(1, h, w) for t, h, w in grid_thw.tolist() for _ in range(t)]
        sizes = [h * w for _, h, w in frames]
        check_sizes(sizes, self._most)
        pieces = hidden_states.float().split(sizes)
        made = [self._one(*each) for each in zip(pieces, frames, strict=True)]
        names = ["features", *(deepstack(level) for level in range(self._levels))]
        features, *levels = (torch.cat([one[name] for one in made]) for name in names)
        output = EncoderOutput(pooler_output=features)
        if levels:  # Transformers indexes a list here
            output.deepstack_features = levels
        return output

    def _one(self, pixels: Tensor, frame: tuple[int, int, int]) -> dict[str, Tensor]:
        grid = {"image_grid_thw": torch.tensor([frame])}
        grids = grid | self._tensors.of(grid, "cpu")
        _check_inputs(self._session, {"pixel_values", *grids}, "tower")
        feeds = {name: grids[name] for name in self._session.inputs if name in grids}
        return self._session.run({"pixel_values": pixels, **feeds})


def check_sizes(sizes: list[int], most: int) -> None:
    """Refuse pictures with more patches than the graph allows."""
    for size in sizes:
        if size > most:
            raise ImageError(
                f"a picture of {size} patches is beyond the {most} that this model was exported "
                "for; make the picture smaller (max_pixels), or export with a larger --max-patches"
            )


class WholeTowerStandIn:
    """Pictures of one size, and tiles of pictures, each through the graph alone."""

    def __init__(self, session: GraphSession, config: PreTrainedConfig) -> None:
        _check_inputs(session, {"pixel_values"}, "tower")
        self._session, self._config = session, config

    def __call__(self, pixel_values: Tensor, *more: object, **options: object) -> EncoderOutput:
        _refuse_outputs("tower", options)
        as_exported = {n for n, value in options.items() if self._is_usual(n, value)}
        refuse_unknown("an exported tower", more, options, {*as_exported, *_OUTPUTS})
        rows = pixel_values.float().split(1)
        made = [self._session.run({"pixel_values": row})["features"] for row in rows]
        # As in Transformers: one tensor for all, or a list with an entry per picture.
        return EncoderOutput(pooler_output=torch.cat(made) if made[0].ndim == 3 else made)

    def _is_usual(self, name: str, value: object) -> bool:
        """Whether an option has the configuration's value, with which the graph was traced."""
        if isinstance(value, Tensor) or not hasattr(self._config, name):
            return False
        return bool(getattr(self._config, name) == value)


class DecoderStandIn:
    """Embeddings, positions and a cache in; hidden states and the grown cache out."""

    def __init__(
        self,
        session: GraphSession,
        decoder: PreTrainedModel,
        shape: Shape,
        appends: bool,
        mrope: bool,
    ) -> None:
        self._session, self._kinds, self._appends = session, shape.kinds, appends
        self._mrope = mrope
        self._rooms = PLACES in session.inputs  # otherwise it gets the past separately
        self._levels = sum(name.startswith("deepstack") for name in session.inputs)
        self._sizes = [state_sizes(decoder, n, kind) for n, kind in enumerate(shape.kinds)]
        self._config = decoder.config
        self._window = getattr(decoder.config, "sliding_window", None) or 0
        states = (state(s, n) for n, kind in enumerate(self._kinds) for s in state_names(kind))
        levels = map(deepstack, range(self._levels))
        _check_inputs(session, {*_DECODER, *levels, *states}, "decoder")

    def __call__(
        self,
        *more: object,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Mask = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        visual_pos_masks: Tensor | None = None,
        deepstack_visual_embeds: Sequence[Tensor] | None = None,
        **options: object,
    ) -> MoeModelOutputWithPast:
        if inputs_embeds is None or input_ids is not None:
            raise UnsupportedInput("an exported decoder takes embeddings, not ids")
        _refuse_outputs("decoder", options)
        cache = past_key_values if cache is None else cache
        _refuse_cache(cache)
        refuse_unknown("an exported decoder", more, options, _OUTPUTS)
        if cache is None:
            cache = DynamicCache(config=self._config)
        rows, tokens, _ = inputs_embeds.shape
        if position_ids is None:
            held = cache.get_seq_length()
            position_ids = torch.arange(held, held + tokens).expand(rows, -1)
        if self._mrope and position_ids.ndim == 2:  # text, time, height, width
            position_ids = position_ids.expand(4, *position_ids.shape)
        elif self._mrope and position_ids.shape[0] == 3:
            position_ids = torch.cat([position_ids[:1], position_ids])
        feeds = {"inputs_embeds": inputs_embeds, "position_ids": position_ids}
        for level in range(self._levels):  # a row for each token: zeros where there is no picture
            feeds[deepstack(level)] = dense = torch.zeros_like(inputs_embeds)
            if visual_pos_masks is not None and deepstack_visual_embeds is not None:
                dense[visual_pos_masks] = deepstack_visual_embeds[level].to(dense.dtype)
        into = {"hidden": torch.empty_like(inputs_embeds)}
        layers = cache.layers
        held_by = self._held(layers, rows)
        for number, layer in enumerate(layers):
            self._put_states(number, layer, inputs_embeds, feeds, into)
        feeds |= self._biases(attention_mask, held_by, tokens, feeds)
        found = self._session.run(feeds, into)
        for number, layer in enumerate(layers):
            self._take_states(number, layer, feeds, found, tokens)
        return MoeModelOutputWithPast(last_hidden_state=found["hidden"], **{RETURNED: cache})

    # -- states ----------------------------------------------------------------------------------

    def _put_states(
        self,
        number: int,
        layer: CacheLayer,
        like: Tensor,
        feeds: dict[str, Tensor],
        into: dict[str, Tensor],
    ) -> None:
        kind, sizes = self._kinds[number], self._sizes[number]
        if kind == "linear":
            for name in state_names(kind):
                held = getattr(layer, f"{name}_states")[0]
                fresh = like.new_zeros(like.shape[0], *sizes[name])
                feeds[state(name, number)] = fresh if held is None else held
            return
        nothing = like.new_empty(like.shape[0], *sizes["k"])
        past = (layer.keys, layer.values) if layer.is_initialized else (nothing, nothing)
        if self._rooms:
            past = _padded_buffers(layer, past, nothing, like.shape[1])
        for name, tensor in zip(("k", "v"), past, strict=True):
            feeds[state(name, number)] = tensor
            if self._appends:
                into[new_state(name, number)] = tensor

    def _take_states(
        self,
        number: int,
        layer: CacheLayer,
        fed: dict[str, Tensor],
        found: dict[str, Tensor],
        tokens: int,
    ) -> None:
        kind = self._kinds[number]
        given = {name: found[new_state(name, number)] for name in state_names(kind)}
        if kind == "linear":
            for name, tensor in given.items():
                restore_linear(layer, name, 0, tensor)
            return
        keys, values = given["k"], given["v"]
        if self._rooms and isinstance(layer, LaneLayer):
            room = layer.stretch(tokens, keys, values)
            for name, own, rows in zip(("k", "v"), room, (keys, values), strict=True):
                if not (self._appends and fed[state(name, number)] is own):
                    _write_rows(own, rows, layer.lengths, tokens, self._appends)
            layer.advance(tokens)
        elif self._rooms and self._appends:
            start = layer.keys.shape[2] if layer.is_initialized else 0
            layer.update(*(x[:, :, start : start + tokens] for x in (keys, values)))
        else:
            layer.update(keys[:, :, -tokens:], values[:, :, -tokens:])

    # -- masks -----------------------------------------------------------------------------------

    def _biases(
        self, mask: Mask, held: dict[str, list[int]], tokens: int, feeds: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The places of new rows, and the attention bias for each kind of layer that has one."""
        # Padding is the same in every layer.
        given = mask if isinstance(mask, dict) else dict.fromkeys(_MASKED, mask)
        found = {}
        for kind, bias, places, window in (
            ("full", BIAS, PLACES, 0),
            ("sliding", SLIDING_BIAS, SLIDING_PLACES, self._window),
        ):
            if kind not in held:
                continue
            size = feeds[state("k", self._kinds.index(kind))].shape[2]
            size += 0 if self._rooms else tokens
            at = torch.tensor(held[kind])[:, None] + torch.arange(tokens)
            found[places] = at
            found[bias] = _bias_of(given.get(f"{kind}_attention"), at, size, window)
        if "linear" in self._kinds:
            own = given.get("full_attention")
            rows = len(next(iter(held.values())))
            found[PRESENT] = torch.ones(rows, tokens) if own is None else own[:, -tokens:].float()
        return found

    def _held(self, layers: Sequence[CacheLayer], rows: int) -> dict[str, list[int]]:
        """The number of keys each row holds, for each kind of layer with keys."""
        held = {}
        for kind, layer in zip(self._kinds, layers, strict=True):
            if kind == "linear":
                continue
            if isinstance(layer, LaneLayer):
                lengths = layer.lengths
            else:
                lengths = [layer.keys.shape[2] if layer.is_initialized else 0]
            held[kind] = lengths if len(lengths) == rows else lengths * rows
        return held


def _check_inputs(session: GraphSession, given: set[str], part: str) -> None:
    """Refuse a graph with inputs that this model lacks: it belongs to another model, whatever the
    record says."""
    if unknown := sorted(session.inputs - given):
        raise ModelError(
            f"the {part}'s graph takes {unknown[0]!r}, which this model lacks: it is of another "
            "export; copy the whole folder again, or export the model again"
        )


def _refuse_outputs(part: str, options: Options) -> None:
    """Refuse outputs that Transformers' module could add and a graph cannot."""
    asked = [name for name in ("output_hidden_states", "output_attentions") if options.get(name)]
    if asked:
        raise UnsupportedInput(
            f"{asked[0]}: an exported {part} returns its last hidden states only"
        )


def _refuse_cache(cache: Cache | None) -> None:
    """Refuse caches whose layers do not grow when new rows are appended."""
    for layer in getattr(cache, "layers", ()):
        if type(layer) not in _LAYERS and not isinstance(layer, LaneLayer | MixerLayer):
            raise UnsupportedInput(
                f"a cache of {type(layer).__name__}: an exported decoder goes on from a "
                "DynamicCache or from Keepsight's memory; leave cache_implementation out"
            )


# -- buffers for keys and values, as a graph reads them: longer than their contents ---------------


def _padded_buffers(
    layer: CacheLayer, past: tuple[Tensor, Tensor], nothing: Tensor, tokens: int
) -> tuple[Tensor, Tensor]:
    """A layer's keys and values with space for more tokens. A lane's own are used in place; for
    many tokens only the filled part is read."""
    if isinstance(layer, LaneLayer):
        keys, values = layer.stretch(tokens, nothing, nothing)
        size = _whole(max(layer.lengths) + tokens)
        if tokens < _FEW or keys.shape[2] <= size:
            return keys, values
        return keys[:, :, :size].contiguous(), values[:, :, :size].contiguous()
    missing = _whole(past[0].shape[2] + tokens) - past[0].shape[2]
    room = nothing.new_zeros(*nothing.shape[:2], missing, nothing.shape[3])
    return torch.cat([past[0], room], dim=2), torch.cat([past[1], room], dim=2)


def _whole(keys: int) -> int:
    return -(-keys // _WHOLE) * _WHOLE


def _write_rows(own: Tensor, rows: Tensor, lengths: list[int], tokens: int, whole: bool) -> None:
    """Write new rows into a lane's own buffer; `whole`: they come in a complete buffer."""
    starts = lengths if len(lengths) == len(rows) else lengths * len(rows)
    for row, start in enumerate(starts):
        given = rows[row, :, start : start + tokens] if whole else rows[row]
        own[row, :, start : start + tokens] = given


def _bias_of(mask: Tensor | None, at: Tensor, size: int, window: int) -> Tensor:
    """Zero where a token is seen, a large negative number elsewhere: (rows, 1, tokens, size).

    Not minus infinity: padding sees nothing, and a softmax over only that is NaN. `at` are the
    places of the tokens; what follows them is not a token yet.
    """
    hidden = torch.finfo(torch.float32).min
    rows, tokens = at.shape
    bias = torch.zeros(rows, 1, tokens, size)
    seen = torch.arange(size)
    total = int(at.max()) + 1
    if mask is not None and mask.ndim == 4:
        own = mask
        if mask.dtype == torch.bool:
            own = torch.zeros(mask.shape).masked_fill_(~mask, hidden)
        bias[..., :total] = own.float().clamp(min=hidden)
        bias[..., total:] = hidden
        return bias
    unseen = seen > at[..., None]
    if window:
        unseen |= seen <= at[..., None] - window
    bias.masked_fill_(unseen[:, None], hidden)
    if mask is not None:
        bias[..., :total].masked_fill_(~mask.bool()[:, None, None, -total:], hidden)
    return bias
