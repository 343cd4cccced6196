"""What a layer remembers: a lane to compute in, and snapshots to keep.

A lane is the memory of one running sequence: a Transformers cache whose full-attention layers live
in preallocated buffers at fixed addresses, so that nothing is copied as a sequence grows and a
compiled or batched step can run on it later. A snapshot is what the tree keeps of a lane at a
boundary: for full layers the keys and values that are new since the parent boundary, for sliding,
linear and convolution layers their fixed-size state whole.

Which cuts are valid is decided here, in `Shape`, and nowhere else: with a fixed-size state anywhere
in the model, a prompt can only be continued where such a state was captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from keepsight.errors import ModelError, UnsupportedModel
from keepsight.formats.package import storage_bytes
from keepsight.kinds import CacheLayer, Record
from keepsight.models.tested import refuse_unknown
from keepsight.models.upstream import (
    DummyLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from keepsight.prefix.node import Node

_ROUND = 256  # capacities are multiples of this, which also keeps every head's rows aligned
Tensors = dict[str, torch.Tensor]


class LaneLayer(DynamicLayer):
    """A full-attention layer in one preallocated buffer. Rows past `length` mean nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized: bool = False
        self.length = 0
        self.reserved = 0
        self.room_k: torch.Tensor | None = None
        self.room_v: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and return all keys and values so far."""
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.is_initialized = True
        start, end = self.length, self.length + key_states.shape[-2]
        self._ensure(end, key_states, value_states)
        self.room_k[:, :, start:end] = key_states  # type: ignore[index]
        self.room_v[:, :, start:end] = value_states  # type: ignore[index]
        self._view(end)
        if start == 0:
            # The first chunk gets what stock gives it: its own contiguous tensors.
            return key_states, value_states
        return self.keys, self.values

    def _ensure(self, end: int, like_k: torch.Tensor, like_v: torch.Tensor) -> None:
        for room, like in ((self.room_k, like_k), (self.room_v, like_v)):
            if room is not None and not _alike(room, like):
                self._make_anew(room, like)
        have = 0 if self.room_k is None else self.room_k.shape[-2]
        if end <= have:
            return
        wanted = max(end, self.reserved, have + have // 2)
        capacity = -(-wanted // _ROUND) * _ROUND
        old_k, old_v = self.room_k, self.room_v
        self.room_k = like_k.new_empty(*like_k.shape[:2], capacity, like_k.shape[-1])
        self.room_v = like_v.new_empty(*like_v.shape[:2], capacity, like_v.shape[-1])
        if self.length and old_k is not None and old_v is not None:
            self.room_k[:, :, : self.length] = old_k[:, :, : self.length]
            self.room_v[:, :, : self.length] = old_v[:, :, : self.length]

    def _make_anew(self, room: torch.Tensor, like: torch.Tensor) -> None:
        """Drop buffers that cannot take what comes; they must be empty."""
        if self.length:
            raise ModelError(
                f"the model computed in {room.dtype} on {room.device} when this turn began, and "
                f"now in {like.dtype} on {like.device}: it was cast or moved, or autocast was "
                "entered or left, while the turn was running; ask again"
            )
        self.room_k = self.room_v = None

    def _view(self, length: int) -> None:
        self.length = length
        self.keys = self.room_k[:, :, :length]  # type: ignore[index]
        self.values = self.room_v[:, :, :length]  # type: ignore[index]

    def rewind(self, length: int) -> None:
        """Forget everything from `length` on. What stands before was written by the same chunks."""
        if length > self.length:
            raise ValueError(f"cannot rewind from {self.length} to {length}")
        if self.room_k is not None:
            self._view(length)
        if length == 0:
            # As new: PaliGemma and Mllama ask it whether this is the first chunk.
            self.is_initialized = False

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put remembered keys and values back at their place."""
        if not self.is_initialized:
            self.dtype, self.device = keys.dtype, keys.device
            self.is_initialized = True
        end = start + keys.shape[-2]
        self.length = start
        self._ensure(end, keys, values)
        self.room_k[:, :, start:end] = keys  # type: ignore[index]
        self.room_v[:, :, start:end] = values  # type: ignore[index]
        self._view(end)

    def stretch(
        self, tokens: int, like_k: torch.Tensor, like_v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The room, with place for some tokens more; who writes them there then says `advance`."""
        if not self.is_initialized:
            self.dtype, self.device = like_k.dtype, like_k.device
            self.is_initialized = True
        self._ensure(self.length + tokens, like_k, like_v)
        return self.room_k, self.room_v  # type: ignore[return-value]

    def advance(self, tokens: int) -> None:
        """Some tokens more were written behind what was held."""
        self._view(self.length + tokens)

    def hold(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Take these buffers as the room, their first `length` rows filled already."""
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.room_k, self.room_v = keys, values
        self._view(length)

    def get_seq_length(self, *more: object, **options: object) -> int:
        """Tokens held."""
        refuse_unknown("get_seq_length of a cache layer", more, options)
        return self.length

    def get_mask_sizes(self, query_length: int, *more: object, **named: object) -> tuple[int, int]:
        """All that is held and all that comes, from the first token on."""
        refuse_unknown("get_mask_sizes of a cache layer", more, named)
        return self.length + query_length, 0

    def reset(self) -> None:
        """Forget everything, keep the room."""
        self.rewind(0)

    @property
    def nbytes(self) -> int:
        """Bytes of the room."""
        return storage_bytes(t for t in (self.room_k, self.room_v) if t is not None)


def _alike(room: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether rows of one tensor can be written into the other as they are."""
    if room.dtype != like.dtype or room.device != like.device:
        return False
    return room.shape[:2] == like.shape[:2] and room.shape[-1] == like.shape[-1]


class CrossLayer(LaneLayer):
    """Keys and values of the media beside the sequence: as many rows as the media have."""


_KINDS: dict[type, str] = {
    DummyLayer: "none",  # it reads the keys and values of a layer before it
    DynamicLayer: "full",
    DynamicSlidingWindowLayer: "sliding",
    LinearAttentionLayer: "linear",
    LinearAttentionAndFullAttentionLayer: "linear+full",
    LinearAttentionAndSlidingWindowAttentionLayer: "linear+sliding",
}


_GROWING = ("full", "cross", "none")  # kinds without a state of fixed size


@dataclass(frozen=True)
class Shape:
    """The kinds of layers of one model, in order."""

    kinds: tuple[str, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Shape:
        """Read off the cache that Transformers itself would build; refuse what we do not know."""
        layers = DynamicCache(config=model.config).layers
        unknown = sorted({type(x).__name__ for x in layers if type(x) not in _KINDS})
        if unknown or not layers:
            raise UnsupportedModel(
                f"cache layers of kind {', '.join(unknown) or '(none)'} are not supported; "
                f"supported: {', '.join(sorted(t.__name__ for t in _KINDS))}"
            )
        _compare_with_decoder(model, len(layers))
        cross = getattr(model.config.get_text_config(), "cross_attention_layers", None) or ()
        kinds = tuple(
            "cross" if i in cross else _KINDS[type(layer)] for i, layer in enumerate(layers)
        )
        if not any(kind == "full" for kind in kinds) and not any("sliding" in k for k in kinds):
            raise UnsupportedModel("a model without any attention layer keeps no token count")
        if "linear+full" in kinds:
            raise UnsupportedModel(
                "layers that are linear and full at once are not yet shown exact"
            )
        return cls(kinds)

    @property
    def has_fixed(self) -> bool:
        """Whether some layer's state is valid only where it was captured."""
        return any(kind not in _GROWING for kind in self.kinds)


def _compare_with_decoder(model: PreTrainedModel, count: int) -> None:
    """Refuse a config that speaks of other layers than the decoder has: the cache follows it."""
    have = getattr(model.get_decoder(), "layers", None)
    if have is None:
        return
    if len(have) != count:
        raise UnsupportedModel(
            f"the config describes {count} layers, the decoder has {len(have)}; load the model "
            "with the config it was saved with"
        )
    said = getattr(model.config.get_text_config(), "layer_types", None) or ()
    for index, (layer, kind) in enumerate(zip(have, said, strict=False)):
        names = ("layer_type", "block_type", "attention_type")  # as families call it
        built = next((getattr(layer, name) for name in names if hasattr(layer, name)), kind)
        if isinstance(built, str) and built != kind:
            raise UnsupportedModel(
                f"the config says that layer {index} is {kind!r}, it was built as {built!r}; load "
                "the model with the config it was saved with"
            )


class Lane:
    """The memory of one running sequence."""

    def __init__(self, model: PreTrainedModel, shape: Shape, making: str = "") -> None:
        self.shape, self.making = shape, making
        self._config = model.config
        self.cache = DynamicCache(config=model.config)
        for i, kind in enumerate(shape.kinds):
            if kind == "full":
                self.cache.layers[i] = LaneLayer()
            elif kind == "cross":
                self.cache.layers[i] = CrossLayer()
        self.length = 0
        self.marks: list[tuple[int, Node]] = []  # (end, node): what of the tree stands here in full
        self.busy = False

    @property
    def full(self) -> list[LaneLayer]:
        """The full-attention layers."""
        layers = self.cache.layers
        return [x for x in layers if isinstance(x, LaneLayer) and not isinstance(x, CrossLayer)]

    @property
    def cross(self) -> list[CrossLayer]:
        """The layers that hold the media beside the sequence."""
        return [layer for layer in self.cache.layers if isinstance(layer, CrossLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes of the preallocated rooms and of the fixed-size states."""
        rooms = sum(layer.nbytes for layer in [*self.full, *self.cross])
        return rooms + storage_bytes(self._fixed().values())

    def reserve(self, tokens: int) -> None:
        """Say how long the sequence will get, so that the rooms need not grow step by step."""
        for layer in self.full:
            layer.reserved = tokens

    def capture(self, start: int, end: int) -> tuple[Tensors, Tensors]:
        """A snapshot: new keys and values since `start` as stacked copies, fixed states whole."""
        if end != self.length:
            raise ValueError(f"a snapshot stands at the lane's end {self.length}, not at {end}")
        return self.capture_full(start, end), {n: t.clone() for n, t in self._fixed().items()}

    def capture_full(self, start: int, end: int) -> Tensors:
        """Keys and values of the full layers in a range: one stacked tensor where all rows have
        one shape on one device, else two for each layer."""
        rows = {}
        for i, layer in enumerate(self.full):
            rows[f"{i}.k"] = layer.keys[0, :, start:end]
            rows[f"{i}.v"] = layer.values[0, :, start:end]
        beside = self._capture_cross() if start == 0 else {}
        if len({(tensor.shape, tensor.dtype, tensor.device) for tensor in rows.values()}) == 1:
            return {"kv": torch.stack(list(rows.values())), **beside}
        return {name: tensor.clone() for name, tensor in rows.items()} | beside

    def _capture_cross(self) -> Tensors:
        """The media's keys and values: all of them are there after the first chunk."""
        rows = {}
        for i, layer in enumerate(self.cross):
            if layer.length:
                rows[f"cross.{i}.k"], rows[f"cross.{i}.v"] = layer.keys[0], layer.values[0]
        return {name: tensor.clone() for name, tensor in rows.items()}

    def restore_full(self, start: int, tensors: Tensors) -> None:
        """Put the keys and values of one snapshot back."""
        stacked = tensors.get("kv")
        for i, layer in enumerate(self.full):
            if stacked is not None:
                layer.write(start, stacked[2 * i][None], stacked[2 * i + 1][None])
            else:
                layer.write(start, tensors[f"{i}.k"][None], tensors[f"{i}.v"][None])
        for i, layer in enumerate(self.cross):
            if f"cross.{i}.k" in tensors:
                layer.write(0, tensors[f"cross.{i}.k"][None], tensors[f"cross.{i}.v"][None])

    def restore_fixed(self, end: int, tensors: Tensors) -> None:
        """Put the fixed-size states of the snapshot at `end` back."""
        for name, tensor in tensors.items():
            index, what, number = name.split(".")
            layer = self.cache.layers[int(index)]
            if what in ("conv", "recurrent"):
                restore_linear(layer, what, int(number), tensor)
            else:
                _restore_sliding(layer, what, tensor, end)
        self.length = end

    def rewind(self, length: int) -> None:
        """Keep only the first tokens of the full layers; fixed states must be restored after."""
        for layer in self.full:
            layer.rewind(length)
        self.marks = [mark for mark in self.marks if mark[0] <= length]
        self.length = length
        if length == 0:
            for beside in self.cross:
                beside.rewind(0)
            self._reset_fixed()

    def _reset_fixed(self) -> None:
        # Upstream's `reset` leaves zeroed tensors where a new layer has none, and layers ask
        # "is there a state?": only new layers make a second first chunk equal to a first one.
        fresh = DynamicCache(config=self._config).layers
        for i, kind in enumerate(self.shape.kinds):
            if kind not in _GROWING:
                self.cache.layers[i] = fresh[i]

    def _fixed(self) -> Tensors:
        """The live fixed-size states by name: `layer.what.number`."""
        states: Tensors = {}
        for i, layer in enumerate(self.cache.layers):
            if isinstance(layer, LaneLayer):
                continue
            for what in ("conv", "recurrent"):
                for number, state in getattr(layer, f"{what}_states", {}).items():
                    if state is not None:
                        states[f"{i}.{what}.{number}"] = state
            if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
                states[f"{i}.keys.0"], states[f"{i}.values.0"] = layer.keys, layer.values
        return states


def layered(rows: Tensors) -> Tensors:
    """Rows with a stacked tensor taken apart, two for each layer; a view where it was one."""
    stacked = rows.get("kv")
    if stacked is None or not stacked.dim():
        return rows
    apart = {f"{i // 2}.{'kv'[i % 2]}": stacked[i] for i in range(len(stacked))}
    return {name: tensor for name, tensor in rows.items() if name != "kv"} | apart


def pattern(kv: Tensors, fixed: Tensors) -> Record:
    """What every snapshot of one model has in common, however its rows are stacked: names, dtypes,
    and sizes but for rows."""
    found: Record = {}
    for name, tensor in layered(kv).items():
        if not name.startswith("cross."):  # there only where the prompt begins with media
            found[f"kv {name}"] = (tensor.dtype, *tensor.shape[:-2], tensor.shape[-1])
    for name, tensor in fixed.items():
        sliding = ".keys." in name or ".values." in name
        sizes = (*tensor.shape[:-2], tensor.shape[-1]) if sliding else tuple(tensor.shape)
        found[f"fixed {name}"] = (tensor.dtype, *sizes)
    return found


def restore_linear(layer: CacheLayer, what: str, number: int, tensor: torch.Tensor) -> None:
    """Put a convolution or recurrent state into a layer."""
    # Upstream updates these states in place, at a static address: copy, never assign.
    if not getattr(layer, f"is_{what}_states_initialized")[number]:
        layer.lazy_initialization(**{f"{what}_states": tensor}, state_idx=number)
    getattr(layer, f"{what}_states")[number].copy_(tensor)
    layer.has_previous_state[number] = True


def _restore_sliding(layer: CacheLayer, what: str, tensor: torch.Tensor, end: int) -> None:
    # Upstream never writes into these tensors (it concatenates), so they need no copy.
    if not layer.is_initialized:
        layer.lazy_initialization(tensor, tensor)
    setattr(layer, what, tensor)
    layer.cumulative_length = end
