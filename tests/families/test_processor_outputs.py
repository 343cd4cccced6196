"""Every tensor that a processor gives changes what is remembered, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import ALL, build, picture, stock_inputs, turn

import keepsight as ks
from keepsight.errors import InputError, KeepsightError, UnsupportedInput

_TWICE = ("sliding", "qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "glm46v", "gemma3_sliding")
KINDS = [kind for kind in ALL if kind not in (*_TWICE, "minicpmv4_6_fine", "paligemma2")]
NOT_USED = {"labels"}  # what a processor adds for training; `WholePrompt` names it
NEEDS_PICTURES = ("got_ocr2", "paligemma")  # their processors refuse a prompt without any
WIDE = (160, 96)


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """The same but for one value: of pixels the first, which is never padding, else the last."""
    other = tensor.clone()
    first, last = other.view(-1)[:1], other.view(-1)[-1:]
    if tensor.dtype == torch.bool:
        last.logical_not_()
    elif tensor.is_floating_point():
        first.add_(0.25)
    else:
        last.copy_(torch.where((last == 0) | (last == 1), 1 - last, last + 1))
    return other


@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_is_used_or_refused(kind: str) -> None:
    model, processor = build(kind)
    chat = [turn("Compare them.", picture(1), picture(2, *WIDE))]
    inputs = stock_inputs(processor, chat)
    once = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}
    with ks.wrap(model, processor) as vlm:
        vlm.generate(**inputs, **once)
        for name in inputs.keys() - NOT_USED:
            try:
                again = vlm.generate(**{**inputs, name: changed(inputs[name])}, **once)
            except KeepsightError:
                continue
            assert again.usage.cached_tokens < again.usage.prompt_tokens, name
        same = vlm.generate(**inputs, **once).usage
        assert same.cached_tokens == same.prompt_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_without_pictures(kind: str) -> None:
    model, processor = build(kind)
    chat = [turn("What is a picture, and what is none?")]
    once = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}
    with ks.wrap(model, processor) as vlm:
        answer = vlm.chat(chat, max_new_tokens=1, do_sample=False).tokens[0]
        if kind in NEEDS_PICTURES:
            return
        inputs = stock_inputs(processor, chat)
        ours = vlm.generate(**inputs, **once, output_logits=True)
        stock = model.generate(**inputs, **once, output_logits=True)
    off = float((ours.logits[0] - stock.logits[0]).abs().max() / stock.logits[0].abs().max())
    assert off < 1e-4 and answer == int(stock.logits[0].argmax())


def masked(inputs: dict[str, Any], name: str) -> dict[str, Any]:
    """The lower part of each picture said to be padding, as a larger neighbour would have it."""
    mask = inputs[name].clone()
    mask[..., mask.shape[-2] // 2 :, :] = 0
    return {**inputs, name: mask}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("aria", "pixel_mask"),
        ("idefics2", "pixel_attention_mask"),
        ("idefics2_split", "pixel_attention_mask"),
        ("idefics3", "pixel_attention_mask"),
    ],
)
def test_masks_reach_the_tower(kind: str, name: str) -> None:
    model, processor = build(kind)
    inputs = stock_inputs(processor, [turn("Compare them.", picture(1), picture(2, *WIDE))])
    how = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    with ks.wrap(model, processor) as vlm:
        seen = []
        for given in (inputs, masked(inputs, name)):
            ours, stock = vlm.generate(**given, **how), model.generate(**given, **how)
            scale = float(stock.logits[0].abs().max())
            assert float((ours.logits[0] - stock.logits[0]).abs().max()) < 1e-4 * scale
            seen.append(stock.logits[0])
    assert float((seen[0] - seen[1]).abs().max()) > 1e-2 * float(seen[0].abs().max())


def test_parts_of_a_picture_side_by_side_are_rendered_as_upstream_does() -> None:
    """Idefics 2 writes one mark between two pictures, and a space where a word would touch it."""
    model, processor = build("idefics2_split")
    a, b = picture(1), picture(2, *WIDE)
    with ks.wrap(model, processor) as vlm:
        for words in ("Both", " Both", "<b>Both"):
            chat = [turn(words, a, b), turn("Yes.", role="assistant"), turn("This?", b)]
            wanted = stock_inputs(processor, chat)["input_ids"][0].tolist()
            assert vlm.render(chat).ids.tolist() == wanted
            assert vlm.chat(chat, max_new_tokens=1).usage.images == 3


def test_tensors_that_belong_to_no_medium_are_refused() -> None:
    model, processor = build("aria")
    inputs = stock_inputs(processor, [turn("Look.", picture(1))])
    mask = torch.ones(3, 980, 980, dtype=torch.bool)
    with ks.wrap(model, processor) as vlm, pytest.raises(UnsupportedInput, match="pixel_mask"):
        vlm.generate(**{**inputs, "pixel_mask": mask}, max_new_tokens=1)
    model, processor = build("qwen3_vl")
    grid = torch.tensor([[1, 4, 4]])
    with ks.wrap(model, processor) as vlm, pytest.raises(InputError, match="image_grid_thw"):
        vlm.generate(torch.tensor([[9, 9, 9]]), image_grid_thw=grid, max_new_tokens=1)
