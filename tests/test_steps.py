"""Short passes run without the model's modules: with the same bits, and if nobody listens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import build, stock_inputs, turn

import keepsight as ks

pytestmark = pytest.mark.tries_anew
LLAMAS = ("qwen3_vl", "llava", "internvl")
MESSAGES = [turn("Which one is nearer, and why?")]
TOKENS: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
ASKED = {**TOKENS, "output_logits": True, "return_dict_in_generate": True}


def _steps(vlm: ks.VLM) -> int:
    steps = vlm.runtime.engine.decoder.steps
    return 0 if steps is None else steps.passes


@pytest.mark.parametrize("name", LLAMAS)
def test_short_passes_have_the_bits_of_the_modules(name: str) -> None:
    model, processor = build(name)
    with ks.wrap(model, processor, pack=True, drafts=False) as vlm:
        inputs = stock_inputs(processor, MESSAGES)
        found = vlm.generate(**inputs, **ASKED)
        assert _steps(vlm) >= 11
        vlm.clear()
        vlm.runtime.finding.kernels.whole_steps = False
        passes = _steps(vlm)
        wanted = vlm.generate(**inputs, **ASKED)
        assert _steps(vlm) == passes
    assert all(map(torch.equal, found.logits, wanted.logits))


def test_a_hook_of_a_layer_sees_every_token() -> None:
    model, processor = build("qwen3_vl")
    seen = list[int]()
    with ks.wrap(model, processor, drafts=False) as vlm:
        vlm.chat(MESSAGES, **TOKENS)
        before, answer = _steps(vlm), vlm.stream(MESSAGES, **TOKENS)
        next(answer)
        layer = model.get_decoder().layers[1].mlp.down_proj
        hook = layer.register_forward_hook(lambda module, args, out: seen.append(len(out)))
        rest = list(answer)
        hook.remove()
    assert before > 0
    assert len(seen) == len(rest) - 2 >= 8  # one token was computed, and the last is not read
