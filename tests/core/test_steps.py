"""Short passes run without the model's modules: with the same bits, and if nobody listens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.changes import CHANGES
from support.models import build, picture, stock_inputs, turn

import keepsight as ks
from keepsight.core.kernels import packing

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


def test_bits_are_the_same_with_whichever_rows_weights_are_read_fastest(monkeypatch: Any) -> None:
    found = list[tuple[torch.Tensor, ...]]()
    for few in (4, 1):
        monkeypatch.setattr(packing, "fastest_few", lambda packed, few=few: few)
        with ks.wrap(*build("qwen3_vl"), pack=True, drafts=False) as vlm:
            found.append(vlm.generate(**stock_inputs(vlm.processor, MESSAGES), **ASKED).logits)
            assert {one.few for one in vlm.runtime.finding.kernels.linears.packed().values()} == {
                few
            }
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj", "model.norm", "model", "lm_head"])
def test_a_hook_sees_every_token(name: str) -> None:
    model, processor = build("qwen3_vl")
    parts = {"model": model.get_decoder(), "lm_head": model.get_output_embeddings()}
    of, _, below = name.partition(".")
    seen = list[int]()
    with ks.wrap(model, processor, drafts=False) as vlm:
        vlm.chat(MESSAGES, **TOKENS)
        before, answer = _steps(vlm), vlm.stream(MESSAGES, **TOKENS)
        next(answer)
        part = parts[of].get_submodule(below)
        hook = part.register_forward_hook(lambda module, args, out: seen.append(1))
        rest = list(answer)
        hook.remove()
    assert before > 0
    assert len(seen) == len(rest) - 1 >= 8  # the last piece ends the answer, without a token


def test_a_model_once_asked_for_hidden_states_decodes_as_fast() -> None:
    model, processor = build("qwen3_vl")
    inputs = stock_inputs(processor, MESSAGES)
    model.generate(**inputs, **TOKENS, output_hidden_states=True, return_dict_in_generate=True)
    assert model.get_decoder().layers[0]._forward_hooks, "Transformers leaves none any more"
    with ks.wrap(model, processor, drafts=False) as vlm:
        vlm.chat(MESSAGES, **TOKENS)
        assert _steps(vlm) > 0


# Of the language model: its settings, modules, functions, hooks and weights.
OF_THE_DECODER = [
    *("attention_scaling", "inverse_frequencies", "another_activation", "layers_in_another_order"),
    *("decoder_layers_in_another_order", "halves_of_a_gated_layer", "another_head"),
    *("the_forward_of_a_decoder_layer", "a_hook_on_a_decoder_layer", "a_hook_on_the_positions"),
    *("a_hook_with_a_state", "a_norm_in_place", "a_weight_in_place"),
]


@pytest.mark.parametrize("name", OF_THE_DECODER)
def test_a_change_between_two_calls_is_seen(name: str) -> None:
    model, processor = build("qwen3_vl")
    inputs = stock_inputs(processor, [turn("What is it?", picture(1))])
    with ks.wrap(model, processor, drafts=False) as vlm:
        before = vlm.generate(**inputs, **ASKED)
        assert _steps(vlm) > 0
        CHANGES[name](model)
        after = vlm.generate(**inputs, **ASKED)
    assert not torch.equal(before.logits[-1], after.logits[-1])
    with ks.wrap(model, processor, drafts=False) as vlm:
        afresh = vlm.generate(**inputs, **ASKED)
    assert all(map(torch.equal, after.logits, afresh.logits))
