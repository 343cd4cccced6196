"""A vision tower without a language model: packages as from any other, and no answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_parts import picture, wake

import keepsight as ks
from keepsight.errors import UnsupportedInput


@pytest.fixture(scope="module")
def mlcd() -> tuple[Any, Any]:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    config = transformers.MLCDVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=56,
        patch_size=14,
    )
    torch.manual_seed(0)
    model = transformers.MLCDVisionModel(config).eval()
    wake(model)
    size = {"height": 56, "width": 56}
    return model, CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=size)


def test_packages_are_the_features(mlcd: tuple[Any, Any], tmp_path: Path) -> None:
    model, image_processor = mlcd
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


def test_it_answers_nothing(mlcd: tuple[Any, Any]) -> None:
    with ks.wrap(*mlcd) as vlm:
        for call in (
            lambda: vlm.ask(picture(1), "What is it?"),
            lambda: vlm.generate(input_ids=torch.tensor([[1]])),
            lambda: vlm.session(),
        ):
            with pytest.raises(UnsupportedInput, match="vision tower"):
                call()
