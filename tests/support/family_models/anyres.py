"""Tiny models that look at an image in parts, as many as its shape asks for.

A processor pads the images of one call to the largest of them: in tiles, in pixels or in patches.
The two pictures of the tests differ in shape, so that each is a larger neighbour to the other.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from transformers import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.processing_utils import ImagesKwargs

from support import model_parts
from support.family_models import Builder
from support.model_parts import MROPE, TEXT, processor_of, tokenizer_with

_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_PINPOINTS = [[32, 32], [32, 64], [64, 32]]  # height, width: two tiles for a square, three if wide


def _id(tokenizer: Any, token: str) -> int:
    found: int = tokenizer.convert_tokens_to_ids(token)
    return found


def _llava_next() -> tuple[Any, Any, Any]:
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    tokenizer = tokenizer_with({"image_token": "<image>"})
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**_TOWER, image_size=32, patch_size=8),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=_id(tokenizer, "<image>"),
        image_grid_pinpoints=_PINPOINTS,
    )
    image_processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": 32},
        crop_size={"height": 32, "width": 32},
        image_grid_pinpoints=_PINPOINTS,
    )
    processor = processor_of(
        "LlavaNextProcessor",
        image_processor,
        tokenizer,
        "<image>",
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return transformers.LlavaNextForConditionalGeneration, config, processor


def _llava_onevision() -> tuple[Any, Any, Any]:
    """`anyres_max_1`: the three tiles of the wide picture are shrunk to fewer tokens."""
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )

    tokenizer = tokenizer_with({"image_token": "<image>", "video_token": "<video>"})
    vision = transformers.SiglipVisionConfig(
        **_TOWER, image_size=32, patch_size=8, vision_use_head=False
    )
    config = transformers.LlavaOnevisionConfig(
        vision_config=vision,
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_index=_id(tokenizer, "<image>"),
        video_token_index=_id(tokenizer, "<video>"),
        image_grid_pinpoints=_PINPOINTS,
        vision_aspect_ratio="anyres_max_1",
    )
    image_processor = LlavaOnevisionImageProcessorPil(
        size={"height": 32, "width": 32}, image_grid_pinpoints=_PINPOINTS
    )
    processor = processor_of(
        "LlavaOnevisionProcessor",
        image_processor,
        tokenizer,
        "<image>",
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_1",
    )
    return transformers.LlavaOnevisionForConditionalGeneration, config, processor


def _mistral3() -> tuple[Any, Any, Any]:
    """One cell of 16 by 16 pixels is one token; each row of cells ends with a token of its own."""
    from transformers.models.pixtral import image_processing_pil_pixtral as pil

    tokenizer = tokenizer_with(
        {"image_token": "[IMG]", "break_token": "[IMG_BREAK]", "end_token": "[IMG_END]"}
    )
    config = transformers.Mistral3Config(
        vision_config=transformers.PixtralVisionConfig(**_TOWER, image_size=160, patch_size=8),
        text_config=transformers.MistralConfig(**TEXT, head_dim=16, sliding_window=None),
        image_token_index=_id(tokenizer, "[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    # Upstream's processor imports the image processor of torchvision for one function of numbers.
    needs_torchvision = "transformers.models.pixtral.image_processing_pixtral"
    with mock.patch.dict(sys.modules, {needs_torchvision: pil}):
        module = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    # Lazy modules may be there twice: the one that `processor_of` looks into is meant.
    upstream = model_parts.transformers
    with mock.patch.object(upstream, "PixtralProcessor", module.PixtralProcessor):
        processor = processor_of(
            "PixtralProcessor",
            pil.PixtralImageProcessorPil(size={"longest_edge": 160}, patch_size=16),
            tokenizer,
            "[IMG]",
            patch_size=8,
            spatial_merge_size=2,
        )
    return transformers.Mistral3ForConditionalGeneration, config, processor


def _llava_pixtral() -> tuple[Any, Any, Any]:
    """The tower of Mistral 3 in a LLaVA, as Pixtral 12B has it: a token for each patch."""
    model_class, config, processor = transformers.LlavaForConditionalGeneration, *_mistral3()[1:]
    processor.patch_size, processor.spatial_merge_size = 16, 1
    vision = transformers.PixtralVisionConfig(**_TOWER, image_size=160, patch_size=16)
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=config.text_config,
        image_token_index=config.image_token_index,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return model_class, config, processor


def _idefics(kind: str, image_processor: Any) -> tuple[Any, Any, Any]:
    """Tiles of 32 by 32 pixels, 4 tokens each, and the whole picture as a last tile."""
    tags = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
    names = {
        "fake_image_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "end_of_utterance_token": "<end_of_utterance>",
        "global_image_token": "<global-img>",
        **{f"tag_{i}": tag for i, tag in enumerate(tags)},
    }
    tokenizer = tokenizer_with(names)
    config = getattr(transformers, f"{kind}Config")(
        vision_config={**_TOWER, "image_size": 32, "patch_size": 8},
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=_id(tokenizer, "<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    parts = image_processor(size={"longest_edge": 96}, max_image_size={"longest_edge": 32})
    processor = processor_of(f"{kind}Processor", parts, tokenizer, "<image>", image_seq_len=4)
    return getattr(transformers, f"{kind}ForConditionalGeneration"), config, processor


def _idefics3() -> tuple[Any, Any, Any]:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    return _idefics("Idefics3", Idefics3ImageProcessorPil)


def _smolvlm() -> tuple[Any, Any, Any]:
    """Upstream's processor wants the package num2words, for the prompt of a video only."""
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    with mock.patch.object(processing_smolvlm, "num2words", str):
        return _idefics("SmolVLM", SmolVLMImageProcessorPil)


def _idefics2(splits: bool = False) -> tuple[Any, Any, Any]:
    """The masks say where padding begins: the two pictures are of different sizes."""
    from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil

    names = {
        "image_boundary_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    tokenizer = tokenizer_with(names)
    config = transformers.Idefics2Config(
        vision_config={**_TOWER, "image_size": 64, "patch_size": 8},
        perceiver_config={
            "hidden_size": 64,
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 4,
            "resampler_head_dim": 16,
            "num_key_value_heads": 2,
        },
        text_config={**TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
        image_token_id=_id(tokenizer, "<image>"),
        tie_word_embeddings=False,
    )
    image_processor = Idefics2ImageProcessorPil(
        size={"shortest_edge": 36, "longest_edge": 64}, do_image_splitting=splits
    )
    processor = processor_of(
        "Idefics2Processor", image_processor, tokenizer, "<image>", image_seq_len=4
    )
    return transformers.Idefics2ForConditionalGeneration, config, processor


def _idefics2_split() -> tuple[Any, Any, Any]:
    """Four quarters and the whole picture."""
    return _idefics2(splits=True)


def _aria() -> tuple[Any, Any, Any]:
    """Its image processor knows two sizes only, so the patches are large and the tower is small."""
    from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil

    tokenizer = tokenizer_with({"image_token": "<image>"})
    config = transformers.AriaConfig(
        vision_config={
            **_TOWER,
            "model_type": "idefics3_vision",
            "image_size": 980,
            "patch_size": 140,
        },
        text_config={**TEXT, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        projector_patch_to_query_dict={9: 4, 49: 8},
        image_token_index=_id(tokenizer, "<image>"),
        vision_feature_layer=-2,
    )
    processor = processor_of(
        "AriaProcessor",
        AriaImageProcessorPil(),
        tokenizer,
        "<image>",
        size_conversion={490: 4, 980: 8},
    )
    return transformers.AriaForConditionalGeneration, config, processor


class LfmKwargs(ImagesKwargs, total=False):  # type: ignore[misc]
    """What upstream's processor passes on."""

    return_row_col_info: bool


class LfmTiles(PilBackend):  # type: ignore[misc]
    """Tiles and patches in the layout of LFM2-VL's image processor.

    Upstream's own needs torchvision. This one knows four grids and a fixed bound of patches.
    """

    encoder_patch_size, downsample_factor, tile_size, use_thumbnail = 8, 2, 32, True
    longest = 64  # patches that each row is padded to
    model_input_names = ["pixel_values", "pixel_attention_mask", "spatial_shapes"]  # noqa: RUF012
    valid_kwargs = LfmKwargs

    def preprocess(self, images: Any, **kwargs: Any) -> BatchFeature:
        """Rows of patches with mask and shape, one for each tile of each image."""
        rows: list[np.ndarray] = []
        info: list[tuple[int, int, list[int]]] = []
        for image in self._flat(images):
            tiles, *shape = self._tiles(image.convert("RGB"))
            rows += tiles
            info.append(tuple(shape))
        pixels = torch.zeros(len(rows), self.longest, 3 * self.encoder_patch_size**2)
        mask = torch.zeros(len(rows), self.longest, dtype=torch.int32)
        for i, row in enumerate(rows):
            count = row.shape[0] * row.shape[1]
            pixels[i, :count] = torch.from_numpy(row.reshape(count, -1))
            mask[i, :count] = 1
        shapes = torch.tensor([row.shape[:2] for row in rows])
        names = ("image_rows", "image_cols", "image_sizes")
        data = {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}
        wanted = names if kwargs.get("return_row_col_info") else ()
        more = {name: [row[i] for row in info] for i, name in enumerate(wanted)}
        return BatchFeature({**data, **more})

    def _flat(self, images: Any) -> list[Any]:
        if not isinstance(images, list):
            return [images]
        return [one for image in images for one in self._flat(image)]

    def _tiles(self, image: Any) -> tuple[list[np.ndarray], int, int, list[int]]:
        ratio = image.width / image.height
        columns, rows = min(
            ((1, 1), (2, 1), (1, 2), (2, 2)), key=lambda g: abs(g[0] / g[1] - ratio)
        )
        if max(image.size) > 64 and columns == rows:
            columns = rows = 2
        side, cell = self.tile_size, self.encoder_patch_size * self.downsample_factor
        whole = [max(cell, round(edge / 40) * cell) for edge in (image.height, image.width)]
        small = self._patches(image.resize((whole[1], whole[0])))
        if columns * rows == 1:
            return [small], 1, 1, whole
        large = image.resize((columns * side, rows * side))
        boxes = [(c * side, r * side) for r in range(rows) for c in range(columns)]
        parts = [self._patches(large.crop((x, y, x + side, y + side))) for x, y in boxes]
        return [*parts, small], rows, columns, whole

    def _patches(self, image: Any) -> np.ndarray:
        side = self.encoder_patch_size
        pixels = np.asarray(image, dtype=np.float32) / 127.5 - 1
        height, width = pixels.shape[0] // side, pixels.shape[1] // side
        cells = pixels.reshape(height, side, width, side, 3).transpose(0, 2, 1, 3, 4)
        return cells.reshape(height, width, -1)


def _lfm2_vl() -> tuple[Any, Any, Any]:
    tags = [f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2)]
    names = {
        "image_token": "<image>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
        **{f"tag_{i}": tag for i, tag in enumerate(tags)},
    }
    tokenizer = tokenizer_with(names)
    layers = ["conv", "full_attention", "conv", "full_attention"]
    text = {**TEXT, "block_auto_adjust_ff_dim": False, "layer_types": layers}
    config = transformers.Lfm2VlConfig(
        vision_config=transformers.Siglip2VisionConfig(
            **_TOWER, patch_size=8, num_patches=16, vision_use_head=False
        ),
        text_config=transformers.Lfm2Config(**text),
        image_token_id=_id(tokenizer, "<image>"),
        projector_hidden_size=48,
        tie_word_embeddings=False,
    )
    processor = processor_of("Lfm2VlProcessor", LfmTiles(), tokenizer, "<image>")
    return transformers.Lfm2VlForConditionalGeneration, config, processor


_LINEAR = {
    "model_type": "qwen3_5_text",
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {**MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
}


def _minicpm(mode: str = "16x", version: str = "4_6") -> tuple[Any, Any, Any]:
    """A picture, then its slices; every image bears a number that its place in the prompt gives."""
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
        MiniCPMV4_6ImageProcessorPil,
    )

    names = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    }
    tokenizer = tokenizer_with(names)
    marks: dict[str, Any] = {
        f"{name}_id": _id(tokenizer, names[f"{name}_token"])
        for name in ("image_start", "image_end", "slice_start", "slice_end")
        if version == "4_7"
    }
    kind = f"MiniCPM{version if version == 'Ocr' else f'V{version}'}"
    config_class = getattr(transformers, f"{kind}Config")
    if version == "Ocr":
        marks["tie_word_embeddings"] = False
    config = config_class(
        **marks,
        **({"newline_id": tokenizer.encode("\n")[0]} if version == "4_7" else {}),
        vision_config={**_TOWER, "image_size": 64, "patch_size": 4},
        text_config={**TEXT, **_LINEAR},
        insert_layer_id=0,
        downsample_mode=mode,
        image_token_id=_id(tokenizer, "<|image_pad|>"),
        video_token_id=_id(tokenizer, "<|video_pad|>"),
    )
    image_processor = MiniCPMV4_6ImageProcessorPil(
        scale_resolution=64 if mode == "16x" else 32,
        patch_size=4,
        max_slice_nums=2,
        downsample_mode=mode,
    )
    processor = processor_of(f"{kind}Processor", image_processor, tokenizer, "<|image_pad|>")
    return getattr(transformers, f"{kind}ForConditionalGeneration"), config, processor


def _minicpm_fine() -> tuple[Any, Any, Any]:
    """Four times the tokens for the same patches: the merger within the tower is left out."""
    return _minicpm("4x")


def _minicpm_ocr() -> tuple[Any, Any, Any]:
    """Its image processor wants torchvision; that of 4.6 gives tensors of the same form."""
    return _minicpm(version="Ocr")


def _minicpm_canvas() -> tuple[Any, Any, Any]:
    """The same on a canvas of three axes of positions."""
    return _minicpm(version="4_7")


BUILDERS: dict[str, Builder] = {
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "mistral3": _mistral3,
    "llava_pixtral": _llava_pixtral,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "idefics2": _idefics2,
    "idefics2_split": _idefics2_split,
    "aria": _aria,
    "lfm2_vl": _lfm2_vl,
    "minicpmv4_6": _minicpm,
    "minicpmv4_6_fine": _minicpm_fine,
    "minicpmv4_7": _minicpm_canvas,
    "minicpm_ocr": _minicpm_ocr,
}
