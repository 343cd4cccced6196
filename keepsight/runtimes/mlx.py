"""Models of mlx-vlm in place of an exported model's graphs: for Macs, and `mlx[cpu]` on Linux.

MLX computes tower, embedding, decoder and head; around them is Transformers' own model without
weights, as with exports. States go in and out of each pass, so engine, memory, packages, stores and
reports are the usual ones. Tensors are passed in float32, which holds all values of bfloat16 and
float16. MLX computes in the checkpoint's own dtype or its 4 or 8 bits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from keepsight.core.decoding.lane_layer import LaneLayer
from keepsight.core.decoding.state import Shape
from keepsight.errors import UnsupportedInput
from keepsight.kinds import CacheLayer, DeviceMap, Dtype, Grid
from keepsight.models.families.tower_tensors import TowerTensors
from keepsight.models.loading import files_digest
from keepsight.models.renamed import NEW, OLD, RETURNED
from keepsight.runtimes.imports import Untyped
from keepsight.runtimes.load import (
    empty_model,
    refuse_what_takes_weights,
    replace_encoder,
)
from keepsight.runtimes.manifest import file_digest
from keepsight.runtimes.mlx_library import Array, Mlx
from keepsight.runtimes.mlx_types import TYPES, MlxType
from keepsight.runtimes.modules import (
    DecoderStandIn,
    EmbeddingStandIn,
    HeadStandIn,
    PackedTowerStandIn,
    WholeTowerStandIn,
)
from keepsight.runtimes.states import (
    BIAS,
    PRESENT,
    SLIDING_BIAS,
    deepstack,
    new_state,
    state,
    state_names,
)
from keepsight.system import digests

Arrays = dict[str, Array]
Feeds = dict[str, Tensor]
GRID = "image_grid_thw"


def load_mlx(
    path: str, dtype: Dtype, device_map: DeviceMap, vision: bool, revision: str | None
) -> tuple[PreTrainedModel, str | None]:
    """A checkpoint of Transformers or mlx-vlm in MLX; and the name of its files."""
    folder = Path(path)
    for refused, why in (
        (dtype not in ("auto", None), f"dtype={dtype!r}: MLX computes in the checkpoint's own "
         "dtype; convert the checkpoint with mlx_vlm.convert"),
        (device_map not in (None, "auto"), f"device_map={device_map!r}: MLX chooses its device "
         "itself"),
        (not vision, "vision=False: a model in MLX has its vision encoder; leave it in"),
        (revision is not None, f"revision={revision!r}: a folder has no revisions"),
        (not folder.is_dir(), f"{path!r} is no folder: download the checkpoint, and name its "
         "folder"),
    ):  # fmt: skip
        if refused:
            raise UnsupportedInput(why)
    mlx = Mlx()
    model = empty_model(folder, "no configuration of a model")
    kind = TYPES.get(model.config.model_type)
    if kind is None:
        raise UnsupportedInput(
            f"models of type {model.config.model_type} do not run in MLX here; those of "
            f"{', '.join(TYPES)} do. Load it without runtime='mlx', or export it "
            "(docs/exporting.md)"
        )
    kind.refuse_other_settings(model.config)
    theirs = mlx.load(folder)
    kind.adjust(mlx, theirs, model.config)
    _put_in_place(model, theirs, mlx, kind)
    model.exported = _InMlx(folder, mlx)
    model.eval()
    refuse_what_takes_weights(model, folder, "a model in MLX")
    return model, files_digest(path, "mlx", every=True)


class _InMlx:
    """Describes the weights in MLX to the rest of Keepsight."""

    rounding_because = "its kernels were never tried in MLX"

    def __init__(self, folder: Path, mlx: Mlx) -> None:
        self.environment = {"runtime": f"mlx {mlx.version}"}
        files = [file for file in sorted(folder.glob("*.safetensors")) if file.is_file()]
        content = digests.digest(
            "weights for mlx",
            (folder / "config.json").read_bytes(),
            [[file.name, file_digest(file)] for file in files],
        )
        self.weights = {"all": content, "vision": content}
        self.decoder_bytes = sum(file.stat().st_size for file in files)

    def require(self, grid: Grid) -> None:
        """Refuse pictures that the tower cannot take; none, by size."""


def _put_in_place(model: PreTrainedModel, theirs: Untyped, mlx: Mlx, kind: MlxType) -> None:
    language, decoder, core = theirs.language_model, model.get_decoder(), model.base_model
    shape = Shape.of(model)
    attentions = [getattr(layer, "self_attn", None) for layer in language.model.layers]
    sliding = [getattr(attention, "is_sliding", False) for attention in attentions]
    if sliding != [one == "sliding" for one in shape.kinds]:
        raise UnsupportedInput(
            "text_config: mlx-vlm does not give a sliding window to the layers that have one here; "
            "load the checkpoint without runtime='mlx'"
        )
    dtype = language.model.norm.weight.dtype
    embedding, table = model.get_input_embeddings(), language.model.embed_tokens
    # Rounded as in Transformers.
    scale = mlx.core.array(float(getattr(embedding, "scalar_embed_scale", 1.0))).astype(dtype)
    head = language.lm_head if hasattr(language, "lm_head") else table.as_linear

    def embed(feeds: Feeds) -> Arrays:
        return {"inputs_embeds": table(mlx.given(feeds["input_ids"])) * scale}

    def logits(feeds: Feeds) -> Arrays:
        return {"logits": head(mlx.given(feeds["hidden"], dtype))}

    def look(feeds: Feeds) -> Arrays:
        """Pictures of one size, each through the tower alone."""
        pixels = mlx.given(feeds["pixel_values"], dtype).transpose(0, 2, 3, 1)
        return {"features": kind.features(mlx, theirs, pixels)} if kind.features else {}

    def look_at_patches(feeds: Feeds) -> Arrays:
        tower = theirs.vision_tower
        pixels = mlx.given(feeds["pixel_values"], tower.patch_embed.proj.weight.dtype)
        found = tower(pixels, mlx.given(feeds[GRID]))
        features, levels = found if isinstance(found, tuple) else (found, [])
        return {"features": features} | {deepstack(n): one for n, one in enumerate(levels)}

    ids = _Part(mlx, {"input_ids"}, embed)
    embedding.forward = EmbeddingStandIn(ids, embedding.embedding_dim)
    model.get_output_embeddings().forward = HeadStandIn(_Part(mlx, {"hidden"}, logits))
    vision = getattr(core, "visual", None)
    levels = getattr(getattr(vision, "config", None), "deepstack_visual_indexes", None) or ()
    session = _Decoder(mlx, language, shape.kinds, len(levels), kind.counts)
    decoder.forward = _MlxDecoder(session, decoder, shape, False, hasattr(core, "get_rope_index"))
    if kind.features is None:
        tower = _Part(mlx, {"pixel_values", GRID}, look_at_patches)
        core.visual.forward = PackedTowerStandIn(tower, vision, TowerTensors(core), sys.maxsize)
    else:
        replace_encoder(core, WholeTowerStandIn(_Part(mlx, {"pixel_values"}, look), model.config))


# -- parts ---------------------------------------------------------------------------------------


class _Part:
    """One part of the model, with named input and output tensors."""

    def __init__(self, mlx: Mlx, inputs: set[str], compute: Callable[[Feeds], Arrays]) -> None:
        self._mlx, self.inputs, self._compute = mlx, frozenset(inputs), compute
        self.version: str = mlx.version

    def run(self, feeds: Feeds, into: Feeds | None = None) -> Feeds:
        """The outputs by name."""
        with self._mlx.alone:
            return {name: self._mlx.taken(one) for name, one in self._compute(feeds).items()}


# -- what layers remember: caches of mlx-vlm, filled before a pass and read after it ------------


@dataclass(frozen=True)
class HeldArrays:
    """A layer's keys and values in MLX, valid while the layer does not change."""

    layer: LaneLayer
    changes: int
    keys: Array
    values: Array

    def is_of(self, layer: CacheLayer) -> bool:
        """Whether these are the current states of a layer."""
        return layer is self.layer and self.layer.changes == self.changes


class PastArrays:
    """Keys and values of a layer before a pass; the pass appends its own."""

    def __init__(self, mlx: Mlx, keys: Array, values: Array, mask: Array) -> None:
        self._mlx, self._keys, self._values, self._mask = mlx, keys, values, mask
        self._held, self.offset = keys.shape[2], keys.shape[2]
        self._rows = self.whole = (keys, values)

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """All keys and values, including those of the pass."""
        self._rows = self.whole = (keys, values)
        if self._held:
            both = [self._keys, keys], [self._values, values]
            before, after = (self._mlx.core.concatenate(parts, axis=2) for parts in both)
            self.whole = (before, after)
        return self.whole

    def make_mask(self, count: int, *more: object, **options: object) -> Array:
        """The mask given by the engine."""
        return self._mask

    def after(self) -> tuple[Array, Array]:
        """The rows that the pass added."""
        return self._rows


class FixedArrays:
    """A layer's states of fixed size. Transformers stores the last inputs of a convolution by
    column, with one more than is read, and transposes a delta rule's state."""

    def __init__(
        self, mlx: Mlx, conv: Tensor, recurrent: Tensor, present: Tensor, dtype: object
    ) -> None:
        self._mlx, self._present = mlx, present
        self.cache = mlx.arrays_cache(2)
        self.cache.make_mask = self.make_mask
        self.cache[0] = mlx.given(conv[..., 1:].transpose(1, 2), dtype)
        self.cache[1] = mlx.given(recurrent.transpose(-1, -2))

    def make_mask(self, count: int) -> Array | None:
        """Which tokens are not padding; None if all are."""
        whole = bool(self._present.all())
        return None if whole else self._mlx.given(self._present > 0)

    def after(self) -> tuple[Array, Array]:
        """The states after the pass, as MLX orders them."""
        return self.cache[0], self.cache[1]

    @staticmethod
    def as_stored(conv: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor]:
        """These states as Transformers orders them."""
        return functional.pad(conv.transpose(1, 2), (1, 0)), recurrent.transpose(-1, -2)


# -- the decoder ----------------------------------------------------------------------------------


class _Decoder(_Part):
    def __init__(
        self, mlx: Mlx, language: Untyped, kinds: Sequence[str], levels: int, counts: bool
    ) -> None:
        names = {state(name, n) for n, kind in enumerate(kinds) for name in state_names(kind)}
        names |= {"inputs_embeds", "position_ids", BIAS, SLIDING_BIAS, PRESENT}
        names |= {deepstack(level) for level in range(levels)}
        super().__init__(mlx, names, self._pass)
        self._language, self._counts = language, counts
        self._dtype = language.model.norm.weight.dtype
        named = inspect.signature(type(language.model).__call__).parameters
        self._embeds = "inputs_embeds" if "inputs_embeds" in named else "input_embeddings"
        self._levels = [deepstack(level) for level in range(levels)]
        self._kinds = kinds
        self._layers: Sequence[CacheLayer] = ()
        self._past: list[PastArrays | FixedArrays] = []
        self._held: dict[int, HeldArrays] = {}

    def begin(self, layers: Sequence[CacheLayer]) -> None:
        """Set the states for the next pass."""
        self._layers = layers

    def end(self, layers: Sequence[CacheLayer]) -> None:
        """The layers now hold the new states; keep MLX's copy for the next pass."""
        self._held = {
            number: HeldArrays(layer, layer.changes, *past.whole)
            for number, (layer, past) in enumerate(zip(layers, self._past, strict=True))
            if isinstance(layer, LaneLayer)
            and not layer.is_sliding
            and isinstance(past, PastArrays)
        }
        self._layers, self._past = (), []

    def _before(self, number: int, feeds: Feeds, masks: Arrays) -> PastArrays | FixedArrays:
        """The states of a layer before a pass."""
        mlx, kind = self._mlx, self._kinds[number]
        held = self._held.get(number)
        if held is not None and number < len(self._layers) and held.is_of(self._layers[number]):
            past = PastArrays(mlx, held.keys, held.values, masks[kind])
        else:
            given = [feeds[state(name, number)] for name in state_names(kind)]
            if kind == "linear":
                return FixedArrays(mlx, given[0], given[1], feeds[PRESENT], self._dtype)
            keys, values = (mlx.given(tensor, self._dtype) for tensor in given)
            past = PastArrays(mlx, keys, values, masks[kind])
        if self._counts:
            past.offset = self._first_positions(feeds)
        return past

    def _first_positions(self, feeds: Feeds) -> int | Array:
        """The first position of each row: these models count on from there themselves."""
        positions = feeds["position_ids"]
        bias = feeds[BIAS if BIAS in feeds else SLIDING_BIAS]
        tokens = positions.shape[1]
        first = positions[:, -1] - tokens + 1
        itself = bias[:, 0].diagonal(bias.shape[-1] - tokens, 1, 2)  # padding does not see itself
        if ((positions != first[:, None] + torch.arange(tokens)) & (itself == 0)).any():
            raise UnsupportedInput(
                "position_ids: mlx-vlm counts the positions of this model itself"
            )
        same = int(first[0])
        return same if bool((first == same).all()) else self._mlx.given(first)

    def run(self, feeds: Feeds, into: Feeds | None = None) -> Feeds:
        """The outputs by name, states as Transformers orders them."""
        found = super().run(feeds, into)
        for number, past in enumerate(self._past):
            if isinstance(past, FixedArrays):
                conv, recurrent = (new_state(name, number) for name in state_names("linear"))
                stored = past.as_stored(found[conv], found[recurrent])
                found[conv], found[recurrent] = stored
        return found

    def _pass(self, feeds: Feeds) -> Arrays:
        mlx, dtype = self._mlx, self._dtype
        named = {"full": BIAS, "sliding": SLIDING_BIAS}
        masks = {k: mlx.given(feeds[name], dtype) for k, name in named.items() if name in feeds}
        self._past = [self._before(n, feeds, masks) for n in range(len(self._kinds))]
        embeds = mlx.given(feeds["inputs_embeds"], dtype)
        cache = [getattr(one, "cache", one) for one in self._past]
        if self._counts:  # models differ in the name of embeddings, and in argument order
            hidden = self._language.model(None, **{self._embeds: embeds}, cache=cache)
        else:
            hidden = self._language.model(
                None,
                inputs_embeds=embeds,
                mask=masks["full"],
                cache=cache,
                position_ids=mlx.given(feeds["position_ids"][-3:]),  # leave out text-only ones
                **self._deepstack(feeds),
            )
        found = {"hidden": hidden}
        for number, one in enumerate(self._past):
            names = [new_state(name, number) for name in state_names(self._kinds[number])]
            found |= dict(zip(names, one.after(), strict=True))
        mlx.core.eval(list(found.values()))
        return found

    def _deepstack(self, feeds: Feeds) -> dict[str, object]:
        """A row for each token: zeros where there is no picture."""
        if not any(bool(feeds[name].any()) for name in self._levels):
            return {}
        dense = [self._mlx.given(feeds[name], self._dtype) for name in self._levels]
        return {
            "deepstack_visual_embeds": [one.reshape(-1, one.shape[-1]) for one in dense],
            "visual_pos_masks": np.ones(feeds["inputs_embeds"].shape[:2], dtype=bool),
        }


class _MlxDecoder(DecoderStandIn):
    """A decoder that keeps its states in MLX, so that no pass copies them from PyTorch."""

    def __call__(self, *more: object, **options: object) -> MoeModelOutputWithPast:
        session = cast(_Decoder, self._session)
        cache = options.get(NEW, options.get(OLD))
        session.begin(getattr(cache, "layers", ()))
        output = super().__call__(*more, **options)  # type: ignore[arg-type]
        session.end(output[RETURNED].layers)
        return output
