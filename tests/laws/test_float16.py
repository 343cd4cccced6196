"""Half precision on a CPU: warm equals cold to the bit, and the tokens are those of stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import build, picture, stock_inputs, turn

import keepsight as ks

FIRST = [turn("What is it?", picture(1))]
NEXT = [*FIRST, turn("A pattern.", role="assistant"), turn("And this?", picture(2, 160, 96))]
HOW: dict[str, Any] = {
    "max_new_tokens": 3,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    off = float((one.float() - other.float()).abs().max())
    return off < 1e-2 * float(other.float().abs().max())


MORE = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("minicpmv4_7", "muse_glimmer")]


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "llama4", *MORE])
def test_float16_is_exact_and_near_stock(kind: str) -> None:
    model, processor = build(kind, torch.float16)
    with ks.wrap(model, processor) as vlm:
        in_bits = vlm.stats()["engine"]["exactness"] == "bits"
        assert in_bits == (kind != "llama4")  # products by bmm: equal to rounding
        for messages in (FIRST, NEXT):
            inputs = stock_inputs(processor, messages)
            pixels = {n: t.half() if t.is_floating_point() else t for n, t in inputs.items()}
            stock, warm = model.generate(**pixels, **HOW), vlm.generate(**pixels, **HOW)
            with ks.wrap(model, processor) as fresh:
                cold = fresh.generate(**pixels, **HOW)
            assert torch.equal(warm.sequences, stock.sequences)
            for mine, again, theirs in zip(warm.logits, cold.logits, stock.logits, strict=True):
                assert torch.equal(mine, again) if in_bits else near(mine, again)
                assert near(mine, theirs)


@pytest.mark.parametrize("kind", ["llama4", "aria"])
def test_verify_hands_stock_pixels_in_the_dtype_of_the_model(kind: str) -> None:
    """Their towers cast nothing, and a processor's pixels are float32."""
    model, processor = build(kind, torch.bfloat16)
    with ks.wrap(model, processor) as vlm:
        assert vlm.verify(FIRST, stock=True).stock_same_tokens
