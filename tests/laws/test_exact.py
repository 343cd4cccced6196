"""Law 2 and law 1: warm equals cold bit for bit, and both answer as stock Transformers does.

Every comparison is with something computed afresh: an empty memory around the same model for
"cold", a plain `model.generate` from pixels for "stock". Controls show that the pictures matter.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.answers import assert_like_stock, cold, conversation, logits
from support.models import build, picture, turn

import keepsight as ks
from keepsight.prefix.prompt import PASS

# Through messages; the shipped suite does the same for every family, through tensors.
SOME = ["qwen3_vl", "qwen3_5", "sliding", "internvl"]
DEMO = ["demo", "demo-hybrid"]


def expect_warm_as_cold(
    model: Any, processor: Any, prompts: list[list[Any]], like_stock: bool = False, **options: Any
) -> None:
    """In a memory that has seen the prompts before, as in one that has seen nothing."""
    with ks.wrap(model, processor, **options) as vlm, ks.wrap(model, processor) as fresh:
        for messages in prompts:
            fresh.clear()
            assert torch.equal(logits(vlm, messages), logits(fresh, messages))
            if like_stock:
                assert_like_stock(vlm, messages)
            vlm.runtime.tree.check()
        for part, budget in (("prefix", "cache_budget"), ("features", "vision_budget")):
            assert vlm.stats()[part]["bytes"] <= options.get(budget, 1 << 40)


@pytest.mark.parametrize("kind", SOME)
def test_warm_equals_cold_and_stock(kind: str) -> None:
    expect_warm_as_cold(*build(kind), conversation(), like_stock=True)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_warm_equals_cold_in_bfloat16(kind: str, attention: str) -> None:
    model, processor = build(kind, torch.bfloat16)
    model.set_attn_implementation(attention)
    expect_warm_as_cold(model, processor, conversation())


@pytest.mark.parametrize("name", DEMO)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_demo_models_warm_equals_cold(demo_parts: Any, name: str, dtype: torch.dtype) -> None:
    model, processor = demo_parts[name]
    copied = copy.deepcopy(model).to(dtype)  # cast back, it would be another model
    expect_warm_as_cold(copied, processor, conversation())


@pytest.mark.parametrize("name", DEMO)
@pytest.mark.parametrize("budget", [0, 1, 200_000])
def test_tiny_budgets_change_no_bit(demo_parts: Any, name: str, budget: int) -> None:
    small = {"cache_budget": budget, "vision_budget": budget}
    expect_warm_as_cold(*demo_parts[name], conversation()[:5], **small)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5", "internvl"])
def test_pictures_matter(kind: str) -> None:
    """The control without which every test above could pass by not looking."""
    model, processor = build(kind)
    with ks.wrap(model, processor) as vlm:
        question = "What do you see in this picture here?"
        one = logits(vlm, [turn(question, picture(1))])
        other = logits(vlm, [turn(question, picture(2))])
        assert float((one - other).abs().max()) > 1e-2 * float(one.abs().max())


def test_one_changed_pixel_is_a_miss(demo: Any) -> None:
    image = picture(1)
    before = demo.ask(image, "Describe it.")
    changed = image.copy()
    red, green, blue = changed.getpixel((48, 48))
    changed.putpixel((48, 48), ((red + 128) % 256, green, blue))
    after = demo.ask(changed, "Describe it.")
    assert before.usage.images_encoded == after.usage.images_encoded == 1
    image.putpixel((48, 48), ((red + 128) % 256, green, blue))  # the same object, in place
    third = demo.ask(image, "Describe it.")
    assert third.usage.images_encoded == 0 and third.tokens == after.tokens


def test_evicted_parent_and_states(demo: Any) -> None:
    """Whatever is let go of in the middle of a path, the answer stays the same."""
    messages = conversation()[2]
    expected = cold(demo, messages)
    assert torch.equal(logits(demo, messages), expected)
    tree = demo.runtime.tree
    while tree.nbytes:
        tree.evict(1)
        tree.check()
        demo.runtime.engine.lanes.clear()
        longest = logits(demo, messages)
        assert torch.equal(longest, expected)
        tree.evict(tree.nbytes // 2 + 1)
        if tree.nbytes < 10_000:
            break
        tree.evict(tree.nbytes)


@pytest.mark.parametrize("name", DEMO)
def test_restart_answers_from_disk(
    demo_parts: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = demo_parts[name]
    messages = conversation()[1]
    with ks.wrap(model, processor, store=tmp_path) as vlm:
        before = logits(vlm, messages)
        vlm.flush()
    with ks.wrap(model, processor, store=tmp_path) as vlm:
        monkeypatch.setattr(type(vlm.runtime.family), "encoder", property(lambda _: _raise))
        after = logits(vlm, messages)
        assert torch.equal(before, after)
        reply = vlm.chat([*messages, turn("Fine.", role="assistant"), turn("More?")])
        assert reply.usage.images_encoded == 0 and reply.usage.cached_tokens > 0
        assert vlm.stats()["features"]["preprocessed"] == 0


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("this must not run on a warm turn")


def test_batch_equals_one_by_one() -> None:
    model, processor = build("qwen3_vl")
    texts, images = [], [picture(1), picture(2, 160, 96), picture(3)]
    messages = [
        [turn("One picture.", images[0])],
        [turn("Two of them in a longer prompt.", images[1], images[2])],
        [turn("None.")],
    ]
    for m in messages:
        texts.append(processor.apply_chat_template(m, add_generation_prompt=True, tokenize=False))
    processor.tokenizer.padding_side = "left"
    batch = processor(text=texts, images=images, padding=True, return_tensors="pt")
    stock = model.generate(**batch, max_new_tokens=6, do_sample=False)
    with ks.wrap(model, processor) as vlm:
        ours = vlm.generate(**batch, max_new_tokens=6, do_sample=False)
        assert torch.equal(ours, stock)
        again = vlm.generate(
            **batch, max_new_tokens=6, do_sample=False, return_dict_in_generate=True
        )
        assert torch.equal(again.sequences, stock)
        assert again.usage.cached_tokens == again.usage.prompt_tokens
        for row, alone in enumerate(messages):
            reply = vlm.chat(alone, max_new_tokens=6, do_sample=False)
            width = batch["input_ids"].shape[1]
            assert stock[row, width : width + len(reply.tokens)].tolist() == reply.tokens


def test_a_prompt_of_several_passes() -> None:
    model, processor = build("qwen3_5")
    text = "many words in a row " * 700
    messages = [turn(text, picture(1))]
    with ks.wrap(model, processor) as vlm:
        prompt = vlm.render(messages)
        assert len(prompt) > 2 * 2048
        first = logits(vlm, messages)
        longer = [*messages, turn("Yes.", role="assistant"), turn("And?", picture(2))]
        assert torch.equal(logits(vlm, longer), cold(vlm, longer))
        assert torch.equal(logits(vlm, messages), first)


@pytest.mark.parametrize(
    ("longest", "side"), [(256, 576), pytest.param(PASS, 1472, marks=pytest.mark.slow)]
)
def test_an_image_longer_than_a_pass_is_cut_inside(longest: int, side: int) -> None:
    """A causal family may be cut inside an image; its features are then fed in parts."""
    model, processor = build("qwen3_vl")
    options = {"size": {"shortest_edge": 64 * 32 * 32, "longest_edge": 4096 * 32 * 32}}
    with ks.wrap(model, processor, image_options=options) as vlm:
        vlm.runtime.engine.longest_pass = longest
        messages = [turn("Big.", picture(1, side, side))]  # 324 tokens, or 2,116
        prompt = vlm.render(messages)
        assert any(a < longest < b for a, b in prompt.ranges[0])
        warm = [*messages, turn("Yes.", role="assistant"), turn("Again.")]
        vlm.chat(messages, max_new_tokens=1)
        report = vlm.verify(warm, stock=True)
        assert report.equal and report.cached_tokens > longest
        assert report.stock_max_difference < 1e-4 * report.stock_scale
