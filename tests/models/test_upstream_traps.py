"""Traps of the installed Transformers that Keepsight steps around.

Each test shows that the trap is still there. When one fails, upstream has mended it, and the place
named in the test can be simplified.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from support.models import build, picture, stock_inputs, turn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from keepsight.models.renamed import EncoderOutput

FIRST = [turn("Look at this picture.", picture(1))]
SECOND = [*FIRST, turn("Fine.", role="assistant"), turn("And this?", picture(2, 160, 96))]


def greedy(model: Any, **inputs: Any) -> torch.Tensor:
    """First-step logits of stock `generate`."""
    out = model.generate(
        **inputs,
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.logits[0]


def cached_first() -> tuple[Any, Any, Any]:
    """A model, its processor and a stock cache of the first prompt."""
    model, processor = build("qwen3_vl")
    cache = DynamicCache(config=model.config)
    model.generate(**stock_inputs(processor, FIRST), past_key_values=cache, max_new_tokens=1)
    return model, processor, cache


def test_all_pixels_with_a_cache_crash() -> None:
    """Stepped around in engine.py: a chunk gets only its own features."""
    model, processor, cache = cached_first()
    with pytest.raises(ValueError, match="do not match"):
        greedy(model, **stock_inputs(processor, SECOND), past_key_values=cache)


def test_stale_rope_deltas_are_silently_wrong() -> None:
    """Stepped around in families/base.py `positions`: always explicit, computed from the prompt."""
    model, processor, cache = cached_first()
    follow = [*FIRST, turn("Fine.", role="assistant"), turn("Why?")]
    inputs = stock_inputs(processor, follow)
    true = greedy(model, **inputs)
    model.generate(**stock_inputs(processor, FIRST), past_key_values=cache, max_new_tokens=1)
    model.base_model.rope_deltas = torch.tensor([[999]])  # as another conversation leaves it
    ids = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    cache = DynamicCache(config=model.config)
    first = stock_inputs(processor, FIRST)
    model(**first, past_key_values=cache, use_cache=True)
    model.base_model.rope_deltas = torch.tensor([[999]])
    wrong = greedy(model, **ids, past_key_values=cache)
    assert float((wrong - true).abs().max()) > 1e-2


def test_generate_changes_the_features_it_is_given() -> None:
    """Stepped around in families/base.py `encoder_outputs`: a new wrapper on each call."""
    model, processor = build("qwen3_vl")
    inputs = stock_inputs(processor, FIRST)
    with torch.no_grad():
        output = model.get_image_features(
            inputs.pop("pixel_values"), inputs["image_grid_thw"], return_dict=True
        )
    holder = EncoderOutput(
        pooler_output=output.pooler_output, deepstack_features=output.deepstack_features
    )
    before = holder.pooler_output
    model.generate(
        **inputs,
        mm_encoder_outputs={"image": holder},
        num_return_sequences=2,
        do_sample=True,
        max_new_tokens=1,
    )
    assert holder.pooler_output is not before


def test_reset_linear_layers_are_not_like_new() -> None:
    """Stepped around in state.py `_reset_fixed`: new layers instead."""
    layer = LinearAttentionLayer()
    layer.update_recurrent_state(torch.ones(1, 2, 3, 3))
    layer.reset()
    assert layer.recurrent_states[0] is not None


def test_qwen_processors_need_torchvision_even_for_images() -> None:
    """Stepped around in partial_processor.py."""
    code = (
        "import importlib.abc, sys\n"
        "class Hide(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torchvision':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n.split('.')[0] == 'torchvision' else real(n, *a)\n"
        "from keepsight.models import loading\n"
        "import transformers\n"
        "path = loading.model_path('demo')\n"
        "try:\n"
        "    p = transformers.AutoProcessor.from_pretrained(path)\n"
        "    print('stock', hasattr(p, 'image_processor'))\n"
        "except Exception as error:\n"
        "    print('stock', False)\n"
        "p = loading.load_processor(path, None)\n"
        "print('ours', type(p).__name__, type(p.image_processor).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "stock False" in done.stdout, done.stdout + done.stderr
    assert "ours Qwen3VLProcessor Qwen2VLImageProcessorPil" in done.stdout, done.stderr


def split(kind: str) -> tuple[Any, dict[str, Any], Any, int]:
    """A model, stock inputs of a prompt with a picture in front, its true logits, and a cut."""
    model, processor = build(kind)
    inputs = stock_inputs(processor, [turn("What do you see?", picture(1))])
    with torch.no_grad():
        true = model(**inputs, use_cache=False, logits_to_keep=1).logits
    return model, inputs, true, inputs["input_ids"].shape[1] - 4


@torch.no_grad()
def test_short_type_ids_of_gemma_are_silently_wrong() -> None:
    """Stepped around in families/one_block.py `chunk_inputs`: type ids from the first token on."""
    model, processor = build("gemma3")
    messages = [turn("Look.", picture(1)), turn("Well.", role="assistant"), turn("?", picture(2))]
    inputs = stock_inputs(processor, messages)
    ids, types, pixels = (inputs[n] for n in ("input_ids", "token_type_ids", "pixel_values"))
    true = model(**inputs, use_cache=False, logits_to_keep=1).logits
    second = int(torch.nonzero(types[0].diff() == 1)[1]) + 1  # where the second picture begins
    found = {}
    for name in ("short", "whole"):
        cache = DynamicCache(config=model.config)
        first = {"token_type_ids": types[:, :second], "pixel_values": pixels[:1]}
        model(input_ids=ids[:, :second], past_key_values=cache, use_cache=True, **first)
        given = types[:, second:] if name == "short" else types
        found[name] = model(
            input_ids=ids[:, second:],
            token_type_ids=given,
            pixel_values=pixels[1:],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
    scale = float(true.abs().max())
    assert float((found["whole"] - true).abs().max()) < 1e-4 * scale
    assert float((found["short"] - true).abs().max()) > 1e-3 * scale


@torch.no_grad()
def test_ernie_without_routes_is_silently_wrong() -> None:
    """Stepped around in families/packed.py: routes are computed from the ids."""
    model, inputs, true, _ = split("ernie4_5_vl_moe")
    inputs.pop("moe_mm_token_type_ids")
    wrong = model(**inputs, use_cache=False, logits_to_keep=1).logits
    assert float((wrong - true).abs().max()) > 1e-3 * float(true.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
def test_omni_without_a_mask_is_silently_wrong(kind: str) -> None:
    """Stepped around in families/qwen_omni.py: positions are explicit, whatever the mask."""
    model, inputs, true, _ = split(kind)
    inputs.pop("attention_mask")
    model.base_model.rope_deltas = None
    wrong = model(**inputs, use_cache=False, logits_to_keep=1).logits
    assert float((wrong - true).abs().max()) > 1e-3 * float(true.abs().max())


def test_a_cache_of_the_whole_prompt_is_silently_wrong() -> None:
    """Stepped around in prefix/tree.py: a whole prompt is remembered with its last logits."""
    model, processor = build("llava")
    inputs = stock_inputs(processor, FIRST)
    true = greedy(model, **inputs)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**inputs, past_key_values=cache, use_cache=True)
    ids = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    wrong = greedy(model, **ids, past_key_values=cache)
    assert float((wrong - true).abs().max()) > 1e-3 * float(true.abs().max())
