"""Prompts that come as embeddings alone: the ids behind them, and the answer that ids give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import build, in_both, picture, stock_inputs, turn

import keepsight as ks
from keepsight.errors import InputError, UnsupportedInput


def embedded(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs with embeddings in the place of ids."""
    rows = model.get_input_embeddings()(inputs["input_ids"]).detach()
    return {name: value for name, value in inputs.items() if name != "input_ids"} | {
        "inputs_embeds": rows
    }


@pytest.mark.parametrize(
    ("kind", "dtype"),
    in_both(["qwen3_vl", "qwen2_5_vl", "llava", "gemma3", "internvl"], ["qwen3_vl", "gemma3"]),
)
def test_the_answer_is_that_of_the_ids(kind: str, dtype: torch.dtype) -> None:
    model, processor = build(kind, dtype)
    asked = stock_inputs(processor, [turn("What is it?", picture(1), picture(2))])
    how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    how["return_dict_in_generate"] = True
    with ks.wrap(model, processor) as vlm:
        wanted = vlm.generate(**asked, **how)
        found = vlm.generate(**embedded(model, asked), **how)
        assert found.usage.cached_tokens == asked["input_ids"].shape[1]
        assert found.usage.images_encoded == 0
        answer = wanted.sequences[:, asked["input_ids"].shape[1] :]
        assert torch.equal(found.sequences, answer)  # no prompt, as Transformers gives none
        assert all(map(torch.equal, wanted.logits, found.logits))


def test_what_is_no_embedding_of_a_token_is_refused_by_name() -> None:
    model, processor = build("qwen3_vl")
    asked = stock_inputs(processor, [turn("What is it?", picture(1))])
    given = embedded(model, asked)
    with ks.wrap(model, processor) as vlm:
        with pytest.raises(InputError, match="two forms of one prompt"):
            vlm.generate(**given, input_ids=asked["input_ids"])
        with pytest.raises(InputError, match="embeds in torch.float32"):
            vlm.generate(**{**given, "inputs_embeds": given["inputs_embeds"].double()})
        for wrong in (given["inputs_embeds"][0], given["inputs_embeds"][..., :3], "text"):
            with pytest.raises(InputError, match="inputs_embeds"):
                vlm.generate(**{**given, "inputs_embeds": wrong})
        soft = given["inputs_embeds"].clone()
        soft[0, 5] += 1e-3
        with pytest.raises(UnsupportedInput, match="token 5 of row 0"):
            vlm.generate(**{**given, "inputs_embeds": soft})
        assert vlm.generate(**given, max_new_tokens=2).shape[1] == 2


def test_tokens_of_one_embedding_are_placeholders_where_one_is() -> None:
    model, processor = build("qwen3_vl")
    asked = stock_inputs(processor, [turn("What is it?", picture(1))])
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        unused = min(set(range(len(table))) - set(asked["input_ids"][0].tolist()))
        table[unused] = table[model.config.image_token_id]
    with ks.wrap(model, processor) as vlm:
        wanted = vlm.generate(**asked, max_new_tokens=3, do_sample=False)
        found = vlm.generate(**embedded(model, asked), max_new_tokens=3, do_sample=False)
        assert torch.equal(wanted[:, asked["input_ids"].shape[1] :], found)
