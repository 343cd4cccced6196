"""What needs accelerators: run where there are some, with `pytest -m gpu`.

The same promises as everywhere, on a device: warm equals cold bit for bit, also with flash
attention and with a model spread over several devices.
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from models import build, folder_of
from test_exact import cold, conversation, logits

import keepsight as ks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator here"),
]
KINDS = ("qwen3_vl", "qwen3_5", "sliding", "llava")


def assert_warm_equals_cold(model: Any, processor: Any) -> None:
    with ks.wrap(model, processor, grain=16) as vlm:
        for messages in conversation():
            assert torch.equal(logits(vlm, messages), cold(vlm, messages))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_one_device(kind: str, dtype: torch.dtype) -> None:
    model, processor = build(kind)
    assert_warm_equals_cold(copy.deepcopy(model).to("cuda", dtype), processor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="no flash_attn")
def test_with_flash_attention(kind: str) -> None:
    model, processor = build(kind)
    model = copy.deepcopy(model).to("cuda", torch.bfloat16)
    model.set_attn_implementation("flash_attention_2")
    assert_warm_equals_cold(model, processor)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_over_several_devices(tmp_path: Any) -> None:
    path = folder_of("qwen3_vl", tmp_path)
    with ks.load(str(path), device_map="balanced", grain=16) as vlm:
        for messages in conversation():
            assert torch.equal(logits(vlm, messages), cold(vlm, messages))
