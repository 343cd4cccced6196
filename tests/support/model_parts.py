"""What tiny test models are made of: numbers, a tokenizer, a template, pictures, processors.

Weights are scaled up so that a wrong picture or a shifted position changes logits visibly: with
default initialisation a tiny model hardly looks at its images and any comparison would pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoTokenizer

from keepsight.models import loading
from keepsight.models.partial_processor import NotLoaded

TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
    "{%- for part in message.content -%}{%- if part.type == 'image' -%}{{- 'IMAGE' -}}"
    "{%- elif part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
MROPE = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 3, 3]}


def picture(seed: int, width: int = 96, height: int = 96) -> Image.Image:
    """Noise in blocks: every seed another picture."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST)


def wake(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "A_log" not in name:
                experts = "experts" in name and weight.dim() == 3
                fan = weight.shape[-1] if experts else weight[0].numel()
                weight.normal_(0.0, 1.2 / fan**0.5, generator=generator)
            if "embed_tokens" in name:
                weight.normal_(0.0, 1.0, generator=generator)


def tokenizer_with(extra: dict[str, str] | None = None) -> Any:
    folder = loading.model_path("demo")
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=extra or {})
    if extra:
        tokenizer.add_special_tokens({"additional_special_tokens": list(extra.values())})
    return tokenizer


def processor_of(name: str, image_processor: Any, tokenizer: Any, image: str, **own: Any) -> Any:
    """A processor of Transformers around any parts; none for videos, which need torchvision."""
    base: Any = getattr(transformers, name)
    anything = {"check_argument_for_proper_class": lambda self, attribute, part: type(part)}
    cls: Any = type(name, (base,), anything)
    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    if "video_processor" in base.get_attributes():
        parts["video_processor"] = NotLoaded()
    return cls(**parts, chat_template=TEMPLATE.replace("IMAGE", image), **own)
