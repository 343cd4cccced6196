"""Short ends of several prompts are read in one pass, with the bits that each has alone."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from models import build, picture, turn

import keepsight as ks
from keepsight.core import engine
from keepsight.core.decoding.joint_prefill import SHORT
from keepsight.core.decoding.lane_batch import LaneBatch
from keepsight.core.decoding.lane_layer import LaneLayer
from keepsight.core.decoding.lanes import restore
from keepsight.core.trials.graph_trial import equal, states_of
from keepsight.core.turn import Turn
from keepsight.prefix.match import Match
from keepsight.scheduler import Together

GREEDY: dict[str, Any] = {"do_sample": False}
KINDS = ("qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe", "sliding", "llava", "gemma3_sliding")
QUESTIONS = (
    "What is it?",
    "Which colours, and where are they?",
    "How many?",
    "And its size, then?",
)


def known() -> list[list[Any]]:
    """Conversations of which only the last question will be new."""
    return [[turn("Look at this.", picture(1 + number))] for number in range(len(QUESTIONS))]


def asked() -> list[list[Any]]:
    return [
        [*chat[:1], {"role": "assistant", "content": "I see."}, turn(question)]
        for chat, question in zip(known(), QUESTIONS, strict=True)
    ]


def ask(together: Together, chats: list[list[Any]], **options: Any) -> list[Any]:
    """The replies to some chats that all came before anything was computed."""
    options = {"max_new_tokens": 6, **GREEDY, **options}
    with together._runtime.lock:
        tickets = [together.submit(chat, **options) for chat in chats]
    return [ticket.result() for ticket in tickets]


def states(vlm: ks.VLM, chat: list[Any]) -> list[torch.Tensor]:
    """Keys, values and logits after a prompt: remembered ones where there are any."""
    one = Turn(vlm.runtime, partial(vlm.render, chat), dict(GREEDY))
    run = one.ready()
    found = [*states_of(run.lane), run.last_logits().clone()]
    one.finish()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_each_has_the_bits_that_it_has_alone(kind: str, dtype: torch.dtype) -> None:
    with ks.wrap(*build(kind, dtype)) as vlm:
        replies = [vlm.chat(chat, max_new_tokens=6, **GREEDY) for chat in asked()]
        wanted = [states(vlm, chat) for chat in asked()]
        if not vlm.runtime.finding.kernels:
            pytest.skip(f"boundaries hold here: {vlm.runtime.finding.why}")
    with ks.wrap(*build(kind, dtype)) as vlm, Together(vlm) as together:
        ask(together, known())
        before = together.stats()
        found = ask(together, asked())
        now = together.stats()
        assert now["joint"] > before["joint"] and now["chunks"] <= before["chunks"] + 2
        assert [reply.tokens for reply in found] == [reply.tokens for reply in replies]
        computed = vlm.runtime.engine.prefill_tokens
        for chat, its in zip(asked(), wanted, strict=True):
            assert equal(states(vlm, chat), its)
        assert vlm.runtime.engine.prefill_tokens == computed, "all of it was remembered"
        vlm.runtime.tree.check()


def test_seeds_hold_and_usage_counts_what_was_new() -> None:
    options = {"do_sample": True, "temperature": 1.5, "seed": 7}
    with ks.wrap(*build("qwen3_vl")) as vlm:
        for chat in known():
            vlm.chat(chat, max_new_tokens=6, **GREEDY)
        wanted = [vlm.chat(chat, max_new_tokens=6, **options) for chat in asked()]
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm) as together:
        ask(together, known())
        found = ask(together, asked(), **options)
        assert together.stats()["joint"]
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        assert one.usage.cached_tokens == other.usage.cached_tokens > 0
        assert one.report.milliseconds["prefill"] > 0


def test_equal_prompts_are_computed_once() -> None:
    computed = []
    for chats in (asked(), [*asked(), *asked()]):
        with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm) as together:
            ask(together, known())
            before = vlm.runtime.engine.prefill_tokens
            replies = [reply.tokens for reply in ask(together, chats)]
            computed.append(vlm.runtime.engine.prefill_tokens - before)
    assert computed[0] == computed[1] > 0 and replies[:4] == replies[4:]


@pytest.mark.parametrize("what", ["pictures", "long"])
def test_what_goes_alone(what: str) -> None:
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm) as together:
        ask(together, known())
        chats = asked()
        for number, chat in enumerate(chats):
            more = "word " * SHORT if what == "long" else "And this?"
            pictures = [picture(20 + number)] if what == "pictures" else []
            chat[-1] = turn(more, *pictures)
        ask(together, chats)
        assert together.stats()["joint"] == 0


def test_a_pass_that_fails_leaves_each_to_go_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with ks.wrap(*build("qwen3_vl")) as vlm:
        wanted = [vlm.chat(chat, max_new_tokens=6, **GREEDY).tokens for chat in asked()]
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm) as together:
        vlm.runtime.warm_up()  # the trial
        ask(together, known())
        whole, rows = LaneBatch.prefill, []

        def broken(batch: LaneBatch) -> torch.Tensor:
            rows.append(len(batch.runs))
            whole(batch)
            raise torch.OutOfMemoryError("too much")

        monkeypatch.setattr(LaneBatch, "prefill", broken)
        assert [reply.tokens for reply in ask(together, asked())] == wanted
        assert len(rows) == 1 and together.stats()["joint"] == 0
        vlm.runtime.tree.check()
        assert vlm.runtime.tree.held_bytes() == 0


def test_other_bits_together_are_seen_and_nothing_is_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = LaneBatch.prefill
    with ks.wrap(*build("qwen3_vl")) as vlm:
        wanted = [vlm.chat(chat, max_new_tokens=6, **GREEDY).tokens for chat in asked()]

    def rounded(batch: LaneBatch) -> torch.Tensor:
        logits = whole(batch)
        return logits.nextafter(logits + 1)

    monkeypatch.setattr(LaneBatch, "prefill", rounded)
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm) as together:
        ask(together, known())
        assert [reply.tokens for reply in ask(together, asked())] == wanted
        assert together.stats()["joint"] == 0 and vlm.runtime.engine.kernels.joins is False


def test_after_a_failed_pass_they_are_read_apart_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm) as together:
        vlm.runtime.warm_up()  # the trial
        ask(together, known())
        with monkeypatch.context() as patch:
            patch.setattr(LaneBatch, "prefill", None)
            ask(together, asked())
        later = [[*chat[:2], turn("What else?")] for chat in asked()]
        ask(together, later)
        assert together.stats()["joint"] == 0
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 61)
        ask(together, [[*chat[:2], turn("What now?")] for chat in asked()])
        assert together.stats()["joint"] > 0


def test_prompts_that_are_known_whole_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed for them, so none waits for a decode step of the one before it."""
    monkeypatch.setattr("keepsight.scheduler.scheduler.WITHOUT_PASSES", 60.0)
    with ks.wrap(*build("qwen3_vl")) as vlm, Together(vlm) as together:
        wanted = [reply.tokens for reply in ask(together, asked())]
        before = together.stats()
        assert [reply.tokens for reply in ask(together, asked())] == wanted
        now = together.stats()
        assert now["chunks"] == before["chunks"] and now["joint"] == before["joint"]
        # The scheduler may have begun with the first before it saw the others.
        assert now["steps"] - before["steps"] <= max(map(len, wanted))


@pytest.mark.parametrize("lost", [False, True])
def test_a_whole_prompt_is_taken_over(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another turn computed all of it meanwhile; one token is computed if its logits are lost."""
    chat = asked()[0]
    with ks.wrap(*build("qwen3_vl")) as vlm:
        wanted = states(vlm, chat)
    with ks.wrap(*build("qwen3_vl")) as vlm:
        late = Turn(vlm.runtime, partial(vlm.render, chat), dict(GREEDY))
        late.begin()
        states(vlm, chat)
        before = vlm.runtime.engine.prefill_tokens
        if lost:
            monkeypatch.setattr(Match, "logits", property(lambda match: None))
        else:  # they lie elsewhere until they are loaded
            load, loaded = vlm.runtime.prefixes.load, list[int]()
            logits = Match.logits
            monkeypatch.setattr(
                vlm.runtime.prefixes, "load", lambda *given: loaded.append(1) or load(*given)
            )
            monkeypatch.setattr(
                Match, "logits", property(lambda match: logits.fget(match) if loaded else None)
            )
        list(late.work(shared=True))
        found = [*states_of(late.run.lane), late.run.last_logits().clone()]
        assert equal(found, wanted)
        assert vlm.runtime.engine.prefill_tokens - before == int(lost)
        late.finish()
        assert vlm.runtime.tree.held_bytes() == 0


def test_a_take_over_that_fails_releases_what_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = asked()[0]
    with ks.wrap(*build("qwen3_vl")) as vlm:
        wanted = states(vlm, chat)
    with ks.wrap(*build("qwen3_vl")) as vlm:
        late = Turn(vlm.runtime, partial(vlm.render, chat), dict(GREEDY))
        late.begin()
        states(vlm, chat)
        late.start()
        with monkeypatch.context() as patch:
            patch.setattr(engine, "restore", broken_restore)
            with pytest.raises(torch.OutOfMemoryError):
                late.start(shared=True)
        list(late.work(shared=True))
        assert equal([*states_of(late.run.lane), late.run.last_logits().clone()], wanted)
        late.finish()
        assert vlm.runtime.tree.held_bytes() == 0
        vlm.runtime.tree.check()


def broken_restore(lane: Any, match: Match, start: int) -> None:
    """Memory that ends half way."""
    restore(lane, match, start)
    raise torch.OutOfMemoryError("too much")


@pytest.mark.parametrize("back", ["before decoding", "at the end"])
def test_what_other_weights_computed_is_not_remembered_for_these(
    back: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that change under a joint pass and change back."""
    model, processor = build("qwen3_vl")
    weight = model.model.language_model.layers[0].mlp.down_proj.weight
    before, whole, changes = weight.detach().clone(), LaneBatch.prefill, []

    def changed(batch: LaneBatch) -> torch.Tensor:
        if not changes:
            with torch.no_grad():
                weight.mul_(1.5)
        changes.append(len(batch.runs))
        found = whole(batch)
        if back == "before decoding":  # no look at the weights in between
            restore()
        return found

    def restore() -> None:
        with torch.no_grad():
            weight.copy_(before)

    with ks.wrap(model, processor) as vlm:
        wanted = [states(vlm, chat) for chat in asked()]
    try:
        with ks.wrap(model, processor) as vlm, Together(vlm) as together:
            vlm.runtime.warm_up()
            ask(together, known())
            monkeypatch.setattr(LaneBatch, "prefill", changed)
            ask(together, asked())
            assert changes
            restore()
            for chat, its in zip(asked(), wanted, strict=True):
                assert equal(states(vlm, chat), its)
    finally:
        restore()


def test_a_lane_that_cannot_grow_keeps_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that suffices for the keys of more tokens, but not for their values."""
    layer, some = LaneLayer(), torch.ones(1, 2, 5, 4)
    layer.append(some, some)
    made: list[int] = []
    zeros = torch.Tensor.new_zeros

    def scarce(like: torch.Tensor, *size: int) -> torch.Tensor:
        made.append(1)
        if len(made) == 2:
            raise torch.OutOfMemoryError("too much")
        return zeros(like, *size)

    more = torch.ones(1, 2, 600, 4)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", scarce)
        with pytest.raises(torch.OutOfMemoryError):
            layer.append(more, more)
    layer.append(more, more)
    assert layer.length == 605 and bool(layer.keys.all()) and bool(layer.values.all())
