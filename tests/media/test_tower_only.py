"""Towers alone, and a model that draws: packages as from any other, and no answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_parts import picture
from support.tiny_models import glm_image, mlcd

import keepsight as ks
from keepsight.errors import ModelError, UnsupportedInput


@pytest.fixture(scope="module")
def tower() -> tuple[Any, Any]:
    return mlcd()


def test_packages_are_the_features(tower: tuple[Any, Any], tmp_path: Path) -> None:
    model, image_processor = tower
    with ks.wrap(model, image_processor, store=tmp_path / "store") as vlm:
        packages = vlm.encode([picture(1), picture(2), picture(1)])
        assert vlm.stats()["features"]["encoded"] == 2
        vlm.flush()
    for package, seed in zip(packages, (1, 2, 1), strict=True):
        pixels = image_processor([picture(seed)], return_tensors="pt")
        with torch.no_grad():
            wanted = model(**pixels).last_hidden_state
        assert torch.equal(package.tensors["features"], wanted) and package.tokens == 17
    packages[0].save(tmp_path / "one.sight")
    again = ks.Package.load(tmp_path / "one.sight")
    assert torch.equal(again.tensors["features"], packages[0].tensors["features"])
    with ks.wrap(model, image_processor, store=tmp_path / "store") as vlm:
        vlm.encode(picture(1))
        assert vlm.stats()["features"]["encoded"] == 0


def test_it_answers_nothing(tower: tuple[Any, Any]) -> None:
    with ks.wrap(*tower) as vlm:
        for call in (
            lambda: vlm.ask(picture(1), "What is it?"),
            lambda: vlm.generate(input_ids=torch.tensor([[1]])),
            lambda: vlm.session(),
        ):
            with pytest.raises(UnsupportedInput, match="vision encoder"):
                call()


def drawing(processor: Any, *prompts: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """What the processor makes of prompts that want a picture drawn after some others."""
    texts = [
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}] * len(pictures)}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for pictures in prompts
    ]
    pictures = [picture for pictures in prompts for picture in pictures]
    options = {"target_h": 64, "target_w": 64, "padding": True, "return_tensors": "pt"}
    return dict(processor(text=texts, images=pictures, **options))


def test_a_model_that_draws_looks_at_a_picture_once() -> None:
    """Stock draws, and keeps the positions of what it draws; the tower has run before."""
    model, processor = glm_image()
    processor.tokenizer.padding_side = "left"
    a, b, c = picture(1), picture(2, 160, 96), picture(3)
    asked = [drawing(processor, (a,)), drawing(processor, (a, b)), drawing(processor, (b,), (c,))]
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    wanted = [model.generate(**inputs, **how) for inputs in asked]
    assert not torch.equal(wanted[2][0, -6:], wanted[2][1, -6:])
    with ks.installed(model, processor) as vlm:
        packages = vlm.encode([a, b, c])
        with vlm.blindfold():
            for inputs, stock in zip(asked, wanted, strict=True):
                assert torch.equal(model.generate(**inputs, **how), stock)
                assert "a model that draws" in vlm.report().notes[0]
    for package, one in zip(packages, (a, b, c), strict=True):
        inputs = drawing(processor, (one,))
        with torch.no_grad():
            (features,) = model.model.get_image_features(
                inputs["pixel_values"], inputs["image_grid_thw"][:1]
            ).pooler_output
        assert torch.equal(package.tensors["features"], features.flatten(1).T)


def test_what_is_drawn_is_refused_by_name() -> None:
    model, processor = glm_image()
    inputs = drawing(processor, (picture(1),))
    with ks.wrap(model, processor) as vlm:
        for call in (
            lambda: vlm.ask(picture(1), "Draw it."),
            lambda: vlm.generate(**inputs),
            lambda: vlm.inputs([]),
            lambda: vlm.session(),
        ):
            with pytest.raises(UnsupportedInput, match="a model that draws"):
                call()
    few = {**inputs, "image_grid_thw": inputs["image_grid_thw"][:1]}
    with ks.installed(model, processor) as vlm:
        with pytest.raises(Exception, match=r"."):
            model.generate(**few, max_new_tokens=2)


def test_a_folder_of_such_a_model_says_how_to_load_it(tmp_path: Path) -> None:
    """Upstream's own message goes on with the names of all types that there are."""
    glm_image()[0].save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no GlmImage among them; load it with a class") as refused:
        ks.load(tmp_path)
    assert "Aria" not in str(refused.value)
