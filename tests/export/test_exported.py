"""Exported models against the models they were made of: same answers, same memory, same laws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.exported_models import copied, exported_demo
from support.models import picture, turn

import keepsight as ks
from keepsight.export.graphs import exporter


@pytest.fixture(
    scope="module",
    params=["demo", pytest.param("demo-hybrid", marks=pytest.mark.slow)],  # minutes to trace
)
def pair(request: pytest.FixtureRequest) -> Any:
    folder = exported_demo(request.param)
    with ks.load(str(folder)) as exported, ks.load(request.param, dtype="float32") as own:
        yield exported, own


def said(vlm: ks.VLM, messages: list[Any]) -> list[int]:
    return vlm.chat(messages, max_new_tokens=24, do_sample=False).tokens


def test_the_same_tokens_over_a_conversation_with_a_new_picture(pair: Any) -> None:
    a, b, c = picture(1, 96, 96), picture(2, 160, 96), picture(3, 96, 96)
    for first in (a, c):  # swapped, of one size
        messages = [turn("What do you see?", first)]
        for text, images in (("Where is it?", []), ("Compare it with this.", [b])):
            answers = [vlm.chat(messages, max_new_tokens=24, do_sample=False) for vlm in pair]
            assert answers[0].tokens == answers[1].tokens
            messages += [turn(str(answers[0]), role="assistant"), turn(text, *images)]
        assert said(pair[0], messages) == said(pair[1], messages)


def test_eight_bits_see_the_same_and_say_how_far_off_they_are(
    pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported, own = pair
    folder = tmp_path / "export"
    name = "demo" if own.model.config.model_type == "qwen3_vl" else "demo-hybrid"
    monkeypatch.setattr(exporter, "write_graph", copied(Path(exported.model.exported.folder)))
    manifest = exporter.export(name, folder, quantised="int8")
    assert manifest.quantised == "int8" and 0 < manifest.deviation["logits"] < 0.05
    small, large = (
        (each / "graphs" / "decoder.onnx.data").stat().st_size
        for each in (folder, exported.model.exported.folder)
    )
    assert small < 0.32 * large
    with ks.load(str(folder)) as vlm:
        image = picture(10, 128, 160)
        mine, theirs = vlm.encode(image), exported.encode(image)
        assert torch.equal(mine.tensors["features"], theirs.tensors["features"])
        assert mine.feature_id != theirs.feature_id
        assert vlm.verify([turn("What do you see?", image, picture(11, 96, 96))]).equal
        messages = [turn("Which is larger?", image, picture(11, 96, 96))]
        assert vlm.runtime.refresh() != exported.runtime.refresh()  # prefixes are never mixed
        assert said(vlm, messages)


def test_warm_equals_cold_bit_for_bit(pair: Any) -> None:
    exported, _ = pair
    messages = [turn("What do you see?", picture(4, 128, 96), picture(5, 96, 128))]
    messages += [turn("Two pictures.", role="assistant"), turn("And this?", picture(6, 192, 64))]
    found = exported.verify(messages, stock=True)
    assert found.equal and found.cached_tokens
    assert found.stock_same_tokens
