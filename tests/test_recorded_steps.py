"""Decoded steps that run as a list of operations give the bits of the model's own code."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import ALL, built, in_both, picture, turn

import keepsight as ks
from keepsight.core.decoding import recorded_steps
from keepsight.core.kernels import recording
from keepsight.core.kernels.recording import CannotRecord, Recording, record
from keepsight.core.kernels.script import RecordedStep, StepSize, scripted
from keepsight.models.private import FUNCTION, PrivateApi
from keepsight.scheduler import Together

RECORDED = ("qwen3_vl", "sliding", "gemma3_sliding", "cohere2_vision", "glm4v", "idefics3", "llava")
LONG = [turn("Look at this. " + "word " * 500, picture(1))]  # over a block of keys
TALK = [[turn("What is it?", picture(1))], LONG, [turn("And these?", picture(2), picture(3))]]
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


@functools.cache
def build(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Models that no other file has used: some tests leave a hook or a method on theirs, and such
    a model is not recorded."""
    return built(ALL[kind], dtype)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the first step of each size, and trust it unseen."""
    monkeypatch.setattr(recorded_steps, "_AFTER", 1)
    monkeypatch.setattr(recorded_steps, "_CHECKED", 0)


@contextmanager
def by_the_model() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_steps, "_AFTER", 10**9)
        yield


def steps(vlm: ks.VLM) -> dict[StepSize, RecordedStep]:
    kernels = vlm.runtime.finding.kernels
    assert kernels is not None
    return kernels.steps


def logits(vlm: ks.VLM, ids: torch.Tensor, count: int = 10) -> torch.Tensor:
    """Of each token that is decoded."""
    seen: list[torch.Tensor] = []

    def catch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores.clone())
        return scores

    vlm.generate(
        input_ids=ids, logits_processor=[catch], max_new_tokens=count, min_new_tokens=count
    )
    return torch.stack(seen)


def some_ids(count: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(10, 400, (rows, count), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize(("kind", "dtype"), in_both(RECORDED, ("qwen3_vl", "gemma3_sliding")))
def test_the_bits_are_those_of_the_model(kind: str, dtype: torch.dtype, at_once: None) -> None:
    """One sequence across the end of a block, several together, and guesses of several tokens."""
    model, processor = build(kind, dtype)
    with by_the_model(), ks.wrap(model, processor) as vlm:
        wanted = [logits(vlm, some_ids(n)) for n in (40, 507, 700)]
        replies = [vlm.chat(messages, **GREEDY).tokens for messages in TALK]
        assert not vlm.stats()["engine"]["recorded_steps"]
    with ks.wrap(model, processor) as vlm:
        found = [logits(vlm, some_ids(n)) for n in (40, 507, 700)]
        assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))
        assert [vlm.chat(messages, **GREEDY).tokens for messages in TALK] == replies
        with Together(vlm) as together:
            waiting = [together.submit(messages, **GREEDY) for messages in TALK]
            assert [one.result().tokens for one in waiting] == replies
        ran = {size for size, step in steps(vlm).items() if step.ran}
        assert (1, 1, 0) in ran and any(rows > 1 for rows, *_ in ran), steps(vlm)
        assert vlm.stats()["engine"]["recorded_steps"] == sum(s.ran for s in steps(vlm).values())


def test_rows_of_a_batch(at_once: None) -> None:
    model, processor = build("qwen3_vl")
    ids = some_ids(33, 4)
    with by_the_model(), ks.wrap(model, processor) as vlm:
        wanted = logits(vlm, ids)
    with ks.wrap(model, processor) as vlm:
        assert torch.equal(logits(vlm, ids), wanted)
        assert steps(vlm)[4, 1, 0].ran


def test_guesses_of_several_tokens(at_once: None) -> None:
    model, processor = build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        long = GREEDY | {"max_new_tokens": 36, "min_new_tokens": 36}
        first = vlm.chat(TALK[0], **long).tokens
        for _ in range(3):  # whatever passes cost on this machine
            vlm.runtime.engine.costs._times = {1: 1.0, 4: 1.05, 8: 1.1, 16: 1.2}
            assert vlm.chat(TALK[0], **long).tokens == first
        assert any(step.ran for (_, count, _), step in steps(vlm).items() if count > 1)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("qwen3_vl_moe", "depends on values"), ("qwen3_5_moe", "depends on values")],
)
def test_what_cannot_be_recorded_is_run_by_the_model(kind: str, why: str, at_once: None) -> None:
    model, processor = build(kind)
    with by_the_model(), ks.wrap(model, processor) as vlm:
        wanted = logits(vlm, some_ids(40))
    with ks.wrap(model, processor) as vlm:
        assert torch.equal(logits(vlm, some_ids(40)), wanted)
        assert why in {step.given_up for step in steps(vlm).values()}.pop()
        assert not vlm.stats()["engine"]["recorded_steps"]


def test_it_is_recorded_after_some_steps_and_looked_at() -> None:
    with ks.wrap(*build("qwen3_vl"), drafts=False) as vlm:
        vlm.chat(TALK[0], **GREEDY)
        assert steps(vlm)[1, 1, 0].run is None
        vlm.chat(TALK[2], **GREEDY)
        known = steps(vlm)[1, 1, 0]
        assert known.run is not None and known.agreed == 2 and known.ran


def test_long_steps_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's part of them is small."""
    monkeypatch.setattr(recorded_steps, "_AFTER", 3)
    monkeypatch.setattr(recorded_steps, "_LONG", 1e-9)
    with ks.wrap(*build("qwen3_vl")) as vlm:
        vlm.chat(TALK[0], **GREEDY)
        assert "takes so long" in steps(vlm)[1, 1, 0].given_up


@pytest.mark.parametrize("what", ["logits", "keys", "error", "inputs", "written"])
def test_a_list_that_gives_other_bits_is_dropped(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_steps, "_AFTER", 1)

    def wrong(recording: Any) -> Callable[[Any], torch.Tensor]:
        right = scripted(recording)

        def run(given: Any) -> torch.Tensor:
            if what == "error":
                right(given)  # whatever it wrote by then
                raise RuntimeError("no such operation")
            found = right(given)
            if what == "inputs":
                given["next inputs", 0, 0].add_(1e-3)
            if what == "written":
                given["written", 0, 1].add_(1e-3)
            if what == "keys":
                given["k", 0, 1][:, :, given["places", 0, (0, False)]] += 1e-3
            return found + 1e-6 if what == "logits" else found

        return run

    hybrid = what not in ("logits", "keys")
    model, processor = build("qwen3_5" if hybrid else "qwen3_vl")
    with by_the_model(), ks.wrap(model, processor) as vlm:
        wanted = logits(vlm, some_ids(40))
    monkeypatch.setattr(recorded_steps, "scripted", wrong)
    with ks.wrap(model, processor) as vlm:
        assert torch.equal(logits(vlm, some_ids(40)), wanted)
        said = {"error": "no such operation"}.get(what, "other bits")
        assert said in steps(vlm)[1, 1, 32 if hybrid else 0].given_up


def test_hooks_that_only_hand_out_what_passes_keep_nothing_from_being_recorded(
    at_once: None,
) -> None:
    """Transformers leaves such hooks on a model that was once asked for its hidden states."""
    model, processor = copy.deepcopy(build("qwen3_vl"))
    with torch.no_grad():
        model(input_ids=some_ids(5), output_hidden_states=True)
    assert model.get_decoder().layers[0]._forward_hooks
    with by_the_model(), ks.wrap(*build("qwen3_vl")) as vlm:
        wanted = logits(vlm, some_ids(40))
    with ks.wrap(model, processor) as vlm:
        assert torch.equal(logits(vlm, some_ids(40)), wanted)
        assert steps(vlm)[1, 1, 0].ran


def test_a_hook_that_comes_later_is_asked_at_each_step(at_once: None) -> None:
    with ks.wrap(*built(ALL["qwen3_vl"])) as vlm:
        first = vlm.chat(TALK[0], **GREEDY)
        assert steps(vlm)[1, 1, 0].ran
        asked: list[int] = []
        layer = vlm.model.get_decoder().layers[0]
        handle = layer.register_forward_pre_hook(lambda module, args: asked.append(1))
        vlm.chat(TALK[2], **GREEDY)
        assert len(asked) >= GREEDY["max_new_tokens"]
        assert "has a hook" in steps(vlm)[1, 1, 0].given_up
        handle.remove()
        assert vlm.chat(TALK[0], **GREEDY).tokens == first.tokens
        vlm.chat(LONG, **GREEDY)
        assert steps(vlm)[1, 1, 0].ran


def test_changed_weights_are_read(at_once: None) -> None:
    """In place, as training does; packed copies are made anew, and so is the list."""
    model, processor = built(ALL["qwen3_vl"])
    with ks.wrap(model, processor, pack=True) as vlm:
        before = logits(vlm, some_ids(40))
        with torch.no_grad():
            model.get_decoder().layers[0].mlp.up_proj.weight.mul_(1.5)
        found = logits(vlm, some_ids(40))
        assert steps(vlm)[1, 1, 0].ran
    with by_the_model(), ks.wrap(model, processor, pack=True) as vlm:
        assert torch.equal(found, logits(vlm, some_ids(40))) and not torch.equal(found, before)


def test_weights_that_were_touched_are_packed_again() -> None:
    """Their values are those of before, so nothing else says that copies were dropped."""
    model, processor = built(ALL["qwen3_vl"])
    with ks.wrap(model, processor, pack=True) as vlm:
        before = logits(vlm, some_ids(40))
        packed = vlm.stats()["engine"]["packed_bytes"]
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0)
        assert torch.equal(logits(vlm, some_ids(40)), before)
        assert vlm.stats()["engine"]["packed_bytes"] == packed > 0


def test_without_torchs_own_function_the_model_runs(
    at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PrivateApi.found
    monkeypatch.setattr(
        PrivateApi,
        "found",
        lambda self, owner=None: None if self is FUNCTION else real(self, owner),
    )
    with ks.wrap(*build("qwen3_vl")) as vlm:
        vlm.chat(TALK[0], **GREEDY)
        assert "cannot make a function from a list" in steps(vlm)[1, 1, 0].given_up


# -- recordings ----------------------------------------------------------------------------------

WEIGHT = torch.arange(12.0).reshape(3, 4)
X = ("x", 0, None)


def test_a_recording_has_what_is_of_use() -> None:
    place = torch.zeros(2, 4)
    given = {X: torch.ones(2, 3), ("place", 0, None): place}

    def step() -> torch.Tensor:
        dead = torch.arange(100).masked_fill_(torch.arange(100) > 5, 0)
        assert len(dead) == 100
        y = given[X] @ WEIGHT
        view = place[1:]
        view.copy_(y[:1])
        left, right = y.split(2, dim=1)
        return torch.cat([right, left, view.expand(2, 4)], dim=1)

    with torch.inference_mode():
        recording = record(step, given)
        assert [one is WEIGHT for one in recording.weights.values()] == [True]
        assert not any("arange" in str(one.function) for one in recording.operations)
        run = scripted(recording)
        other = {X: torch.randn(2, 3), ("place", 0, None): torch.zeros(2, 4)}
        found, wanted_place = run(other), other["place", 0, None].clone()
        given.update(other)
        place = torch.zeros(2, 4)
        assert torch.equal(found, step()) and torch.equal(wanted_place, place)
        assert wanted_place.any()


def names_of(recording: Recording) -> list[str]:
    return [str(one.function).split(".")[1] for one in recording.operations]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_changes_nothing_is_left_out(dtype: torch.dtype) -> None:
    """A norm as models write it, between shapes of shapes."""
    x = torch.randn(2, 6, dtype=dtype)

    def step() -> torch.Tensor:
        y = (given[X] * 2).to(dtype)[0:2].view(1, 2, 6).reshape(-1, 6).unsqueeze(0)
        wide = y.float()
        y = y * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6).to(dtype)
        return y.transpose(0, 1).contiguous().view(2, 6)[:, 1:].reshape(-1)

    given = {X: x}
    with torch.inference_mode():
        recording = record(step, given)
        found = [one for one in names_of(recording) if one not in ("to", "_to_copy")]
        assert found == [
            *("mul", "view", "mul", "sum", "div", "add", "rsqrt", "mul"),
            *("view", "slice", "reshape"),
        ]
        other = {X: torch.randn(2, 6, dtype=dtype)}
        found_now = scripted(recording)(other)
        given.update(other)
        assert torch.equal(found_now, step())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_that_is_no_sum_is_left_as_it_is(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of one step may agree by chance; in few digits nearly all do."""
    if dtype is torch.float32:
        monkeypatch.setattr(recording, "_SUM", lambda x, *how: x.double().sum(*how).float())
        recording._torch_makes_them_so.cache_clear()
    given = {X: torch.ones(2, 3, dtype=dtype)}
    with torch.inference_mode():
        found = record(lambda: (given[X] + 0.1).pow(2).mean(-1, keepdim=True), given)
    assert names_of(found) == ["add", "pow", "mean"]
    assert found.weights == {}
    recording._torch_makes_them_so.cache_clear()


def test_shapes_of_what_is_given_are_made_anew() -> None:
    """It may be longer next time; a shape of a step's own memory follows what is written there."""
    given = {X: torch.ones(2, 3)}

    def step() -> torch.Tensor:
        y = given[X].reshape(-1)[0:6].view(-1) * 2
        y.view(-1)[:2].zero_()
        return y.view(-1)

    with torch.inference_mode():
        recording = record(step, given)
        assert names_of(recording) == ["reshape", "slice", "view", "mul", "slice", "zero_"]
        given[X] = torch.randn(2, 3)
        assert torch.equal(scripted(recording)(given), step())


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x * float(x.sum()),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: x * x.tolist()[0][0],
        lambda x: x * int(x.numpy()[0, 0]),
        lambda x: x + torch.rand(2, 3),
        lambda x: torch.nn.functional.dropout(x, 0.5),
        lambda x: WEIGHT.add_(x.sum()),
        lambda x: x * len(x.nonzero()),
    ],
)
def test_what_a_list_would_not_do_again_is_not_recorded(step: Callable[..., torch.Tensor]) -> None:
    x = torch.ones(2, 3)
    with torch.inference_mode(), pytest.raises(CannotRecord):
        record(lambda: step(x), {X: x})


def test_steps_that_differ_are_told_apart() -> None:
    def of(length: int, noted: float = 1.0) -> Any:
        x = torch.ones(2, 3)
        return record(lambda: x * torch.tensor(noted) + torch.arange(length).sum(), {X: x})

    with torch.inference_mode():
        assert of(5).equals(of(5))
        assert not of(5).equals(of(6))
        assert not of(5).equals(of(5, 2.0))


@pytest.mark.parametrize(
    ("kind", "dtype"), in_both(("qwen3_5", "lfm2_vl", "minicpmv4_6"), ("lfm2_vl",))
)
def test_states_of_fixed_size(kind: str, dtype: torch.dtype, at_once: None) -> None:
    """Through all blocks of a rule and over the end of its chunk, on from snapshots too."""
    model, processor = build(kind, dtype)
    going_on = [*TALK[0], {"role": "assistant", "content": "A cat."}, turn("And now?")]
    talks = [*TALK, going_on, [*going_on[:-1], turn("Where?")]]
    with by_the_model(), ks.wrap(model, processor) as vlm:
        wanted = [logits(vlm, some_ids(n), 80) for n in (40, 61, 507)]
        replies = [vlm.chat(messages, **GREEDY).tokens for messages in talks]
    with ks.wrap(model, processor) as vlm:
        found = [logits(vlm, some_ids(n), 80) for n in (40, 61, 507)]
        assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))
        assert [vlm.chat(messages, **GREEDY).tokens for messages in talks] == replies
        given_up = {step.given_up for step in steps(vlm).values()}
        assert given_up == {""} and vlm.stats()["engine"]["recorded_steps"] > 200, steps(vlm)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_warmed_up_steps_are_recorded_before_anyone_waits(kind: str) -> None:
    model, processor = build(kind)
    with by_the_model(), ks.wrap(model, processor) as vlm:
        wanted = vlm.chat(TALK[0], **GREEDY).tokens
    with ks.wrap(model, processor) as vlm:
        before = vlm.stats()["engine"]
        vlm.runtime.warm_up()
        made, after = steps(vlm), vlm.stats()["engine"]
        assert all(step.agreed == 2 and not step.given_up for step in made.values()), made
        alone = {(1, 1), (1, 4), (1, 8), (1, 16)}
        assert {size[:2] for size in made} == ({(1, 1)} if kind == "qwen3_5" else {*alone, (8, 1)})
        assert len(made) == (4 if kind == "qwen3_5" else 5)  # one for each block of a grid
        assert all(after[name] == before[name] for name in ("prefill_tokens", "decode_steps"))
        assert not vlm.stats()["prefix"]["bytes"]
        ran = after["recorded_steps"]
        reply = vlm.chat(TALK[0], **GREEDY)
        assert reply.tokens == wanted
        assert vlm.stats()["engine"]["recorded_steps"] == ran + GREEDY["max_new_tokens"] - 1


def test_warming_up_leaves_what_has_no_steps_to_record_alone() -> None:
    model, processor = build("qwen3_vl")
    with ks.wrap(model, processor, grain=16) as vlm:
        vlm.runtime.warm_up()
        assert vlm.chat(TALK[0], **GREEDY).tokens
