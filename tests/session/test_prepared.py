"""A prepared beginning answers as the whole conversation computed afresh."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.common import in_threads
from support.models import build, picture, stock_inputs, turn

import keepsight as ks
from keepsight.errors import InputError, MessagesError, TowerRan, UnsupportedInput

KINDS = ("qwen3_vl", "qwen2_vl", "qwen2_5_vl", "gemma3")
SHOWN = [turn("What is it?", picture(1)), turn("A pattern.", role="assistant")]
QUERIES = [
    [turn("Where is it?")],
    [turn("And this one?", picture(2, 160, 96))],
    [turn("One.", picture(2)), turn("Yes.", role="assistant"), turn("Compare both of them.")],
]
HOW: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
DICT: dict[str, Any] = {**HOW, "return_dict_in_generate": True, "output_logits": True}


def whole(processor: Any, query: Any) -> dict[str, torch.Tensor]:
    return stock_inputs(processor, [*SHOWN, *query])


def afresh(model: Any, processor: Any, inputs: Any, **how: Any) -> Any:
    with ks.wrap(model, processor, **how) as vlm:
        return vlm.generate(**inputs, **DICT)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_equal_the_whole_conversation_afresh(kind: str) -> None:
    """Also where `generate` is given the query alone."""
    model, processor = build(kind)
    with (
        ks.wrap(model, processor) as vlm,
        vlm.prefix(SHOWN) as prefix,
        ks.wrap(model, processor) as other,
        other.prefix(SHOWN) as same,
    ):
        assert prefix.report.computed_tokens == prefix.tokens
        encoded = vlm.stats()["features"]["encoded"]
        for number, query in enumerate(QUERIES):
            inputs, alone = whole(processor, query), stock_inputs(processor, query)
            wanted = afresh(model, processor, inputs)
            found = prefix.generate(**inputs, **DICT)
            assert torch.equal(found.sequences, wanted.sequences)
            assert all(map(torch.equal, found.logits, wanted.logits))
            assert found.usage.cached_tokens >= prefix.tokens - 1
            new = found.sequences[:, inputs["input_ids"].shape[1] :]
            reply = prefix.chat(query, **HOW)
            assert reply.tokens == new[0].tolist() and reply.usage.images_encoded == 0
            assert vlm.stats()["features"]["encoded"] - encoded <= number + (number == 1)
            found = same.generate(**alone, **DICT)
            start = alone["input_ids"].shape[1]
            assert torch.equal(found.sequences[:, :start], alone["input_ids"])
            assert torch.equal(found.sequences[:, start:], new)
            assert all(map(torch.equal, found.logits, wanted.logits))
            with pytest.raises(UnsupportedInput, match="position_ids"):
                same.generate(**alone, position_ids=torch.arange(start)[None], **HOW)
        assert torch.equal(wanted.sequences, model.generate(**inputs, **HOW))


def test_held_while_it_lives_and_prepared_again_when_forgotten(vlm: Any) -> None:
    prefix = vlm.prefix(SHOWN)
    vlm.runtime.tree.evict(1 << 40)
    vlm.runtime.check()
    assert prefix.ask("Where?", **HOW).usage.cached_tokens >= prefix.tokens - 1
    vlm.clear()
    first = prefix.ask("Where?", **HOW)
    assert (first.usage.cached_tokens, first.usage.images_encoded) == (0, 1)
    assert prefix.ask("Why?", **HOW).usage.cached_tokens >= prefix.tokens - 1
    other = vlm.prefix(SHOWN)
    other.close()
    vlm.runtime.tree.evict(1 << 40)
    assert prefix.ask("Why?", **HOW).usage.cached_tokens >= prefix.tokens - 1
    with pytest.raises(InputError, match="closed"):
        other.ask("Why?", **HOW)
    with pytest.raises(MessagesError, match="expected a list of messages"):
        prefix.chat(None)
    del prefix, other
    vlm.stats(), vlm.runtime.refresh()
    with vlm.runtime.lock:
        vlm.runtime.tree.evict(1 << 40)
        assert vlm.runtime.tree.device.nbytes == 0
    vlm.runtime.check()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_copy_releases_what_a_prefix_holds(vlm: Any, copied: Callable[[Any], object]) -> None:
    with vlm.prefix([turn("Look.", picture(1))]) as prefix:
        held = vlm.stats()["prefix"]["held_bytes"]
        with pytest.raises(InputError, match="cannot be copied"):
            copied(prefix)
        gc.collect()
        vlm.ask("Hm?", max_new_tokens=1)
        assert vlm.stats()["prefix"]["held_bytes"] == held > 0


def test_a_deleted_picture_is_gone_while_a_prefix_is_open() -> None:
    with ks.wrap(*build("qwen3_vl")) as vlm, vlm.prefix(SHOWN) as prefix:
        wanted = prefix.ask("Where?", **HOW)
        assert wanted.usage.images_encoded == 0
        vlm.delete(picture(1))
        told = vlm.stats()["prefix"]
        assert told["held_bytes"] == 0 and told["bytes"] == told["lane_bytes"] == 0
        vlm.runtime.check()
        with vlm.blindfold(), pytest.raises(TowerRan):
            prefix.ask("Where?", **HOW)
        again = prefix.ask("Where?", **HOW)
        assert again.tokens == wanted.tokens
        assert (again.usage.images_encoded, again.usage.images_reused) == (1, 0)
        vlm.delete(picture(1))
        vlm.prepare(SHOWN)  # others may remember it again
        prefix.ask("Where?", **HOW)
        assert vlm.stats()["prefix"]["held_bytes"] > 0, "its own snapshots are held again"
        found = prefix.generate(**stock_inputs(vlm.processor, QUERIES[0]), **DICT)
        assert found.usage.images_encoded == 0 and found.usage.cached_tokens
        vlm.runtime.check()
    assert vlm.stats()["prefix"]["held_bytes"] == 0


def test_saved_and_loaded_elsewhere(tmp_path: Path) -> None:
    model, processor = build("qwen2_5_vl")
    with ks.wrap(model, processor) as vlm, vlm.prefix(SHOWN) as prefix:
        wanted = prefix.chat(QUERIES[2], **HOW).tokens
        path = prefix.save(tmp_path / "shown.keep")
    with ks.wrap(model, processor) as vlm, vlm.blindfold(), vlm.prefix(path) as prefix:
        assert prefix.report.cached_tokens >= prefix.tokens - 1 and not prefix.notes
        vlm_encoded = vlm.stats()["features"]["encoded"]
        assert vlm_encoded == 0 and prefix.ask("Where?", **HOW).usage.cached_tokens
    with ks.wrap(model, processor) as vlm, vlm.prefix(str(path)) as prefix:
        assert prefix.chat(QUERIES[2], **HOW).tokens == wanted
        assert vlm.resume(path).ask("Where?", **HOW).usage.cached_tokens


def test_a_template_that_does_not_go_on_is_answered_right() -> None:
    model, processor = build("qwen3_vl")
    counting = "{{ messages | length }} " + processor.chat_template
    with ks.wrap(model, processor, chat_template=counting) as vlm, vlm.prefix(SHOWN) as prefix:
        found = prefix.chat(QUERIES[0], **HOW)
        assert found.usage.cached_tokens < prefix.tokens // 2 and not found.usage.images_encoded
    with ks.wrap(model, processor, chat_template=counting) as vlm:
        assert vlm.chat([*SHOWN, *QUERIES[0]], **HOW).tokens == found.tokens


def test_shared_between_threads() -> None:
    model, processor = build("qwen3_vl")
    wanted, found = {}, {}
    with ks.wrap(model, processor) as vlm:
        for number, query in enumerate(QUERIES):
            wanted[number] = vlm.chat([*SHOWN, *query], **HOW).tokens
    with ks.wrap(model, processor) as vlm, vlm.prefix(SHOWN) as prefix:

        def work(number: int) -> None:
            found[number] = prefix.chat(QUERIES[number], **HOW).tokens

        in_threads(*(partial(work, number) for number in wanted))
        assert vlm.stats()["features"]["encoded"] == 3
        assert "".join(piece.text for piece in prefix.stream(QUERIES[0], **HOW)) is not None
    assert found == wanted


def test_tools_belong_to_the_prefix(tmp_path: Path) -> None:
    model, processor = build("qwen3_vl")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + processor.chat_template
    query = QUERIES[0]
    with ks.wrap(model, processor, chat_template=template) as vlm:
        wanted = [vlm.chat([*SHOWN, *query], tools=t, **HOW).tokens for t in (tools, [])]
    with ks.wrap(model, processor, chat_template=template) as vlm:
        prefix = vlm.prefix(SHOWN, tools=tools)
        found = prefix.chat(query, **HOW)
        assert found.tokens == wanted[0] and found.usage.cached_tokens >= prefix.tokens - 1
        assert prefix.chat(query, tools=[], **HOW).tokens == wanted[1]
        with pytest.raises(UnsupportedInput, match="with tools or template options"):
            prefix.save(tmp_path / "tools.keep")


def test_sound_in_a_prefix(tmp_path: Path) -> None:
    model, processor = build("qwen3_omni_moe_thinker")
    noise = torch.randn(16000, generator=torch.Generator().manual_seed(1)).numpy()
    clip = {"type": "audio", "audio": {"array": noise, "sampling_rate": 16000}}
    shown = [{"role": "user", "content": [clip]}, turn("A noise.", role="assistant")]
    with ks.wrap(model, processor) as vlm:
        wanted = vlm.chat([*shown, *QUERIES[0]], **HOW).tokens
    with ks.wrap(model, processor) as vlm, vlm.prefix(shown) as prefix:
        encoded = vlm.stats()["features"]["encoded"]
        assert prefix.chat(QUERIES[0], **HOW).tokens == wanted
        assert vlm.stats()["features"]["encoded"] == encoded
        with pytest.raises(UnsupportedInput, match="audio"):
            prefix.save(tmp_path / "sound.keep")
