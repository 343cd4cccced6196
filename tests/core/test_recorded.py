"""Short passes on an accelerator: the same code on a CPU, where a test plays its kernels.

`test_gpu.py` asks the same of an accelerator.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.models import build, picture, turn

import keepsight as ks
from keepsight.core.any_cut import AnyCut
from keepsight.core.decoding import forward, recorded
from keepsight.core.decoding.forward import LanguageModel
from keepsight.core.kernels import flash
from keepsight.core.kernels.attention import _plain
from keepsight.core.kernels.layers import is_quiet


def plain_at_the_end(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    count, length = query.shape[2], keys.shape[2]
    own, places = torch.arange(length - count, length)[:, None], torch.arange(length)
    seen = (places <= own) & (places > own - (window or length + 1))
    return _plain(query, keys, values, seen[None, None], scale=scale, enable_gqa=True)


def plain_in_a_pool(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    rows: int,
    scale: float | None,
    window: int | None,
    **others: Any,
) -> torch.Tensor:
    found = []
    for i, length in enumerate(lengths.tolist()):
        own = query[i * rows : (i + 1) * rows].transpose(0, 1)[None]
        at = int(starts[i])
        seen, held = (x[at : at + length].transpose(0, 1)[None] for x in (keys, values))
        found.append(plain_at_the_end(own, seen, held, scale, window)[0].transpose(0, 1))
    return torch.cat(found)


def record(self: Any, run: Any, memory: Any) -> None:
    def replay() -> None:
        self.logits = run()

    self.replay = replay


@pytest.fixture
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models without our kernels, whose lanes are read in place and whose passes are recorded."""
    monkeypatch.setattr(flash, "fits", lambda query, values: True)
    monkeypatch.setattr(flash, "at_the_end", plain_at_the_end)
    monkeypatch.setattr(flash, "in_a_pool", plain_in_a_pool)
    monkeypatch.setattr(recorded._Recording, "record", record)
    monkeypatch.setattr(recorded, "_shared_memory", lambda device: None)
    monkeypatch.setattr(forward, "_DEVICE", "cpu")
    monkeypatch.setattr(recorded.RecordedPasses, "can", staticmethod(quiet))
    monkeypatch.setattr(recorded, "_LEAST", 64)
    find = AnyCut._why_not
    monkeypatch.setattr(AnyCut, "_why_not", lambda self, e: find(self, e) or "as on an accelerator")


def quiet(model: Any, shape: Any) -> bool:
    return is_quiet(list(model.modules()))


def conversation() -> list[list[Any]]:
    first = [turn("What do you see in this picture here?", picture(1))]
    second = [*first, turn("A pattern.", role="assistant"), turn("And the colour of it, please?")]
    other = [turn("Which of these two is larger?", picture(2))]
    return [first, second, other, second]


def decoder_of(vlm: Any) -> LanguageModel:
    found: LanguageModel = vlm.runtime.engine.decoder
    return found


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize("kind", ["qwen3_vl", "sliding", "llava"])
def test_recorded_passes_answer_as_stock_does(kind: str) -> None:
    model, processor = build(kind)
    with ks.wrap(model, processor) as vlm:
        for messages in conversation():
            inputs = vlm.inputs(messages)
            wanted = model.generate(**inputs, max_new_tokens=12, do_sample=False)
            count = inputs["input_ids"].shape[1]
            reply = vlm.chat(messages, max_new_tokens=12, do_sample=False)
            assert reply.tokens == wanted[0, count:].tolist()
        recorder = decoder_of(vlm).recorder
        assert recorder is not None and recorder.replays > 30
        assert vlm.stats()["engine"]["exactness"] == "rounding"
        vlm.runtime.tree.check()


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize("keys", [700, 2500, 100_000])
def test_sequences_share_recorded_passes_and_make_way_for_each_other(keys: int) -> None:
    model, processor = build("qwen3_vl")
    asked = [[turn(f"Question {i} about it, in a few words?", picture(i))] for i in range(6)]
    with ks.wrap(model, processor) as vlm:
        alone = [vlm.chat(one, max_new_tokens=20, do_sample=False).tokens for one in asked]
    with ks.wrap(model, processor) as vlm:
        vlm.chat(asked[0], max_new_tokens=2)
        decoder_of(vlm)._room = keys * vlm.runtime.engine.bytes_per_token[0]
        decoder_of(vlm).forget()
        with ThreadPoolExecutor(6) as threads:
            asking = [
                threads.submit(vlm.chat, one, max_new_tokens=20, do_sample=False) for one in asked
            ]
            assert [one.result().tokens for one in asking] == alone
        again = [vlm.chat(one, max_new_tokens=20, do_sample=False).tokens for one in asked]
        assert again == alone
        recorder = decoder_of(vlm).recorder
        assert recorder is not None and recorder.replays > 30


@pytest.mark.usefixtures("as_on_an_accelerator")
def test_a_model_that_cannot_be_recorded_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, run: Any, memory: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    model, processor = build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        wanted = vlm.chat(conversation()[0], max_new_tokens=6, do_sample=False).tokens
    monkeypatch.setattr(recorded._Recording, "record", fails)
    with ks.wrap(model, processor) as vlm:
        assert vlm.chat(conversation()[0], max_new_tokens=6, do_sample=False).tokens == wanted
        assert decoder_of(vlm).recorder is None


@pytest.mark.usefixtures("as_on_an_accelerator")
def test_what_is_attached_or_changed_later_is_not_passed_by() -> None:
    """A recording runs no Python: a hook must end it, and changed weights must reach it."""
    model, processor = build("qwen3_vl")
    asked, heard = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}, list[int]()
    last = model.model.language_model.layers[-1]
    with ks.wrap(model, processor) as vlm:
        plain = vlm.chat(conversation()[0], **asked).tokens
        assert decoder_of(vlm).recorder is not None
        handle = last.register_forward_hook(lambda *of: heard.append(1))
        assert vlm.chat(conversation()[0], **asked).tokens == plain
        assert len(heard) >= 8 and decoder_of(vlm).recorder is None
        handle.remove()
        assert vlm.chat(conversation()[1], **asked).tokens
        assert decoder_of(vlm).recorder is not None
        with torch.no_grad():
            last.mlp.down_proj.weight.mul_(-3.0)
        changed = vlm.chat(conversation()[0], **asked).tokens
    with ks.wrap(model, processor) as vlm:
        assert vlm.chat(conversation()[0], **asked).tokens == changed != plain
