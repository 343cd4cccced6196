"""Model types that nobody has written down: found out by trial, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import build, picture, turn
from test_exact import assert_like_stock, cold, logits

import keepsight as ks
from keepsight import families
from keepsight.errors import UnsupportedModel


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no type had ever been written down."""
    monkeypatch.setattr(families, "SUPPORTED", {})


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("kind", "whole", "reuse"),
    [
        ("qwen3_vl", False, "prefix"),
        ("qwen3_5", False, "prefix"),
        ("llava", False, "prefix"),
    ],
)
def test_what_a_model_can_reuse_is_found_out(kind: str, whole: bool, reuse: str) -> None:
    model, processor = build(kind)
    first = [turn("What do you see in this picture here?", picture(1))]
    second = [*first, turn("A pattern.", role="assistant"), turn("And this?", picture(2))]
    with ks.wrap(model, processor, grain=16) as vlm:
        family = vlm.memory.family
        assert not family.proven and family.sees_whole_media == whole
        assert family.reuse == reuse
        for messages in (first, second, first):
            assert torch.equal(logits(vlm, messages), cold(vlm, messages))
            assert_like_stock(vlm, messages)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("kind", ["ernie4_5_vl_moe", "ovis2", "mllama", "idefics3", "gemma3"])
def test_what_cannot_be_shown_is_refused(kind: str) -> None:
    """Each of these needs something that the generic family does not know."""
    model, processor = build(kind)
    with pytest.raises(UnsupportedModel, match="(exact|takes no precomputed features)"):
        ks.wrap(model, processor)


@pytest.mark.usefixtures("forgotten")
def test_without_a_processor_nothing_can_be_tried() -> None:
    with pytest.raises(UnsupportedModel, match="processor"):
        ks.wrap(build("llava")[0], None)


def test_a_blind_model_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = build("llava")
    monkeypatch.setattr(families, "SUPPORTED", {})
    before: Any = model.base_model.multi_modal_projector.linear_2.weight.data.clone()
    try:
        for parameter in model.base_model.multi_modal_projector.parameters():
            parameter.data.zero_()
        with pytest.raises(UnsupportedModel, match="hardly depend"):
            ks.wrap(model, processor)
    finally:
        build.cache_clear()
        del before
