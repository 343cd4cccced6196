"""Tiny random-weight models of each supported family, with real processors.

`build(kind)` gives one. The larger part of the builders is in `family_models/`, by behaviour.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from keepsight.models import loading
from support import FamilyTests
from support.family_models import BUILDERS as _MORE
from support.family_models import Builder
from support.model_parts import (
    MROPE,
    TEMPLATE,
    TEXT,
    TOKENS,
    picture,
    processor_of,
    tokenizer_with,
    wake,
)

__all__ = [
    "ALL",
    "TEMPLATE",
    "build",
    "demo_parts",
    "folder_of",
    "in_both",
    "picture",
    "saved",
    "stock_inputs",
    "suite_of",
    "turn",
]


def build(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Model and processor of one family: the same weights each time, the caller's to change."""
    return copy.deepcopy(_first(kind, dtype))


@functools.cache
def _first(kind: str, dtype: torch.dtype) -> tuple[Any, Any]:
    return built(ALL[kind], dtype)


@functools.cache
def demo_parts(name: str) -> tuple[Any, Any]:
    """A demo model in float32 and its processor, loaded once: not the caller's to change."""
    path = loading.model_path(name)
    model = loading.load_named(path, "float32", None, None)[0]
    return model, loading.load_processor(path, None)


def suite_of(kind: str, **own: Any) -> type[FamilyTests]:
    """The suite for a family of which nothing else is tested beside it."""
    return type(kind, (FamilyTests,), {"make_model": lambda self: build(kind), **own})


def built(builder: Builder, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The same of a family that is given."""
    torch.manual_seed(0)
    model_class, config, processor = builder()
    config.text_config.vocab_size = 576
    model = model_class(config)
    wake(model)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval(), processor


def _qwen_processor(name: str, patch: int) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    unit = (2 * patch) ** 2
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": 4 * unit, "longest_edge": 64 * unit}
    )
    return processor_of(
        name, image_processor, tokenizer_with(), "<|vision_start|><|image_pad|><|vision_end|>"
    )


def _qwen2_vl() -> tuple[Any, Any, Any]:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "patch_size": 14}
    rope = {"type": "mrope", **MROPE}
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, **TOKENS
    )
    processor = _qwen_processor("Qwen2VLProcessor", 14)
    return transformers.Qwen2VLForConditionalGeneration, config, processor


def _qwen2_5_vl() -> tuple[Any, Any, Any]:
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
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": {"type": "mrope", **MROPE}},
        vision_config=vision,
        **TOKENS,
    )
    processor = _qwen_processor("Qwen2_5_VLProcessor", 14)
    return transformers.Qwen2_5_VLForConditionalGeneration, config, processor


def _sliding() -> tuple[Any, Any, Any]:
    """Half of the layers see 24 tokens back: far less than any prompt in the tests."""
    model_class, config, processor = _qwen2_5_vl()
    text = config.text_config.to_dict()
    text |= {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}
    text.pop("layer_types", None)
    vision = config.vision_config.to_dict()
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **TOKENS)
    return model_class, config, processor


_VISION3 = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 16,
    "num_position_embeddings": 64,
}


def _qwen3_vl() -> tuple[Any, Any, Any]:
    config = transformers.Qwen3VLConfig(
        text_config={
            **TEXT,
            "head_dim": 16,
            "rope_parameters": {**MROPE, "mrope_interleaved": True},
        },
        vision_config={**_VISION3, "deepstack_visual_indexes": [0, 1]},
        **TOKENS,
    )
    processor = _qwen_processor("Qwen3VLProcessor", 16)
    return transformers.Qwen3VLForConditionalGeneration, config, processor


_HYBRID = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {**MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def _qwen3_5() -> tuple[Any, Any, Any]:
    config = transformers.Qwen3_5Config(
        text_config={**TEXT, **_HYBRID}, vision_config=_VISION3, **TOKENS
    )
    processor = _qwen_processor("Qwen3VLProcessor", 16)
    return transformers.Qwen3_5ForConditionalGeneration, config, processor


def _qwen3_5_moe() -> tuple[Any, Any, Any]:
    config = transformers.Qwen3_5MoeConfig(
        text_config={**TEXT, **_HYBRID, **_MOE}, vision_config=_VISION3, **TOKENS
    )
    processor = _qwen_processor("Qwen3VLProcessor", 16)
    return transformers.Qwen3_5MoeForConditionalGeneration, config, processor


def _qwen3_vl_moe() -> tuple[Any, Any, Any]:
    rope = {**MROPE, "mrope_interleaved": True}
    config = transformers.Qwen3VLMoeConfig(
        text_config={**TEXT, **_MOE, "head_dim": 16, "rope_parameters": rope},
        vision_config={**_VISION3, "deepstack_visual_indexes": [0, 1]},
        **TOKENS,
    )
    processor = _qwen_processor("Qwen3VLProcessor", 16)
    return transformers.Qwen3VLMoeForConditionalGeneration, config, processor


def _llava() -> tuple[Any, Any, Any]:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = tokenizer_with({"image_token": "<image>"})
    token = tokenizer.convert_tokens_to_ids("<image>")
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=48,
        patch_size=12,
    )
    text = transformers.LlamaConfig(**TEXT)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=token, image_token_id=token
    )
    image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": 48}, crop_size={"height": 48, "width": 48}
    )
    processor = processor_of(
        "LlavaProcessor",
        image_processor,
        tokenizer,
        "<image>",
        patch_size=12,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return transformers.LlavaForConditionalGeneration, config, processor


def _internvl() -> tuple[Any, Any, Any]:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
        GotOcr2ImageProcessorPil,
    )

    tokenizer = tokenizer_with(
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        }
    )
    token = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    vision = transformers.InternVLVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=[32, 32],
        patch_size=[4, 4],
    )
    text = transformers.Qwen2Config(**TEXT)
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=token, image_seq_length=16
    )
    image_processor = GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=3
    )
    processor = processor_of(
        "InternVLProcessor", image_processor, tokenizer, "<IMG_CONTEXT>", image_seq_length=16
    )
    return transformers.InternVLForConditionalGeneration, config, processor


_BUILDERS = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "sliding": _sliding,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "llava": _llava,
    "internvl": _internvl,
}
ALL = {**_BUILDERS, **_MORE}


def in_both(kinds: Sequence[str], quick: Sequence[str]) -> list[Any]:
    """Each family in float32, and in bfloat16: those that are not quick there are slow tests."""
    found = [pytest.param(kind, torch.float32, id=f"f32-{kind}") for kind in kinds]
    for kind in kinds:
        marks = () if kind in quick else pytest.mark.slow
        found.append(pytest.param(kind, torch.bfloat16, id=f"bf16-{kind}", marks=marks))
    return found


def stock_inputs(processor: Any, messages: list[Any]) -> dict[str, torch.Tensor]:
    """What a user of stock Transformers would make of the conversation."""
    images = [
        part["image"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return dict(processor(text=[text], images=images or None, return_tensors="pt"))


def turn(text: str, *images: Any, role: str = "user") -> dict[str, Any]:
    """One message, pictures first."""
    parts: list[Any] = [{"type": "image", "image": image} for image in images]
    return {"role": role, "content": [*parts, {"type": "text", "text": text}]}


def folder_of(kind: str, path: Path) -> Path:
    """A family's tiny checkpoint on disk, as a hub folder."""
    return saved(*build(kind), path)


def saved(model: Any, processor: Any, path: Path) -> Path:
    """A checkpoint on disk, with a processor that stock Transformers would load."""
    model.save_pretrained(path)
    processor.tokenizer.save_pretrained(path)
    processor.image_processor.save_pretrained(path)
    (path / "chat_template.jinja").write_text(processor.chat_template)
    parts = ("image_processor", "tokenizer", "video_processor")
    own = {n: v for n, v in processor.to_dict().items() if n not in parts}
    (path / "processor_config.json").write_text(json.dumps(own))
    return path
