"""The memory of a layer: a lane to compute in, and snapshots to keep.

A lane is the memory of one running sequence: a Transformers cache whose full-attention layers live
in preallocated buffers at fixed addresses. Nothing is copied as a sequence grows, and a compiled or
batched step can run on it later. A snapshot is what the tree keeps of a lane: for full layers
keys and values of a stretch, for layers with a state of fixed size this state, whole.

Only `Shape` decides which cuts are valid: if any layer has a fixed-size state, a prompt can only be
continued where such a state was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from keepsight.core.decoding.lane_layer import CrossLayer, LaneLayer, WindowLayer
from keepsight.core.decoding.lane_mixer import MixerLayer
from keepsight.core.decoding.positions import PromptPositions
from keepsight.errors import UnsupportedModel
from keepsight.formats.package import storage_bytes
from keepsight.kinds import CacheLayer, Record
from keepsight.models.upstream import (
    DummyLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from keepsight.prefix.node import Node
from keepsight.system.devices import to_devices

Tensors = dict[str, torch.Tensor]


_KINDS: dict[type, str] = {
    DummyLayer: "none",  # it reads the keys and values of an earlier layer
    DynamicLayer: "full",
    DynamicSlidingWindowLayer: "sliding",
    LinearAttentionLayer: "linear",
}


@dataclass(frozen=True)
class Shape:
    """The kinds of layers of one model, in order."""

    kinds: tuple[str, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Shape:
        """Read the layers from the cache Transformers would build; refuse unknown ones."""
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
        if {"full", "sliding"}.isdisjoint(kinds):
            raise UnsupportedModel(
                "this model has no attention layer, so nothing counts its tokens; use it without "
                "Keepsight"
            )
        return cls(kinds)

    @property
    def has_states(self) -> bool:
        """Whether some layer has a state of fixed size, which is valid only where it was
        captured."""
        return "linear" in self.kinds


def _compare_with_decoder(model: PreTrainedModel, count: int) -> None:
    """Refuse a config that disagrees with the decoder: the cache follows the config."""
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
        names = ("layer_type", "block_type", "attention_type")  # the name that families use
        built = next((getattr(layer, name) for name in names if hasattr(layer, name)), kind)
        if isinstance(built, str) and built != kind:
            raise UnsupportedModel(
                f"the config says that layer {index} is {kind!r}, it was built as {built!r}; load "
                "the model with the config it was saved with"
            )


class Lane:
    """The memory of one running sequence. Layers with windows hold all keys and values, so that any
    prefix can be taken of them."""

    def __init__(self, model: PreTrainedModel, shape: Shape, variant: str = "") -> None:
        self.shape, self.variant = shape, variant
        self.cache = DynamicCache(config=model.config)
        for i, kind in enumerate(shape.kinds):
            if kind == "full":
                self.cache.layers[i] = LaneLayer()
            elif kind == "cross":
                self.cache.layers[i] = CrossLayer()
            elif kind == "sliding":
                self.cache.layers[i] = _window(model, i, self.cache.layers[i])
            elif kind == "linear":
                self.cache.layers[i] = MixerLayer()
        self.length = self._start = 0
        self.node: Node | None = None  # the deepest one whose path is completely here
        self.placed: PromptPositions | None = None  # the last prompt it held, with its positions
        self.behind: Callable[[Lane], None] | None = None  # brings what was computed elsewhere
        self.copied = 0  # first tokens of which a copy elsewhere is as here

    @property
    def full(self) -> list[LaneLayer]:
        """The layers that grow with the sequence."""
        layers = self.cache.layers
        return [x for x in layers if isinstance(x, LaneLayer) and not isinstance(x, CrossLayer)]

    @property
    def cross(self) -> list[CrossLayer]:
        return [layer for layer in self.cache.layers if isinstance(layer, CrossLayer)]

    def settle(self) -> None:
        """Hold here what was computed elsewhere."""
        if self.behind is not None:
            bring, self.behind = self.behind, None
            bring(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the preallocated buffers and of the fixed-size states."""
        rooms = sum(layer.nbytes for layer in [*self.full, *self.cross])
        return rooms + storage_bytes(self._fixed().values())

    def reserve(self, tokens: int) -> None:
        """Announce the final length of the sequence, so that buffers are allocated once."""
        for layer in self.full:
            layer.reserved = tokens

    def capture(self, start: int, end: int) -> tuple[Tensors, Tensors]:
        """A snapshot: new keys and values since `start` as stacked copies, fixed states whole."""
        if end != self.length:
            raise ValueError(f"a snapshot is taken at the lane's end {self.length}, not at {end}")
        return self.capture_watched(start, end)

    def capture_watched(self, start: int, end: int) -> tuple[Tensors, Tensors]:
        """A snapshot that may also end inside the last pass, where it was watched."""
        return self.capture_full(start, end), self._capture_fixed(end)

    def _capture_fixed(self, end: int) -> Tensors:
        """The fixed-size states at the lane's end, or where the last pass was watched."""
        if end == self.length:
            return {name: tensor.clone() for name, tensor in self._fixed().items()}
        states: Tensors = {}
        for i, layer in self._mixers():
            if end - self._start not in layer.found:
                raise ValueError(f"no snapshot was planned at {end}, the lane has {self.length}")
            found = layer.held(end - self._start)
            states |= {f"{i}.{what}.0": state for what, state in found.items()}
        return states

    def watch(self, ends: Sequence[int]) -> None:
        """Capture fixed-size states after these tokens of the next pass too, or after none."""
        self._start = self.length
        for _, layer in self._mixers():
            layer.ends = [end - self.length for end in ends]

    def capture_full(self, start: int, end: int) -> Tensors:
        """Keys and values of the full layers in a range: one stacked tensor if all rows have one
        shape on one device, otherwise two per layer."""
        self.settle()
        rows = {}
        for i, layer in enumerate(self.full):
            rows[f"{i}.k"] = layer.keys[0, :, start:end]
            rows[f"{i}.v"] = layer.values[0, :, start:end]
        beside = self._capture_cross() if start == 0 else {}
        if len({(tensor.shape, tensor.dtype, tensor.device) for tensor in rows.values()}) == 1:
            return {"kv": torch.stack(list(rows.values())), **beside}
        return {name: tensor.clone() for name, tensor in rows.items()} | beside

    def _capture_cross(self) -> Tensors:
        """The media's keys and values; all exist after the first chunk."""
        rows = {}
        for i, layer in enumerate(self.cross):
            if layer.length:
                rows[f"cross.{i}.k"], rows[f"cross.{i}.v"] = layer.keys[0], layer.values[0]
        return {name: tensor.clone() for name, tensor in rows.items()}

    def restore_full(self, snapshots: Sequence[tuple[int, Tensors]]) -> None:
        """Restore the keys and values of snapshots that lie one behind the other."""
        if not snapshots:
            return
        self.settle()
        start = snapshots[0][0]
        self.copied = min(self.copied, start)
        several = [layered(tensors) for _, tensors in snapshots]
        for i, layer in enumerate(self.full):
            keys, values = ([rows[f"{i}.{name}"] for rows in several] for name in "kv")
            layer.write(start, keys, values)
        for i, beside in enumerate(self.cross):
            for rows in several:
                if f"cross.{i}.k" in rows:
                    beside.write(0, [rows[f"cross.{i}.k"]], [rows[f"cross.{i}.v"]])

    def restore_fixed(self, end: int, tensors: Tensors) -> None:
        """Restore the fixed-size states of the snapshot at `end`."""
        for name, tensor in tensors.items():
            index, what, number = name.split(".")
            layer = self.cache.layers[int(index)]
            if what in ("grid", "tail"):
                layer.restore(what, tensor)
            else:
                restore_linear(layer, what, int(number), tensor)
        self.length = end

    def rewind(self, length: int) -> None:
        """Keep only the first tokens of the full layers; fixed states must be restored
        afterwards."""
        self.settle()
        self.copied = min(self.copied, length)
        for layer in self.full:
            layer.rewind(length)
        while self.node is not None and self.node.end > length:
            self.node = self.node.parent
        self.length = length
        if length == 0:
            for beside in self.cross:
                beside.rewind(0)
            # Transformers' `reset` leaves zeroed tensors where a new layer has none, and layers ask
            # "is there a state?". Only new layers make a later first chunk equal to a first one.
            for i, _ in self._mixers():
                self.cache.layers[i] = MixerLayer()

    def _mixers(self) -> list[tuple[int, MixerLayer]]:
        """The layers with a state of fixed size, with their numbers."""
        return [(i, x) for i, x in enumerate(self.cache.layers) if isinstance(x, MixerLayer)]

    def _fixed(self) -> Tensors:
        """The live fixed-size states by name: `layer.what.number`."""
        return {
            f"{i}.{n}.0": state for i, mixer in self._mixers() for n, state in mixer.held().items()
        }


class Placement:
    """The device on which each layer keeps its state, and how remembered tensors get there. A
    snapshot from elsewhere with all rows in one tensor is split when it arrives."""

    def __init__(self, model: PreTrainedModel, shape: Shape) -> None:
        self._main: torch.device = model.device
        layers = getattr(model.get_decoder(), "layers", None) or ()
        found: list[torch.device] = [
            next((w.device for w in layer.parameters()), self._main) for layer in layers
        ]
        self._of_layer = found or [self._main] * len(shape.kinds)
        both = list(zip(self._of_layer, shape.kinds, strict=True))
        self._all_rows = [d for d, kind in both if kind in ("full", "sliding")]
        self._cross = [device for device, kind in both if kind == "cross"]

    def __eq__(self, other: object) -> bool:
        """Whether every layer is on the same device in both."""
        if not isinstance(other, Placement):
            return NotImplemented
        return (self._main, self._of_layer) == (other._main, other._of_layer)

    @property
    def devices(self) -> set[torch.device]:
        return {self._main, *self._of_layer}

    def rows(self, rows: Tensors) -> Tensors:
        """Keys, values and last logits, each on its layer's device."""
        apart = layered(rows) if len({*self._all_rows}) > 1 else rows
        return to_devices(apart, self._of_rows)

    def fixed(self, states: Tensors) -> Tensors:
        """States of fixed size, each on its layer's device."""
        return to_devices(states, lambda name: self._of_layer[int(name.split(".")[0])])

    def _of_rows(self, name: str) -> torch.device:
        match name.split("."):
            case ["cross", index, _]:
                return self._cross[int(index)]
            case [index, _]:
                return self._all_rows[int(index)]
        return self._all_rows[0] if name == "kv" and self._all_rows else self._main


def _window(model: PreTrainedModel, index: int, layer: CacheLayer) -> WindowLayer:
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    chunked = kinds is not None and kinds[index] == "chunked_attention"
    return WindowLayer(layer.sliding_window, chunked)


def layered(rows: Tensors) -> Tensors:
    """Rows with a stacked tensor split into two per layer; views where possible."""
    stacked = rows.get("kv")
    if stacked is None or not stacked.dim():
        return rows
    apart = {f"{i // 2}.{'kv'[i % 2]}": stacked[i] for i in range(len(stacked))}
    return {name: tensor for name, tensor in rows.items() if name != "kv"} | apart


def pattern(kv: Tensors, fixed: Tensors) -> Record:
    """What all snapshots of one model share, however their rows are stacked: names, dtypes, and
    sizes except the number of rows."""
    found: Record = {}
    for name, tensor in layered(kv).items():
        if not name.startswith("cross."):  # only present if the prompt begins with media
            found[f"kv {name}"] = (tensor.dtype, *tensor.shape[:-2], tensor.shape[-1])
    for name, tensor in fixed.items():
        grows = ".tail." in name
        sizes = (*tensor.shape[:-2], tensor.shape[-1]) if grows else tuple(tensor.shape)
        found[f"fixed {name}"] = (tensor.dtype, *sizes)
    return found


def restore_linear(layer: CacheLayer, what: str, number: int, tensor: torch.Tensor) -> None:
    """Restore a convolution or recurrent state into a layer."""
    # Transformers updates these states in place, at a static address: copy, never assign.
    if not getattr(layer, f"is_{what}_states_initialized")[number]:
        layer.lazy_initialization(**{f"{what}_states": tensor}, state_idx=number)
    getattr(layer, f"{what}_states")[number].copy_(tensor)
    layer.has_previous_state[number] = True
