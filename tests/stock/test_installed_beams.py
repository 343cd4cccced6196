"""Beams and other ways of decoding that stock code computes: from features, without the tower."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import build, picture, stock_inputs, turn

import keepsight as ks
from keepsight.errors import TowerRan

ONE = [turn("What is it?", picture(1))]
NEXT = [*ONE, turn("A pattern.", role="assistant"), turn("And this?", picture(2, 160, 96))]
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
# Features in one tensor, in lists, with levels, tile by tile, with tokens of a frame.
KINDS = ("qwen3_vl", "qwen2_vl", "llava", "internvl", "idefics3", "gemma3", "ovis2", "aria")
WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 2},
    "several of the beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "no cache": {"use_cache": False},
}


def batch(processor: Any) -> dict[str, torch.Tensor]:
    """Two prompts with unlike numbers of pictures, which are of unlike sizes."""
    processor.tokenizer.padding_side = "left"
    texts = [
        processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for messages in (ONE, [turn("Two of them.", picture(2, 160, 96), picture(3, 60, 150))])
    ]
    pictures = [[picture(1)], [picture(2, 160, 96), picture(3, 60, 150)]]
    return dict(processor(text=texts, images=pictures, padding=True, return_tensors="pt"))


def tokens(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    found = model.generate(**inputs, **{**GREEDY, **options})
    sequences: torch.Tensor = getattr(found, "sequences", found)
    return sequences


@pytest.mark.parametrize("kind", KINDS)
def test_the_tower_looks_at_a_picture_once(kind: str) -> None:
    model, processor = build(kind)
    prompts = [stock_inputs(processor, ONE), stock_inputs(processor, NEXT), batch(processor)]
    wanted = [tokens(model, inputs, **WAYS["beams"]) for inputs in prompts]
    with ks.installed(model, processor) as vlm:
        for inputs, stock in zip(prompts, wanted, strict=True):
            assert torch.equal(tokens(model, inputs, **WAYS["beams"]), stock)
            assert len(vlm.report().notes) == 1 and "num_beams" in vlm.report().notes[0]
        assert [s.features for s in vlm.report().segments] == ["memory", "memory", "tower"]
        with vlm.blindfold():
            for inputs, stock in zip(prompts, wanted, strict=True):
                assert torch.equal(tokens(model, inputs, **WAYS["beams"]), stock)
                ids = inputs["input_ids"]
                rest = {n: tensor for n, tensor in inputs.items() if n != "input_ids"}
                assert torch.equal(model.generate(ids, **rest, **GREEDY, num_beams=2), stock)
            with pytest.raises(TowerRan):
                tokens(model, stock_inputs(processor, [turn("New?", picture(9))]), num_beams=2)


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_of_decoding(way: str) -> None:
    model, processor = build("qwen3_vl")
    inputs = batch(processor)
    wanted = tokens(model, inputs, **WAYS[way])
    with ks.installed(model, processor) as vlm:
        tokens(model, inputs)
        with vlm.blindfold():
            assert torch.equal(tokens(model, inputs, **WAYS[way]), wanted)


def test_what_takes_no_features_goes_as_pixels() -> None:
    """Cross attention wants features anew with each token; training has its own noise."""
    model, processor = build("mllama")
    inputs = stock_inputs(processor, ONE)
    wanted = tokens(model, inputs, num_beams=2)
    with ks.installed(model, processor) as vlm:
        assert torch.equal(tokens(model, inputs, num_beams=2), wanted)
        assert "went as pixels: stock code of mllama takes no features" in vlm.report().notes[1]
    model, processor = build("qwen3_vl")
    inputs = stock_inputs(processor, ONE)
    with ks.installed(model, processor) as vlm:
        model.train()
        try:
            tokens(model, inputs, num_beams=2)
        finally:
            model.eval()
        assert "went as pixels" in vlm.report().notes[1] and "training" in vlm.report().notes[1]
        tokens(model, inputs, num_beams=2, custom_generate=_own)
        assert "custom_generate is set by the caller" in vlm.report().notes[1]


def _own(model: Any, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    """A way of decoding of somebody's own."""
    return ids


def test_inputs_for_stock_code_take_beams() -> None:
    """Upstream looks into a list of levels wherever there is one."""
    for kind in ("llava", "qwen2_vl", "qwen3_vl", "idefics3"):
        model, processor = build(kind)
        with ks.wrap(model, processor) as vlm:
            wanted = tokens(model, stock_inputs(processor, NEXT), num_beams=2)
            assert torch.equal(tokens(model, vlm.inputs(NEXT), num_beams=2), wanted)
