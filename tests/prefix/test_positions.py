"""Positions counted on from an earlier prompt are those that the family gives to the whole."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from support.models import build, picture

import keepsight as ks
from keepsight.core.decoding.positions import PromptPositions, place
from keepsight.prefix.prompt import Prompt

MROPE = [
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "glm46v"),
    *("ernie4_5_vl_moe", "paddleocr_vl", "glm4v_moe", "glm_ocr", "qwen2_5_omni_thinker"),
    *("video_llama_3", "qwen3_omni_moe_thinker", "kimi_k25", "llava"),
]


def longer(prompt: Prompt, more: list[int]) -> Prompt:
    ids = np.append(prompt.ids, np.array(more, dtype=np.int64))
    return Prompt(ids, prompt.media, prompt.ranges)


@pytest.mark.parametrize("kind", MROPE)
def test_text_behind_a_prompt_counts_on(kind: str) -> None:
    model, processor = build(kind)
    chance = random.Random(kind)
    with ks.wrap(model, processor) as vlm:
        family = vlm.runtime.family
        content = [{"type": "image", "image": picture(n)} for n in range(2)]
        first = vlm.render([{"role": "user", "content": [*content, {"type": "text", "text": "?"}]}])
        before: PromptPositions | None = None
        prompt = first
        for _ in range(12):
            found = place(family, prompt, before)
            wanted = family.positions(prompt.ids, prompt.types, prompt.grids)
            assert torch.equal(found.positions, wanted)
            assert found.positions.dtype == wanted.dtype
            before = found
            more = [chance.randrange(model.config.text_config.vocab_size) for _ in range(9)]
            prompt = longer(prompt, more[: chance.randrange(10)])


def test_what_is_not_text_behind_the_same_prompt_is_placed_anew(vlm: Any) -> None:
    family: Any = vlm.runtime.family

    def talk(*images: int, text: str = "?") -> Prompt:
        parts = [{"type": "image", "image": picture(n, 64, 64 + 32 * n)} for n in images]
        said = [{"type": "text", "text": text}]
        return vlm.render([{"role": "user", "content": [*parts, *said]}], generate=False)

    before = place(family, talk(0), None)
    for other in (talk(1), talk(0, 1), talk(), talk(0, text="! and more")):
        found = place(family, other, before).positions
        assert torch.equal(found, family.positions(other.ids, other.types, other.grids))
