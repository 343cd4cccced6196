"""Tiny models of types that are refused in words (docs/families.md says why)."""

from __future__ import annotations

from typing import Any

import transformers

from support.family_models import Builder
from support.family_models.grids import _GLM_TOKENS, _GLM_VISION
from support.family_models.newer import (
    _granite_docling,
    _id,
    _ids,
    _model,
    _patches,
    _pil,
    _qwen4_exp,
)
from support.family_models.tiles import _SIGLIP
from support.model_parts import TEXT, processor_of, tokenizer_with

_EXPERTS = {"num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 16}


def _glm5_next() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with(_GLM_TOKENS)
    heads = {"v_head_dim": 16, "qk_nope_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4}
    ranks = {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "hc_mult": 2}
    experts = {**_EXPERTS, "moe_intermediate_size": 32, "n_routed_experts": 4}
    index = {"index_topk": 64, "index_kpool": 4}
    kinds = {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}
    config = transformers.Glm5NextConfig(
        text_config={**TEXT, **heads, **ranks, **experts, **index, **kinds},
        vision_config={**_GLM_VISION, "projection_intermediate_size": 64},
        **_ids(tokenizer, _GLM_TOKENS),
    )
    size = {"shortest_edge": 16 * 28 * 28, "longest_edge": 64 * 28 * 28}
    images = _pil("glm5_next", "Glm5NextImageProcessorPil", size=size)
    image = "<|begin_of_image|><|image|><|end_of_image|>"
    return _model("Glm5Next"), config, processor_of("Glm5NextProcessor", images, tokenizer, image)


def _granite4_vision() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with({"image_token": "<image>"})
    points = [[32, 32], [32, 64], [64, 32]]
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    images = _pil("llava_next", "LlavaNextImageProcessorPil", image_grid_pinpoints=points, **sizes)
    both = {"vision_feature_select_strategy": "full", "downsample_rate": "1/2"}
    config = transformers.Granite4VisionConfig(
        vision_config={**_SIGLIP, "hidden_size": 64},
        text_config=TEXT,
        qformer_config={"intermediate_size": 64},
        image_token_index=_id(tokenizer, "<image>"),
        image_grid_pinpoints=points,
        deepstack_layer_map=[[0, 0], [1, 1]],
        spatial_target_layers=[0, 1, 2, 3],
        **both,
    )
    processor = processor_of(
        "Granite4VisionProcessor", images, tokenizer, "<image>", patch_size=4, **both
    )
    return _model("Granite4Vision"), config, processor


def _minimax_m3() -> tuple[Any, Any, Any]:
    names = {"image_token": "]<]image[>[", "video_token": "]<]video[>["}
    ends = {"vision_start_token": "]<]start of image[>[", "vision_end_token": "]<]end of image[>["}
    tokenizer = tokenizer_with({**names, **ends})
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    sizes = {"head_dim": 16, "rotary_dim": 8, "dense_intermediate_size": 64}
    experts = {**_EXPERTS, "shared_intermediate_size": 32, "num_local_experts": 4}
    index = {"index_block_size": 8, "index_topk_blocks": 4}
    layers = {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2}
    layers |= {"mlp_layer_types": ["dense", "sparse"] * 2}
    tower = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.MiniMaxM3VLConfig(
        text_config={**TEXT, **sizes, **experts, **index, **layers, "rope_parameters": rope},
        vision_config={**tower, "num_attention_heads": 4, "patch_size": 14, "image_size": 112},
        projector_hidden_size=64,
        image_token_index=_id(tokenizer, "]<]image[>["),
        video_token_index=_id(tokenizer, "]<]video[>["),
    )
    processor = processor_of("MiniMaxM3VLProcessor", _patches(14), tokenizer, "]<]image[>[")
    return transformers.MiniMaxM3SparseForConditionalGeneration, config, processor


def _qianfan_ocr() -> tuple[Any, Any, Any]:
    names = {"image_token": "<IMG_CONTEXT>", "context_image_token": "<IMG_CONTEXT>"}
    ends = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}
    tokenizer = tokenizer_with({**ends, **names})
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape = {"num_attention_heads": 4, "image_size": [32, 32], "patch_size": [4, 4]}
    config = transformers.QianfanOCRConfig(
        vision_config={**sizes, **shape, "layer_scale_init_value": 1.0, "drop_path_rate": 0.0},
        text_config={**TEXT, "model_type": "qwen3", "head_dim": 16},
        image_token_id=_id(tokenizer, "<IMG_CONTEXT>"),
        image_seq_length=16,
    )
    tiles = {"size": {"height": 32, "width": 32}, "min_patches": 1, "max_patches": 3}
    images = _pil("got_ocr2", "GotOcr2ImageProcessorPil", **tiles)
    processor = processor_of(
        "QianfanOCRProcessor", images, tokenizer, "<image>", image_seq_length=16
    )
    return _model("QianfanOCR"), config, processor


REFUSED: dict[str, Builder] = {
    "qwen4_exp": _qwen4_exp,
    "granite_docling": _granite_docling,
    "glm5_next": _glm5_next,
    "granite4_vision": _granite4_vision,
    "minimax_m3_vl": _minimax_m3,
    "qianfan_ocr": _qianfan_ocr,
}
