"""The two tiny architectures, and the files that make a folder of weights a whole model.

Both are ordinary Transformers architectures with small numbers in their configs, so they exercise
the very code that the large models run: deepstack and full attention in one, linear attention
beside full attention in the other.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from patches import MERGE, PATCH, TEMPORAL
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from words import SIZE, SPECIAL

from keepsight.demo.scene import SIDES

KINDS = ("qwen3_vl", "qwen3_5")
HERE = Path(__file__).parent
MODELS = HERE.parent / "keepsight" / "demo" / "models"

_WIDTH = 160
_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_heads": 3,
    "out_hidden_size": _WIDTH,
    "num_position_embeddings": 256,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": TEMPORAL,
}
_TEXT: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "intermediate_size": 448,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": SIZE,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": SPECIAL.index("<|im_end|>"),
}
_TOKENS: dict[str, Any] = {
    "image_token_id": SPECIAL.index("<|image_pad|>"),
    "video_token_id": SPECIAL.index("<|video_pad|>"),
    "vision_start_token_id": SPECIAL.index("<|vision_start|>"),
    "vision_end_token_id": SPECIAL.index("<|vision_end|>"),
    "tie_word_embeddings": True,
}


# Linear attention carries along which picture it is in; attention picks one picture out of several.
HYBRID = ("linear_attention", "linear_attention", "full_attention", "full_attention") * 2


def fresh(kind: str) -> PreTrainedModel:
    """A model of one kind with random weights."""
    if kind == "qwen3_vl":
        return _fresh_qwen3_vl()
    if kind == "qwen3_5":
        return _fresh_qwen3_5()
    raise ValueError(f"no such kind of model: {kind!r}")


def with_tower(model: PreTrainedModel, tower: Path) -> PreTrainedModel:
    """Give a model the tower of stage 1, which from then on stays as it is.

    Stage 1 trains the tower of qwen3_vl; the one of qwen3_5 is the same without its deepstack.
    """
    missing, _ = model.model.visual.load_state_dict(load_file(tower), strict=False)
    if missing:
        raise ValueError(f"{tower.name} lacks {', '.join(missing)}")
    model.model.visual.requires_grad_(False)
    return model


def grown(small: PreTrainedModel) -> PreTrainedModel:
    """A model of today's layers that answers exactly as one with fewer of them does.

    A layer that is new repeats the one before it, but adds nothing yet: what it hands on begins at
    zero, and training takes it from there.
    """
    model = fresh(small.config.model_type)
    text, old = model.model.language_model, small.model.language_model
    before = _kinds(old.config)
    state = {k: v for k, v in small.state_dict().items() if ".layers." not in k or "visual" in k}
    model.load_state_dict(state, strict=False)
    at = 0
    for layer, kind in zip(text.layers, _kinds(text.config), strict=True):
        is_old = at < len(before) and before[at] == kind
        layer.load_state_dict(old.layers[at if is_old else at - 1].state_dict())
        at += is_old
        if not is_old:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    if at < len(before):
        raise ValueError(f"the layers {before} are not among {_kinds(text.config)}")
    return model


def _kinds(text: PreTrainedConfig) -> list[str]:
    """The kind of each layer; where a config names none, all have attention."""
    kinds: list[str] | None = getattr(text, "layer_types", None)
    return kinds or ["full_attention"] * text.num_hidden_layers


def save(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a complete model folder, the weights in bfloat16; ``model`` itself stays as it is."""
    half = copy.deepcopy(model).to(torch.bfloat16)
    for config in (half.config, half.config.text_config, half.config.vision_config):
        config.dtype = torch.bfloat16
    half.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    _save_words(tokenizer, folder)
    _save_settings(folder)


def _fresh_qwen3_vl() -> PreTrainedModel:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e5,
        "mrope_section": [8, 8, 8],
        "mrope_interleaved": True,
    }
    text = {**_TEXT, "num_hidden_layers": 7, "head_dim": 48, "rope_parameters": rope}
    vision = {**_VISION, "deepstack_visual_indexes": [0, 1]}
    config = Qwen3VLConfig(**_TOKENS, vision_config=vision, text_config=text)
    return Qwen3VLForConditionalGeneration(config)


def _fresh_qwen3_5() -> PreTrainedModel:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e5,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    }
    linear = {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
    }
    text = {**_TEXT, **linear, "head_dim": 64, "rope_parameters": rope}
    text["num_hidden_layers"] = len(HYBRID)
    config = Qwen3_5Config(
        **_TOKENS, vision_config=_VISION, text_config={**text, "layer_types": list(HYBRID)}
    )
    return Qwen3_5ForConditionalGeneration(config)


def _save_words(tokenizer: Tokenizer, folder: Path) -> None:
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL[1:]),
        model_max_length=32768,
    ).save_pretrained(folder)
    shutil.copyfile(HERE / "chat_template.jinja", folder / "chat_template.jinja")


def _save_settings(folder: Path) -> None:
    """The processors' settings: no picture of this world is ever resized."""
    common = {
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL,
        "merge_size": MERGE,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor",
    }
    least, most = SIDES[0] ** 2, SIDES[-1] ** 2
    image = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
        "size": {"shortest_edge": least, "longest_edge": most},
    }
    video = {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": least, "longest_edge": most * 16},
    }
    generation = {
        "do_sample": False,
        "eos_token_id": [SPECIAL.index("<|im_end|>")],
        "pad_token_id": 0,
    }
    _write(folder / "preprocessor_config.json", {**common, **image})
    _write(folder / "video_preprocessor_config.json", {**common, **video})
    _write(folder / "generation_config.json", generation)


def _write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=1) + "\n")
