"""Model types that nobody has written down: found out by trial, or refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.answers import assert_like_stock, logits
from support.models import build, picture, turn

import keepsight as ks
from keepsight.errors import UnsupportedModel
from keepsight.models import families
from keepsight.models.families import base


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no type had ever been written down."""
    monkeypatch.setattr(families, "SUPPORTED", {})


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5", "llava"])
def test_what_a_model_can_reuse_is_found_out(kind: str) -> None:
    model, processor = build(kind)
    first = [turn("What do you see in this picture here?", picture(1))]
    second = [*first, turn("A pattern.", role="assistant"), turn("And this?", picture(2))]
    with ks.wrap(model, processor) as vlm, ks.wrap(model, processor) as fresh:
        family = vlm.runtime.family
        assert not family.proven and not family.sees_whole_media
        assert family.reuse == "prefix"
        for messages in (first, second, first):
            fresh.clear()
            assert torch.equal(logits(vlm, messages), logits(fresh, messages))
            assert_like_stock(vlm, messages)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("kind", ["ernie4_5_vl_moe", "ovis2", "mllama", "idefics2", "gemma3"])
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
    for parameter in model.base_model.multi_modal_projector.parameters():
        parameter.data.zero_()
    with pytest.raises(UnsupportedModel, match="hardly depend"):
        ks.wrap(model, processor)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("refuses", [True, False])
def test_a_mask_that_is_ignored_is_found_out(
    monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """No picture of the trial is padded here, so every mask that comes by itself is all ones."""
    model, processor = build("aria")
    monkeypatch.setattr(processor.image_processor, "min_image_size", 980)
    monkeypatch.setattr(base, "with_others", lambda media, tensors, names: media)
    if not refuses:
        monkeypatch.setattr(base, "refuse_dropped", lambda media, tensors, names: None)
    wanted = "pixel_mask of shape .* belongs to none" if refuses else "pixel_mask with zeros: off"
    with pytest.raises(UnsupportedModel, match=wanted):
        ks.wrap(model, processor)


@pytest.mark.usefixtures("forgotten")
def test_messages_that_are_prepared_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ids are not enough: what a call on messages hands to the tower is compared too."""
    model, processor = build("llava")
    right = base.Family.preprocess

    def wrong(self: Any, *arguments: Any) -> Any:
        pixels = right(self, *arguments)
        darker = {name: tensor * 0.5 for name, tensor in pixels.tensors.items()}
        return dataclasses.replace(pixels, tensors=darker)

    monkeypatch.setattr(base.Family, "preprocess", wrong)
    with pytest.raises(UnsupportedModel, match="exact: off by"):
        ks.wrap(model, processor)


@pytest.mark.usefixtures("forgotten")
def test_whatever_a_processor_raises_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = build("llava")

    def not_there(*_: Any, **__: Any) -> str:
        raise NotImplementedError

    monkeypatch.setattr(base.upstream, "processed", not_there)
    with pytest.raises(UnsupportedModel, match="not rendered as its processor does it"):
        ks.wrap(model, processor)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        ("token", "names no image token"),
        ("processor", "its processor did not prepare a text with pictures"),
        ("model", "stock Transformers did not answer a prompt with pictures either"),
        ("trial", "one picture: an error inside its code in Transformers"),
    ],
)
def test_a_refusal_shows_no_insides(
    monkeypatch: pytest.MonkeyPatch, part: str, wanted: str
) -> None:
    """An inner error says nothing to a user: the log has it, and the refusal its cause."""
    model, processor = build("llava")

    def broken(*_: Any, **__: Any) -> Any:
        raise AttributeError("'NoneType' object has no attribute 'image_grid'")

    if part == "token":
        monkeypatch.setattr(processor, "image_token", None)
    elif part == "processor":
        monkeypatch.setattr(type(processor), "__call__", broken)
    elif part == "model":
        monkeypatch.setattr(model, "generate", broken)
    else:
        monkeypatch.setattr(base.Family, "encode", broken)
    with pytest.raises(UnsupportedModel, match=wanted) as refused:
        ks.wrap(model, processor)
    assert not any(word in str(refused.value) for word in ("NoneType", "attribute", "Error"))


@pytest.mark.usefixtures("forgotten")
def test_a_picture_is_framed_as_the_chat_template_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """HunyuanVL's processor refuses an image token without its frame."""
    monkeypatch.setattr(base.Family, "_grid_tokens", lambda *_: None)
    model, processor = build("hunyuan_vl")
    with pytest.raises(UnsupportedModel, match="could not be shown exact") as refused:
        ks.wrap(model, processor)
    assert str(refused.value).count("one picture: ") == 1  # said once for all ways that were tried
