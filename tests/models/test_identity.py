"""Law 5: a model is its tensors, its configuration and its modules. Every change is noticed, and so
is its end; each state is compared with a fresh wrap."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.answers import cold, logits
from support.changes import CHANGES, attention
from support.models import build, folder_of, picture, stock_inputs, turn

import keepsight as ks
from keepsight.encode import encode
from keepsight.errors import ModelError
from keepsight.models import loading
from keepsight.vlm import VLM

MESSAGES = [turn("Please look at this picture very carefully and tell what it is.", picture(1))]
SAME_BITS = {"another_attention"}  # those that need not change the logits of a tiny model


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    """One model for all these tests, which leave it as they found it."""
    return build("qwen3_vl")


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


class Gain(torch.nn.Module):
    """An activation that asks the configuration in each pass."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * self.config.gain


def test_a_configuration_that_a_forward_reads(vlm: Any) -> None:
    config, mlp = vlm.model.config.text_config, vlm.model.get_decoder().layers[0].mlp
    config.gain, usual = 1.0, mlp.act_fn
    mlp.act_fn = Gain(config)
    try:
        first, named = logits(vlm, MESSAGES), namespace(vlm)
        config.gain = 0.5
        assert not torch.equal(logits(vlm, MESSAGES), first)
        assert torch.equal(logits(vlm, MESSAGES), cold(vlm, MESSAGES))
        config.gain = 1.0
        assert namespace(vlm) == named
    finally:
        mlp.act_fn = usual
        del config.gain


def test_casts_are_changes_and_so_is_the_way_back(vlm: Any) -> None:
    first, named = logits(vlm, MESSAGES), namespace(vlm)
    kept = copy.deepcopy(vlm.model)
    vlm.model.bfloat16()
    try:
        assert torch.equal(logits(vlm, MESSAGES), cold(vlm, MESSAGES))
        assert namespace(vlm) != named
    finally:
        vlm.model.float()
        wide = [*kept.parameters(), *kept.buffers()]
        for ours, was in zip([*vlm.model.parameters(), *vlm.model.buffers()], wide, strict=True):
            ours.data.copy_(was)
    assert namespace(vlm) == named and torch.equal(logits(vlm, MESSAGES), first)


# -- hooks and replaced methods --------------------------------------------------------------------


def _counting(model: Any, seen: list[int]) -> Any:
    return model.base_model.visual.register_forward_hook(lambda *_: seen.append(1)).remove


def _counting_forward(model: Any, seen: list[int]) -> Any:
    visual = model.base_model.visual
    usual = visual.forward

    def forward(*given: Any, **options: Any) -> Any:
        seen.append(1)
        return usual(*given, **options)

    visual.forward = forward
    return lambda: delattr(visual, "forward")


def stored(folder: Path) -> set[str]:
    """The entries of a store, by file."""
    return {str(path.relative_to(folder)) for path in folder.glob("*/*/*")}


@pytest.mark.parametrize("attach", [_counting, _counting_forward])
def test_a_memory_of_its_own_while_something_is_attached(
    vlm: Any, attach: Any, tmp_path: Path
) -> None:
    ks.wrap(vlm.model, vlm.processor, store=tmp_path).close()
    with ks.wrap(vlm.model, vlm.processor, store=tmp_path) as kept:
        kept.chat(MESSAGES, max_new_tokens=2)
        kept.flush()
        before, entries = kept.stats()["store"], stored(tmp_path)
        seen: list[int] = []
        detach = attach(kept.model, seen)
        try:
            for question in ("What is it, please?", "And which colour is it?"):
                usage = kept.ask(picture(1), question, max_new_tokens=2).usage
                assert seen == [1], "the tower runs for the first question only"
            assert usage.images_reused == 1 and usage.cached_tokens
            kept.session().ask("What is it?", images=[picture(2)], max_new_tokens=2)
            kept.flush()
            after = kept.stats()["store"]
            assert stored(tmp_path) == entries and after["entries"] == before["entries"], after
        finally:
            detach()
        report = kept.explain(MESSAGES)
        assert report.cached_tokens == report.prompt_tokens, "the old memory is back"
    with ks.wrap(vlm.model, vlm.processor, store=tmp_path) as again:
        usage = again.ask(picture(1), "And which colour is it?", max_new_tokens=2).usage
        assert not usage.images_encoded and usage.cached_tokens < usage.prompt_tokens


def test_packages_made_under_a_hook_are_refused_by_a_store(vlm: Any, tmp_path: Path) -> None:
    picture(3).save(tmp_path / "one.png")
    with ks.wrap(vlm.model, vlm.processor, store=tmp_path / "store") as kept:
        detach = _counting(kept.model, [])
        try:
            with pytest.raises(ModelError, match="hook"):
                list(encode([str(tmp_path / "one.png")], kept))
        finally:
            detach()
        assert not any("package" in name for name in stored(tmp_path / "store"))


# -- what is announced -----------------------------------------------------------------------------


def test_a_hidden_change_of_a_weight_is_announced(vlm: Any, tmp_path: Path) -> None:
    """One value through `.data`, between those that are looked at."""
    with ks.wrap(vlm.model, vlm.processor, store=tmp_path) as kept:
        first, named = logits(kept, MESSAGES), namespace(kept)
        weight = attention(vlm.model).o_proj.weight
        before = weight.detach().clone()
        weight.data[3, 5:9] += 10.0
        assert namespace(kept) == named
        kept.refresh()
        changed = logits(kept, MESSAGES)
        assert not torch.equal(changed, first) and torch.equal(changed, cold(kept, MESSAGES))
        kept.flush()
        with ks.wrap(vlm.model, vlm.processor, store=tmp_path) as other:
            report = other.explain(MESSAGES)
            assert report.cached_tokens == report.prompt_tokens, "such weights have a name"
        weight.data.copy_(before)
        kept.refresh()
        assert namespace(kept) == named and torch.equal(logits(kept, MESSAGES), first)


def test_what_has_no_name_is_announced_too(
    vlm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of a library, which nobody looks for."""
    import transformers.models.qwen3_vl.modeling_qwen3_vl as home

    usual = home.rotate_half
    with ks.wrap(vlm.model, vlm.processor, store=tmp_path) as kept:
        first = logits(kept, MESSAGES)
        kept.flush()
        entries = stored(tmp_path)
        monkeypatch.setattr(home, "rotate_half", lambda x: usual(x) * 0.5)
        kept.refresh()
        changed = logits(kept, MESSAGES)
        assert not torch.equal(changed, first) and torch.equal(changed, cold(kept, MESSAGES))
        assert torch.equal(logits(kept, MESSAGES), changed)
        assert kept.explain(MESSAGES).cached_tokens, "it remembers again"
        kept.flush()
        assert stored(tmp_path) == entries
        monkeypatch.undo()
        kept.refresh()
        assert torch.equal(logits(kept, MESSAGES), first)


# -- parts of a model ------------------------------------------------------------------------------


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


def test_gradient_checkpointing_is_no_setting(vlm: Any, tmp_path: Path) -> None:
    """It acts in training mode only, where layers also forget their cache: that is refused."""
    named, package = namespace(vlm), vlm.encode(picture(1)).save(tmp_path / "a.sight")
    vlm.model.activation_checkpointing_enable()
    vlm.model.enable_input_require_grads()
    try:
        assert namespace(vlm) == named
        vlm.chat([turn("What is it?", ks.Package.load(package))], max_new_tokens=1)
        vlm.model.get_decoder().layers[0].train()
        with pytest.raises(ModelError, match="is in training mode"):
            vlm.chat(MESSAGES, max_new_tokens=1)
    finally:
        vlm.model.eval()
        vlm.model.disable_input_require_grads()
        vlm.model.activation_checkpointing_disable()
    assert namespace(vlm) == named


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


def test_the_scale_of_an_adapter_is_part_of_the_model(tmp_path: Path) -> None:
    """In a session, and over a store."""
    peft = pytest.importorskip("peft")
    model, processor = build("qwen3_vl")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    how: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    with ks.wrap(model, processor, store=tmp_path) as vlm:
        model.add_adapter(config, adapter_name="one")
        model.eval()
        first, named, session = logits(vlm, MESSAGES), namespace(vlm), vlm.session()
        session.ask("What is it?", images=[picture(1)], **how)
        vlm.flush()
        layers = [m for m in model.modules() if hasattr(m, "set_scale")]
        for layer in layers:
            layer.set_scale("one", 3.0)
        assert namespace(vlm) != named
        scaled = logits(vlm, MESSAGES)
        assert not torch.equal(scaled, first) and torch.equal(scaled, cold(vlm, MESSAGES))
        reply = session.ask("And now?", **how)
        with ks.wrap(model, processor) as fresh:
            assert fresh.chat(session.messages[:-1], **how).tokens == reply.tokens
        with ks.wrap(model, processor, store=tmp_path) as other:
            assert torch.equal(logits(other, MESSAGES), scaled)
        for layer in layers:
            layer.set_scale("one", 1.0)
        assert namespace(vlm) == named
        for deed in ("merge", "unmerge"):
            for layer in layers:
                getattr(layer, deed)()
            assert torch.equal(logits(vlm, MESSAGES), cold(vlm, MESSAGES))
        model.delete_adapter("one")
        assert torch.equal(logits(vlm, MESSAGES), cold(vlm, MESSAGES))


def test_an_adapter_folder_is_bound_to_its_base_and_its_settings(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, store = folder_of("qwen3_vl", tmp_path / "base"), tmp_path / "store"
    model, processor = build("qwen3_vl")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model.add_adapter(config, adapter_name="default")
    adapter = tmp_path / "adapter"
    model.name_or_path = str(base)
    model.save_pretrained(adapter)
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
