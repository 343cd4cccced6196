"""Law 5: bound to weights. Every way of changing them is noticed on the next call."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.answers import cold, logits
from support.models import build, folder_of, picture, stock_inputs, turn

import keepsight as ks
from keepsight.errors import ModelError, UnreadableWeights, UnsupportedModel, WrongIdentity
from keepsight.models import loading

MESSAGES = [turn("Please look at this picture very carefully and tell what it is.", picture(1))]


def test_language_weights_leave_packages_alone(vlm: Any) -> None:
    vlm.chat(MESSAGES, max_new_tokens=1)
    with torch.no_grad():
        vlm.model.get_decoder().layers[1].self_attn.q_proj.weight.mul_(1.05)
    usage = vlm.chat(MESSAGES, max_new_tokens=1).usage
    assert usage.images_encoded == 0 and usage.cached_tokens == 0
    with torch.no_grad():
        vlm.model.base_model.visual.merger.linear_fc2.weight.mul_(1.05)
    assert vlm.chat(MESSAGES, max_new_tokens=1).usage.images_encoded == 1


def test_a_package_of_other_weights_is_refused_by_field(vlm: Any, tmp_path: Path) -> None:
    path = vlm.encode(picture(1)).save(tmp_path / "cat.sight")
    with torch.no_grad():
        vlm.model.base_model.visual.merger.linear_fc2.weight.mul_(1.05)
    with pytest.raises(WrongIdentity) as caught:
        vlm.ask(ks.Package.load(path), "What is it?")
    assert caught.value.field == "vision weights"
    assert caught.value.found in str(caught.value) and caught.value.expected in str(caught.value)
    assert vlm.ask(picture(1), "What is it?", max_new_tokens=2).tokens


def test_a_package_of_other_processor_settings_is_refused(vlm: Any) -> None:
    package = vlm.encode(picture(1))
    vlm.processor.image_processor.image_mean = [0.4, 0.4, 0.4]
    with pytest.raises(WrongIdentity) as caught:
        vlm.ask(package, "What is it?")
    assert caught.value.field == "processor settings"
    assert vlm.ask(picture(1), "What is it?", max_new_tokens=1).usage.images_encoded == 1


def test_models_that_cannot_be_used(vlm: Any) -> None:
    vlm.model.train()
    with pytest.raises(ModelError, match="eval"):
        vlm.chat(MESSAGES)
    vlm.model.eval()
    assert vlm.chat(MESSAGES, max_new_tokens=1).tokens
    with pytest.raises(ModelError, match="expected a Transformers model"):
        ks.wrap(torch.nn.Linear(2, 2))
    meta = type(vlm.model)(vlm.model.config).to("meta").eval()
    with pytest.raises(UnreadableWeights):
        ks.wrap(meta)
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(UnsupportedModel, match="gpt2"):
        ks.wrap(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1)).eval())


def test_loading_from_a_folder_agrees_with_wrapping(tmp_path: Path) -> None:
    model, processor = build("qwen3_vl")
    folder = folder_of("qwen3_vl", tmp_path / "model")
    store = tmp_path / "store"
    with ks.wrap(model, processor) as one:
        wrapped = one.runtime.weights
        with ks.load(folder, dtype="float32", store=store) as two:
            assert two.runtime.weights.all == wrapped.all
            assert two.runtime.weights.vision == wrapped.vision
        # The second time the fingerprints come from the store, and are the same.
        with ks.load(folder, dtype="float32", store=store) as three:
            assert three.runtime.weights.all == wrapped.all
            assert torch.equal(logits(three, MESSAGES), logits(one, MESSAGES))
    with pytest.raises(ModelError, match="cannot be loaded"):
        ks.load(tmp_path / "nothing")


def test_adapters_are_weights_and_switches_are_noticed(vlm: Any) -> None:
    """Adapters added after wrapping, switched off and on again, each with its own memory."""
    peft = pytest.importorskip("peft")
    plain = logits(vlm, MESSAGES)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    vlm.model.add_adapter(config, adapter_name="one")
    vlm.model.eval()
    adapted = logits(vlm, MESSAGES)
    assert not torch.equal(adapted, plain)
    assert torch.equal(adapted, cold(vlm, MESSAGES))
    vlm.model.disable_adapters()
    assert torch.equal(logits(vlm, MESSAGES), cold(vlm, MESSAGES))
    vlm.model.enable_adapters()
    report = vlm.explain(MESSAGES)
    assert report.cached_tokens == report.prompt_tokens
    assert torch.equal(logits(vlm, MESSAGES), adapted)
    vlm.model.add_adapter(config, adapter_name="two")
    vlm.model.set_adapter("two")
    vlm.model.eval()
    other = logits(vlm, MESSAGES)
    assert not torch.equal(other, adapted) and torch.equal(other, cold(vlm, MESSAGES))


def test_a_peft_model_is_told_what_to_give_instead() -> None:
    peft = pytest.importorskip("peft")
    model, processor = build("qwen3_vl")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    with ks.wrap(model, processor) as plain:
        without = logits(plain, MESSAGES)
    adapted = peft.get_peft_model(model, config).eval()
    with pytest.raises(ModelError, match=r"got a PeftModel; give its get_base_model\(\)"):
        ks.wrap(adapted, processor)
    with ks.wrap(adapted.get_base_model(), processor) as vlm:
        found = logits(vlm, MESSAGES)
    assert not torch.equal(found, without)
    with torch.no_grad():
        stock = adapted(**stock_inputs(processor, MESSAGES)).logits[0, -1]
    assert torch.allclose(found, stock, atol=1e-4 * float(stock.abs().max()))


def test_an_adapter_switched_off_while_merged_is_out_of_every_copy() -> None:
    """PEFT takes it out of the weights in the midst of the next pass."""
    peft = pytest.importorskip("peft")
    model, processor = build("qwen3_vl")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model.add_adapter(config, adapter_name="one")
    model.eval()
    for layer in model.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.merge()
    with ks.wrap(model, processor, pack=True) as vlm:
        merged = logits(vlm, MESSAGES)
        model.disable_adapters()
        found = logits(vlm, MESSAGES)
        assert not torch.equal(found, merged)
        with ks.wrap(model, processor, pack=True) as fresh:
            assert torch.equal(found, logits(fresh, MESSAGES))


@pytest.mark.parametrize(
    ("kind", "field", "value", "said"),
    [
        ("qwen3_vl", "num_hidden_layers", 2, "describes 2 layers, the decoder has 4"),
        ("qwen3_vl", "num_hidden_layers", 6, "describes 6 layers, the decoder has 4"),
        ("qwen3_5", "layer_types", ["full_attention"] * 4, "built as 'linear_attention'"),
    ],
)
def test_a_config_that_lies_about_layers_is_refused(
    kind: str, field: str, value: Any, said: str
) -> None:
    model, processor = build(kind)
    before = getattr(model.config.text_config, field)
    setattr(model.config.text_config, field, value)
    try:
        with pytest.raises(UnsupportedModel, match=said):
            ks.wrap(model, processor)
    finally:
        setattr(model.config.text_config, field, before)


def test_half_a_processor_is_refused() -> None:
    model, processor = build("llava")
    for part in (processor.tokenizer, processor.image_processor, object()):
        with pytest.raises(ModelError, match="without"):
            ks.wrap(model, part)


def test_two_models_under_one_name_share_a_store_and_nothing_else(tmp_path: Path) -> None:
    """A folder whose weights were exchanged, even with size and time of the files as before."""
    folder, store = tmp_path / "model", tmp_path / "store"
    shutil.copytree(loading.model_path("demo"), folder)
    file = folder / "model.safetensors"
    first = load_file(file)
    other = {name: tensor + tensor for name, tensor in first.items()}  # no bit lost: it goes back
    told = []
    for weights in (first, other, first):
        status = file.stat()
        file.unlink()
        save_file(weights, file, metadata={"format": "pt"})
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        with ks.load(folder, dtype="float32", store=store) as vlm:
            reply = vlm.ask(picture(1), "What is this?", max_new_tokens=4)
            told.append((reply.usage.images_encoded, reply.usage.cached_tokens > 0, reply.text))
    assert told[0][:2] == told[1][:2] == (1, False)
    assert told[2] == (0, True, told[0][2])


def test_layers_that_replace_their_weights_are_right_and_the_report_says_why_nothing_is_kept() -> (
    None
):
    """As layers do whose weights are rounded in each pass."""
    model, processor = build("qwen3_vl")
    layer = model.get_decoder().layers[0].mlp.down_proj
    plain = type(layer).forward

    def rounding(rows: torch.Tensor) -> torch.Tensor:
        before = layer.weight.data.clone()
        layer.weight.data = layer.weight.data.bfloat16().float()
        try:
            return plain(layer, rows)
        finally:
            layer.weight.data = before

    layer.forward = rounding
    with ks.wrap(model, processor) as vlm:
        replies = [vlm.chat(MESSAGES, max_new_tokens=4, do_sample=False) for _ in range(2)]
        stock = model.generate(**vlm.inputs(MESSAGES), max_new_tokens=4, do_sample=False)
    assert replies[0].tokens == replies[1].tokens == stock[0, -4:].tolist()
    assert replies[1].usage.images_encoded == 0 == replies[1].usage.cached_tokens
    assert all("weights changed while" in reply.report.notes[-1] for reply in replies)
    del layer.forward
    with ks.wrap(model, processor) as vlm:
        for _ in range(2):
            reply = vlm.chat(MESSAGES, max_new_tokens=4, do_sample=False)
        assert reply.usage.cached_tokens and not reply.report.notes
