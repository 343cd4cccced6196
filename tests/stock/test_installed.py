"""`model.generate` of anybody's code, unmodified, on a model that Keepsight is installed in."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.common import in_threads
from support.models import build, picture, stock_inputs, turn
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    StoppingCriteria,
    TextIteratorStreamer,
)
from transformers.generation import GenerateDecoderOnlyOutput

import keepsight as ks
from keepsight.core.decoding import sampling as decoding
from keepsight.errors import InputError, ModelError, TowerRan, UnsupportedInput

KINDS = ("qwen3_vl", "qwen2_vl", "gemma3", "llava")
FIRST = [turn("What is it?", picture(1))]
NEXT = [*FIRST, turn("A pattern.", role="assistant"), turn("And this?", picture(2))]
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture
def parts() -> Iterator[tuple[Any, Any]]:
    model, processor = build("qwen3_vl")
    yield model, processor
    assert "generate" not in vars(model), "nothing is left behind"


def script(model: Any, processor: Any, messages: Any, **options: Any) -> Any:
    """What anybody's code does."""
    torch.manual_seed(7)
    return model.generate(**stock_inputs(processor, messages), **{**GREEDY, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_stock_and_the_tower_is_not_called(kind: str) -> None:
    model, processor = build(kind)
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 20}
    wanted = [script(model, processor, m, **o) for m in (FIRST, NEXT) for o in ({}, sampled)]
    with ks.installed(model, processor) as vlm:
        found = [script(model, processor, m, **o) for m in (FIRST, NEXT) for o in ({}, sampled)]
        assert all(map(torch.equal, found, wanted))
        with vlm.blindfold():
            assert torch.equal(script(model, processor, NEXT), wanted[2])
            assert vlm.report().cached_tokens and not vlm.report().notes
            with pytest.raises(TowerRan):
                script(model, processor, [turn("What?", picture(3))])
    assert "generate" not in vars(model) and model.generate.__func__ is type(model).generate
    assert torch.equal(script(model, processor, NEXT), wanted[2])


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "llava"])
def test_padding_without_a_mask_is_seen_as_stock_sees_it(kind: str) -> None:
    model, processor = build(kind)
    left = stock_inputs(processor, FIRST)
    del left["attention_mask"]
    for name, filled in (("input_ids", 550), ("mm_token_type_ids", 0), ("token_type_ids", 0)):
        if name in left:
            left[name] = torch.nn.functional.pad(left[name], (3, 0), value=filled)
    hole = {**left, "input_ids": left["input_ids"].clone()}
    hole["input_ids"][0, -2] = 550
    for ends in (2, [2, 550]):  # a token that ends answers is no padding
        options = {**GREEDY, "pad_token_id": 550, "eos_token_id": ends, "output_logits": True}
        options["return_dict_in_generate"] = True
        wanted, holed = (model.generate(**given, **options) for given in (left, hole))
        with ks.installed(model, processor) as vlm:
            found = [vlm.generate(**left, **options), model.generate(**left, **options)]
            assert vlm.report().cached_tokens
            assert torch.equal(model.generate(**hole, **options).sequences, holed.sequences)
            if ends == 2:
                with pytest.raises(UnsupportedInput, match="attention_mask"):
                    vlm.generate(**hole, **options)
        for one in found:
            assert torch.equal(one.sequences, wanted.sequences)
            near = 1e-4 * wanted.logits[0].abs().max()
            torch.testing.assert_close(one.logits[0], wanted.logits[0], rtol=0, atol=float(near))


def test_settings_come_from_wherever_stock_takes_them(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    inputs = stock_inputs(processor, FIRST)
    ids, length = inputs.pop("input_ids"), inputs["attention_mask"].shape[1]
    config = copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=3, return_dict_in_generate=True)
    model.generation_config.max_new_tokens = 2
    ways: list[Any] = [((ids, config), {}), ((ids,), {"max_length": length + 5})]
    wanted = [model.generate(*given, **inputs, **options) for given, options in ways]
    with ks.installed(model, processor):
        found = [model.generate(*given, **inputs, **options) for given, options in ways]
    assert type(found[0]) is type(wanted[0])
    assert torch.equal(found[0].sequences, wanted[0].sequences)
    assert torch.equal(found[1], wanted[1])


OPTIONS: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "use_cache": {"use_cache": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_not_ours_goes_to_stock_with_a_note(name: str, parts: tuple[Any, Any]) -> None:
    model, processor = parts
    options = OPTIONS[name]
    wanted = script(model, processor, FIRST, **options)
    with ks.installed(model, processor) as vlm:
        found = script(model, processor, FIRST, **options)
        assert name in vlm.report().notes[0]
    assert type(found) is type(wanted)
    assert torch.equal(*(getattr(one, "sequences", one) for one in (found, wanted)))


def test_assisted_decoding_goes_to_stock(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    text = [turn("A question of words alone.")]
    wanted = script(model, processor, text)
    ways: dict[str, Any] = {
        "assistant_model": copy.deepcopy(model),
        "prompt_lookup_num_tokens": 2,
    }
    with ks.installed(model, processor) as vlm:
        for name, way in ways.items():
            assert torch.equal(script(model, processor, text, **{name: way}), wanted)
            assert name in vlm.report().notes[0]


def test_errors_are_those_of_stock(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    wrong: list[dict[str, Any]] = [
        {"no_such": 1},
        {"num_return_sequences": 3},
        {"num_beams": 0},
        {"synced_gpus": True},
    ]

    def message(options: dict[str, Any]) -> str:
        with pytest.raises(Exception, match=r".") as caught:
            script(model, processor, FIRST, **options)
        return f"{type(caught.value).__name__}: {caught.value}"

    wanted = [message(options) for options in wrong]
    with ks.installed(model, processor):
        assert [message(options) for options in wrong] == wanted
        with pytest.raises(TypeError, match="positional"):
            model.generate(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, no_such=1)


def test_dicts_streamers_and_processors(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    options: dict[str, Any] = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "logits_processor": LogitsProcessorList([MinLengthLogitsProcessor(900, 2)]),
    }
    wanted = script(model, processor, FIRST, **options)
    with ks.installed(model, processor) as vlm:
        found = script(model, processor, FIRST, **options)
        assert isinstance(found, GenerateDecoderOnlyOutput)
        assert torch.equal(found.sequences, wanted.sequences)
        for ours, stock in zip(found.scores, wanted.scores, strict=True):
            assert torch.allclose(ours, stock, atol=1e-4)
        assert vlm.report().notes == ["past_key_values are not returned: Keepsight keeps its own"]
        streamer = TextIteratorStreamer(processor.tokenizer, skip_prompt=True, timeout=60)
        config = copy.deepcopy(model.generation_config)
        config.return_dict_in_generate = True
        thread = threading.Thread(
            target=script,
            args=(model, processor, FIRST),
            kwargs={"streamer": streamer, "generation_config": config},
        )
        thread.start()
        text = "".join(streamer)
        thread.join()
    new = wanted.sequences[0, stock_inputs(processor, FIRST)["input_ids"].shape[1] :]
    assert text == processor.tokenizer.decode(new)


@pytest.mark.parametrize("kind", ["qwen3_vl", "internvl"])
def test_going_on_with_the_cache_of_a_reply(kind: str) -> None:
    """There is none: stock would take the placeholders for words, without an error."""
    model, processor = build(kind)
    inputs = stock_inputs(processor, FIRST)
    with ks.installed(model, processor) as vlm:
        reply = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
        ids = torch.cat([reply.sequences, torch.tensor([[15, 16]])], dim=1)
        more = {"input_ids": ids, "past_key_values": reply.past_key_values}
        with pytest.raises(InputError, match="Keepsight's replies hold no past_key_values"):
            model.generate(**more, **GREEDY)
        pictures = {n: t for n, t in inputs.items() if n.startswith(("pixel", "image"))}
        with vlm.blindfold():
            found = model.generate(**more, **pictures, **GREEDY)
            assert vlm.report().cached_tokens >= reply.sequences.shape[1] - 1
    wanted = model.generate(input_ids=ids, **pictures, **GREEDY)
    if kind == "internvl":  # M-RoPE's stock code wants to be told where pictures stand
        assert torch.equal(found, wanted)


class _AfterThree(StoppingCriteria):
    """As scripts have them: one bool for all rows."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        self.calls += 1
        return self.calls >= 3


def test_criteria_that_say_so_in_one_bool(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    wanted = script(model, processor, FIRST, stopping_criteria=[_AfterThree()])
    with ks.installed(model, processor) as vlm:
        found = script(model, processor, FIRST, stopping_criteria=[_AfterThree()])
        assert torch.equal(found, wanted) and not vlm.report().notes


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_the_callers_that_is_empty_still_needs_no_tower(kind: str) -> None:
    model, processor = build(kind)
    wanted = script(model, processor, FIRST, past_key_values=DynamicCache(config=model.config))
    with ks.installed(model, processor) as vlm:
        script(model, processor, FIRST)
        with vlm.blindfold():
            cache = DynamicCache(config=model.config)
            assert torch.equal(script(model, processor, FIRST, past_key_values=cache), wanted)
        assert cache.get_seq_length() == wanted.shape[1] - 1
        assert "past_key_values" in vlm.report().notes[0] and len(vlm.report().notes) == 1


def test_samples_share_one_prefill(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    options = {"do_sample": True, "num_return_sequences": 3, "temperature": 5.0}
    wanted = script(model, processor, FIRST, **options)
    with ks.installed(model, processor) as vlm:
        found = script(model, processor, FIRST, **options)
        assert found.shape == wanted.shape and len({tuple(row.tolist()) for row in found}) > 1
        length = stock_inputs(processor, FIRST)["input_ids"].shape[1]
        computed = vlm.stats()["engine"]["prefill_tokens"]
        assert computed < 2 * length and vlm.stats()["features"]["encoded"] == 1
        own = vlm.generate(**stock_inputs(processor, FIRST), **GREEDY | options, seed=3)
        assert own.shape == wanted.shape and len({tuple(row.tolist()) for row in own}) > 1


def test_samples_are_those_of_stock_cold_and_warm(parts: tuple[Any, Any]) -> None:
    """Whichever row comes first, and also where some have ended."""
    model, processor = parts
    ends = list(range(0, 576, 8))  # likely enough that rows end at different steps
    options = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 12}
    options |= {"eos_token_id": ends, "pad_token_id": 0}

    def sampled(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        return model.generate(**stock_inputs(processor, FIRST), **options), torch.rand(1)

    wanted = [sampled(seed) for seed in range(4)]
    lengths = {int((row != 0).sum()) for rows, _ in wanted for row in rows}
    assert len(lengths) > 3
    with ks.installed(model, processor) as vlm:
        for state in ("cold", "warm"):
            for seed, (rows, after) in enumerate(wanted):
                if state == "cold":
                    vlm.clear()
                found, then = sampled(seed)
                assert torch.equal(found, rows), (state, seed)
                assert torch.equal(then, after)  # stock's own next random number


@pytest.mark.parametrize("kept", [1, 1 << 27])
def test_rows_that_come_late_draw_what_they_would_have_drawn(
    monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Also where nothing could be kept for them."""
    monkeypatch.setattr(decoding, "_KEPT", kept)
    likely = torch.softmax(torch.randn(12, 3, 700), -1)  # of each step and row
    torch.manual_seed(5)
    wanted = [torch.multinomial(rows, 1)[:, 0].tolist() for rows in likely]
    for order in ("rows", "steps"):
        torch.manual_seed(5)
        draws, found = decoding.Draws(3), [[0] * 3 for _ in likely]
        every = [(step, row) for step in range(12) for row in range(3)]
        for step, row in every if order == "steps" else sorted(every, key=lambda at: at[1]):
            found[step][row] = int(draws.pick(row, likely[step][row : row + 1]))
        assert found == wanted


def test_packages_are_read_in_chunks_by_stock() -> None:
    for kind in ("qwen3_vl", "llava"):  # with levels behind the first layer, and without
        model, processor = build(kind)
        messages = [turn("These?", picture(1), picture(2))]
        how: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True, **GREEDY}
        wanted = model.generate(**stock_inputs(processor, messages), **how).logits
        with ks.wrap(model, processor) as vlm:
            found = model.generate(**vlm.inputs(messages), prefill_chunk_size=5, **how).logits
        for one, other in zip(wanted, found, strict=True):
            assert float((one - other).abs().max()) < 1e-4 * float(one.abs().max())


def test_nested_other_options_and_after_errors(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    with pytest.raises(ZeroDivisionError), ks.installed(model, processor, drafts=False) as vlm:
        with ks.installed(model) as inner, ks.installed(model, processor, drafts=False):
            assert inner is vlm
        with pytest.raises(ModelError, match="other options"):
            ks.install(model, processor, drafts=True)
        assert "generate" in vars(model)
        script(model, processor, FIRST)
        raise ZeroDivisionError
    assert "generate" not in vars(model)
    with pytest.raises(ModelError, match="not installed"):
        ks.uninstall(model)
    assert ks.install(model, processor).report.__self__ is not vlm
    kept = model.generate
    ks.uninstall(model)
    assert torch.equal(
        kept(**stock_inputs(processor, FIRST), **GREEDY), script(model, processor, FIRST)
    )


def test_a_generate_of_somebody_elses(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    model.generate = lambda **options: None
    try:
        with (
            pytest.raises(ModelError, match="somebody else replaced generate"),
            ks.installed(model, processor),
        ):
            pass
    finally:
        del model.generate


def test_copied_pickled_trained_and_moved() -> None:
    model, processor = build("qwen3_vl")  # one without hooks that cannot be pickled
    wanted = script(model, processor, FIRST)
    with ks.installed(model, processor) as vlm:
        script(model, processor, FIRST)
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(saved, weights_only=False),
        ]
        for other in copies:
            assert other.generate.__self__ is other
            assert torch.equal(script(other, processor, FIRST), wanted)
        with ks.installed(copies[0], processor):
            assert torch.equal(script(copies[0], processor, FIRST), wanted)
        model.train()
        try:
            script(model, processor, FIRST)
            assert "training" in vlm.report().notes[0]
        finally:
            model.eval()
        model.double()
        try:
            script(model, processor, FIRST)
            assert vlm.report().cached_tokens == 0
        finally:
            model.float()
        assert torch.equal(script(model, processor, FIRST), wanted)


def test_names_and_stores_are_those_of_a_wrap(parts: tuple[Any, Any], tmp_path: Path) -> None:
    model, processor = parts
    store = str(tmp_path / "store")
    with ks.wrap(model, processor, store=store) as vlm:
        vlm.chat(FIRST, **GREEDY)
        named = vlm.runtime.refresh()
        vlm.flush()
    with ks.installed(model, processor, store=store) as vlm:
        assert vlm.runtime.refresh() == named and not vlm.runtime.weights.is_private
        with vlm.blindfold():
            script(model, processor, FIRST)
        assert vlm.report().cached_tokens
        script(model, processor, NEXT)
        vlm.flush()
    with ks.wrap(model, processor, store=store) as vlm, vlm.blindfold():
        assert vlm.chat(NEXT, **GREEDY).usage.cached_tokens


def test_several_threads(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    wanted = [script(model, processor, m, num_beams=b) for m in (FIRST, NEXT) for b in (1, 2)]
    inputs = [(stock_inputs(processor, m), b) for m in (FIRST, NEXT) for b in (1, 2)]
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        tensors, beams = inputs[number]
        with ks.installed(model, processor) as vlm:
            found[number] = model.generate(**tensors, **GREEDY, num_beams=beams)
            assert bool(vlm.report().notes) == (beams > 1)

    in_threads(*(partial(work, number) for number in range(4)))
    assert all(torch.equal(found[n], wanted[n]) for n in range(4))
