"""A model without its vision tower is the same model: same names, same bits, less memory.

Its tower's weights are named before they are let go; what only a tower could do is refused by
name before anything is computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.answers import logits
from support.models import ALL, build, folder_of, picture, turn

import keepsight as ks
from keepsight.errors import ModelError, UnsupportedInput, UnsupportedModel
from keepsight.models import loading
from keepsight.models.families import SUPPORTED
from keepsight.models.families.tower_absent import absent_parts

TEXT = "Please look at this picture very carefully and tell what it is."


def parts_of(kind: str, path: Path, dtype: str = "float32") -> tuple[Any, Any]:
    """The same checkpoint, wrapped whole and wrapped without its tower."""
    folder = str(folder_of(kind, path))
    _, processor = build(kind)
    whole = loading.load_named(folder, dtype, None, None)[0]
    part = loading.load_without_tower(folder, dtype, None, None)[0]
    return ks.wrap(whole, processor), ks.wrap(part, processor)


def same_names(one: Any, other: Any) -> bool:
    return bool(one.runtime.weights.record() == other.runtime.weights.record())


@pytest.mark.parametrize("kind", ALL)
def test_names_and_answers_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    whole, part = parts_of(kind, tmp_path)
    assert same_names(whole, part)
    assert part.model.num_parameters() < whole.model.num_parameters()
    assert type(part.model) is type(whole.model)
    packages = whole.encode([picture(1), picture(2, 128, 64)])
    messages = [turn(TEXT, *packages)]
    assert torch.equal(logits(part, messages), logits(whole, messages))
    before = part.stats()["engine"]["prefill_tokens"]
    with pytest.raises(UnsupportedInput, match="left out"):
        part.chat([turn(TEXT, packages[1], packages[0], picture(3))], max_new_tokens=1)
    assert part.stats()["engine"]["prefill_tokens"] == before
    assert torch.equal(logits(part, messages), logits(whole, messages))


@pytest.mark.parametrize("name", ["demo", "demo-hybrid"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_models_answer_from_packages(name: str, dtype: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with ks.load(name, dtype=dtype, store=store) as whole:
        package = whole.encode(picture(1))
        expected = logits(whole, [turn(TEXT, picture(1))])
        whole.flush()
        with ks.load(name, dtype=dtype, vision=False) as part:
            assert same_names(whole, part)
            assert torch.equal(logits(part, [turn(TEXT, package)]), expected)
            with pytest.raises(UnsupportedInput, match="left out"):
                part.ask(picture(1), TEXT)
            with pytest.raises(UnsupportedInput, match="left out"):
                part.encode(picture(1))
    with ks.load(name, dtype=dtype, vision=False, store=store) as part:
        assert torch.equal(logits(part, [turn(TEXT, picture(1))]), expected)
        assert part.encode(picture(1)).feature_id == package.feature_id
        with pytest.raises(UnsupportedInput, match="left out"):
            part.ask(picture(2), TEXT)
        with pytest.raises(UnsupportedInput, match="left out"):
            part.explain([turn(TEXT, picture(2))])
        assert part.explain([turn(TEXT, picture(1))]).prompt_tokens > 0


def test_no_weight_of_the_tower_is_there_and_its_settings_are() -> None:
    model = loading.load_without_tower(loading.model_path("demo"), "float32", None, None)[0]
    whole = loading.load_named(loading.model_path("demo"), "float32", None, None)[0]
    assert not list(model.base_model.visual.parameters())
    assert not list(model.base_model.visual.buffers())
    merge = whole.base_model.visual.spatial_merge_size
    assert model.base_model.visual.spatial_merge_size == merge
    text = {name: t for name, t in whole.named_parameters() if ".visual." not in name}
    kept = dict(model.named_parameters())
    assert kept.keys() == text.keys()
    assert all(torch.equal(kept[name], text[name]) for name in text)


def test_stock_forward_refuses_pixels_by_name() -> None:
    path = loading.model_path("demo")
    model = loading.load_without_tower(path, "float32", None, None)[0]
    processor = loading.load_processor(path, None)
    pixels = processor.image_processor([picture(1)], return_tensors="pt")
    with pytest.raises(UnsupportedInput, match="left out"):
        model.get_image_features(**pixels)
    with pytest.raises(UnsupportedInput, match="left out"):
        model.base_model.visual(pixels["pixel_values"])


def test_another_tower_has_another_name(tmp_path: Path) -> None:
    whole, _ = parts_of("qwen3_vl", tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if "visual" in name and tensors[name].dim() > 1)
    tensors[name].view(-1)[-1] += 1e-3
    save_file(tensors, file, {"format": "pt"})
    part = ks.wrap(
        loading.load_without_tower(str(tmp_path), "float32", None, None)[0], whole.processor
    )
    assert part.runtime.weights.vision != whole.runtime.weights.vision
    assert part.runtime.weights.all != whole.runtime.weights.all


def test_a_tower_put_back_is_noticed(tmp_path: Path) -> None:
    whole, part = parts_of("qwen3_vl", tmp_path)
    with torch.no_grad():
        whole.model.base_model.visual.merger.linear_fc2.weight.mul_(1.05)
    whole.runtime.refresh()
    part.model.base_model.visual = whole.model.base_model.visual
    part.runtime.refresh()
    assert not absent_parts(part.model)
    assert same_names(whole, part)


def test_models_that_no_test_has_shown_exact_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("qwen3_vl", tmp_path)
    monkeypatch.delitem(SUPPORTED, "qwen3_vl")
    with pytest.raises(UnsupportedModel, match="without its vision encoder"):
        ks.load(folder, vision=False)
    with pytest.raises(ModelError, match="cannot be loaded"):
        ks.load(tmp_path / "nothing", vision=False)


def test_changes_of_the_language_model_are_noticed(tmp_path: Path) -> None:
    whole, part = parts_of("qwen3_vl", tmp_path)
    messages = [turn(TEXT, whole.encode(picture(1)))]
    first = logits(part, messages)
    for vlm in (whole, part):
        with torch.no_grad():
            vlm.model.get_decoder().layers[1].self_attn.q_proj.weight.mul_(1.05)
    changed = logits(part, messages)
    assert not torch.equal(changed, first)
    assert torch.equal(changed, logits(whole, messages))
    assert same_names(whole, part)
