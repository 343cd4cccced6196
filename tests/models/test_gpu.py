"""What needs accelerators: run where there are some, with `pytest -m gpu`.

The same promises as everywhere, on a device: warm equals cold to rounding, also with flash
attention, from a store, a session file and the host tier, under streams of the caller's own, and
with a model spread over several devices. `test_devices.py` asks most of this of a simulated one,
and `test_recorded.py` of recorded passes. The family suite runs there with
`KEEPSIGHT_TEST_ON=cuda:bfloat16 pytest tests/test_families*.py`.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from support.answers import cold, conversation, logits
from support.models import build, folder_of, picture, stock_inputs

import keepsight as ks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator here"),
]
KINDS = ("qwen3_vl", "qwen3_5", "sliding", "llava")


def close(one: torch.Tensor, other: torch.Tensor, near: float = 1e-4) -> bool:
    """Whether logits are equal to rounding; that of float32, unless said otherwise."""
    return bool((one - other).abs().max() <= near * other.abs().max())


def assert_warm_equals_cold(model: Any, processor: Any) -> None:
    with ks.wrap(model, processor) as vlm:
        for messages in conversation():
            assert close(logits(vlm, messages), cold(vlm, messages))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_one_device(kind: str, dtype: torch.dtype) -> None:
    model, processor = build(kind)
    assert_warm_equals_cold(copy.deepcopy(model).to("cuda", dtype), processor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="no flash_attn")
def test_with_flash_attention(kind: str) -> None:
    model, processor = build(kind)
    model = copy.deepcopy(model).to("cuda", torch.bfloat16)
    model.set_attn_implementation("flash_attention_2")
    assert_warm_equals_cold(model, processor)


@pytest.mark.parametrize("kind", ["qwen3_vl", "sliding", "llava"])
def test_recorded_passes_answer_as_the_modules_do(kind: str) -> None:
    model, processor = build(kind)
    model = copy.deepcopy(model).to("cuda", torch.bfloat16)
    with ks.wrap(model, processor) as vlm:
        for messages in conversation():
            asked = {"max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}
            given = stock_inputs(processor, messages)
            inputs = {name: tensor.to("cuda") for name, tensor in given.items()}
            ours = vlm.generate(**inputs, **asked, do_sample=False)
            theirs = model.generate(**inputs, **asked, do_sample=False)
            for step, (one, other) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
                assert close(one, other, 5e-2), step
                if int(one.argmax()) != int(other.argmax()):
                    break
        recorder = vlm.runtime.engine.decoder.recorder
        assert recorder is not None and recorder.replays > 30
        vlm.runtime.tree.check()


def on_cuda(kind: str) -> tuple[Any, Any]:
    model, processor = build(kind)
    return copy.deepcopy(model).to("cuda"), processor


def assert_from_store(parts: tuple[Any, Any], folder: Path, known: torch.Tensor) -> None:
    """The third prompt of the conversation is answered from the store alone, with these bits."""
    with ks.wrap(*parts, store=folder) as vlm:
        assert close(logits(vlm, conversation()[2]), known)
        assert vlm.runtime.engine.prefill_tokens == 0
        vlm.runtime.tree.check()


def filled(parts: tuple[Any, Any], folder: Path) -> torch.Tensor:
    """A store that has seen the conversation; the logits behind its third prompt."""
    with ks.wrap(*parts, store=folder) as vlm:
        known = [logits(vlm, messages) for messages in conversation()[:3]]
        vlm.flush()
        assert close(known[2], cold(vlm, conversation()[2]))
    return known[2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_gives_back_what_lay_on_a_device(kind: str, tmp_path: Path) -> None:
    parts = on_cuda(kind)
    assert_from_store(parts, tmp_path, filled(parts, tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_the_writer_waits_for_the_device(kind: str, tmp_path: Path) -> None:
    """Its thread has the default stream, the work is queued on another."""
    parts = on_cuda(kind)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        known = filled(parts, tmp_path)
    assert_from_store(parts, tmp_path, known)


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_file_goes_to_the_device(kind: str, tmp_path: Path) -> None:
    parts, question = on_cuda(kind), "And the colour of it?"
    with ks.wrap(*parts) as vlm:
        session = vlm.session()
        session.ask("What do you see in this picture here?", [picture(1)], max_new_tokens=3)
        path = session.save(tmp_path / "talk.keep")
        expected = session.ask(question, [picture(2)], max_new_tokens=4, do_sample=False)
    with ks.wrap(*parts) as vlm:
        resumed = vlm.resume(path)
        reply = resumed.ask(question, [picture(2)], max_new_tokens=4, do_sample=False)
        assert reply.tokens == expected.tokens and reply.usage.cached_tokens > 0
        assert not resumed.notes


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_tier_gives_back_what_lay_on_a_device(kind: str) -> None:
    with ks.wrap(*on_cuda(kind), cache_budget="48KiB") as vlm:
        first, again = ([logits(vlm, m) for m in conversation()] for _ in range(2))
        assert all(close(a, b) for a, b in zip(first, again, strict=True))
        told = vlm.stats()["prefix"]
        assert told["demotions"] > 0 and told["promotions"] > 0
        vlm.runtime.tree.check()


@pytest.mark.parametrize("kind", KINDS)
def test_callers_with_streams_of_their_own_follow_each_other(kind: str) -> None:
    with ks.wrap(*on_cuda(kind)) as vlm:
        known = cold(vlm, conversation()[1])
        for messages in conversation()[:2]:
            with torch.cuda.stream(torch.cuda.Stream()):
                vlm.prepare(messages)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert close(logits(vlm, conversation()[1]), known)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_over_several_devices(kind: str, tmp_path: Path) -> None:
    path, store = folder_of(kind, tmp_path / "model"), tmp_path / "store"
    asked = conversation()
    with ks.load(str(path), device_map="balanced", store=store) as vlm:
        known = [logits(vlm, messages) for messages in asked]
        assert all(close(k, cold(vlm, m)) for k, m in zip(known, asked, strict=True))
    for where in ("balanced", "cuda:0"):  # each layer's state goes where the layer is now
        with ks.load(str(path), device_map=where, store=store) as vlm:
            assert close(logits(vlm, asked[2]), known[2])
            assert vlm.runtime.engine.prefill_tokens == 0
