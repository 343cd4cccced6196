"""Tiny models where tokens of media see each other, or where text sees media across layers.

Gemma's image tokens attend to each other both ways inside one image, Molmo 2's across all images,
PaliGemma's with the whole prompt; Mllama's images are not in the sequence at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import BatchFeature
from transformers.image_processing_backends import PilBackend

from support.family_models import Builder
from support.model_parts import TEXT, processor_of, tokenizer_with

_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
}
_GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}


def _gemma3(window: int = 4096, crops: bool = False) -> tuple[Any, Any, Any]:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = tokenizer_with(_GEMMA_TOKENS)
    boi, eoi, image = tokenizer.convert_tokens_to_ids(list(_GEMMA_TOKENS.values()))
    text = transformers.Gemma3TextConfig(
        **TEXT,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(**_SIGLIP, vision_use_head=False),
        mm_tokens_per_image=16,
        boi_token_index=boi,
        eoi_token_index=eoi,
        image_token_index=image,
        tie_word_embeddings=False,
    )
    pan = {"pan_and_scan_min_crop_size": 32, "pan_and_scan_max_num_crops": 3}
    pan |= {"pan_and_scan_min_ratio_to_activate": 1.2, "do_pan_and_scan": crops}
    image_processor = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, **pan)
    processor = processor_of(
        "Gemma3Processor", image_processor, tokenizer, "<start_of_image>", image_seq_length=16
    )
    processor.images_kwargs = pan  # stock goes by these, whatever the image processor says
    return transformers.Gemma3ForConditionalGeneration, config, processor


def _gemma3_sliding() -> tuple[Any, Any, Any]:
    """Half of the layers see 24 tokens back: far less than any prompt in the tests."""
    return _gemma3(window=24)


def _gemma3_crops() -> tuple[Any, Any, Any]:
    """A wide picture becomes three runs of placeholders with words between them."""
    return _gemma3(window=24, crops=True)


_GEMMA4_TOKENS = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}
_GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}


def _gemma4(**own: Any) -> tuple[Any, Any, Any]:
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    tokenizer = tokenizer_with(_GEMMA4_TOKENS)
    image_processor = Gemma4ImageProcessorPil(
        patch_size=4, pooling_kernel_size=2, max_soft_tokens=70
    )
    processor = processor_of(
        "Gemma4Processor",
        image_processor,
        tokenizer,
        "<|image|>",
        feature_extractor=Gemma4AudioFeatureExtractor(),
    )
    names = ("boi_token", "eoi_token", "image_token", "boa_token", "audio_token")
    ids = {f"{n}_id": tokenizer.convert_tokens_to_ids(_GEMMA4_TOKENS[n]) for n in names}
    text = transformers.Gemma4TextConfig(
        **TEXT,
        head_dim=16,
        global_head_dim=32,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=576,
        **own,
    )
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config=transformers.Gemma4VisionConfig(**_GEMMA4_VISION),
        audio_config=None,
        video_token_id=processor.video_token_id,
        eoa_token_index=tokenizer.convert_tokens_to_ids("<audio|>"),
        tie_word_embeddings=False,
        **ids,
    )
    return transformers.Gemma4ForConditionalGeneration, config, processor


def _gemma4_causal() -> tuple[Any, Any, Any]:
    """As the small checkpoints: inputs for each layer, and layers that share keys and values."""
    return _gemma4(hidden_size_per_layer_input=8, num_kv_shared_layers=2, use_double_wide_mlp=True)


def _gemma4_vision() -> tuple[Any, Any, Any]:
    """As the large checkpoints: an image's tokens see each other; keys are values in some layers.

    Only sliding layers see both ways, as upstream has it.
    """
    return _gemma4(
        hidden_size_per_layer_input=0,
        use_bidirectional_attention="vision",
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    )


def _gemma4_unified() -> tuple[Any, Any, Any]:
    """Patches enter without a tower. Its image processor wants torchvision; that of Gemma 4 gives
    tensors of the same form where it pools nothing."""
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    tokenizer = tokenizer_with(_GEMMA4_TOKENS)
    processor = processor_of(
        "Gemma4UnifiedProcessor",
        Gemma4ImageProcessorPil(patch_size=16, pooling_kernel_size=1, max_soft_tokens=70),
        tokenizer,
        "<|image|>",
        feature_extractor=Gemma4AudioFeatureExtractor(),
    )
    names = ("boi_token", "eoi_token", "image_token", "boa_token", "audio_token")
    ids = {f"{n}_id": tokenizer.convert_tokens_to_ids(_GEMMA4_TOKENS[n]) for n in names}
    layers = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma4UnifiedConfig(
        text_config={**TEXT, "head_dim": 16, "sliding_window": 24, "layer_types": layers},
        vision_config={
            "patch_size": 8,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 64,
            "mm_posemb_size": 64,
            "output_proj_dims": 64,
        },
        audio_config=None,
        video_token_id=processor.video_token_id,
        tie_word_embeddings=False,
        **ids,
    )
    return transformers.Gemma4UnifiedForConditionalGeneration, config, processor


def _paligemma(two: bool = False) -> tuple[Any, Any, Any]:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    tokenizer = tokenizer_with({"image_token": "<image>", "start_token": "<bos>"})
    tokenizer.bos_token = "<bos>"
    image_processor = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    image_processor.image_seq_length = 16
    processor = processor_of("PaliGemmaProcessor", image_processor, tokenizer, "<image>")
    vision = transformers.SiglipVisionConfig(
        **{**_SIGLIP, "patch_size": 8}, vision_use_head=False, projection_dim=64
    )
    if two:
        text = transformers.Gemma2Config(
            **TEXT, head_dim=16, query_pre_attn_scalar=16, sliding_window=24
        )
    else:
        text = transformers.GemmaConfig(**TEXT, head_dim=16)
    config = transformers.PaliGemmaConfig(
        vision_config=vision,
        text_config=text,
        projection_dim=64,
        hidden_size=64,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    return transformers.PaliGemmaForConditionalGeneration, config, processor


def _paligemma2() -> tuple[Any, Any, Any]:
    """On Gemma 2: every other layer slides."""
    return _paligemma(two=True)


class Molmo2Crops(PilBackend):  # type: ignore[misc]
    """Crops, patches and pooling indices in the layout of Molmo 2's image processor.

    Upstream's own needs torchvision. This one has crops that do not overlap.
    """

    size = {"height": 32, "width": 32}  # noqa: RUF012
    patch_size = 8
    max_crops = 6
    model_input_names = [  # noqa: RUF012
        "pixel_values",
        "image_token_pooling",
        "image_grids",
        "image_num_crops",
    ]

    def preprocess(self, images: Any, **kwargs: Any) -> BatchFeature:
        """All crops one after another; pooling indices count patches from the first image on."""
        images = images if isinstance(images, list) else [images]
        images = [i for part in images for i in (part if isinstance(part, list) else [part])]
        crops, pooling, grids, offset = [], [], [], 0
        for image in images:
            patches, indices, grid = self._one(image)
            crops.append(patches)
            pooling.append(torch.where(indices >= 0, indices + offset, indices))
            grids.append(grid)
            offset += patches.shape[0] * patches.shape[1]
        data = {
            "pixel_values": torch.cat(crops),
            "image_token_pooling": torch.cat(pooling),
            "image_grids": torch.tensor(grids),
            "image_num_crops": torch.tensor([len(part) for part in crops]),
        }
        return BatchFeature(data)

    def _one(self, image: Image.Image) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        side = self.size["height"]
        rows, columns = (min(3, max(1, n // 48)) for n in (image.height, image.width))
        rows = min(rows, self.max_crops // columns)
        small = self._patches(image, 1, 1)
        large = self._patches(image, rows, columns)
        n = side // self.patch_size
        index = torch.arange(rows * columns * n * n).view(rows, columns, n, n)
        index = index.permute(0, 2, 1, 3).reshape(rows * n, columns * n)
        low, (a, b) = _pools(torch.arange(n * n).view(n, n))
        high, (c, d) = _pools(index)
        return torch.cat([small, large]), torch.cat([low, high + n * n]), [a, b, c, d]

    def _patches(self, image: Image.Image, rows: int, columns: int) -> torch.Tensor:
        """(crops, patches, numbers of a patch)"""
        side, p = self.size["height"], self.patch_size
        n = side // p
        resized = image.convert("RGB").resize((columns * side, rows * side))
        pixels = torch.from_numpy(np.asarray(resized, dtype=np.float32) / 127.5 - 1)
        crops = pixels.view(rows, n, p, columns, n, p, 3).permute(0, 3, 1, 4, 2, 5, 6)
        return crops.reshape(rows * columns, n * n, p * p * 3)


def _pools(index: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
    """Windows of 2 x 2 patches: which patches each pooled token is made of."""
    rows, columns = index.shape[0] // 2, index.shape[1] // 2
    windows = index.view(rows, 2, columns, 2).permute(0, 2, 1, 3).reshape(rows * columns, 4)
    return windows, (rows, columns)


_MOLMO_TOKENS = {
    "image_token": "<|image|>",
    "image_patch": "<im_patch>",
    "image_column": "<im_col>",
    "image_start": "<im_start>",
    "image_end": "<im_end>",
    "low_res_image_start": "<low_res_im_start>",
    "frame_start": "<frame_start>",
    "frame_end": "<frame_end>",
    "image_low": "<im_low>",
    "video_token": "<|video|>",
}


def _molmo2() -> tuple[Any, Any, Any]:
    tokenizer = tokenizer_with(_MOLMO_TOKENS)
    ids = {n: tokenizer.convert_tokens_to_ids(token) for n, token in _MOLMO_TOKENS.items()}
    attention = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    vision = {**attention, "head_dim": 8, "intermediate_size": 64, "num_hidden_layers": 2}
    text = {key: TEXT[key] for key in TEXT if not key.endswith("_token_id")}
    config = transformers.Molmo2Config(
        text_config={**text, "head_dim": 16, "additional_vocab_size": 0},
        vision_config={**vision, "image_size": [32, 32], "patch_size": 8},
        adapter_config={
            **attention,
            "head_dim": 8,
            "vision_feature_layer": [1, 0],
            "intermediate_size": 64,
            "text_hidden_size": 64,
        },
        image_patch_id=ids["image_patch"],
        **{f"{name}_token_id": ids[name] for name in ids if name.endswith(("_start", "_end"))},
    )
    processor = processor_of("Molmo2Processor", Molmo2Crops(), tokenizer, "<|image|>")
    return transformers.Molmo2ForConditionalGeneration, config, processor


def _mllama() -> tuple[Any, Any, Any]:
    """A small picture is one tile of four, a wide one two: the others are padding."""
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

    tokenizer = tokenizer_with({"image_token": "<|image|>", "start_token": "<|begin_of_text|>"})
    tokenizer.bos_token = "<|begin_of_text|>"
    config = transformers.MllamaConfig(
        text_config={**TEXT, "cross_attention_layers": [1, 3], "bos_token_id": 513},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 4,
            "image_size": 96,
            "patch_size": 24,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<|image|>"),
    )
    image_processor = MllamaImageProcessorPil(size={"height": 96, "width": 96}, max_image_tiles=4)
    processor = processor_of("MllamaProcessor", image_processor, tokenizer, "<|image|>")
    return _open_gates, config, processor


def _open_gates(config: Any) -> Any:
    """A new model's gates are shut: it would not look at any picture."""
    model = transformers.MllamaForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "gate" in name and weight.numel() == 1:
            weight.data.fill_(0.7)
    return model


BUILDERS: dict[str, Builder] = {
    "gemma3": _gemma3,
    "gemma3_sliding": _gemma3_sliding,
    "gemma3_crops": _gemma3_crops,
    "gemma4": _gemma4_causal,
    "gemma4_vision": _gemma4_vision,
    "gemma4_unified": _gemma4_unified,
    "paligemma": _paligemma,
    "paligemma2": _paligemma2,
    "molmo2": _molmo2,
    "mllama": _mllama,
}
