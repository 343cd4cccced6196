"""Differences between mlx-vlm's models: the path from pixels to features, and who computes
positions.

Also the settings that their code ignores: a checkpoint with other values would load and answer
wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from transformers import PreTrainedConfig

from keepsight.errors import UnsupportedInput
from keepsight.runtimes.imports import Untyped
from keepsight.runtimes.mlx_library import Array, Mlx

Features = Callable[[Mlx, Untyped, Array], Array]


@dataclass(frozen=True)
class MlxType:
    """One model type. Settings are dotted names, with the values that mlx-vlm computes."""

    settings: Mapping[str, tuple[object, ...]]
    # Pixels (pictures, height, width, channels) to features; None for patches of any size.
    features: Features | None = None
    counts: bool = False  # positions from the cache length, and masks from the cache
    adjust: Callable[[Mlx, Untyped, PreTrainedConfig], None] = field(default=lambda *_: None)

    def refuse_other_settings(self, config: PreTrainedConfig) -> None:
        """Refuse the first setting that mlx-vlm would ignore."""
        for name, allowed in self.settings.items():
            value = config
            for part in name.split("."):
                value = getattr(value, part, None)
            if value not in allowed:
                raise UnsupportedInput(
                    f"{name} is {value!r}, but mlx-vlm always computes {allowed[0]!r}: "
                    "load the checkpoint without runtime='mlx'"
                )


def _llava(mlx: Mlx, theirs: Untyped, pixels: Array) -> Array:
    *_, states = theirs.vision_tower(pixels, output_hidden_states=True)
    chosen = states[theirs.vision_feature_layer]
    if theirs.vision_feature_select_strategy == "default":
        chosen = chosen[:, 1:]
    features = theirs.multi_modal_projector(chosen)
    return cast(Array, features[0])  # Transformers gives a list, one entry per picture


def _gemma3(mlx: Mlx, theirs: Untyped, pixels: Array) -> Array:
    hidden, *_ = theirs.vision_tower(pixels, output_hidden_states=True)
    return cast(Array, theirs.multi_modal_projector(hidden))


def _internvl(mlx: Mlx, theirs: Untyped, pixels: Array) -> Array:
    hidden, _ = theirs.vision_tower(pixels)
    shuffled = mlx.pixel_shuffle(hidden[:, 1:], theirs.config.downsample_ratio)
    return cast(Array, theirs.multi_modal_projector(shuffled))


def _adjust_gemma3(mlx: Mlx, theirs: Untyped, config: PreTrainedConfig) -> None:
    """mlx-vlm scales the decoder's inputs, including features, by a root rounded to bfloat16, and
    uses another epsilon after the tower; Keepsight's embedding scales as the checkpoint's."""
    decoder = theirs.language_model.model
    decoder.scale_inputs_embeds = False
    # At first it asks the last layer for the mask of full layers, even if that is none.
    decoder.sliding_window_pattern = min(decoder.sliding_window_pattern, len(decoder.layers))
    theirs.vision_tower.vision_model.post_layernorm.eps = config.vision_config.layer_norm_eps


def _adjust_internvl(mlx: Mlx, theirs: Untyped, config: PreTrainedConfig) -> None:
    """mlx-vlm approximates GELU; these checkpoints need the exact GELU."""
    for layer in theirs.vision_tower.encoder.layer:
        layer.mlp.activation_fn = mlx.nn.GELU()
    theirs.multi_modal_projector.activation = mlx.nn.GELU()


def _adjust_qwen3_vl_moe(mlx: Mlx, theirs: Untyped, config: PreTrainedConfig) -> None:
    """mlx-vlm swaps the two kinds of GELU."""
    tower = theirs.vision_tower
    for block in tower.blocks:
        block.mlp.act_fn = mlx.nn.GELU(approx="tanh")
    for merger in (tower.merger, *tower.deepstack_merger_list):
        merger.act_fn = mlx.nn.GELU()


def _acts(text: str, vision: str) -> dict[str, tuple[object, ...]]:
    return {"text_config.hidden_act": (text,), "vision_config.hidden_act": (vision,)}


_QWEN3 = _acts("silu", "gelu_pytorch_tanh")
TYPES = {
    "qwen2_vl": MlxType(_acts("silu", "quick_gelu")),
    "qwen2_5_vl": MlxType(_acts("silu", "silu")),
    "qwen3_vl": MlxType(_QWEN3),
    "qwen3_vl_moe": MlxType(_QWEN3, adjust=_adjust_qwen3_vl_moe),
    "qwen3_5": MlxType(_QWEN3),
    "qwen3_5_moe": MlxType(_QWEN3),
    "gemma3": MlxType(
        {
            "text_config.hidden_activation": ("gelu_pytorch_tanh",),
            "text_config.attn_logit_softcapping": (None,),
            "text_config.final_logit_softcapping": (None,),
            "text_config.use_bidirectional_attention": (False, None),
            "vision_config.hidden_act": ("gelu_pytorch_tanh",),
            "tie_word_embeddings": (True,),
        },
        _gemma3,
        counts=True,
        adjust=_adjust_gemma3,
    ),
    "llava": MlxType(
        {
            **_acts("silu", "quick_gelu"),
            "projector_hidden_act": ("gelu",),
        },
        _llava,
        counts=True,
    ),
    "internvl": MlxType(
        {
            "text_config.model_type": ("qwen3",),
            **_acts("silu", "gelu"),
            "vision_config.use_absolute_position_embeddings": (True,),
            "vision_config.use_mean_pooling": (True,),
            "projector_hidden_act": ("gelu",),
            "vision_feature_layer": (-1,),
            "vision_feature_select_strategy": ("default",),
        },
        _internvl,
        counts=True,
        adjust=_adjust_internvl,
    ),
}
