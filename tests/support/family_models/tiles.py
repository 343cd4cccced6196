"""Tiny models of families that cut an image into tiles, and of their sliding and chunked layers.

Two of them (llama4, step3p7) and cohere2_vision come with image processors for torchvision only.
Where that is missing a small PIL one stands in: it gives the processor of the family the same
tensors and counts, which is all that the processor and the model ever see of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import SizeDict
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import (
    DeepseekVLImageProcessorPil,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil

from support.family_models import Builder
from support.model_parts import TEXT, processor_of, tokenizer_with

_WINDOW = 24  # far less than any prompt in the tests
_LAYERS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
    "vision_use_head": False,
}
_COHERE2 = {
    **TEXT,
    "model_type": "cohere2",
    "sliding_window": _WINDOW,
    "layer_types": _LAYERS,
    "logit_scale": 1.0,
}
_TILES = {"size": {"height": 32, "width": 32}, "min_patches": 1, "max_patches": 3}


def _token(tokenizer: Any, name: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(name))


# -- tiles in one tensor -----------------------------------------------------------------------


def _aya_vision() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with(
        {
            "image_token": "<image>",
            "start_token": "<|START_OF_IMG|>",
            "end_token": "<|END_OF_IMG|>",
            "patch_token": "<|IMG_PATCH|>",
        }
    )
    config = transformers.AyaVisionConfig(
        vision_config=_SIGLIP,
        text_config=_COHERE2,
        image_token_index=_token(tokenizer, "<|IMG_PATCH|>"),
        tie_word_embeddings=False,
    )
    processor = processor_of(
        "AyaVisionProcessor",
        GotOcr2ImageProcessorPil(**_TILES),
        tokenizer,
        "<image>",
        patch_size=4,
        img_size=32,
        downsample_factor=2,
    )
    return transformers.AyaVisionForConditionalGeneration, config, processor


class Cohere2Tiles(GotOcr2ImageProcessorPil):
    """The tiles of cohere2_vision are those of got_ocr2; `patch_size` is tokens per tile side."""

    patch_size = 4
    crop_to_patches = True


def _cohere2_vision() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with(
        {
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        }
    )
    token = _token(tokenizer, "<|IMG_PATCH|>")
    tokenizer.image_token_id = token
    config = transformers.Cohere2VisionConfig(
        vision_config=_SIGLIP,
        text_config=_COHERE2,
        alignment_intermediate_size=128,
        image_token_id=token,
        tie_word_embeddings=False,
    )
    processor = processor_of(
        "Cohere2VisionProcessor", Cohere2Tiles(**_TILES), tokenizer, "<|IMG_PATCH|>"
    )
    return transformers.Cohere2VisionForConditionalGeneration, config, processor


def _got_ocr2() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with(
        {"img_start": "<img>", "img_end": "</img>", "image_token": "<imgpad>"}
    )
    vision = {
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 4,
        "window_size": 8,
        "global_attn_indexes": [1],
        "mlp_dim": 64,
    }
    config = transformers.GotOcr2Config(
        vision_config=vision,
        text_config={**TEXT, "model_type": "qwen2"},
        image_token_index=_token(tokenizer, "<imgpad>"),
        image_seq_length=16,
        tie_word_embeddings=False,
    )
    processor = processor_of(
        "GotOcr2Processor",
        GotOcr2ImageProcessorPil(**{**_TILES, "size": {"height": 64, "width": 64}}),
        tokenizer,
        "<img><imgpad></img>",
    )
    processor.num_image_tokens = 16
    processor.images_kwargs = {"crop_to_patches": True, "min_patches": 1, "max_patches": 3}
    return transformers.GotOcr2ForConditionalGeneration, config, processor


def _deepseek_vl() -> tuple[Any, Any, Any]:
    """One picture, one tile: every picture is padded to a square and gives 64 tokens."""
    tokenizer = tokenizer_with({"image_token": "<image_placeholder>"})
    config = transformers.DeepseekVLConfig(
        vision_config=_SIGLIP,
        text_config={**TEXT, "model_type": "llama"},
        image_token_id=_token(tokenizer, "<image_placeholder>"),
        tie_word_embeddings=False,
    )
    processor = processor_of(
        "DeepseekVLProcessor",
        DeepseekVLImageProcessorPil(size=_TILES["size"]),
        tokenizer,
        "<image_placeholder>",
        num_image_tokens=64,
    )
    return transformers.DeepseekVLForConditionalGeneration, config, processor


# -- tiles and what stands between them --------------------------------------------------------

_INDICATORS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")


def _ovis2() -> tuple[Any, Any, Any]:
    names = ("<image>", "<IMG_ATOM>", *_INDICATORS)
    tokenizer = tokenizer_with({f"token_{i}": name for i, name in enumerate(names)})
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 4,
        "vocab_size": 64,
        "hidden_stride": 2,
    }
    config = transformers.Ovis2Config(
        vision_config=vision,
        text_config={**TEXT, "model_type": "qwen2"},
        image_token_id=_token(tokenizer, "<IMG_ATOM>"),
        visual_indicator_token_ids=[_token(tokenizer, name) for name in _INDICATORS],
        vocab_size=576,
        hidden_size=64,
        tie_word_embeddings=False,
    )
    image_processor = Ovis2ImageProcessorPil(**_TILES, crop_to_patches=True)
    processor = processor_of(
        "Ovis2Processor", image_processor, tokenizer, "<image>", image_seq_length=16
    )
    return transformers.Ovis2ForConditionalGeneration, config, processor


class Llama4Tiles(GotOcr2ImageProcessorPil):
    """Tiles row by row, then the whole picture; `aspect_ratios` are tiles down and across."""

    def _preprocess(self, images: list[Any], size: SizeDict, **kwargs: Any) -> BatchFeature:
        kwargs["crop_to_patches"] = True
        found = super()._preprocess(images, size=size, **kwargs)
        found.pop("num_patches")
        found["aspect_ratios"] = [
            get_optimal_tiled_canvas(
                image.shape[-2:],
                (size.height, size.width),
                kwargs["min_patches"],
                kwargs["max_patches"],
            )[::-1]
            for image in images
        ]
        return found


def _llama4() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with(
        {
            "image_token": "<|image|>",
            "start": "<|image_start|>",
            "end": "<|image_end|>",
            "patch": "<|patch|>",
            "tile_x": "<|tile_x_separator|>",
            "tile_y": "<|tile_y_separator|>",
        }
    )
    vision = {
        "hidden_size": 32,
        "intermediate_size": 128,  # what the pixel shuffle makes of hidden_size
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 4,
        "projector_input_dim": 48,
        "projector_output_dim": 48,
        "vision_output_dim": 48,
    }
    text = {
        **TEXT,
        "intermediate_size_mlp": 128,
        "head_dim": 16,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": _WINDOW,
        "floor_scale": 64,  # so that the temperature of far positions is part of the tests
    }
    config = transformers.Llama4Config(
        vision_config=vision,
        text_config=text,
        boi_token_index=_token(tokenizer, "<|image_start|>"),
        eoi_token_index=_token(tokenizer, "<|image_end|>"),
        image_token_index=_token(tokenizer, "<|patch|>"),
        tie_word_embeddings=False,
    )
    processor = processor_of(
        "Llama4Processor", Llama4Tiles(**_TILES), tokenizer, "<|image|>", patch_size=4
    )
    return transformers.Llama4ForConditionalGeneration, config, processor


class Step3p7Tiles(GotOcr2ImageProcessorPil):
    """The whole picture at one size, and where it is long its tiles at another."""

    patch_size = 32
    vision_patch_size = 4
    downsampler_stride = 4

    def _preprocess(self, images: list[Any], size: SizeDict, **kwargs: Any) -> BatchFeature:
        finish = {**kwargs, "return_tensors": "np"}
        whole = super()._preprocess(images, size=size, **{**finish, "crop_to_patches": False})
        found: dict[str, Any] = {"pixel_values": whole["pixel_values"]}
        tiles = [_cut(image) for image in images]
        found["num_local_patches"] = [len(cut) for cut in tiles]
        result = BatchFeature(found, tensor_type=kwargs.get("return_tensors"))
        flat = [tile for cut in tiles for tile in cut]
        if flat:
            small = SizeDict(height=self.patch_size, width=self.patch_size)
            local = super()._preprocess(flat, size=small, **{**finish, "crop_to_patches": False})
            values = BatchFeature(
                {"pixel_values": local["pixel_values"]}, tensor_type=kwargs.get("return_tensors")
            )
            result["pixel_values_local"] = values["pixel_values"]
            most = max(map(len, tiles))
            result["patch_newline_masks"] = [_newlines(len(cut), most) for cut in tiles]
        return result


def _cut(image: np.ndarray) -> list[np.ndarray]:
    """Two rows of two tiles for a picture that is longer than it is wide, or wider."""
    height, width = image.shape[-2:]
    if max(height, width) / min(height, width) <= 1.5:
        return []
    y, x = height // 2, width // 2
    return [image[:, :y, :x], image[:, :y, x:], image[:, y:, :x], image[:, y:, x:]]


def _newlines(tiles: int, length: int) -> list[bool]:
    return [tiles == 4 and i == 1 for i in range(length)]


def _step3p7() -> tuple[Any, Any, Any]:
    names = ("<im_patch>", "<im_start>", "<im_end>")
    names += ("<patch_start>", "<patch_end>", "<patch_newline>")
    tokenizer = tokenizer_with({f"token_{i}": name for i, name in enumerate(names)})
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 4,
        "mlp_ratio": 2.0,
        "max_position_embeddings": 256,
    }
    text = {
        **TEXT,
        "head_dim": 16,
        "layer_types": _LAYERS,
        "sliding_window": _WINDOW,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "num_sliding_attention_heads": 2,
    }
    config = transformers.Step3p7Config(
        vision_config=vision,
        text_config=text,
        image_token_id=_token(tokenizer, "<im_patch>"),
        tie_word_embeddings=False,
    )
    processor = processor_of(
        "Step3p7Processor", Step3p7Tiles(size={"height": 64, "width": 64}), tokenizer, "<im_patch>"
    )
    return transformers.Step3p7ForConditionalGeneration, config, processor


BUILDERS: dict[str, Builder] = {
    "aya_vision": _aya_vision,
    "cohere2_vision": _cohere2_vision,
    "got_ocr2": _got_ocr2,
    "deepseek_vl": _deepseek_vl,
    "ovis2": _ovis2,
    "llama4": _llama4,
    "step3p7": _step3p7,
}
