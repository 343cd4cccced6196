"""Models of mlx-vlm in the places of an exported model's graphs: for Macs, and `mlx[cpu]` on Linux.

MLX computes tower, embedding, decoder and head; around them stands Transformers' own model without
weights, as with exports. States go in and out of each pass, so engine, memory, packages, stores and
reports are those of every model. Numbers cross the seam in float32, which holds all of bfloat16's
and float16's, and are computed in the checkpoint's own dtype or its own 4 or 8 bits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from keepsight import digests
from keepsight.core.lane_layer import LaneLayer
from keepsight.core.state import Shape
from keepsight.errors import UnsupportedInput
from keepsight.kinds import CacheLayer, DeviceMap, Dtype, Grid
from keepsight.models.families.tower_tensors import TowerTensors
from keepsight.models.loading import files_digest
from keepsight.runtimes.imports import Foreign
from keepsight.runtimes.manifest import file_digest
from keepsight.runtimes.mlx_library import Array, Mlx
from keepsight.runtimes.modules import (
    DecoderStandIn,
    EmbeddingStandIn,
    HeadStandIn,
    PackedTowerStandIn,
)
from keepsight.runtimes.states import BIAS, PRESENT, deepstack, new_state, state, state_names
from keepsight.runtimes.weightless import empty_model, refuse_what_takes_weights

# Model types whose parts in mlx-vlm are shown to give what Transformers' own give.
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
_NO_BOUND = 1 << 40  # of patches in a picture


def load_mlx(
    path: str, dtype: Dtype, device_map: DeviceMap, vision: bool, revision: str | None
) -> tuple[PreTrainedModel, str | None]:
    """A checkpoint that Transformers or mlx-vlm made, in MLX; and what its files are known by."""
    _refuse_options(dtype, device_map, vision, revision)
    folder = Path(path)
    if not folder.is_dir():
        raise UnsupportedInput(
            f"{path!r} is no folder: download the checkpoint, and name its folder"
        )
    mlx = Mlx()
    model = empty_model(folder, "no configuration of a model")
    kind = model.config.model_type
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedInput(
            f"models of type {kind} do not run in MLX here; those of {known} do. Load it without "
            "runtime='mlx', or export it (docs/exporting.md)"
        )
    theirs = mlx.load(folder)
    _put_in_place(model, theirs, mlx)
    model.exported = _InMlx(folder, mlx, theirs)
    model.eval()
    refuse_what_takes_weights(model, folder, "a model in MLX")
    return model, files_digest(path, "mlx", every=True)


def _refuse_options(
    dtype: Dtype, device_map: DeviceMap, vision: bool, revision: str | None
) -> None:
    if dtype not in ("auto", None):
        raise UnsupportedInput(
            f"dtype={dtype!r}: MLX computes in the checkpoint's own dtype; convert the checkpoint "
            "with mlx_vlm.convert"
        )
    if device_map not in (None, "auto"):
        raise UnsupportedInput(f"device_map={device_map!r}: MLX chooses its device itself")
    if not vision:
        raise UnsupportedInput("vision=False: a model in MLX has its tower; leave it in")
    if revision is not None:
        raise UnsupportedInput(f"revision={revision!r}: a folder has no revisions")


class _InMlx:
    """What a model says of the weights that lie in MLX."""

    def __init__(self, folder: Path, mlx: Mlx, model: Foreign) -> None:
        self.environment = {"runtime": f"mlx {mlx.version}"}
        files = [file for file in sorted(folder.glob("*.safetensors")) if file.is_file()]
        content = digests.digest(
            "weights for mlx",
            (folder / "config.json").read_bytes(),
            [[file.name, file_digest(file)] for file in files],
        )
        self.weights = {"all": content, "vision": content}
        self.decoder_bytes = sum(os.path.getsize(file) for file in files)

    def require(self, grid: Grid) -> None:
        """Refuse what the tower cannot take: nothing, by its size."""


def _put_in_place(model: PreTrainedModel, theirs: Foreign, mlx: Mlx) -> None:
    language, decoder = theirs.language_model, model.get_decoder()
    embedding, core = model.get_input_embeddings(), model.base_model
    embedding.forward = EmbeddingStandIn(_Embedding(mlx, language), embedding.embedding_dim)
    model.get_output_embeddings().forward = HeadStandIn(_Head(mlx, language))
    indexes = getattr(core.visual.config, "deepstack_visual_indexes", None) or ()
    shape = Shape.of(model)
    session = _Decoder(mlx, language, shape.kinds, len(indexes))
    decoder.forward = _MlxDecoder(session, decoder, shape, False, hasattr(core, "get_rope_index"))
    core.visual.forward = _MlxTower(mlx, theirs.vision_tower, core.visual, TowerTensors(core))


# -- parts ---------------------------------------------------------------------------------------


class _Part:
    """One part of the model, which takes and gives tensors by name."""

    inputs: frozenset[str]

    def __init__(self, mlx: Mlx, language: Foreign) -> None:
        self._mlx, self._language = mlx, language
        self.version: str = mlx.version
        self._dtype = language.model.norm.weight.dtype

    def run(
        self, feeds: dict[str, Tensor], into: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The outputs by name."""
        with self._mlx.alone:
            return {name: self._mlx.taken(one) for name, one in self.compute(feeds).items()}

    def compute(self, feeds: dict[str, Tensor]) -> dict[str, Array]:
        """The same as arrays."""
        raise NotImplementedError


class _Embedding(_Part):
    inputs = frozenset({"input_ids"})

    def compute(self, feeds: dict[str, Tensor]) -> dict[str, Array]:
        ids = self._mlx.given(feeds["input_ids"])
        return {"inputs_embeds": self._language.model.embed_tokens(ids)}


class _Head(_Part):
    inputs = frozenset({"hidden"})

    def compute(self, feeds: dict[str, Tensor]) -> dict[str, Array]:
        hidden, language = self._mlx.given(feeds["hidden"], self._dtype), self._language
        tied = language.args.tie_word_embeddings
        head = language.model.embed_tokens.as_linear if tied else language.lm_head
        return {"logits": head(hidden)}


class _Decoder(_Part):
    def __init__(self, mlx: Mlx, language: Foreign, kinds: Sequence[str], levels: int) -> None:
        super().__init__(mlx, language)
        self._levels = [deepstack(level) for level in range(levels)]
        self._kinds = kinds
        names = [state(name, n) for n, kind in enumerate(kinds) for name in state_names(kind)]
        self.inputs = frozenset(
            {"inputs_embeds", "position_ids", BIAS, PRESENT, *self._levels, *names}
        )
        self._layers: Sequence[CacheLayer] = ()
        self._past: list[_Past | _Fixed] = []
        self._held: dict[int, _HeldArrays] = {}

    def begin(self, layers: Sequence[CacheLayer]) -> None:
        """Say whose states come."""
        self._layers = layers

    def end(self, layers: Sequence[CacheLayer]) -> None:
        """The layers hold the new states too: the next pass over them reads no copy of these."""
        self._held = {
            number: _HeldArrays(layer, layer.changes, *past.whole)
            for number, (layer, past) in enumerate(zip(layers, self._past, strict=True))
            if isinstance(layer, LaneLayer) and isinstance(past, _Past)
        }
        self._layers, self._past = (), []

    def _before(self, number: int, feeds: dict[str, Tensor], mask: Array) -> _Past | _Fixed:
        """The states of a layer before a pass."""
        mlx, kind = self._mlx, self._kinds[number]
        held = self._held.get(number)
        if held is not None and number < len(self._layers) and held.is_of(self._layers[number]):
            return _Past(mlx, held.keys, held.values, mask)
        given = [feeds[state(name, number)] for name in state_names(kind)]
        if kind == "linear":
            return _Fixed(mlx, given[0], given[1], feeds[PRESENT], self._dtype)
        keys, values = (mlx.given(tensor, self._dtype) for tensor in given)
        return _Past(mlx, keys, values, mask)

    def compute(self, feeds: dict[str, Tensor]) -> dict[str, Array]:
        mlx, dtype = self._mlx, self._dtype
        mask = mlx.given(feeds[BIAS], dtype)
        self._past = [self._before(n, feeds, mask) for n in range(len(self._kinds))]
        options: dict[str, object] = {}
        if self._levels and any(bool(feeds[name].any()) for name in self._levels):
            # A row for each token: zeros where there is no picture.
            dense = [mlx.given(feeds[name], dtype) for name in self._levels]
            options["deepstack_visual_embeds"] = [one.reshape(-1, one.shape[-1]) for one in dense]
            options["visual_pos_masks"] = np.ones(feeds["inputs_embeds"].shape[:2], dtype=bool)
        hidden = self._language.model(
            None,
            inputs_embeds=mlx.given(feeds["inputs_embeds"], dtype),
            mask=mask,
            cache=[getattr(one, "cache", one) for one in self._past],
            position_ids=mlx.given(feeds["position_ids"][-3:]),  # without those of text alone
            **options,
        )
        found = {"hidden": hidden}
        for number, one in enumerate(self._past):
            names = [new_state(name, number) for name in state_names(self._kinds[number])]
            found |= dict(zip(names, one.after(), strict=True))
        mlx.core.eval(list(found.values()))
        return found


@dataclass(frozen=True)
class _HeldArrays:
    """Keys and values of a layer as MLX has them, as long as the layer does not change."""

    layer: LaneLayer
    changes: int
    keys: Array
    values: Array

    def is_of(self, layer: CacheLayer) -> bool:
        """Whether these are the current states of a layer."""
        return layer is self.layer and self.layer.changes == self.changes


class _MlxDecoder(DecoderStandIn):
    """A decoder whose states need not come again from PyTorch's memory in each pass."""

    def __call__(self, *more: object, **options: object) -> MoeModelOutputWithPast:
        session = cast(_Decoder, self._session)
        session.begin(getattr(options.get("past_key_values"), "layers", ()))
        output = super().__call__(*more, **options)  # type: ignore[arg-type]
        session.end(output.past_key_values.layers)
        return output


class _Past:
    """Keys and values of a layer before a pass; the pass adds its own."""

    def __init__(self, mlx: Mlx, keys: Array, values: Array, mask: Array) -> None:
        self._mlx, self._keys, self._values, self._mask = mlx, keys, values, mask
        self.offset = keys.shape[2]
        self._rows = self.whole = (keys, values)

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """All keys and values, with those of the pass behind."""
        self._rows = self.whole = (keys, values)
        if self.offset:
            both = [self._keys, keys], [self._values, values]
            before, after = (self._mlx.core.concatenate(parts, axis=2) for parts in both)
            self.whole = (before, after)
        return self.whole

    def make_mask(self, count: int, *more: object, **options: object) -> Array:
        """Who sees whom, as the engine says."""
        return self._mask

    def after(self) -> tuple[Array, Array]:
        """The rows that the pass added."""
        return self._rows


class _Fixed:
    """The states of fixed size of a layer: Transformers lays the last inputs of a convolution in
    columns, with one more than is read, and a delta rule's state the other way round."""

    def __init__(
        self, mlx: Mlx, conv: Tensor, recurrent: Tensor, present: Tensor, dtype: object
    ) -> None:
        self._mlx, self._present = mlx, present
        self.cache = mlx.arrays_cache(2)
        self.cache.make_mask = self.make_mask
        self.cache[0] = mlx.given(conv[..., 1:].transpose(1, 2), dtype)
        self.cache[1] = mlx.given(recurrent.transpose(-1, -2))

    def make_mask(self, count: int) -> Array | None:
        """Which tokens are no padding; None where all are."""
        whole = bool(self._present.all())
        return None if whole else self._mlx.given(self._present > 0)

    def after(self) -> tuple[Array, Array]:
        """The states behind the pass."""
        conv, recurrent = self.cache[0], self.cache[1]
        columns = self._mlx.core.pad(conv.swapaxes(1, 2), [(0, 0), (0, 0), (1, 0)])
        return columns, recurrent.swapaxes(-1, -2)


class _MlxTower(PackedTowerStandIn):
    """Patches of pictures, or of the frames of a video, each through the tower alone."""

    def __init__(
        self, mlx: Mlx, theirs: Foreign, tower: PreTrainedModel, tensors: TowerTensors
    ) -> None:
        super().__init__(_NoGraph(mlx.version), tower, tensors, _NO_BOUND)
        self._mlx, self._theirs = mlx, theirs

    def _one(self, pixels: Tensor, frame: tuple[int, int, int]) -> dict[str, Tensor]:
        mlx = self._mlx
        with mlx.alone:
            dtype = self._theirs.patch_embed.proj.weight.dtype
            grid = mlx.core.array([list(frame)])
            found = self._theirs(mlx.given(pixels, dtype), grid)
            features, levels = found if isinstance(found, tuple) else (found, [])
            named = {"features": features}
            named |= {deepstack(level): one for level, one in enumerate(levels)}
            return {name: mlx.taken(one) for name, one in named.items()}


class _NoGraph:
    """A tower that is no graph has no inputs by name."""

    inputs: frozenset[str] = frozenset()

    def __init__(self, version: str) -> None:
        self.version = version

    def run(
        self, feeds: dict[str, Tensor], into: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Never asked for."""
        raise NotImplementedError
