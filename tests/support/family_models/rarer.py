"""Tiny models of rarer types: shown exact, or refused when they are loaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from support.family_models import Builder
from support.family_models.grids import _GLM_ROPE, _GLM_TOKENS, _GLM_VISION, _ids
from support.family_models.newer import _PACKED, _PACKED_IMAGE, _id, _model, _patches, _pil
from support.family_models.tiles import _SIGLIP
from support.model_parts import TEXT, processor_of, tokenizer_with, wake


def _hyperclovax() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with()
    vision = {**_PACKED, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    config = transformers.HyperCLOVAXVisionV2Config(
        text_config={**TEXT, "model_type": "hyperclovax"},
        vision_config={**vision, "model_type": "qwen2_5_vl_vision"},
        image_token_id=_id(tokenizer, "<|image_pad|>"),
        video_token_id=_id(tokenizer, "<|video_pad|>"),
        tie_word_embeddings=False,
    )
    tokenizer.image_token, tokenizer.video_token = "<|image_pad|>", "<|video_pad|>"
    processor = processor_of("HyperCLOVAXVisionV2Processor", _patches(14), tokenizer, _PACKED_IMAGE)
    return _model("HyperCLOVAXVisionV2"), config, processor


def _glmga() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with(_GLM_TOKENS)
    size = {"shortest_edge": 2 * 16 * 28 * 28, "longest_edge": 2 * 64 * 28 * 28}
    config = transformers.GlmgaConfig(
        text_config={**TEXT, "model_type": "glm4v_text", "rope_parameters": _GLM_ROPE},
        vision_config={**_GLM_VISION, "model_type": "glm4v_vision"},
        **_ids(tokenizer, _GLM_TOKENS),
    )
    image = "<|begin_of_image|><|image|><|end_of_image|>"
    images = _pil("glmga", "GlmgaImageProcessorPil", size=size)
    return _model("Glm46V"), config, processor_of("Glm46VProcessor", images, tokenizer, image)


def _deepseek_hybrid() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with({"image_token": "<image_placeholder>"})
    config = transformers.DeepseekVLHybridConfig(
        vision_config=_SIGLIP,
        high_res_vision_config={
            "model_type": "sam_vision_model",
            "hidden_size": 32,
            "output_channels": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 128,
            "patch_size": 4,
            "window_size": 8,
            "global_attn_indexes": [1],
            "mlp_dim": 64,
        },
        text_config={**TEXT, "model_type": "llama"},
        image_token_id=_id(tokenizer, "<image_placeholder>"),
        tie_word_embeddings=False,
    )
    processor = processor_of(
        "DeepseekVLHybridProcessor",
        _pil(
            "deepseek_vl_hybrid",
            "DeepseekVLHybridImageProcessorPil",
            size={"height": 32, "width": 32},
            high_res_size={"height": 128, "width": 128},
        ),
        tokenizer,
        "<image_placeholder>",
        num_image_tokens=64,
    )
    return _model("DeepseekVLHybrid"), config, processor


def _deepseek_ocr2() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with({"image_token": "<image>"})
    config = transformers.DeepseekOcr2Config(
        vision_config={
            "sam_config": {
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 64,
                "patch_size": 4,
                "window_size": 8,
                "global_attn_indexes": [1],
                "mlp_dim": 64,
                "downsample_channels": [24, 32],
            },
            "encoder_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 8,
            },
        },
        text_config={
            **TEXT,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["dense", "sparse"] * 2,
        },
        image_token_id=_id(tokenizer, "<image>"),
    )
    images = _pil(
        "deepseek_ocr2",
        "DeepseekOcr2ImageProcessorPil",
        size={"height": 256, "width": 256},
        tile_size=192,
    )
    processor = processor_of(
        "DeepseekOcr2Processor", images, tokenizer, "<image>", patch_size=4, downsample_ratio=4
    )
    return _model("DeepseekOcr2"), config, processor


def glm_image() -> tuple[Any, Any]:
    """Model and processor of a type that draws: packages, and no answers."""
    names = {
        "image_token": "<img>",
        "image_start_token": "<imb>",
        "image_end_token": "<ime>",
        "grid_bos_token": "<sop>",
        "grid_eos_token": "<eop>",
    }
    tokenizer = tokenizer_with(names)
    tokenizer.bos_token = "<imb>"
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = transformers.GlmImageConfig(
        text_config={**TEXT, "vocab_size": 576, "vision_vocab_size": 64, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 4,
            "intermediate_size": 64,
            "image_size": 128,
        },
        vq_config={"embed_dim": 16, "num_embeddings": 64, "latent_channels": 32},
        **_ids(tokenizer, {k: v for k, v in names.items() if k.startswith("image")}),
    )
    torch.manual_seed(0)
    model = transformers.GlmImageForConditionalGeneration(config).eval()
    wake(model)
    size = {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}
    patches = {"patch_size": 16, "temporal_patch_size": 1, "merge_size": 1, "size": size}
    images = _pil("glm_image", "GlmImageImageProcessorPil", **patches)
    processor = processor_of("GlmImageProcessor", images, tokenizer, "<imb><img><ime>")
    return model, processor


BUILDERS: dict[str, Builder] = {
    "hyperclovax_vision_v2": _hyperclovax,
    "glmga": _glmga,
    "deepseek_vl_hybrid": _deepseek_hybrid,
    "deepseek_ocr2": _deepseek_ocr2,
}
