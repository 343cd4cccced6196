"""Tiny random-weight models of each supported family, with real processors.

`build(kind)` gives one; tiny_models.py has a row for each.
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

from keepsight.models import loading
from support import FamilyTests
from support.model_parts import TEMPLATE, picture, wake
from support.tiny_models import BUILDERS as ALL
from support.tiny_models import Builder

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
