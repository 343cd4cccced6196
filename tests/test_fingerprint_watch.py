"""Law 5: everything that a forward pass reads is noticed when it changes, and when it is undone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from changes import CHANGES, attention
from models import build, folder_of, picture, stock_inputs, turn
from safetensors.torch import load_file, save_file
from test_exact import cold, logits

import keepsight as ks
from keepsight.errors import ModelError
from keepsight.models import loading
from keepsight.models.families import family_of
from keepsight.models.fingerprint.watch import Watch
from keepsight.models.weights import Weights
from keepsight.vlm import VLM

MESSAGES = [turn("Please look at this picture very carefully and tell what it is.", picture(1))]
SAME_BITS = {"another_attention"}  # those that need not change the logits of a tiny model


@pytest.fixture(scope="module")
def parts() -> Iterator[tuple[Any, Any]]:
    """A model of their own for these tests, which leave it as they found it."""
    build.cache_clear()
    yield build("qwen3_vl")
    build.cache_clear()


@pytest.fixture
def vlm(parts: tuple[Any, Any]) -> Iterator[Any]:
    with ks.wrap(*parts) as vlm:
        yield vlm


def namespace(vlm: Any) -> str:
    return str(vlm.runtime.refresh())


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_and_so_is_its_end(vlm: Any, name: str, tmp_path: Path) -> None:
    before, named = logits(vlm, MESSAGES), namespace(vlm)
    undo = CHANGES[name](vlm.model)
    try:
        assert namespace(vlm) != named
        after = logits(vlm, MESSAGES)
        assert torch.equal(after, cold(vlm, MESSAGES))
        assert name in SAME_BITS or not torch.equal(after, before)
        with ks.wrap(vlm.model, vlm.processor, store=tmp_path) as changed:
            assert torch.equal(logits(changed, MESSAGES), after)
    finally:
        undo()
    assert namespace(vlm) == named
    report = vlm.explain(MESSAGES)
    assert report.cached_tokens == report.prompt_tokens
    assert torch.equal(logits(vlm, MESSAGES), before)
    # Nothing that the changed model wrote down answers for the one that is as it was.
    with ks.wrap(vlm.model, vlm.processor, store=tmp_path) as other:
        assert other.explain(MESSAGES).cached_tokens == 0
        assert torch.equal(logits(other, MESSAGES), before)


def test_changes_in_any_order(vlm: Any) -> None:
    """Any of them on top of any others, compared each time with a memory that has seen nothing."""
    chance, undo = random.Random(7), list[tuple[str, Any]]()
    for _ in range(14):
        if undo and chance.random() < 0.45:
            undo.pop()[1]()
        else:
            name = chance.choice([n for n in CHANGES if n not in [done for done, _ in undo]])
            undo.append((name, CHANGES[name](vlm.model)))
        assert torch.equal(logits(vlm, MESSAGES), cold(vlm, MESSAGES)), [n for n, _ in undo]
    while undo:
        undo.pop()[1]()
    assert torch.equal(logits(vlm, MESSAGES), cold(vlm, MESSAGES))


@pytest.mark.parametrize("name", CHANGES)
def test_words_of_memory_and_plain_comparison_agree(
    parts: tuple[Any, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow way, for interpreters whose dicts have no versions, notices the same."""
    monkeypatch.setattr(Watch.__init__, "__defaults__", (False,))
    model = parts[0]
    weights = Weights(model, family_of(model))
    weights.refresh()
    before = (weights.all, weights.config, weights.code)
    undo = CHANGES[name](model)
    try:
        assert weights.refresh()
        assert (weights.all, weights.config, weights.code) != before
    finally:
        undo()
    weights.refresh()
    assert (weights.all, weights.config, weights.code) == before


def test_a_hook_whose_state_changes_is_another_hook(vlm: Any) -> None:
    amounts = [0.25]
    handle = attention(vlm.model).o_proj.register_forward_hook(lambda m, a, out: out + amounts[0])
    try:
        first = logits(vlm, MESSAGES)
        assert torch.equal(logits(vlm, MESSAGES), first)
        amounts[0] = 0.5
        assert not torch.equal(logits(vlm, MESSAGES), first)
        assert torch.equal(logits(vlm, MESSAGES), cold(vlm, MESSAGES))
    finally:
        handle.remove()


def test_who_only_looks_changes_nothing(vlm: Any) -> None:
    """Hooks and wrappers that count or record leave a model the one that it was."""
    logits(vlm, MESSAGES)
    named, visual, seen = namespace(vlm), vlm.model.base_model.visual, list[Any]()
    forward = visual.forward

    def counted(*args: Any, **options: Any) -> Any:
        seen.append(1)
        return forward(*args, **options)

    def recorded(module: Any, args: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            seen.append(out.shape)

    for what in (counted, mock.Mock(wraps=forward), mock.Mock(side_effect=AssertionError)):
        with mock.patch.object(visual, "forward", what):
            assert namespace(vlm) == named
    handle = attention(vlm.model).o_proj.register_forward_hook(recorded)
    assert namespace(vlm) == named
    handle.remove()

    def doubled(module: Any, args: Any, out: Any) -> None:
        seen.append(1)
        out.mul_(2)

    handle = attention(vlm.model).o_proj.register_forward_hook(doubled)
    assert namespace(vlm) != named
    handle.remove()
    assert namespace(vlm) == named


def test_what_generate_notes_on_a_model_is_no_setting(vlm: Any) -> None:
    """Lengths of static caches and compiled calls stay on the model behind stock `generate`."""
    named, before = namespace(vlm), set(vars(vlm.model))
    inputs = stock_inputs(vlm.processor, MESSAGES)
    vlm.model.generate(**inputs, max_new_tokens=2, cache_implementation="static")
    vlm.model.get_compiled_call(None)
    left = set(vars(vlm.model)) - before
    try:
        assert {"_previous_max_cache_length", "_compiled_call"} <= left
        assert namespace(vlm) == named
    finally:
        for name in left:
            delattr(vlm.model, name)


def test_a_part_in_training_mode_is_refused_where_it_is_random(vlm: Any) -> None:
    named, layer = namespace(vlm), attention(vlm.model)
    layer.o_proj.train()  # a plain linear layer computes the same
    assert namespace(vlm) == named
    layer.extra = torch.nn.Dropout(0.5).train()
    try:
        with pytest.raises(ModelError, match=r"extra \(Dropout\) is in training mode"):
            vlm.chat(MESSAGES, max_new_tokens=1)
    finally:
        del layer.extra
        vlm.model.eval()
    assert namespace(vlm) == named


def test_the_scale_of_an_adapter_is_part_of_the_model(parts: tuple[Any, Any]) -> None:
    peft = pytest.importorskip("peft")
    build.cache_clear()
    model, processor = build("qwen3_vl")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    with ks.wrap(model, processor) as vlm:
        model.add_adapter(config, adapter_name="one")
        model.eval()
        first, named = logits(vlm, MESSAGES), namespace(vlm)
        layers = [m for m in model.modules() if hasattr(m, "set_scale")]
        for layer in layers:
            layer.set_scale("one", 3.0)
        assert namespace(vlm) != named
        scaled = logits(vlm, MESSAGES)
        assert not torch.equal(scaled, first) and torch.equal(scaled, cold(vlm, MESSAGES))
        for layer in layers:
            layer.set_scale("one", 1.0)
        assert namespace(vlm) == named
    build.cache_clear()


def test_an_adapter_folder_is_bound_to_its_base_and_its_settings(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    build.cache_clear()
    base, store = folder_of("qwen3_vl", tmp_path / "base"), tmp_path / "store"
    model, processor = build("qwen3_vl")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model.add_adapter(config, adapter_name="default")
    adapter = tmp_path / "adapter"
    model.name_or_path = str(base)
    model.save_pretrained(adapter)
    build.cache_clear()
    settings = adapter / "adapter_config.json"
    record = json.loads(settings.read_text()) | {"base_model_name_or_path": str(base)}
    settings.write_text(json.dumps(record))

    def loaded() -> tuple[str, torch.Tensor, torch.Tensor]:
        live, files = loading.load_named(str(adapter), "float32", None, None)
        assert files is not None
        with VLM(live, processor, files=files, store=store) as vlm:
            return vlm.runtime.weights.all, logits(vlm, MESSAGES), cold(vlm, MESSAGES)

    seen = [loaded()]
    settings.write_text(json.dumps(record | {"lora_alpha": 5 * record["lora_alpha"]}))
    seen.append(loaded())
    weights = load_file(base / "model.safetensors")
    save_file(
        {n: t * 1.01 for n, t in weights.items()}, base / "model.safetensors", {"format": "pt"}
    )
    seen.append(loaded())
    assert all(torch.equal(warm, fresh) for _, warm, fresh in seen)
    assert len({name for name, _, _ in seen}) == 3
