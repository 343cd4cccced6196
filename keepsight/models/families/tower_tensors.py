"""Computes tower inputs that depend on sizes alone, once per size.

Sequence bounds, position ids, window indices and interpolation weights follow from the grid of an
image, not from its pixels. Towers in Transformers compute them for every image, with loops and
copies to the host, unless they are passed as keyword arguments. Transformers' exporter can compute
them, so it is used here. A tower gets only what its code reads; most get nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from keepsight.kinds import Inputs, Record
from keepsight.models import upstream
from keepsight.models.renamed import SINCE_5_24
from keepsight.store import MemoryCache

BUDGET = 32 * 2**20  # bytes for one model; an image of 4,096 patches takes about 300 KB

# Names for the sizes of a medium in `get_*_features`, and in its tower.
_SIZES: dict[str, dict[str, str]] = {
    "get_image_features": {
        "image_grid_thw": "grid_thw",
        "image_merge_sizes": "merge_sizes",
        "target_sizes": "target_sizes",
    },
    "get_video_features": {"video_grid_thw": "grid_thw", "video_merge_sizes": "merge_sizes"},
}
_AUDIO = ("get_audio_features", "input_features", "feature_attention_mask")
_TELLING = ("grid_thw", "target_sizes", "feature_lens")  # a tower takes one of these

# Functions of Transformers that return a given tensor unchanged, by the tensor's name. A tower
# whose code calls none of them does not use the tensor.
_TAKERS = {
    "cu_seqlens": ("get_vision_attention_seqlens", "get_vision_cu_seqlens", "get_audio_cu_seqlens"),
    "max_seqlen": ("get_vision_attention_seqlens", "get_max_seqlen"),
    "position_ids": ("get_vision_position_ids", "get_vision_nearest_position_ids"),
    "window_index": ("get_vision_window_index",),
    "cu_window_seqlens": ("get_vision_window_index",),
    "max_window_seqlen": ("get_max_seqlen",),
    "interp_indices": ("get_vision_interpolation_indices_and_weights",),
    "interp_weights": ("get_vision_interpolation_indices_and_weights",),
    "frame_index": ("get_vision_frame_index",),
    "temporal_merge_index": ("get_vision_temporal_merge_index",),
    "pixel_shuffle_index": ("get_vision_pixel_shuffle_index",),
    "merged_shape": ("get_vision_merged_shape",),
    "chunk_lengths": ("chunk_and_pad_features",),
    "valid_indices": ("get_valid_indices",),
    "pool_indices": ("get_pool_indices",),
}

# Since 5.24 this tower reads its table of positions with height and width exchanged, and what
# Transformers computes for it beforehand does not: the tower is left to do it by itself.
_OWN = {"muse_glimmer_vision": {"interp_indices", "interp_weights"}} if SINCE_5_24 else {}

FOLLOWS_FROM_SIZES = frozenset(_TAKERS)  # what a tower may be given besides its pixels


@dataclass(frozen=True)
class _Tower:
    """A module that accepts precomputed tensors, and the names it accepts."""

    module: torch.nn.Module
    takes: frozenset[str]


@dataclass(frozen=True)
class _Prepared:
    """What is remembered for one size."""

    inputs: Inputs
    chunks: list[int] = field(default_factory=list)  # frames of each audio chunk

    @property
    def nbytes(self) -> int:
        values = (v if isinstance(v, tuple) else (v,) for v in self.inputs.values())
        return sum(v.nbytes for some in values for v in some if isinstance(v, torch.Tensor))


class TowerTensors:
    """The tensors of one model's towers, the most recently used."""

    def __init__(self, core: torch.nn.Module, budget: int = BUDGET) -> None:
        self.prepared: MemoryCache[_Prepared] = MemoryCache(
            budget, lambda prepared: prepared.nbytes
        )
        self._towers = {name: tower for name in _TELLING if (tower := _tower(core, name))}
        self._open = {name for name in (*_SIZES, _AUDIO[0]) if _passes_on(core, name)}

    def of(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device | str | None = None
    ) -> Record:
        """What the encoder takes besides the `tensors` of one medium; often nothing.

        Computed on `device`, where stock would compute them: a floating tensor's last bit depends
        on it.
        """
        sizes = self._sizes(tensors)
        name = next((name for name in _TELLING if name in sizes), "")
        tower = self._towers.get(name)
        if tower is None:
            return {}
        config = tower.module.config
        how = (str(device), getattr(config, "_attn_implementation", None))
        key = repr((how, [(n, str(t.dtype), t.tolist()) for n, t in sizes.items()]))
        prepared = self.prepared.get("", key)
        if prepared is None:
            prepared = _made(tower, {n: t.to(device) for n, t in sizes.items()})
            self.prepared.put("", key, prepared)
        if "chunk_lengths" not in prepared.inputs:
            return dict(prepared.inputs)
        return {**prepared.inputs, "padded_feature": _padded(tensors, prepared.chunks, device)}

    def _sizes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The sizes of the medium, by the tower's names."""
        getter, features, mask = _AUDIO
        if getter in self._open and features in tensors and mask in tensors:
            return {"feature_lens": tensors[mask].sum(dim=1)}
        for getter, names in _SIZES.items():
            found = {names[its]: tensor for its, tensor in tensors.items() if its in names}
            if found and getter in self._open:
                return found
        return {}


def _made(tower: _Tower, sizes: dict[str, torch.Tensor]) -> _Prepared:
    """The tensors that Transformers' exporter would pass, as far as the tower accepts them.

    Not in inference mode: training code for a tower may get them too.
    """
    with torch.inference_mode(False), torch.no_grad():
        inputs: Inputs = dict(sizes)
        lengths = sizes.get("feature_lens")
        if lengths is not None:  # sound is cut into chunks by its length alone
            inputs["input_features"] = torch.empty(0, int(lengths.sum()), device=lengths.device)
        upstream.precompute(tower.module, inputs)
    made = {n: v for n, v in inputs.items() if n in tower.takes and v is not None}
    chunks = made.get("chunk_lengths")
    return _Prepared(made, [] if chunks is None else chunks.tolist())


def _padded(
    tensors: Mapping[str, torch.Tensor], chunks: list[int], device: torch.device | str | None
) -> torch.Tensor:
    """Sound itself in chunks of equal length; the only value that is not computed from sizes."""
    _, features, mask = _AUDIO
    frames = tensors[features].permute(0, 2, 1)[tensors[mask].bool()].to(device)
    return torch.nn.utils.rnn.pad_sequence(list(frames.split(chunks)), True).transpose(1, 2)


def _tower(core: torch.nn.Module, name: str) -> _Tower | None:
    """The outermost part of the model that takes a size of this name and precomputed tensors."""
    for module in core.modules():
        if module is core or name not in _arguments(type(module).forward):
            continue
        called = set(_called(module))
        takes = {n for n, takers in _TAKERS.items() if called & set(takers)}
        takes -= _OWN.get(_kind(module), set())
        if takes:
            return _Tower(module, frozenset(takes))
    return None


def _kind(module: torch.nn.Module) -> str:
    return str(getattr(getattr(module, "config", None), "model_type", ""))


@lru_cache(maxsize=512)
def _arguments(forward: Callable[..., object]) -> Iterable[str]:
    try:
        return inspect.signature(forward).parameters
    except ValueError:
        return ()  # a function of C


def _called(module: torch.nn.Module) -> Iterator[str]:
    """Every global name that the code of a module and its parts uses."""
    classes = {cls for part in module.modules() for cls in type(part).__mro__}
    for cls in classes:
        if not cls.__module__.startswith("torch."):
            for value in vars(cls).values():
                if inspect.isfunction(value):
                    yield from inspect.unwrap(value).__code__.co_names


def _passes_on(core: torch.nn.Module, name: str) -> bool:
    """Whether this method of the model passes keyword arguments to its tower."""
    method = getattr(core, name, None)
    if method is None:
        return False
    parameters = inspect.signature(method).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
