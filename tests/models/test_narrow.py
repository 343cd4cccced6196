"""Weights in eight bits: another model, exact in itself, with the features of the wide one."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from support.answers import cold, logits
from support.models import build, picture, turn

import keepsight as ks
from keepsight.errors import UnsupportedInput
from keepsight.models.families import family_of
from keepsight.models.narrow import NarrowLinear, is_narrow, narrow

FIRST = [turn("What do you see in this picture here?", picture(1))]
SECOND = [*FIRST, turn("A pattern.", role="assistant"), turn("And this one?", picture(2))]


@pytest.mark.parametrize("count", [1, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_near_the_wide_one(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.nn.Linear(96, 64).to(dtype)
    rows = torch.randn(2, count, 96).to(dtype)
    with torch.no_grad():
        wanted, found = wide(rows).float(), NarrowLinear(wide)(rows)
    assert found.dtype == dtype and found.shape == wanted.shape
    off = float((found.float() - wanted).abs().max() / wanted.abs().max())
    assert 0 < off < 0.03


@pytest.mark.parametrize("name", ["demo", "demo-hybrid"])
def test_it_is_exact_in_itself_and_answers_as_the_wide_model(name: str, tmp_path: Path) -> None:
    question = "Describe the picture."
    with ks.load(name, dtype="float32", store=tmp_path) as wide:
        answer = wide.ask(picture(1), question).text
        wide.flush()
    with ks.load(name, dtype="float32", store=tmp_path, weights="int8") as vlm:
        reply = vlm.ask(picture(1), question)
        assert reply.text == answer
        assert (reply.usage.images_reused, reply.usage.cached_tokens) == (1, 0)
        for messages in (FIRST, SECOND, FIRST):
            assert near(logits(vlm, messages), cold(vlm, messages))
        stock = vlm.verify(SECOND, stock=True)
        assert stock and (stock.stock_max_difference or 0) < 0.03 * (stock.stock_scale or 0)
        vlm.flush()
    with ks.load(name, dtype="float32", store=tmp_path, weights="int8") as vlm:
        assert vlm.ask(picture(1), question).usage.cached_tokens > 0
    with ks.load(name, dtype="float32", store=tmp_path) as wide:
        assert wide.ask(picture(1), question).text == answer


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Eight bits round more; a wrong picture or place is far more than that."""
    return bool((one - other).abs().max() <= 0.05 * other.abs().max())


def test_the_reason_for_rounding_is_said() -> None:
    with ks.load("demo", weights="int8") as vlm:
        assert "eight bits" in vlm.stats()["engine"]["rounding_because"]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl", "gemma3"])
def test_other_families(name: str) -> None:
    model, processor = build(name)
    narrow(model, family_of(model).text_modules())
    assert is_narrow(model)
    with ks.wrap(model, processor) as vlm:
        for messages in (FIRST, SECOND, FIRST):
            assert near(logits(vlm, messages), cold(vlm, messages))


def test_a_decoder_without_such_layers_is_refused() -> None:
    model, _ = build("qwen3_vl")
    with pytest.raises(UnsupportedInput, match="no linear layers"):
        narrow(model, [])


def test_the_wide_weights_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both copies of all weights never lie in memory together."""
    model = build("qwen3_vl")[0]
    wide = [
        weakref.ref(module)
        for module in model.get_decoder().modules()
        if type(module) is torch.nn.Linear
    ]
    alive: list[int] = []
    make = NarrowLinear.__init__

    def counted(self: NarrowLinear, layer: torch.nn.Linear) -> None:
        alive.append(sum(one() is not None for one in wide))
        make(self, layer)

    monkeypatch.setattr(NarrowLinear, "__init__", counted)
    narrow(model, [model.get_decoder()])
    assert len(alive) > 10 and alive == [len(wide) - done for done in range(len(alive))]
