"""Tiny models of every family with random weights: a row each, of what it has of its own.

`tiny` makes one of a row: model class, configuration, and a real processor. Sizes are the least
that show what is special: windows of 24 tokens, pictures of two or three tiles, four experts.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import transformers

from support import model_parts
from support.model_parts import MROPE, TEXT, processor_of, tokenizer_with, wake
from support.tiny_images import (
    Cohere2Tiles,
    KimiPatches,
    LfmTiles,
    Llama4Tiles,
    Molmo2Crops,
    Step3p7Tiles,
)

Made = tuple[Any, Any, Any]
Builder = Callable[[], Made]
# An image processor of ours, or one of Transformers' by its home and kind; and its options.
Images = tuple[str | type, dict[str, Any]]
NOTHING: dict[str, Any] = {}


def tiny(
    kind: str,
    images: Images,
    image: str,
    names: dict[str, str] | None = None,
    ids: Mapping[str, str | list[str]] = NOTHING,
    *,
    text: Mapping[str, Any] = NOTHING,
    vision: Mapping[str, Any] = NOTHING,
    model: str = "",
    processor: str = "",
    given: Mapping[str, Any] = NOTHING,
    marks: Mapping[str, str] = NOTHING,
    then: Mapping[str, Any] = NOTHING,
    shared: tuple[str, ...] = (),
    **config: Any,
) -> Made:
    """One model, by Transformers' name for its kind.

    `image` is what the template writes for a picture, `names` the tokens that the tokenizer has
    besides the demo model's, `ids` those that the configuration names, and `marks` attributes of
    the tokenizer. `given` goes to the processor, `then` are attributes that it gets, and `shared`
    those that the configuration has too. `model` and `processor` are of another kind, if named.
    """
    tokenizer = tokenizer_with(names)
    numbers = tokenizer.convert_tokens_to_ids
    for name, token in marks.items():
        setattr(tokenizer, name, numbers(token) if name.endswith("_id") else token)
    known = {name: numbers(token) for name, token in ids.items()}
    made = processor_of(
        f"{processor or kind}Processor", images_of(images), tokenizer, image, **given
    )
    for name, value in then.items():
        setattr(made, name, value)
    known |= {name: getattr(made, name) for name in shared}
    parts = {"text_config": {**TEXT, **text}, "vision_config": dict(vision)}
    settings = getattr(transformers, f"{kind}Config")(**parts, **known, **config)
    return getattr(transformers, f"{model or kind}ForConditionalGeneration"), settings, made


def images_of(images: Images) -> Any:
    """An image processor that needs no torchvision."""
    name, options = images
    if isinstance(name, type):
        return name(**options)
    home, _, kind = name.partition(".")
    module = importlib.import_module(f"transformers.models.{home}.image_processing_pil_{home}")
    return getattr(module, f"{kind}ImageProcessorPil")(**options)


def of(names: Mapping[str, str], *only: str, end: str = "_id") -> dict[str, str]:
    """These tokens by the configuration's names for their ids."""
    return {f"{name}{end}": names[name] for name in only or names}


def row(kind: str, *given: Any, **own: Any) -> Builder:
    """A model that is made when it is asked for."""
    return functools.partial(tiny, kind, *given, **own)


BUILDERS: dict[str, Builder] = {}
REFUSED: dict[str, Builder] = {}  # in words (docs/families.md says why)


# From here on rows of tables, laid out by hand.
# fmt: off

# -- what several have -----------------------------------------------------------------------------

_TOWER = {"hidden_size": 32, "intermediate_size": 64}
_TOWER |= {"num_hidden_layers": 2, "num_attention_heads": 4}
_CLIP = {**_TOWER, "model_type": "clip_vision_model", "image_size": 32, "patch_size": 8}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 4}
_SIGLIP |= {"vision_use_head": False}
_SAM = {**_TOWER, "output_channels": 16, "image_size": 64, "patch_size": 4, "window_size": 8}
_SAM.pop("intermediate_size")
_SAM |= {"global_attn_indexes": [1], "mlp_dim": 64}
_PACKED = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
_PACKED |= {"out_hidden_size": 64, "patch_size": 16}
_WINDOWS = {**_PACKED, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
_LEARNED = {**_PACKED, "num_position_embeddings": 64}
_DEEP = {"deepstack_visual_indexes": [0, 1]}

_LLAMA, _QWEN2 = {"model_type": "llama"}, {"model_type": "qwen2"}
_SLIDES = ["sliding_attention", "full_attention"] * 2
_MROPE = {"type": "mrope", **MROPE}
_INTERLEAVED = {**MROPE, "mrope_interleaved": True}
_DENSE_FIRST = {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
_DENSE_FIRST |= {"moe_intermediate_size": 32}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = {**_MOE, "shared_expert_intermediate_size": 32}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_HYBRID = {
    **_LINEAR, "head_dim": 16, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": {**_INTERLEAVED, "partial_rotary_factor": 1.0},
}

_QWEN = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>",
}
_SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
_ONE, _BOTH = {"image_token": "<image>"}, {"image_token": "<image>", "video_token": "<video>"}
_POINTS = [[32, 32], [32, 64], [64, 32]]  # height, width: two tiles for a square, three if wide
_SQUARE = {"height": 32, "width": 32}
_TILES = {"size": _SQUARE, "min_patches": 1, "max_patches": 3}
_ANYRES = {"size": {"shortest_edge": 32}, "crop_size": _SQUARE, "image_grid_pinpoints": _POINTS}


def _edges(side: int, least: int = 4, most: int = 64) -> dict[str, Any]:
    """Sizes of pictures of so many cells."""
    return {"size": {"shortest_edge": least * side**2, "longest_edge": most * side**2}}


def _patches(patch: int) -> Images:
    return "qwen2_vl.Qwen2VL", {"patch_size": patch, **_edges(2 * patch)}


# -- Qwen's, and patches on a grid -----------------------------------------------------------------

_of_qwen = functools.partial(row, image=_SEEN, ids=of(_QWEN))
_qwen3 = functools.partial(_of_qwen, images=_patches(16), processor="Qwen3VL")


def _cosmos3_edge() -> Made:
    made = _of_qwen(
        "Cosmos3Edge", images=("cosmos3_edge.Cosmos3Edge", {"patch_size": 16, **_edges(32)}),
        text={"head_dim": 16, "rope_parameters": MROPE},
        vision={**_TOWER, "patch_size": 16, "num_patches": 64}, projector_hidden_size=64,
    )()
    type(made[2]).return_mm_token_type_ids = True  # as a checkpoint's own file has to say
    return made


BUILDERS |= {
    "qwen2_vl": _of_qwen(
        "Qwen2VL", images=_patches(14), text={"rope_parameters": _MROPE},
        vision={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "patch_size": 14},
    ),
    "qwen2_5_vl": _of_qwen(
        "Qwen2_5_VL", images=_patches(14), text={"rope_parameters": _MROPE}, vision=_WINDOWS
    ),
    # Half of the layers see 24 tokens back: far less than any prompt in the tests.
    "sliding": _of_qwen(
        "Qwen2_5_VL", images=_patches(14),
        text={
            "rope_parameters": _MROPE,
            "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2,
        },
        vision=_WINDOWS,
    ),
    "qwen3_vl": _qwen3(
        "Qwen3VL", text={"head_dim": 16, "rope_parameters": _INTERLEAVED},
        vision={**_LEARNED, **_DEEP, "depth": 3},
    ),
    "qwen3_vl_moe": _qwen3(
        "Qwen3VLMoe", text={**_SHARED, "head_dim": 16, "rope_parameters": _INTERLEAVED},
        vision={**_LEARNED, **_DEEP, "depth": 3},
    ),
    "qwen3_5": _qwen3("Qwen3_5", text=_HYBRID, vision={**_LEARNED, "depth": 3}),
    "qwen3_5_moe": _qwen3(
        "Qwen3_5Moe", text={**_HYBRID, **_SHARED}, vision={**_LEARNED, "depth": 3}
    ),
    "exaone4_5": _of_qwen(
        "Exaone4_5_", images=_patches(14), ids=of(_QWEN, "image_token", "video_token"),
        marks={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        text={"model_type": "exaone4", "sliding_window": 24, "sliding_window_pattern": 2},
        vision={**_WINDOWS, "num_key_value_heads": 2},
    ),
    "hyperclovax_vision_v2": _of_qwen(
        "HyperCLOVAXVisionV2", images=_patches(14), ids=of(_QWEN, "image_token", "video_token"),
        marks={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        text={"model_type": "hyperclovax"},
        vision={**_WINDOWS, "model_type": "qwen2_5_vl_vision"}, tie_word_embeddings=False,
    ),
    "lfm3_vl": _of_qwen(
        "Lfm3Vl", images=_patches(16),
        text={
            "head_dim": 16, "sliding_window": 24,
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        },
        vision={**_TOWER, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
        projector_hidden_size=64,
    ),
    "cosmos3_edge": _cosmos3_edge,
    # The half that sees and reads; a hub folder has a processor of Qwen3-VL.
    "cosmos3_omni": _qwen3(
        "Cosmos3Omni",
        text={"model_type": "qwen3_vl_text", "head_dim": 16, "rope_parameters": _INTERLEAVED},
        vision={**_LEARNED, **_DEEP, "depth": 3, "model_type": "qwen3_vl_vision"},
    ),
}
REFUSED["qwen4_exp"] = _qwen3(
    "Qwen4Exp",
    text={
        **_LINEAR, **_SHARED, "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
        "hc_count": 2, "hc_lowrank": 8, "ple_embed_dim": 16, "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2, "heads_per_ngram": 2, "indexer_n_heads": 2,
        "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    vision=_LEARNED,
)

_COMPASS = {
    "image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>",
    "vision_start_token": "<|VISION_START|>", "vision_end_token": "<|VISION_END|>",
}
_MUSE = {
    "image_token": "<|patch|>", "video_token": "<|video|>",
    "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
}
_HUNYUAN = {"image_token": "<image>", "image_start_token": "<ims>", "image_end_token": "<ime>"}
_HUNYUAN |= {"image_newline_token": "<imn>"}
_XDROPE = {"rope_type": "xdrope", "rope_theta": 1e4, "xdrope_section": [2, 2, 2, 2]}
BUILDERS |= {
    "cohere_compass": row(
        "CohereCompass", ("cohere_compass.CohereCompass", {"patch_size": 16, **_edges(32)}),
        "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>", _COMPASS, of(_COMPASS),
        text={"head_dim": 16, "rope_parameters": {"full_attention": MROPE}, "logit_scale": 1.0},
        vision={**_LEARNED, **_DEEP},
    ),
    # Its image processor wants torchvision; that of Qwen2-VL gives tensors of the same form.
    "muse_glimmer": row(
        "MuseGlimmer", _patches(14), "<|patch|>", _MUSE, of(_MUSE, "image_token", "video_token"),
        text={"head_dim": 16, "sliding_window": 24}, vision={**_TOWER, "patch_size": 14},
        out_hidden_size=128, projector_hidden_size=64,
    ),
    "hunyuan_vl": row(
        "HunYuanVL", ("hunyuan_vl.HunYuanVL", {"patch_size": 16, **_edges(32)}),
        "<ims><image><ime>", _HUNYUAN,
        {
            **of(_HUNYUAN, "image_token"),
            "im_start_id": "<ims>", "im_end_id": "<ime>", "im_newline_id": "<imn>",
        },
        text={"head_dim": 16, "rope_parameters": {**_XDROPE, "alpha": 1000.0, "factor": 1.0}},
        vision={
            **_TOWER, "num_key_value_heads": 4,
            "out_hidden_size": 64, "text_hidden_size": 64, "patch_size": 16,
            "max_image_size": 512, "min_image_size": 32,
        },
    ),
}

_GLM = {
    "image_token": "<|image|>", "video_token": "<|video|>",
    "image_start_token": "<|begin_of_image|>", "image_end_token": "<|end_of_image|>",
    "video_start_token": "<|begin_of_video|>", "video_end_token": "<|end_of_video|>",
}
_GLM_IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
_GLM_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 4, "out_hidden_size": 64}
_GLM_VISION |= {"intermediate_size": 64, "image_size": 112}
# Half of each head of 16 is rotated: 8 dimensions are 4 frequencies.
_GLM_ROPE = {**MROPE, "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_WHOLE_ROPE = {**_GLM_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [2, 3, 3]}
_GLM4V = ("glm4v.Glm4v", _edges(28, 2 * 16, 2 * 64))
_GLM46V = ("glm46v.Glm46V", _edges(28, 2 * 16, 2 * 64))
_glm = functools.partial(row, image=_GLM_IMAGE, names=_GLM, ids=of(_GLM))
BUILDERS |= {
    "glm4v": _glm("Glm4v", images=_GLM4V, text={"rope_parameters": _GLM_ROPE}, vision=_GLM_VISION),
    "glm4v_moe": _glm(
        "Glm4vMoe", images=_GLM4V, processor="Glm4v",
        text={**_DENSE_FIRST, "head_dim": 16, "rope_parameters": _GLM_ROPE}, vision=_GLM_VISION,
    ),
    "glm46v": _glm(
        "Glm46V", images=_GLM46V, text={"model_type": "glm4v_text", "rope_parameters": _GLM_ROPE},
        vision=_GLM_VISION,
    ),
    "glm_ocr": _glm(
        "GlmOcr", images=_GLM46V, processor="Glm46V",
        text={"head_dim": 16, "rope_parameters": _WHOLE_ROPE}, vision=_GLM_VISION,
    ),
}
REFUSED["glm5_next"] = _glm(
    "Glm5Next", images=("glm5_next.Glm5Next", _edges(28, 16, 64)),
    text={
        "v_head_dim": 16, "qk_nope_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4,
        "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "hc_mult": 2,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64, "index_kpool": 4,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    },
    vision={**_GLM_VISION, "projection_intermediate_size": 64},
)


def _glmga() -> Made:
    """Of a type of its own with the classes of GLM-4.6V."""
    tokenizer = tokenizer_with(_GLM)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in of(_GLM).items()}
    config = transformers.GlmgaConfig(
        text_config={**TEXT, "model_type": "glm4v_text", "rope_parameters": _GLM_ROPE},
        vision_config={**_GLM_VISION, "model_type": "glm4v_vision"}, **ids,
    )
    images = images_of(("glmga.Glmga", _edges(28, 2 * 16, 2 * 64)))
    processor = processor_of("Glm46VProcessor", images, tokenizer, _GLM_IMAGE)
    return transformers.Glm46VForConditionalGeneration, config, processor


def glm_image() -> tuple[Any, Any]:
    """Model and processor of a type that draws: packages, and no answers."""
    names = {"image_token": "<img>", "image_start_token": "<imb>", "image_end_token": "<ime>"}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    patches = {"patch_size": 16, "temporal_patch_size": 1, "merge_size": 1}
    model_class, config, processor = tiny(
        "GlmImage",
        (
            "glm_image.GlmImage",
            {**patches, "size": {"shortest_edge": 64**2, "longest_edge": 128**2}},
        ),
        "<imb><img><ime>", {**names, "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
        of(names), marks={"bos_token": "<imb>"},
        text={"vocab_size": 576, "vision_vocab_size": 64, "rope_parameters": rope},
        vision={
            "depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64,
            "image_size": 128,
        },
        vq_config={"embed_dim": 16, "num_embeddings": 64, "latent_channels": 32},
    )
    torch.manual_seed(0)
    model = model_class(config).eval()
    wake(model)
    return model, processor


def mlcd() -> tuple[Any, Any]:
    """A tower without a language model, and its image processor."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    config = transformers.MLCDVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        image_size=56, patch_size=14,
    )
    torch.manual_seed(0)
    model = transformers.MLCDVisionModel(config).eval()
    wake(model)
    size = {"height": 56, "width": 56}
    return model, CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=size)


_ERNIE = {
    "image_token": "<|IMAGE_PLACEHOLDER|>", "image_start_token": "<|IMAGE_START|>",
    "image_end_token": "<|IMAGE_END|>", "video_token": "<|VIDEO_PLACEHOLDER|>",
    "video_start_token": "<|VIDEO_START|>", "video_end_token": "<|VIDEO_END|>",
}
_PADDLE = {"image_token": "<|IMAGE_PLACEHOLDER|>", "video_token": "<|VIDEO_PLACEHOLDER|>"}
_PADDLE |= {"vision_start_token": "<|IMAGE_START|>", "vision_end_token": "<|IMAGE_END|>"}
_KIMI = {
    "image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>",
    "vision_start_token": "<|media_begin|>", "vision_end_token": "<|media_end|>",
}


def _video_llama_3(merge: int) -> Builder:
    """The merge size is the processor's here: a setting, not a fact of the model."""
    sizes = _edges(14 * merge, 16)
    return row(
        "VideoLlama3", ("video_llama_3.VideoLlama3", {"merge_size": merge, **sizes}), "<image>",
        _BOTH, of(_BOTH), text=_QWEN2, vision={**_TOWER, "patch_size": 14},
    )


BUILDERS |= {
    "glmga": _glmga,
    "ernie4_5_vl_moe": row(
        "Ernie4_5_VLMoe", ("ernie4_5_vl_moe.Ernie4_5_VLMoe", _edges(28, 16)),
        "Picture:<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>", _ERNIE, of(_ERNIE),
        text={
            "moe_intermediate_size": [32, 24], "moe_num_experts": 4, "moe_k": 2,
            "moe_num_shared_experts": 1,
            "rope_parameters": {**MROPE, "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
        },
        vision={"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64},
        tie_word_embeddings=False,
    ),
    "paddleocr_vl": row(
        "PaddleOCRVL", ("paddleocr_vl.PaddleOCRVL", _edges(28, 16)),
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>", _PADDLE, of(_PADDLE),
        text={"head_dim": 16, "rope_parameters": MROPE}, vision={**_TOWER, "image_size": 112},
        tie_word_embeddings=False,
    ),
    "video_llama_3": _video_llama_3(1),
    "video_llama_3_merged": _video_llama_3(2),
    "kimi_k25": row(
        "Kimi_K25", (KimiPatches, {}),
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>", _KIMI, of(_KIMI),
        text={  # multi-head latent attention: keys are wider than values
            "model_type": "deepseek_v3", **_DENSE_FIRST,
            "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
            "n_group": 1, "topk_group": 1,
        },
        vision={**_TOWER, "pos_emb_height": 8, "pos_emb_width": 8}, projection_hidden_size=32,
        tie_word_embeddings=False,
    ),
}
_MINIMAX = {"image_token": "]<]image[>[", "video_token": "]<]video[>["}
REFUSED["minimax_m3_vl"] = row(
    "MiniMaxM3VL", _patches(14), "]<]image[>[",
    {
        **_MINIMAX, "vision_start_token": "]<]start of image[>[",
        "vision_end_token": "]<]end of image[>[",
    },
    of(_MINIMAX, end="_index"), model="MiniMaxM3Sparse",
    text={
        "head_dim": 16, "rotary_dim": 8, "dense_intermediate_size": 64,
        "num_experts_per_tok": 2, "shared_intermediate_size": 32, "num_local_experts": 4,
        "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": 4,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5
        },
    },
    vision={**_TOWER, "hidden_size": 48, "patch_size": 14, "image_size": 112},
    projector_hidden_size=64,
)


# -- one size of picture, or parts of a picture ----------------------------------------------------

_CLIP_TOKENS = {"patch_size": 8, "num_additional_image_tokens": 1}
_CLIP_TOKENS |= {"vision_feature_select_strategy": "default"}
_LIGHT = {"image_token": "<|image_pad|>", "image_break_token": "<br>", "image_end_token": "<e>"}
_INTERN = {"start_image_token": "<img>", "end_image_token": "</img>"}
_INTERN_IMAGE = {"context_image_token": "<IMG_CONTEXT>"}
_PLACEHOLDER = {"image_token": "<image_placeholder>"}


def _clip(side: int) -> Images:
    return "clip.CLIP", {
        "size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side},
    }


BUILDERS |= {
    "llava": row(
        "Llava", _clip(48), "<image>", _ONE,
        {"image_token_index": "<image>", "image_token_id": "<image>"}, text=_LLAMA,
        vision={**_CLIP, "num_hidden_layers": 3, "image_size": 48, "patch_size": 12},
        given={**_CLIP_TOKENS, "patch_size": 12},
    ),
    "vipllava": row(
        "VipLlava", _clip(32), "<image>", _ONE, of(_ONE, end="_index"), processor="Llava",
        text=_LLAMA, vision=_CLIP, given=_CLIP_TOKENS, vision_feature_layers=[-1, -2],
        vision_feature_layer=[-1, -2],
    ),
    "internvl": row(
        "InternVL", ("got_ocr2.GotOcr2", {**_TILES, "crop_to_patches": True}), "<IMG_CONTEXT>",
        {**_INTERN, **_INTERN_IMAGE, "video_token": "<video>"},
        {"image_token_id": "<IMG_CONTEXT>"}, text=_QWEN2,
        vision={**_TOWER, "image_size": [32, 32], "patch_size": [4, 4]},
        given={"image_seq_length": 16}, image_seq_length=16,
    ),
    "llava_next": row(
        "LlavaNext", ("llava_next.LlavaNext", _ANYRES), "<image>", _ONE, of(_ONE, end="_index"),
        text=_LLAMA, vision=_CLIP, given=_CLIP_TOKENS, image_grid_pinpoints=_POINTS,
    ),
    "llava_next_video": row(
        "LlavaNextVideo", ("llava_next.LlavaNext", _ANYRES), "<image>", _BOTH,
        of(_BOTH, end="_index"), text=_LLAMA, vision=_CLIP, given=_CLIP_TOKENS,
        image_grid_pinpoints=_POINTS,
    ),
    # `anyres_max_1`: the three tiles of the wide picture are shrunk to fewer tokens.
    "llava_onevision": row(
        "LlavaOnevision",
        ("llava_onevision.LlavaOnevision", {"size": _SQUARE, "image_grid_pinpoints": _POINTS}),
        "<image>", _BOTH, of(_BOTH, end="_index"), text=_QWEN2,
        vision={**_SIGLIP, "patch_size": 8},
        given={
            "num_image_tokens": 16, "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_1",
        },
        image_grid_pinpoints=_POINTS, vision_aspect_ratio="anyres_max_1",
    ),
    "lighton_ocr": row(
        "LightOnOcr", ("pixtral.Pixtral", {"size": {"longest_edge": 128}, "patch_size": 8}),
        "<|image_pad|>", _LIGHT, of(_LIGHT, "image_token"),
        text={"model_type": "qwen3", "head_dim": 16},
        vision={**_CLIP, "model_type": "pixtral", "image_size": 160, "head_dim": 8},
        given={"patch_size": 8, "spatial_merge_size": 2}, spatial_merge_size=2,
    ),
    # One picture, one tile: every picture is padded to a square and gives 64 tokens.
    "deepseek_vl": row(
        "DeepseekVL", ("deepseek_vl.DeepseekVL", {"size": _SQUARE}), "<image_placeholder>",
        _PLACEHOLDER, of(_PLACEHOLDER), text=_LLAMA, vision=_SIGLIP,
        given={"num_image_tokens": 64}, tie_word_embeddings=False,
    ),
    "deepseek_vl_hybrid": row(
        "DeepseekVLHybrid",
        (
            "deepseek_vl_hybrid.DeepseekVLHybrid",
            {"size": _SQUARE, "high_res_size": {"height": 128, "width": 128}},
        ),
        "<image_placeholder>", _PLACEHOLDER, of(_PLACEHOLDER), text=_LLAMA, vision=_SIGLIP,
        given={"num_image_tokens": 64},
        high_res_vision_config={**_SAM, "model_type": "sam_vision_model", "image_size": 128},
        tie_word_embeddings=False,
    ),
    "deepseek_ocr2": row(
        "DeepseekOcr2",
        (
            "deepseek_ocr2.DeepseekOcr2",
            {"size": {"height": 256, "width": 256}, "tile_size": 192},
        ),
        "<image>", _ONE, of(_ONE),
        text={
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse"] * 2,
        },
        vision={
            "sam_config": {**_SAM, "downsample_channels": [24, 32]},
            "encoder_config": {**_TOWER, "num_key_value_heads": 2, "vocab_size": 8},
        },
        given={"patch_size": 4, "downsample_ratio": 4},
    ),
    # Its image processor knows two sizes only, so the patches are large and the tower is small.
    "aria": row(
        "Aria", ("aria.Aria", {}), "<image>", _ONE, of(_ONE, end="_index"),
        text={"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        vision={**_TOWER, "model_type": "idefics3_vision", "image_size": 980, "patch_size": 140},
        given={"size_conversion": {490: 4, 980: 8}}, projector_patch_to_query_dict={9: 4, 49: 8},
        vision_feature_layer=-2,
    ),
}
REFUSED["granite4_vision"] = row(
    "Granite4Vision", ("llava_next.LlavaNext", _ANYRES), "<image>", _ONE, of(_ONE, end="_index"),
    vision={**_SIGLIP, "hidden_size": 64},
    given={"patch_size": 4, "vision_feature_select_strategy": "full", "downsample_rate": "1/2"},
    qformer_config={"intermediate_size": 64}, image_grid_pinpoints=_POINTS,
    deepstack_layer_map=[[0, 0], [1, 1]], spatial_target_layers=[0, 1, 2, 3],
    vision_feature_select_strategy="full", downsample_rate="1/2",
)
REFUSED["qianfan_ocr"] = row(
    "QianfanOCR", ("got_ocr2.GotOcr2", _TILES), "<image>",
    {**_INTERN, "video_token": "<video>", "image_token": "<IMG_CONTEXT>", **_INTERN_IMAGE},
    {"image_token_id": "<IMG_CONTEXT>"}, text={"model_type": "qwen3", "head_dim": 16},
    vision={
        **_TOWER, "image_size": [32, 32], "patch_size": [4, 4],
        "layer_scale_init_value": 1.0, "drop_path_rate": 0.0,
    },
    given={"image_seq_length": 16}, image_seq_length=16,
)


def _mistral3() -> Made:
    """One cell of 16 by 16 pixels is one token; each row of cells ends with a token of its own."""
    from transformers.models.pixtral import image_processing_pil_pixtral as pil

    # Upstream's processor imports the image processor of torchvision for one function of numbers.
    needs_torchvision = "transformers.models.pixtral.image_processing_pixtral"
    with mock.patch.dict(sys.modules, {needs_torchvision: pil}):
        module = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    # Lazy modules may be there twice: the one that `processor_of` looks into is meant.
    with mock.patch.object(model_parts.transformers, "PixtralProcessor", module.PixtralProcessor):
        return tiny(
            "Mistral3", ("pixtral.Pixtral", {"size": {"longest_edge": 160}, "patch_size": 16}),
            "[IMG]",
            {"image_token": "[IMG]", "break_token": "[IMG_BREAK]", "end_token": "[IMG_END]"},
            {"image_token_index": "[IMG]"}, processor="Pixtral",
            text={"model_type": "mistral", "head_dim": 16, "sliding_window": None},
            vision={**_TOWER, "model_type": "pixtral", "image_size": 160, "patch_size": 8},
            given={"patch_size": 8, "spatial_merge_size": 2}, spatial_merge_size=2,
            tie_word_embeddings=False,
        )


def _llava_pixtral() -> Made:
    """The tower of Mistral 3 in a LLaVA, as Pixtral 12B has it: a token for each patch."""
    _, config, processor = _mistral3()
    processor.patch_size, processor.spatial_merge_size = 16, 1
    vision = transformers.PixtralVisionConfig(**_TOWER, image_size=160, patch_size=16)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=config.text_config,
        image_token_index=config.image_token_index, vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return transformers.LlavaForConditionalGeneration, config, processor


# -- tiles -----------------------------------------------------------------------------------------

_FAR = [*["sliding_attention"] * 3, "full_attention"]
_COHERE2 = {"model_type": "cohere2", "sliding_window": 24, "layer_types": _FAR, "logit_scale": 1.0}
_AYA = {
    "image_token": "<image>", "start_token": "<|START_OF_IMG|>", "end_token": "<|END_OF_IMG|>",
    "patch_token": "<|IMG_PATCH|>",
}
_COHERE = {
    "image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>", "img_line_break_token": "<|IMG_LINE_BREAK|>",
}
_LLAMA4 = {
    "image_token": "<|image|>", "start": "<|image_start|>", "end": "<|image_end|>",
    "patch": "<|patch|>", "tile_x": "<|tile_x_separator|>", "tile_y": "<|tile_y_separator|>",
}
_FRAME = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
_STEP = ("<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>")


def _numbered(*tokens: str) -> dict[str, str]:
    return {f"token_{i}": token for i, token in enumerate(tokens)}


BUILDERS |= {
    "mistral3": _mistral3,
    "llava_pixtral": _llava_pixtral,
    "aya_vision": row(
        "AyaVision", ("got_ocr2.GotOcr2", _TILES), "<image>", _AYA,
        {"image_token_index": "<|IMG_PATCH|>"}, text=_COHERE2, vision=_SIGLIP,
        given={"patch_size": 4, "img_size": 32, "downsample_factor": 2},
        tie_word_embeddings=False,
    ),
    "cohere2_vision": row(
        "Cohere2Vision", (Cohere2Tiles, _TILES), "<|IMG_PATCH|>", _COHERE,
        {"image_token_id": "<|IMG_PATCH|>"}, marks={"image_token_id": "<|IMG_PATCH|>"},
        text=_COHERE2, vision=_SIGLIP, alignment_intermediate_size=128, tie_word_embeddings=False,
    ),
    "got_ocr2": row(
        "GotOcr2", ("got_ocr2.GotOcr2", {**_TILES, "size": {"height": 64, "width": 64}}),
        "<img><imgpad></img>",
        {"img_start": "<img>", "img_end": "</img>", "image_token": "<imgpad>"},
        {"image_token_index": "<imgpad>"}, text=_QWEN2, vision=_SAM,
        then={
            "num_image_tokens": 16,
            "images_kwargs": {"crop_to_patches": True, "min_patches": 1, "max_patches": 3},
        },
        image_seq_length=16, tie_word_embeddings=False,
    ),
    "ovis2": row(
        "Ovis2", ("ovis2.Ovis2", {**_TILES, "crop_to_patches": True}), "<image>",
        _numbered("<image>", "<IMG_ATOM>", *_FRAME),
        {"image_token_id": "<IMG_ATOM>", "visual_indicator_token_ids": _FRAME}, text=_QWEN2,
        vision={
            **_TOWER, "image_size": 32, "patch_size": 4, "vocab_size": 64, "hidden_stride": 2,
        },
        given={"image_seq_length": 16}, vocab_size=576, hidden_size=64, tie_word_embeddings=False,
    ),
    "llama4": row(
        "Llama4", (Llama4Tiles, _TILES), "<|image|>", _LLAMA4,
        {
            "boi_token_index": "<|image_start|>", "eoi_token_index": "<|image_end|>",
            "image_token_index": "<|patch|>",
        },
        text={
            "intermediate_size_mlp": 128, "head_dim": 16, "num_local_experts": 4,
            "interleave_moe_layer_step": 2, "attention_chunk_size": 24,
            "floor_scale": 64,  # so that the temperature of far positions is part of the tests
        },
        vision={
            **_TOWER, "image_size": 32, "patch_size": 4,
            "intermediate_size": 128,  # what the pixel shuffle makes of hidden_size
            "projector_input_dim": 48, "projector_output_dim": 48, "vision_output_dim": 48,
        },
        given={"patch_size": 4}, tie_word_embeddings=False,
    ),
    "step3p7": row(
        "Step3p7", (Step3p7Tiles, {"size": {"height": 64, "width": 64}}), "<im_patch>",
        _numbered(*_STEP), {"image_token_id": "<im_patch>"},
        text={
            "head_dim": 16, "layer_types": _FAR, "sliding_window": 24,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "share_expert_dim": 32, "num_sliding_attention_heads": 2,
        },
        vision={
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 64, "patch_size": 4, "mlp_ratio": 2.0, "max_position_embeddings": 256,
        },
        tie_word_embeddings=False,
    ),
}


# -- tiles with marks ------------------------------------------------------------------------------

_IDEFICS = {
    "fake_image_token": "<fake_token_around_image>", "image_token": "<image>",
    "end_of_utterance_token": "<end_of_utterance>", "global_image_token": "<global-img>",
    **{f"tag_{3 * r + c}": f"<row_{r + 1}_col_{c + 1}>" for r in range(3) for c in range(3)},
}
_IDEFICS2 = {
    "image_boundary_token": "<fake_token_around_image>", "image_token": "<image>",
    "end_of_utterance_token": "<end_of_utterance>",
}
_LFM2 = {
    "image_token": "<image>", "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>", "image_thumbnail_token": "<|img_thumbnail|>",
    **{f"tag_{2 * r + c}": f"<|img_row_{r + 1}_col_{c + 1}|>" for r in range(2) for c in range(2)},
}
_MINICPM = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
    "image_start_token": "<image>", "image_end_token": "</image>", "slice_start_token": "<slice>",
    "slice_end_token": "</slice>", "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}


def _idefics(kind: str, home: str) -> Builder:
    """Tiles of 32 by 32 pixels, 4 tokens each, and the whole picture as a last tile."""
    sizes = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}
    return row(
        kind, (f"{home}.{kind}", sizes), "<image>", _IDEFICS, {"image_token_id": "<image>"},
        text=_LLAMA, vision={**_TOWER, "image_size": 32, "patch_size": 8},
        given={"image_seq_len": 4}, scale_factor=2, pad_token_id=0,
    )


def _smolvlm() -> Made:
    """Upstream's processor wants the package num2words, for the prompt of a video only."""
    from transformers.models.smolvlm import processing_smolvlm

    with mock.patch.object(processing_smolvlm, "num2words", str):
        return _idefics("SmolVLM", "smolvlm")()


def _idefics2(splits: bool) -> Builder:
    """The masks say where padding begins: the two pictures are of different sizes. If it splits:
    four quarters and the whole picture."""
    sizes = {"size": {"shortest_edge": 36, "longest_edge": 64}, "do_image_splitting": splits}
    return row(
        "Idefics2", ("idefics2.Idefics2", sizes), "<image>", _IDEFICS2,
        {"image_token_id": "<image>"},
        text={"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        vision={**_TOWER, "image_size": 64, "patch_size": 8}, given={"image_seq_len": 4},
        perceiver_config={
            "hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 1,
            "resampler_n_heads": 4, "resampler_head_dim": 16, "num_key_value_heads": 2,
        },
        tie_word_embeddings=False,
    )


def _minicpm(mode: str = "16x", kind: str = "V4_6", **own: Any) -> Builder:
    """A picture, then its slices; every image bears a number that its place in the prompt gives."""
    sizes = {"scale_resolution": 64 if mode == "16x" else 32, "patch_size": 4, "max_slice_nums": 2}
    ids = of(_MINICPM, "image_token", "video_token")
    if kind == "V4_7":  # on a canvas of three axes of positions
        marks = ("image_start", "image_end", "slice_start", "slice_end")
        ids |= {f"{mark}_id": _MINICPM[f"{mark}_token"] for mark in marks} | {"newline_id": "Ċ"}
    return row(
        f"MiniCPM{kind}", ("minicpmv4_6.MiniCPMV4_6", {**sizes, "downsample_mode": mode}),
        "<|image_pad|>", _MINICPM, ids, text={**_HYBRID, "model_type": "qwen3_5_text"},
        vision={**_TOWER, "image_size": 64, "patch_size": 4}, insert_layer_id=0,
        downsample_mode=mode, **own,
    )


BUILDERS |= {
    "idefics3": _idefics("Idefics3", "idefics3"),
    "smolvlm": _smolvlm,
    "idefics2": _idefics2(splits=False),
    "idefics2_split": _idefics2(splits=True),
    "lfm2_vl": row(
        "Lfm2Vl", (LfmTiles, {}), "<image>", _LFM2, {"image_token_id": "<image>"},
        text={
            "model_type": "lfm2", "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"] * 2,
        },
        vision={
            **_TOWER, "model_type": "siglip2_vision_model", "patch_size": 8,
            "num_patches": 16, "vision_use_head": False,
        },
        projector_hidden_size=48, tie_word_embeddings=False,
    ),
    "minicpmv4_6": _minicpm(),
    # Four times the tokens for the same patches: the merger within the tower is left out.
    "minicpmv4_6_fine": _minicpm("4x"),
    "minicpmv4_7": _minicpm(kind="V4_7"),
    # Its image processor wants torchvision; that of 4.6 gives tensors of the same form.
    "minicpm_ocr": _minicpm(kind="Ocr", tie_word_embeddings=False),
}
_TAGS = {f"tag_{r}{c}": f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4)}
REFUSED["granite_docling"] = row(
    "GraniteDocling", ("granite_docling.GraniteDocling", {"size": _SQUARE, "max_patches": 3}),
    "<image>", {**_ONE, "fake": "<fake_token_around_image>", "all": "<global-img>", **_TAGS},
    of(_ONE),
    text={
        "embedding_multiplier": 1.0, "logits_scaling": 1.0,
        "residual_multiplier": 1.0, "attention_multiplier": 0.25,
    },
    vision={
        **_TOWER, **_DEEP, "num_hidden_layers": 3, "image_size": 32, "patch_size": 4,
        "out_hidden_size": 64, "scale_factor": 2, "use_fine_route": False,
    },
    given={"image_seq_len": 16}, tie_word_embeddings=False,
)


# -- tokens that see each other both ways, across layers, and sound --------------------------------

_GEMMA = {
    "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_GEMMA4 = {
    "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>",
    "boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>",
}
_GEMMA4_IDS = of(_GEMMA4, "boi_token", "eoi_token", "image_token", "boa_token", "audio_token")
_MOLMO = {
    "image_token": "<|image|>", "image_patch": "<im_patch>", "image_column": "<im_col>",
    "image_start": "<im_start>", "image_end": "<im_end>",
    "low_res_image_start": "<low_res_im_start>", "frame_start": "<frame_start>",
    "frame_end": "<frame_end>", "image_low": "<im_low>", "video_token": "<|video|>",
}


def _gemma3(window: int = 24, crops: bool = False) -> Builder:
    """Half of the layers see so many tokens back. With crops, a wide picture becomes three runs of
    placeholders with words between them."""
    pan = {"pan_and_scan_min_crop_size": 32, "pan_and_scan_max_num_crops": 3}
    pan |= {"pan_and_scan_min_ratio_to_activate": 1.2, "do_pan_and_scan": crops}
    return row(
        "Gemma3", ("gemma3.Gemma3", {"size": _SQUARE, **pan}), "<start_of_image>", _GEMMA,
        of(_GEMMA, end="_index"),
        text={
            "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": window,
            "layer_types": _SLIDES,
        },
        vision=_SIGLIP, given={"image_seq_length": 16},
        then={"images_kwargs": pan},  # stock goes by these, whatever the image processor says
        mm_tokens_per_image=16, tie_word_embeddings=False,
    )


def _heard() -> Any:
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    return Gemma4AudioFeatureExtractor()


def _gemma4(**own: Any) -> Made:
    return tiny(
        "Gemma4",
        ("gemma4.Gemma4", {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}),
        "<|image|>", _GEMMA4, {**_GEMMA4_IDS, "eoa_token_index": "<audio|>"},
        text={
            "head_dim": 16, "global_head_dim": 32, "sliding_window": 24,
            "layer_types": _SLIDES, "vocab_size_per_layer_input": 576, **own,
        },
        vision={
            **_TOWER, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4,
            "pooling_kernel_size": 2, "position_embedding_size": 64,
        },
        given={"feature_extractor": _heard()}, shared=("video_token_id",), audio_config=None,
        tie_word_embeddings=False,
    )


def _gemma4_unified() -> Made:
    """Patches enter without a tower. Its image processor wants torchvision; that of Gemma 4 gives
    tensors of the same form where it pools nothing."""
    return tiny(
        "Gemma4Unified",
        ("gemma4.Gemma4", {"patch_size": 16, "pooling_kernel_size": 1, "max_soft_tokens": 70}),
        "<|image|>", _GEMMA4, _GEMMA4_IDS,
        text={"head_dim": 16, "sliding_window": 24, "layer_types": _SLIDES},
        vision={
            "patch_size": 8, "pooling_kernel_size": 2, "mm_embed_dim": 64,
            "mm_posemb_size": 64, "output_proj_dims": 64,
        },
        given={"feature_extractor": _heard()}, shared=("video_token_id",), audio_config=None,
        tie_word_embeddings=False,
    )


def _paligemma(**text: Any) -> Made:
    return tiny(
        "PaliGemma", ("siglip.Siglip", {"size": _SQUARE, "image_seq_length": 16}), "<image>",
        {"image_token": "<image>", "start_token": "<bos>"}, {"image_token_index": "<image>"},
        text={"head_dim": 16, **text}, vision={**_SIGLIP, "patch_size": 8, "projection_dim": 64},
        marks={"bos_token": "<bos>"}, projection_dim=64, hidden_size=64,
        tie_word_embeddings=False,
    )


def _molmo2() -> Made:
    attention = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    tokenizer = tokenizer_with(_MOLMO)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _MOLMO.items()}
    text = {key: TEXT[key] for key in TEXT if not key.endswith("_token_id")}
    config = transformers.Molmo2Config(
        text_config={**text, "head_dim": 16, "additional_vocab_size": 0},
        vision_config={
            **_TOWER, **attention, "head_dim": 8, "image_size": [32, 32], "patch_size": 8
        },
        adapter_config={
            **attention, "head_dim": 8, "vision_feature_layer": [1, 0],
            "intermediate_size": 64, "text_hidden_size": 64,
        },
        image_patch_id=ids["image_patch"],
        **{f"{name}_token_id": ids[name] for name in ids if name.endswith(("_start", "_end"))},
    )
    processor = processor_of("Molmo2Processor", Molmo2Crops(), tokenizer, "<|image|>")
    return transformers.Molmo2ForConditionalGeneration, config, processor


def _mllama() -> Made:
    """A small picture is one tile of four, a wide one two: the others are padding."""
    _, config, processor = tiny(
        "Mllama", ("mllama.Mllama", {"size": {"height": 96, "width": 96}, "max_image_tiles": 4}),
        "<|image|>", {"image_token": "<|image|>", "start_token": "<|begin_of_text|>"},
        {"image_token_index": "<|image|>"}, marks={"bos_token": "<|begin_of_text|>"},
        text={"cross_attention_layers": [1, 3], "bos_token_id": 513},
        vision={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_global_layers": 1, "attention_heads": 4, "image_size": 96, "patch_size": 24,
            "intermediate_layers_indices": [0], "vision_output_dim": 64,
        },
    )
    return _open_gates, config, processor


def _open_gates(config: Any) -> Any:
    """A new model's gates are shut: it would not look at any picture."""
    model = transformers.MllamaForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "gate" in name and weight.numel() == 1:
            weight.data.fill_(0.7)
    return model


_OMNI = {
    "image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
}
_EDGES = {"start": "bos", "end": "eos"}
_OMNI_IDS = {
    **of(_OMNI, "image_token", "video_token", "audio_token"),
    **of(_OMNI, "image_token", "video_token", "audio_token", end="_index"),
    **{
        f"{a}_{b}_token_id": _OMNI[f"{a}_{c}_token"]
        for a in ("vision", "audio")
        for b, c in _EDGES.items()
    },
}
_AUDIO = {"num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4}
_AUDIO |= {"encoder_ffn_dim": 64, "output_dim": 64, "max_source_positions": 400}


def _omni(kind: str, patch: int, **own: Any) -> Made:
    """A thinker: images, videos and sound beside the text."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=4)
    _, config, processor = tiny(
        f"{kind}Thinker", _patches(patch), "<|vision_bos|><|IMAGE|><|vision_eos|>", _OMNI,
        _OMNI_IDS, processor=kind, given={"feature_extractor": extractor}, **own,
    )
    heard, text = "<|audio_bos|><|AUDIO|><|audio_eos|>", "{%- elif part.type == 'text' -%}"
    processor.chat_template = processor.chat_template.replace(
        text, "{%- elif part.type == 'audio' -%}{{- '" + heard + "' -}}" + text
    )
    return getattr(transformers, f"{kind}ThinkerForConditionalGeneration"), config, processor


BUILDERS |= {
    "gemma3": _gemma3(window=4096),
    "gemma3_sliding": _gemma3(),
    "gemma3_crops": _gemma3(crops=True),
    # As the small checkpoints: inputs for each layer, and layers that share keys and values.
    "gemma4": functools.partial(
        _gemma4, hidden_size_per_layer_input=8, num_kv_shared_layers=2, use_double_wide_mlp=True
    ),
    # As the large checkpoints: an image's tokens see each other; keys are values in some layers.
    # Only sliding layers see both ways, as upstream has it.
    "gemma4_vision": functools.partial(
        _gemma4, hidden_size_per_layer_input=0, use_bidirectional_attention="vision",
        attention_k_eq_v=True, num_global_key_value_heads=1,
    ),
    "gemma4_unified": _gemma4_unified,
    "paligemma": functools.partial(_paligemma, model_type="gemma"),
    # On Gemma 2: every other layer slides.
    "paligemma2": functools.partial(
        _paligemma, model_type="gemma2", query_pre_attn_scalar=16, sliding_window=24
    ),
    "molmo2": _molmo2,
    "mllama": _mllama,
    "qwen2_5_omni_thinker": functools.partial(
        _omni, "Qwen2_5Omni", 14, text={"rope_parameters": _MROPE}, vision=_WINDOWS,
        audio_config={**_AUDIO, "n_window": 25},
    ),
    "qwen3_omni_moe_thinker": functools.partial(
        _omni, "Qwen3OmniMoe", 16, text={**_MOE, "head_dim": 16, "rope_parameters": _INTERLEAVED},
        vision={**_LEARNED, **_DEEP, "depth": 3},
        audio_config={
            **_AUDIO, "n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 16
        },
    ),
}
