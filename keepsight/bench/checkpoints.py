"""Builds random-weight checkpoints with everything else real.

A benchmark must not depend on a download, and speed does not depend on trained weights. The
tokenizer is trained here on the standard library; image processor, chat template and folder layout
are those of the hub. Weights are scaled so that pictures influence the answer: with the usual small
initialisation they hardly would, and equal tokens would prove little.
"""

from __future__ import annotations

import json
import logging
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from keepsight.errors import InputError
from keepsight.kinds import Record

logger = logging.getLogger(__name__)

FORMAT = 1  # raise it when a checkpoint of the same name would change
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}"
    "{%- for part in message.content %}{%- if part.type == 'image' %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Size:
    """The size of a checkpoint; every shape has the same proportions."""

    hidden: int
    layers: int
    heads: int
    head: int
    tower: int
    depth: int
    vocabulary: int
    stored: str = "float32"

    @property
    def scale(self) -> int:
        """The number of vision heads: 64 wide each, at least one."""
        return max(1, self.tower // 64)


SIZES = {
    "tiny": Size(64, 4, 4, 16, 64, 3, 1024),  # for a smoke run
    "small": Size(768, 12, 8, 128, 384, 8, 8000),  # about 0.13 B
    "base": Size(1536, 20, 12, 128, 768, 16, 8000),  # about 0.7 B
    "large": Size(2304, 28, 16, 128, 1024, 24, 8000, "bfloat16"),  # about 2 B
}


@dataclass(frozen=True)
class Architecture:
    """One architecture: its name in Transformers' classes and the settings of its parts."""

    name: str
    processor: str
    patch: int
    text: Callable[[Size], Record]
    vision: Callable[[Size], Record]


def _text(size: Size) -> Record:
    return {
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }


def _vision(size: Size) -> Record:
    return {
        "depth": size.depth,
        "hidden_size": size.tower,
        "intermediate_size": 4 * size.tower,
        "num_heads": size.scale,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "out_hidden_size": size.hidden,
    }


def _rope(head: int, **more: object) -> Record:
    """Rotary settings for `head` dimensions that rotate; a third each for height and width."""
    half = head // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    return {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections, **more}


def _qwen3_text(size: Size) -> Record:
    rope = _rope(size.head, mrope_interleaved=True)
    return {**_text(size), "head_dim": size.head, "rope_parameters": rope}


def _qwen3_vision(size: Size) -> Record:
    levels = [1, 3, 5] if size.depth > 5 else [0, 1]
    return {**_vision(size), "deepstack_visual_indexes": levels}


def _qwen2_5_text(size: Size) -> Record:
    rope = _rope(size.head, type="mrope")
    heads = size.hidden // size.head
    return {**_text(size), "num_attention_heads": heads, "rope_parameters": rope}


def _qwen2_5_vision(size: Size) -> Record:
    vision, last = _vision(size), size.depth - 1
    del vision["num_position_embeddings"]
    return {
        **vision,
        "intermediate_size": 3 * size.tower,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [last // 2, last],
    }


def _hybrid_text(size: Size) -> Record:
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(size.layers)]
    rope = _rope(size.head // 2, mrope_interleaved=True, partial_rotary_factor=0.25)
    return {
        **_text(size),
        "num_attention_heads": size.heads // 2,
        "head_dim": 2 * size.head,
        "layer_types": kinds,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": size.head,
        "linear_value_head_dim": size.head,
        "linear_num_key_heads": size.heads // 2,
        "linear_num_value_heads": size.heads,
        "rope_parameters": rope,
    }


SHAPES = {
    "qwen3_vl": Architecture("Qwen3VL", "Qwen3VLProcessor", 16, _qwen3_text, _qwen3_vision),
    "qwen2_5_vl": Architecture(
        "Qwen2_5_VL", "Qwen2_5_VLProcessor", 14, _qwen2_5_text, _qwen2_5_vision
    ),
    "qwen3_5": Architecture("Qwen3_5", "Qwen3VLProcessor", 16, _hybrid_text, _vision),
}


def checkpoint(shape: str, size: str, folder: Path) -> Path:
    """The folder of a checkpoint, built if it does not exist."""
    if shape not in SHAPES or size not in SIZES:
        raise InputError(
            f"no checkpoint {shape!r} of size {size!r}; shapes: {', '.join(SHAPES)}; "
            f"sizes: {', '.join(SIZES)}"
        )
    path = folder / f"{shape}-{size}-{FORMAT}"
    if (path / "config.json").exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    logger.info("building the checkpoint %s", path.name)
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        _build(SHAPES[shape], SIZES[size], Path(draft))
        shutil.copytree(draft, path, dirs_exist_ok=True)
    return path


def _build(shape: Architecture, size: Size, folder: Path) -> None:
    tokenizer = _tokenizer(size.vocabulary)
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    config = getattr(transformers, f"{shape.name}Config")(
        text_config={
            **shape.text(size),
            "vocab_size": -(-len(tokenizer) // 128) * 128,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config=shape.vision(size),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{shape.name}ForConditionalGeneration")(config).eval()
    _wake(model)
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    tokenizer.save_pretrained(folder)
    _write_processor(shape, folder)
    model.to(getattr(torch, size.stored)).save_pretrained(folder)


def _wake(model: torch.nn.Module) -> None:
    """Rescale weights so that they keep the size of activations and pictures influence the
    answer."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_tokens" in name:
                weight.normal_(0.0, 1.0, generator=generator)
            elif weight.dim() >= 2:
                weight.normal_(0.0, weight[0].numel() ** -0.5, generator=generator)


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE like Qwen's, trained on Python's own sources."""
    raw = Tokenizer(BPE())
    raw.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    raw.decoder = decoders.ByteLevel()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[
        : min(150, vocabulary // 50)
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False
    )
    raw.train([str(source) for source in sources], trainer)
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL[1:]),
        chat_template=TEMPLATE,
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )


def _write_processor(shape: Architecture, folder: Path) -> None:
    unit = (2 * shape.patch) ** 2
    clip = shape.patch == 14  # older towers keep CLIP's normalisation
    mean = [0.48145466, 0.4578275, 0.40821073] if clip else [0.5] * 3
    std = [0.26862954, 0.26130258, 0.27577711] if clip else [0.5] * 3
    common = {
        "patch_size": shape.patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": mean,
        "image_std": std,
        "processor_class": shape.processor,
    }
    size = {"shortest_edge": 4 * unit, "longest_edge": 16384 * unit}
    image = {**common, "image_processor_type": "Qwen2VLImageProcessor", "size": size}
    video = {**common, "video_processor_type": "Qwen3VLVideoProcessor"}
    video["size"] = {"shortest_edge": 4096, "longest_edge": 25165824}
    if clip:
        video["video_processor_type"] = "Qwen2VLVideoProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=1))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=1))
