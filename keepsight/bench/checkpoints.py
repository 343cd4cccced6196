"""Builds random-weight checkpoints with everything else real.

A benchmark must not depend on a download, and speed does not depend on trained weights. The
tokenizer is trained here on the standard library; image processor, chat template and folder layout
are those of the hub. Weights are scaled so that pictures influence the answer: with the usual small
initialisation they hardly would, and equal tokens would prove little.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from keepsight.errors import InputError
from keepsight.kinds import Record

FORMAT = 1  # raise it when a checkpoint of the same name would change
END, START, STOP, VISION_START, VISION_END, IMAGE, VIDEO = SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
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


SIZES = {
    "tiny": Size(64, 4, 4, 16, 64, 3, 1024),  # for a smoke run
    "small": Size(768, 12, 8, 128, 384, 8, 8000),  # about 0.13 B
    "base": Size(1536, 20, 12, 128, 768, 16, 8000),  # about 0.7 B
    "large": Size(2304, 28, 16, 128, 1024, 24, 8000, "bfloat16"),  # about 2 B
}
SHAPES = {"qwen3_vl": "Qwen3VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_5": "Qwen3_5"}  # classes


def patch_of(shape: str) -> int:
    """Pixels of a patch, down and across."""
    return 14 if shape == "qwen2_5_vl" else 16


def checkpoint(shape: str, size: str, folder: Path) -> Path:
    """The folder of a checkpoint, built if it does not exist."""
    if shape not in SHAPES or size not in SIZES:
        raise InputError(
            f"no checkpoint {shape!r} of size {size!r}; shapes: {', '.join(SHAPES)}; "
            f"sizes: {', '.join(SIZES)}"
        )
    path = folder / f"{shape}-{size}-{FORMAT}"
    if not (path / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            _build(shape, SIZES[size], Path(draft))
            shutil.copytree(draft, path, dirs_exist_ok=True)
    return path


def _build(shape: str, size: Size, folder: Path) -> None:
    tokenizer = tokenizer_of(size.vocabulary)
    config = configuration(shape, *parts(shape, size), tokenizer)
    torch.manual_seed(0)
    made = getattr(transformers, f"{SHAPES[shape]}ForConditionalGeneration")
    model = made(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # activations keep their size, and pictures influence the answer
        for name, weight in model.named_parameters():
            if "embed_tokens" in name:
                weight.normal_(0.0, 1.0, generator=generator)
            elif weight.dim() >= 2:
                weight.normal_(0.0, weight[0].numel() ** -0.5, generator=generator)
    stop, end = tokenizer.convert_tokens_to_ids([STOP, END])
    model.generation_config.update(do_sample=False, eos_token_id=[stop, end], pad_token_id=end)
    save_processor(shape, tokenizer, folder)
    model.to(getattr(torch, size.stored)).save_pretrained(folder)


def parts(shape: str, size: Size) -> tuple[Record, Record]:
    """The settings of a shape's language model and of its vision encoder."""
    text: Record = {
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }
    vision: Record = {
        "depth": size.depth,
        "hidden_size": size.tower,
        "intermediate_size": 4 * size.tower,
        "num_heads": max(1, size.tower // 64),
        "patch_size": patch_of(shape),
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "out_hidden_size": size.hidden,
    }
    if shape == "qwen3_vl":
        text |= {"head_dim": size.head, "rope_parameters": _rope(size.head, mrope_interleaved=True)}
        vision["deepstack_visual_indexes"] = [1, 3, 5] if size.depth > 5 else [0, 1]
    elif shape == "qwen2_5_vl":
        text |= {"num_attention_heads": size.hidden // size.head}
        text |= {"rope_parameters": _rope(size.head, type="mrope")}
        del vision["num_position_embeddings"]
        vision |= {"intermediate_size": 3 * size.tower, "window_size": 112}
        vision["fullatt_block_indexes"] = [(size.depth - 1) // 2, size.depth - 1]
    else:
        layers = range(size.layers)
        text |= {
            "num_attention_heads": size.heads // 2,
            "head_dim": 2 * size.head,
            "layer_types": ["linear_attention" if i % 4 < 3 else "full_attention" for i in layers],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": size.head,
            "linear_value_head_dim": size.head,
            "linear_num_key_heads": size.heads // 2,
            "linear_num_value_heads": size.heads,
            "rope_parameters": _rope(
                size.head // 2, mrope_interleaved=True, partial_rotary_factor=0.25
            ),
        }
    return text, vision


def _rope(head: int, **more: object) -> Record:
    """Rotary settings for `head` dimensions that rotate; a third each for height and width."""
    half = head // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    return {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections, **more}


def configuration(
    shape: str, text: Record, vision: Record, tokenizer: PreTrainedTokenizerFast
) -> Any:
    """The configuration of a whole model, with the ids of a tokenizer."""
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    own = {
        "vocab_size": -(-len(tokenizer) // 128) * 128,
        "bos_token_id": None,
        "eos_token_id": ids[STOP],
        "pad_token_id": ids[END],
    }
    return getattr(transformers, f"{SHAPES[shape]}Config")(
        text_config={**own, **text},
        vision_config=vision,
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=False,
    )


def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE like Qwen's, trained on Python's own sources."""
    raw = Tokenizer(BPE())
    raw.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    raw.decoder = decoders.ByteLevel()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False
    )
    raw.train([str(source) for source in sources[: min(150, vocabulary // 50)]], trainer)
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=STOP,
        pad_token=END,
        additional_special_tokens=list(SPECIAL[1:]),
        chat_template=TEMPLATE,
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )


def save_processor(shape: str, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a tokenizer, and the processors of pictures and videos."""
    patch = patch_of(shape)
    clip = patch == 14  # older towers keep CLIP's normalisation
    common = {
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073] if clip else [0.5] * 3,
        "image_std": [0.26862954, 0.26130258, 0.27577711] if clip else [0.5] * 3,
        "processor_class": "Qwen2_5_VLProcessor" if clip else "Qwen3VLProcessor",
    }
    unit = (2 * patch) ** 2
    size = {"shortest_edge": 4 * unit, "longest_edge": 16384 * unit}
    image = {**common, "image_processor_type": "Qwen2VLImageProcessor", "size": size}
    kind = "Qwen2VLVideoProcessor" if clip else "Qwen3VLVideoProcessor"
    video = {**common, "video_processor_type": kind}
    video["size"] = {"shortest_edge": 4096, "longest_edge": 25165824}
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=1))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=1))
