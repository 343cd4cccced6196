"""The thinkers of the Omni models: images, videos and sound beside the text."""

from __future__ import annotations

from typing import Any

import transformers

from support.family_models import Builder
from support.model_parts import TEXT, processor_of, tokenizer_with

_MROPE = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 3, 3]}
_WORDS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
MELS = 16


def _tokenizer() -> tuple[Any, dict[str, int]]:
    tokenizer = tokenizer_with(_WORDS)
    return tokenizer, {n: tokenizer.convert_tokens_to_ids(w) for n, w in _WORDS.items()}


def _ids(ids: dict[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["image_token"],
        "image_token_index": ids["image_token"],
        "video_token_id": ids["video_token"],
        "video_token_index": ids["video_token"],
        "audio_token_id": ids["audio_token"],
        "audio_token_index": ids["audio_token"],
        "vision_start_token_id": ids["vision_bos_token"],
        "vision_end_token_id": ids["vision_eos_token"],
        "audio_start_token_id": ids["audio_bos_token"],
        "audio_end_token_id": ids["audio_eos_token"],
    }


def _processor(name: str, tokenizer: Any, patch: int) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    unit = (2 * patch) ** 2
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": 4 * unit, "longest_edge": 64 * unit}
    )
    extractor = transformers.WhisperFeatureExtractor(feature_size=MELS, chunk_length=4)
    written = f"{_WORDS['vision_bos_token']}{_WORDS['image_token']}{_WORDS['vision_eos_token']}"
    processor = processor_of(name, image_processor, tokenizer, written, feature_extractor=extractor)
    heard = f"{_WORDS['audio_bos_token']}{_WORDS['audio_token']}{_WORDS['audio_eos_token']}"
    processor.chat_template = processor.chat_template.replace(
        "{%- elif part.type == 'text' -%}",
        "{%- elif part.type == 'audio' -%}{{- '" + heard + "' -}}{%- elif part.type == 'text' -%}",
    )
    return processor


def _qwen2_5_omni() -> tuple[Any, Any, Any]:
    tokenizer, ids = _tokenizer()
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    audio = {
        "num_mel_bins": MELS,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "output_dim": 64,
        "n_window": 25,
        "max_source_positions": 400,
    }
    config = transformers.Qwen2_5OmniThinkerConfig(
        text_config={**TEXT, "rope_parameters": {"type": "mrope", **_MROPE}},
        vision_config=vision,
        audio_config=audio,
        **_ids(ids),
    )
    processor = _processor("Qwen2_5OmniProcessor", tokenizer, 14)
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration, config, processor


def _qwen3_omni_moe() -> tuple[Any, Any, Any]:
    tokenizer, ids = _tokenizer()
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 16,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    audio = {
        "num_mel_bins": MELS,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "output_dim": 64,
        "n_window": 50,
        "n_window_infer": 200,
        "downsample_hidden_size": 16,
        "max_source_positions": 400,
    }
    text = {
        **TEXT,
        "head_dim": 16,
        "rope_parameters": {**_MROPE, "mrope_interleaved": True},
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    config = transformers.Qwen3OmniMoeThinkerConfig(
        text_config=text, vision_config=vision, audio_config=audio, **_ids(ids)
    )
    processor = _processor("Qwen3OmniMoeProcessor", tokenizer, 16)
    return transformers.Qwen3OmniMoeThinkerForConditionalGeneration, config, processor


BUILDERS: dict[str, Builder] = {
    "qwen2_5_omni_thinker": _qwen2_5_omni,
    "qwen3_omni_moe_thinker": _qwen3_omni_moe,
}
