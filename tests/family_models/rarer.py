"""Tiny models of rarer types: shown exact, or refused when they are loaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from model_parts import TEXT, processor_of, tokenizer_with, wake

from family_models import Builder
from family_models.grids import _GLM_ROPE, _GLM_TOKENS, _GLM_VISION, _ids
from family_models.newer import _PACKED, _PACKED_IMAGE, _id, _model, _patches, _pil
from family_models.tiles import _SIGLIP


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


def _glm5_next() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with(_GLM_TOKENS)
    size = {"shortest_edge": 16 * 28 * 28, "longest_edge": 64 * 28 * 28}
    text = {
        **TEXT,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 64,
        "index_kpool": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "hc_mult": 2,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    }
    config = transformers.Glm5NextConfig(
        text_config=text,
        vision_config={**_GLM_VISION, "projection_intermediate_size": 64},
        **_ids(tokenizer, _GLM_TOKENS),
    )
    image = "<|begin_of_image|><|image|><|end_of_image|>"
    images = _pil("glm5_next", "Glm5NextImageProcessorPil", size=size)
    return _model("Glm5Next"), config, processor_of("Glm5NextProcessor", images, tokenizer, image)


def _granite4_vision() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with({"image_token": "<image>"})
    points = [[32, 32], [32, 64], [64, 32]]
    images = _pil(
        "llava_next",
        "LlavaNextImageProcessorPil",
        size={"shortest_edge": 32},
        crop_size={"height": 32, "width": 32},
        image_grid_pinpoints=points,
    )
    config = transformers.Granite4VisionConfig(
        vision_config={**_SIGLIP, "hidden_size": 64},
        text_config=TEXT,
        qformer_config={"intermediate_size": 64},
        image_token_index=_id(tokenizer, "<image>"),
        image_grid_pinpoints=points,
        downsample_rate="1/2",
        deepstack_layer_map=[[0, 0], [1, 1]],
        spatial_target_layers=[0, 1, 2, 3],
        vision_feature_select_strategy="full",
    )
    processor = processor_of(
        "Granite4VisionProcessor",
        images,
        tokenizer,
        "<image>",
        patch_size=4,
        vision_feature_select_strategy="full",
        downsample_rate="1/2",
    )
    return _model("Granite4Vision"), config, processor


def _minimax_m3() -> tuple[Any, Any, Any]:
    names = {
        "image_token": "]<]image[>[",
        "video_token": "]<]video[>[",
        "vision_start_token": "]<]start of image[>[",
        "vision_end_token": "]<]end of image[>[",
    }
    tokenizer = tokenizer_with(names)
    text = {
        **TEXT,
        "head_dim": 16,
        "rotary_dim": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 4,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    }
    config = transformers.MiniMaxM3VLConfig(
        text_config=text,
        vision_config={
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": 14,
            "image_size": 112,
        },
        projector_hidden_size=64,
        image_token_index=_id(tokenizer, "]<]image[>["),
        video_token_index=_id(tokenizer, "]<]video[>["),
    )
    processor = processor_of("MiniMaxM3VLProcessor", _patches(14), tokenizer, "]<]image[>[")
    return transformers.MiniMaxM3SparseForConditionalGeneration, config, processor


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
        text_config={
            **TEXT,
            "vocab_size": 576,
            "vision_vocab_size": 64,
            "rope_parameters": rope,
        },
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
    "hyperclovax_vision_v2": _hyperclovax,
    "glmga": _glmga,
    "deepseek_vl_hybrid": _deepseek_hybrid,
    "deepseek_ocr2": _deepseek_ocr2,
}

# Types that are refused, in words.
REFUSED: dict[str, Builder] = {
    "glm5_next": _glm5_next,
    "granite4_vision": _granite4_vision,
    "minimax_m3_vl": _minimax_m3,
    "granite_docling": _granite_docling,
}
