"""`model(**inputs)` of anybody's code, on a model that Keepsight is installed in."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support.common import in_threads
from support.models import ALL, build, built, picture, stock_inputs, turn

import keepsight as ks
from keepsight.errors import ModelError, TowerRan

ONE = [turn("What is it?", picture(1))]
TWO = [turn("These two?", picture(2), picture(1))]


def forward(model: Any, inputs: Any, *args: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(*args, **inputs).logits
    return logits


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((found - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())


def hooks(model: Any) -> list[int]:
    return [len(vars(model)[name]) for name in vars(model) if name.startswith("_forward_pre_hooks")]


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "llava_next", "idefics3", "ovis2"])
def test_pixels_become_features(kind: str) -> None:
    model, processor = build(kind)
    one, two = stock_inputs(processor, ONE), stock_inputs(processor, TWO)
    wanted, before = [forward(model, one), forward(model, two)], hooks(model)
    with ks.installed(model, processor, forwards=True) as vlm:
        assert near(forward(model, one), wanted[0])
        assert near(forward(model, two), wanted[1])
        assert [s.features for s in vlm.report().segments] == ["tower", "memory"]
        with vlm.blindfold():
            assert near(forward(model, two), wanted[1])
            ids = two["input_ids"]
            rest = {name: value for name, value in two.items() if name != "input_ids"}
            assert near(forward(model, rest, ids), wanted[1])
            with pytest.raises(TowerRan):
                forward(model, stock_inputs(processor, [turn("This?", picture(3))]))
        assert torch.equal(model.generate(**two, max_new_tokens=2)[:, :1], two["input_ids"][:, :1])
        assert vlm.verify(ONE, stock=True).equal
    assert hooks(model) == before and torch.equal(forward(model, two), wanted[1])


def test_what_is_not_served_is_stock_with_a_note() -> None:
    model, processor = build("qwen3_vl")
    inputs = stock_inputs(processor, ONE)
    wanted = model(**inputs).logits
    short = {**inputs, "input_ids": inputs["input_ids"][:, 20:]}
    with ks.installed(model, processor, forwards=True) as vlm:
        assert torch.equal(model(**inputs).logits, wanted) and wanted.requires_grad
        assert "gradients are requested" in vlm.report().notes[0]
        embedded = {**inputs, "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}
        del embedded["input_ids"]
        with torch.no_grad():
            model(**embedded)
        assert "without input_ids" in vlm.report().notes[0]
        with pytest.raises(Exception, match=r".") as ours:
            forward(model, short)
        assert "placeholders" in vlm.report().notes[0]
    with pytest.raises(type(ours.value)):
        forward(model, short)


def test_copies_threads_and_exceptions_leave_nothing() -> None:
    # A model of its own: what others asked of a shared one may have left hooks of Transformers' own
    # on it, and with these not even stock can be pickled.
    model, processor = built(ALL["qwen3_vl"])
    inputs, before = stock_inputs(processor, ONE), hooks(model)
    wanted = forward(model, inputs)
    found: list[bool] = []
    with pytest.raises(KeyError), ks.installed(model, processor, forwards=True) as vlm:
        in_threads(*3 * [lambda: found.append(near(forward(model, inputs), wanted))])
        with ks.installed(model, processor, forwards=True) as same:
            assert same is vlm
        assert near(forward(model, inputs), wanted) and vlm.report().segments
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with vlm.blindfold():
                assert torch.equal(forward(other, inputs), wanted)  # a copy is stock
        raise KeyError
    assert found == [True] * 3 and hooks(model) == before
    with ks.installed(model, processor), pytest.raises(ModelError, match="without forwards"):
        ks.install(model, processor, forwards=True)
