"""Tiny models of types that nobody named: tried when they are loaded, or refused."""

from __future__ import annotations

import importlib
from typing import Any

import transformers

from support.family_models import Builder
from support.model_parts import MROPE, TEXT, processor_of, tokenizer_with

_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_PACKED = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 16,
}
_VISION_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_PACKED_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_BY_LAYER = {"full_attention": MROPE}
_LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def _id(tokenizer: Any, token: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(token))


def _ids(tokenizer: Any, names: dict[str, str]) -> dict[str, int]:
    return {f"{name}_id": _id(tokenizer, token) for name, token in names.items()}


def _pil(kind: str, name: str, **options: Any) -> Any:
    module = f"transformers.models.{kind}.image_processing_pil_{kind}"
    return getattr(importlib.import_module(module), name)(**options)


def _patches(patch: int) -> Any:
    unit = (2 * patch) ** 2
    size = {"shortest_edge": 4 * unit, "longest_edge": 64 * unit}
    return _pil("qwen2_vl", "Qwen2VLImageProcessorPil", patch_size=patch, size=size)


def _model(kind: str) -> Any:
    return getattr(transformers, f"{kind}ForConditionalGeneration")


# -- one size of picture, or tiles -------------------------------------------------------------


def _vipllava() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with({"image_token": "<image>"})
    config = transformers.VipLlavaConfig(
        vision_config=_CLIP,
        text_config={**TEXT, "model_type": "llama"},
        image_token_index=_id(tokenizer, "<image>"),
        vision_feature_layers=[-1, -2],
        vision_feature_layer=[-1, -2],
    )
    size = {"shortest_edge": 32}
    crop = {"height": 32, "width": 32}
    processor = processor_of(
        "LlavaProcessor",
        _pil("clip", "CLIPImageProcessorPil", size=size, crop_size=crop),
        tokenizer,
        "<image>",
        patch_size=8,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )
    return _model("VipLlava"), config, processor


def _anyres(kind: str, **own: Any) -> tuple[Any, Any]:
    points = [[32, 32], [32, 64], [64, 32]]
    tokenizer = tokenizer_with({"image_token": "<image>", "video_token": "<video>"})
    images = _pil(
        "llava_next",
        "LlavaNextImageProcessorPil",
        size={"shortest_edge": 32},
        crop_size={"height": 32, "width": 32},
        image_grid_pinpoints=points,
    )
    return tokenizer, processor_of(
        f"{kind}Processor",
        images,
        tokenizer,
        "<image>",
        patch_size=8,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        **own,
    )


def _llava_next_video() -> tuple[Any, Any, Any]:
    tokenizer, processor = _anyres("LlavaNextVideo")
    config = transformers.LlavaNextVideoConfig(
        vision_config=_CLIP,
        text_config={**TEXT, "model_type": "llama"},
        image_token_index=_id(tokenizer, "<image>"),
        video_token_index=_id(tokenizer, "<video>"),
        image_grid_pinpoints=[[32, 32], [32, 64], [64, 32]],
    )
    return _model("LlavaNextVideo"), config, processor


def _lighton_ocr() -> tuple[Any, Any, Any]:
    names = {"image_token": "<|image_pad|>", "image_break_token": "<br>", "image_end_token": "<e>"}
    tokenizer = tokenizer_with(names)
    vision = {**_CLIP, "model_type": "pixtral", "image_size": 160, "head_dim": 8}
    config = transformers.LightOnOcrConfig(
        vision_config=vision,
        text_config={**TEXT, "model_type": "qwen3", "head_dim": 16},
        image_token_id=_id(tokenizer, "<|image_pad|>"),
        spatial_merge_size=2,
    )
    size = {"longest_edge": 128}
    processor = processor_of(
        "LightOnOcrProcessor",
        _pil("pixtral", "PixtralImageProcessorPil", size=size, patch_size=8),
        tokenizer,
        "<|image_pad|>",
        patch_size=8,
        spatial_merge_size=2,
    )
    return _model("LightOnOcr"), config, processor


# -- packed patches ----------------------------------------------------------------------------


def _qwen4_exp() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with()
    text = {
        **TEXT,
        **_LINEAR,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_embed_dim": 16,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2,
        "heads_per_ngram": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    }
    config = transformers.Qwen4ExpConfig(
        text_config=text,
        vision_config={**_PACKED, "num_position_embeddings": 64},
        **_ids(tokenizer, _VISION_TOKENS),
    )
    processor = processor_of("Qwen3VLProcessor", _patches(16), tokenizer, _PACKED_IMAGE)
    return _model("Qwen4Exp"), config, processor


def _exaone4_5() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with()
    vision = {**_PACKED, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    text = {**TEXT, "model_type": "exaone4", "sliding_window": 24, "sliding_window_pattern": 2}
    config = transformers.Exaone4_5_Config(
        text_config=text,
        vision_config={**vision, "num_key_value_heads": 2},
        image_token_id=_id(tokenizer, "<|image_pad|>"),
        video_token_id=_id(tokenizer, "<|video_pad|>"),
    )
    tokenizer.image_token, tokenizer.video_token = "<|image_pad|>", "<|video_pad|>"
    processor = processor_of("Exaone4_5_Processor", _patches(14), tokenizer, _PACKED_IMAGE)
    return _model("Exaone4_5_"), config, processor


def _lfm3_vl() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with()
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention"],
    }
    text = {
        **TEXT,
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
    }
    config = transformers.Lfm3VlConfig(
        text_config=text,
        vision_config=vision,
        projector_hidden_size=64,
        **_ids(tokenizer, _VISION_TOKENS),
    )
    processor = processor_of("Lfm3VlProcessor", _patches(16), tokenizer, _PACKED_IMAGE)
    return _model("Lfm3Vl"), config, processor


def _cohere_compass() -> tuple[Any, Any, Any]:
    names = {
        "image_token": "<|IMAGE_PAD|>",
        "video_token": "<|VIDEO_PAD|>",
        "vision_start_token": "<|VISION_START|>",
        "vision_end_token": "<|VISION_END|>",
    }
    tokenizer = tokenizer_with(names)
    unit = 32**2
    size = {"shortest_edge": 4 * unit, "longest_edge": 64 * unit}
    images = _pil("cohere_compass", "CohereCompassImageProcessorPil", patch_size=16, size=size)
    vision = {**_PACKED, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    config = transformers.CohereCompassConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": _BY_LAYER, "logit_scale": 1.0},
        vision_config=vision,
        **_ids(tokenizer, names),
    )
    image = "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>"
    processor = processor_of("CohereCompassProcessor", images, tokenizer, image)
    return _model("CohereCompass"), config, processor


def _cosmos3_edge() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with()
    unit = 32**2
    size = {"shortest_edge": 4 * unit, "longest_edge": 64 * unit}
    images = _pil("cosmos3_edge", "Cosmos3EdgeImageProcessorPil", patch_size=16, size=size)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": 16,
        "num_patches": 64,
    }
    config = transformers.Cosmos3EdgeConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": MROPE},
        vision_config=vision,
        projector_hidden_size=64,
        **_ids(tokenizer, _VISION_TOKENS),
    )
    processor = processor_of("Cosmos3EdgeProcessor", images, tokenizer, _PACKED_IMAGE)
    type(processor).return_mm_token_type_ids = True  # as a checkpoint's own file has to say
    return _model("Cosmos3Edge"), config, processor


def _cosmos3_omni() -> tuple[Any, Any, Any]:
    """The half that sees and reads; a hub folder has a processor of Qwen3-VL."""
    tokenizer = tokenizer_with()
    rope = {**MROPE, "mrope_interleaved": True}
    vision = {**_PACKED, "depth": 3, "model_type": "qwen3_vl_vision"}
    config = transformers.Cosmos3OmniConfig(
        text_config={
            **TEXT,
            "model_type": "qwen3_vl_text",
            "head_dim": 16,
            "rope_parameters": rope,
        },
        vision_config={**vision, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        **_ids(tokenizer, _VISION_TOKENS),
    )
    processor = processor_of("Qwen3VLProcessor", _patches(16), tokenizer, _PACKED_IMAGE)
    return _model("Cosmos3Omni"), config, processor


def _muse_glimmer() -> tuple[Any, Any, Any]:
    """Its image processor wants torchvision; that of Qwen2-VL gives tensors of the same form."""
    names = {
        "image_token": "<|patch|>",
        "video_token": "<|video|>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
    }
    tokenizer = tokenizer_with(names)
    config = transformers.MuseGlimmerConfig(
        text_config={**TEXT, "head_dim": 16, "sliding_window": 24},
        vision_config={
            "patch_size": 14,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        out_hidden_size=128,
        projector_hidden_size=64,
        image_token_id=_id(tokenizer, "<|patch|>"),
        video_token_id=_id(tokenizer, "<|video|>"),
    )
    processor = processor_of("MuseGlimmerProcessor", _patches(14), tokenizer, "<|patch|>")
    return _model("MuseGlimmer"), config, processor


def _hunyuan_vl() -> tuple[Any, Any, Any]:
    names = {"image_token": "<image>", "image_start_token": "<ims>", "image_end_token": "<ime>"}
    tokenizer = tokenizer_with({**names, "image_newline_token": "<imn>"})
    images = _pil(
        "hunyuan_vl",
        "HunYuanVLImageProcessorPil",
        patch_size=16,
        size={"shortest_edge": 4 * 32**2, "longest_edge": 64 * 32**2},
    )
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "out_hidden_size": 64,
        "text_hidden_size": 64,
        "patch_size": 16,
        "max_image_size": 512,
        "min_image_size": 32,
    }
    rope = {"rope_type": "xdrope", "rope_theta": 1e4, "xdrope_section": [2, 2, 2, 2]}
    rope |= {"alpha": 1000.0, "factor": 1.0}
    config = transformers.HunYuanVLConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=_id(tokenizer, "<image>"),
        im_start_id=_id(tokenizer, "<ims>"),
        im_end_id=_id(tokenizer, "<ime>"),
        im_newline_id=_id(tokenizer, "<imn>"),
    )
    processor = processor_of("HunYuanVLProcessor", images, tokenizer, "<ims><image><ime>")
    return _model("HunYuanVL"), config, processor


def _granite_docling() -> tuple[Any, Any, Any]:
    tags = {f"tag_{r}{c}": f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4)}
    names = {"image_token": "<image>", "fake": "<fake_token_around_image>", "all": "<global-img>"}
    tokenizer = tokenizer_with({**names, **tags})
    multipliers = {
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 0.25,
    }
    config = transformers.GraniteDoclingConfig(
        text_config={**TEXT, **multipliers},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 4,
            "out_hidden_size": 64,
            "scale_factor": 2,
            "deepstack_visual_indexes": [0, 1],
            "use_fine_route": False,
        },
        image_token_id=_id(tokenizer, "<image>"),
        tie_word_embeddings=False,
    )
    size = {"height": 32, "width": 32}
    images = _pil("granite_docling", "GraniteDoclingImageProcessorPil", size=size, max_patches=3)
    processor = processor_of(
        "GraniteDoclingProcessor", images, tokenizer, "<image>", image_seq_len=16
    )
    return _model("GraniteDocling"), config, processor


BUILDERS: dict[str, Builder] = {
    "vipllava": _vipllava,
    "llava_next_video": _llava_next_video,
    "lighton_ocr": _lighton_ocr,
    "exaone4_5": _exaone4_5,
    "lfm3_vl": _lfm3_vl,
    "cohere_compass": _cohere_compass,
    "cosmos3_edge": _cosmos3_edge,
    "cosmos3_omni": _cosmos3_omni,
    "hunyuan_vl": _hunyuan_vl,
    "muse_glimmer": _muse_glimmer,
}
