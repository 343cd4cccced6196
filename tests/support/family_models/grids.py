"""Tiny models whose images are packed as rows of patches, with a grid for each image.

One tensor holds the patches of all images one after another; `image_grid_thw` tells where each
ends. Most of these families have multimodal rope.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from transformers import BatchFeature
from transformers.image_processing_backends import PilBackend

from support.family_models import Builder
from support.model_parts import MROPE, TEXT, processor_of, tokenizer_with

_GLM_TOKENS = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>",
    "video_start_token": "<|begin_of_video|>",
    "video_end_token": "<|end_of_video|>",
}
_GLM_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "out_hidden_size": 64,
    "intermediate_size": 64,
    "image_size": 112,
}
# Half of each head of 16 is rotated: 8 dimensions are 4 frequencies.
_GLM_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
}


def _ids(tokenizer: Any, names: dict[str, str]) -> dict[str, int]:
    """`{"image_token": "<x>"}` becomes `{"image_token_id": 512}`."""
    return {f"{key}_id": tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def _without(names: dict[str, Any], *drop: str) -> dict[str, Any]:
    return {key: value for key, value in names.items() if key not in drop}


def _glm(kind: str, processor: str, image_processor: Any, **text: Any) -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with(_GLM_TOKENS)
    size = {"shortest_edge": 2 * 16 * 28 * 28, "longest_edge": 2 * 64 * 28 * 28}
    config = getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, "rope_parameters": _GLM_ROPE, **text},
        vision_config=_GLM_VISION,
        **_ids(tokenizer, _GLM_TOKENS),
    )
    image = "<|begin_of_image|><|image|><|end_of_image|>"
    processor = processor_of(processor, image_processor(size=size), tokenizer, image)
    return getattr(transformers, f"{kind}ForConditionalGeneration"), config, processor


def _glm4v() -> tuple[Any, Any, Any]:
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    return _glm("Glm4v", "Glm4vProcessor", Glm4vImageProcessorPil)


def _glm4v_moe() -> tuple[Any, Any, Any]:
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    experts = {
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "head_dim": 16,
    }
    return _glm("Glm4vMoe", "Glm4vProcessor", Glm4vImageProcessorPil, **experts)


def _glm46v() -> tuple[Any, Any, Any]:
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

    model_type = {"model_type": "glm4v_text"}
    return _glm("Glm46V", "Glm46VProcessor", Glm46VImageProcessorPil, **model_type)


def _glm_ocr() -> tuple[Any, Any, Any]:
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

    rope = {**_GLM_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [2, 3, 3]}
    text = {"rope_parameters": rope, "head_dim": 16}
    return _glm("GlmOcr", "Glm46VProcessor", Glm46VImageProcessorPil, **text)


_ERNIE_TOKENS = {
    "image_token": "<|IMAGE_PLACEHOLDER|>",
    "image_start_token": "<|IMAGE_START|>",
    "image_end_token": "<|IMAGE_END|>",
    "video_token": "<|VIDEO_PLACEHOLDER|>",
    "video_start_token": "<|VIDEO_START|>",
    "video_end_token": "<|VIDEO_END|>",
}


def _ernie() -> tuple[Any, Any, Any]:
    from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
        Ernie4_5_VLMoeImageProcessorPil,
    )

    tokenizer = tokenizer_with(_ERNIE_TOKENS)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    experts = {
        "moe_intermediate_size": [32, 24],
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
    }
    config = transformers.Ernie4_5_VLMoeConfig(
        text_config={**TEXT, **experts, "rope_parameters": rope},
        vision_config={"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64},
        tie_word_embeddings=False,
        **_ids(tokenizer, _ERNIE_TOKENS),
    )
    image_processor = Ernie4_5_VLMoeImageProcessorPil(
        size={"shortest_edge": 16 * 28 * 28, "longest_edge": 64 * 28 * 28}
    )
    processor = processor_of(
        "Ernie4_5_VLMoeProcessor",
        image_processor,
        tokenizer,
        "Picture:<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    )
    return transformers.Ernie4_5_VLMoeForConditionalGeneration, config, processor


def _paddleocr_vl() -> tuple[Any, Any, Any]:
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
        PaddleOCRVLImageProcessorPil,
    )

    tokens = {"image_token": "<|IMAGE_PLACEHOLDER|>", "video_token": "<|VIDEO_PLACEHOLDER|>"}
    edges = {"vision_start_token": "<|IMAGE_START|>", "vision_end_token": "<|IMAGE_END|>"}
    tokenizer = tokenizer_with({**tokens, **edges})
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 112,
    }
    config = transformers.PaddleOCRVLConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": MROPE},
        vision_config=vision,
        tie_word_embeddings=False,
        **_ids(tokenizer, {**tokens, **edges}),
    )
    image_processor = PaddleOCRVLImageProcessorPil(
        size={"shortest_edge": 16 * 28 * 28, "longest_edge": 64 * 28 * 28}
    )
    image = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
    processor = processor_of("PaddleOCRVLProcessor", image_processor, tokenizer, image)
    return transformers.PaddleOCRVLForConditionalGeneration, config, processor


def _video_llama_3(merge: int = 1) -> tuple[Any, Any, Any]:
    from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import (
        VideoLlama3ImageProcessorPil,
    )

    names = {"image_token": "<image>", "video_token": "<video>"}
    tokenizer = tokenizer_with(names)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": 14,
    }
    config = transformers.VideoLlama3Config(
        text_config={**TEXT, "model_type": "qwen2"}, vision_config=vision, **_ids(tokenizer, names)
    )
    unit = (14 * merge) ** 2
    image_processor = VideoLlama3ImageProcessorPil(
        merge_size=merge, size={"shortest_edge": 16 * unit, "longest_edge": 64 * unit}
    )
    processor = processor_of("VideoLlama3Processor", image_processor, tokenizer, "<image>")
    return transformers.VideoLlama3ForConditionalGeneration, config, processor


def _video_llama_3_merged() -> tuple[Any, Any, Any]:
    """The merge size is the processor's here: a setting, not a fact of the model."""
    return _video_llama_3(merge=2)


class KimiPatches(PilBackend):  # type: ignore[misc]
    """Patches and grids in the layout of Kimi's image processor.

    Upstream's own needs torchvision. This one resizes to whole cells instead of padding.
    """

    patch_size, merge_size = 14, 2
    model_input_names = ["pixel_values", "image_grid_thw"]  # noqa: RUF012

    def preprocess(self, images: Any, **kwargs: Any) -> BatchFeature:
        """Rows of patches, and a grid for each image."""
        images = images if isinstance(images, list) else [images]
        patches, grids = zip(*(self._patches(image) for image in images), strict=True)
        data = {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
        return BatchFeature(data)

    def _patches(self, image: Any) -> tuple[torch.Tensor, list[int]]:
        side, unit = self.patch_size, self.patch_size * self.merge_size
        width, height = (-(-length // unit) * unit for length in image.size)
        pixels = np.asarray(image.convert("RGB").resize((width, height)), dtype=np.float32)
        h, w = height // side, width // side
        cells = torch.from_numpy(pixels / 127.5 - 1).reshape(h, side, w, side, 3)
        return cells.permute(0, 2, 4, 1, 3).reshape(h * w, 3, side, side), [1, h, w]


_KIMI_TOKENS = {
    "image_token": "<|media_pad|>",
    "video_token": "<|kimi_k25_video_placeholder|>",
    "vision_start_token": "<|media_begin|>",
    "vision_end_token": "<|media_end|>",
}
_LATENT = {  # multi-head latent attention: keys are wider than values
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _kimi_k25() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with(_KIMI_TOKENS)
    vision = {
        "pos_emb_height": 8,
        "pos_emb_width": 8,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
    }
    config = transformers.Kimi_K25Config(
        text_config={**TEXT, **_LATENT},
        vision_config=vision,
        projection_hidden_size=32,
        tie_word_embeddings=False,
        **_ids(tokenizer, _KIMI_TOKENS),
    )
    image = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    processor = processor_of("Kimi_K25Processor", KimiPatches(), tokenizer, image)
    return transformers.Kimi_K25ForConditionalGeneration, config, processor


BUILDERS: dict[str, Builder] = {
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v_moe,
    "glm46v": _glm46v,
    "glm_ocr": _glm_ocr,
    "ernie4_5_vl_moe": _ernie,
    "paddleocr_vl": _paddleocr_vl,
    "video_llama_3": _video_llama_3,
    "video_llama_3_merged": _video_llama_3_merged,
    "kimi_k25": _kimi_k25,
}
