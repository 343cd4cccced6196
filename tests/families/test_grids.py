"""Images as packed patches with a grid: the suite, and what only these families can get wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import build, picture, stock_inputs, suite_of, turn

import keepsight as ks
from keepsight.errors import InputError, KeepsightError

TestGlm4v = suite_of("glm4v")
TestGlm4vMoe = suite_of("glm4v_moe")
TestGlm46V = suite_of("glm46v")
TestGlmOcr = suite_of("glm_ocr")
TestErnie = suite_of("ernie4_5_vl_moe")
TestPaddleOcr = suite_of("paddleocr_vl")
TestVideoLlama3 = suite_of("video_llama_3")
TestVideoLlama3Merged = suite_of("video_llama_3_merged")
TestKimi = suite_of("kimi_k25", decodes_together=False)


QUESTION = "What do you see in this picture here?"


def inputs_of(kind: str, *pictures: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """An empty memory, and what the processor makes of one question."""
    model, processor = build(kind)
    inputs = stock_inputs(processor, [turn(QUESTION, *pictures)])
    return ks.wrap(model, processor), inputs


def answer(vlm: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    out = vlm.generate(**inputs, max_new_tokens=1, return_dict_in_generate=True, output_logits=True)
    logits: torch.Tensor = out.logits[0]
    return logits


def test_experts_follow_from_ids() -> None:
    """Ernie's routes are computed; what a caller says of them must agree."""
    vlm, inputs = inputs_of("ernie4_5_vl_moe", picture(1))
    with vlm:
        routes = inputs.pop("moe_mm_token_type_ids")
        found = vlm.inputs([turn(QUESTION, picture(1))])["moe_mm_token_type_ids"]
        assert torch.equal(found, routes)
        assert int(routes.sum()) == 16 + 2  # the tokens around a picture are the picture's
        expected = answer(vlm, {**inputs, "moe_mm_token_type_ids": routes})
        vlm.clear()
        assert torch.equal(answer(vlm, inputs), expected)
        with pytest.raises(KeepsightError, match="moe_mm_token_type_ids"):
            answer(vlm, {**inputs, "moe_mm_token_type_ids": torch.zeros_like(routes)})
        with pytest.raises(KeepsightError, match="moe_mm_token_type_ids"):
            answer(vlm, {**inputs, "moe_mm_token_type_ids": inputs["mm_token_type_ids"]})


def test_experts_matter() -> None:
    """The control: with all tokens sent to the text experts, the logits are others."""
    vlm, inputs = inputs_of("ernie4_5_vl_moe", picture(1))
    with vlm:
        right = answer(vlm, inputs)
        vlm.clear()
        vlm.runtime.family.chunk_inputs = lambda *_: {}
        wrong = answer(vlm, inputs)
        del vlm.runtime.family.chunk_inputs
    assert float((right - wrong).abs().max()) > 1e-2 * float(right.abs().max())


def test_a_chunk_of_nothing_but_a_picture() -> None:
    """Ernie's text experts get no token at all, between the second cut and the third."""
    model, processor = build("ernie4_5_vl_moe")
    template = processor.chat_template.replace("Picture:", "")
    with ks.wrap(model, processor, chat_template=template) as vlm:
        messages = [turn(QUESTION, picture(1), picture(2, 160, 96))]
        prompt = vlm.render(messages)
        first, second = [*prompt.ends(vlm.runtime.rule)][:2]
        routes = vlm.runtime.family.chunk_inputs(prompt.ids, prompt.types, first, second)
        assert routes["moe_mm_token_type_ids"].all()
        vlm.runtime.engine.longest_pass = second - first
        stock = {**vlm.inputs(messages), "max_new_tokens": 6, "do_sample": False}
        length = len(prompt)
        wanted = model.generate(**stock)[0, length:].tolist()
        assert vlm.chat(messages, max_new_tokens=6, do_sample=False).tokens[:6] == wanted


def test_a_typed_placeholder_meets_the_text_experts() -> None:
    """What a user types is text, also for the router."""
    model, processor = build("ernie4_5_vl_moe")
    with ks.wrap(model, processor) as vlm:
        prompt = vlm.render([turn("Is <|IMAGE_START|> or <|VIDEO_PLACEHOLDER|> a word?")])
        routes = vlm.runtime.family.chunk_inputs(prompt.ids, prompt.types, 0, len(prompt))
        assert not routes["moe_mm_token_type_ids"].any()


@pytest.mark.parametrize("kind", ["video_llama_3", "kimi_k25", "paddleocr_vl", "ernie4_5_vl_moe"])
def test_patches_need_grids(kind: str) -> None:
    """Without them nobody can tell where an image ends."""
    vlm, inputs = inputs_of(kind, picture(1), picture(2, 160, 96))
    with vlm:
        right = answer(vlm, inputs)
        with pytest.raises(InputError, match="without image_grid_thw"):
            answer(vlm, {k: v for k, v in inputs.items() if k != "image_grid_thw"})
        for wrong in (inputs["image_grid_thw"][:1], inputs["image_grid_thw"] * 2):
            with pytest.raises(KeepsightError):
                answer(vlm, {**inputs, "image_grid_thw": wrong})
        vlm.clear()
        assert torch.equal(answer(vlm, inputs), right)


@pytest.mark.parametrize(
    "sizes",
    [None, torch.tensor([2]), torch.tensor([2, 0]), torch.tensor([2.0, 2.0]), torch.tensor([2, 3])],
)
def test_merge_sizes_are_checked(sizes: torch.Tensor | None) -> None:
    """VideoLLaMA 3 takes one for each image."""
    vlm, inputs = inputs_of("video_llama_3_merged", picture(1), picture(2, 160, 96))
    with vlm, pytest.raises(KeepsightError):
        answer(vlm, {**inputs, "image_merge_sizes": sizes})


def test_the_merge_size_is_part_of_a_picture() -> None:
    """The same patches merged otherwise are other features."""
    vlm, inputs = inputs_of("video_llama_3_merged", picture(1))
    rows = [inputs["input_ids"][0].numpy()]
    with vlm:
        split = vlm.runtime.family.split_tensors
        one = split(inputs, rows)[0]
        other = split({**inputs, "image_merge_sizes": torch.tensor([1])}, rows)[0]
    assert one.layout == (16,) and other.layout == (64,)
    assert one.key != other.key


@pytest.mark.parametrize("kind", ["qwen2_vl", "glm4v", "ernie4_5_vl_moe", "kimi_k25"])
def test_grids_that_describe_nothing(kind: str) -> None:
    """As many patches as there are, on sides that no image has."""
    vlm, inputs = inputs_of(kind, picture(1))
    patches = len(inputs["pixel_values"])
    with vlm:
        for row in ([1, -patches, -1], [-1, -2, patches // 2], [1, 1, patches], [patches, 1, 1]):
            with pytest.raises(KeepsightError):
                answer(vlm, {**inputs, "image_grid_thw": torch.tensor([row])})
        vlm.runtime.tree.check()
