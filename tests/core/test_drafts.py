"""Guessed tokens change no bit: not of what is chosen, nor of what stays on the lane."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import cuts
from support.answers import Catch
from support.cuts import BOTH
from support.hostile import bounded
from support.models import build, picture, turn

import keepsight as ks
from keepsight import Together
from keepsight.core.decoding import drafts
from keepsight.core.decoding.drafts import (
    NOTHING,
    DraftCounts,
    EarlierAnswers,
    Guesses,
    PassCosts,
)
from keepsight.errors import InputError
from keepsight.prefix.prompt import Prompt

wrapped = functools.partial(cuts.wrapped, "qwen3_vl")
CHAT = [turn("Look at this. " * 4, picture(1)), turn("And now this one.", picture(2))]
HOWS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.3, "seed": 4},
    "penalised": {"do_sample": True, "seed": 2, "repetition_penalty": 1.3, "min_new_tokens": 12},
}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guess seven tokens at every step, mostly wrong ones, whatever it costs."""
    count = itertools.count()

    def guess(self: Guesses, generated: list[int]) -> list[int]:
        left = self._most - len(generated) - 1
        _, there = drafts._latest(self._all(generated), self._earlier)
        tokens = [*there.tolist()[: next(count) % 7], *range(20, 40)]
        return tokens[: max(0, min(7, left))]

    monkeypatch.setattr(Guesses, "next", guess)


def asked(vlm: ks.VLM, messages: Any, count: int = 24, **how: Any) -> tuple[ks.Reply, Catch]:
    seen = Catch()
    return vlm.chat(messages, max_new_tokens=count, logits_processor=[seen], **how), seen


def alike(one: Catch, other: Catch) -> bool:
    pairs = zip(one.rows, other.rows, strict=True)
    return one.tokens == other.tokens and all(torch.equal(a, b) for a, b in pairs)


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@BOTH
def test_no_bit_changes_whatever_is_guessed(dtype: torch.dtype, how: str, eager: None) -> None:
    with wrapped(dtype) as vlm, wrapped(dtype, drafts=False) as plain:
        for messages in (CHAT[:1], CHAT[:1], CHAT):
            reply, seen = asked(vlm, messages, **HOWS[how])
            wanted, one_by_one = asked(plain, messages, **HOWS[how])
            assert reply.tokens == wanted.tokens and alike(seen, one_by_one)
            assert reply.usage.drafted_tokens and not wanted.usage.drafted_tokens
        said = [*CHAT, {"role": "assistant", "content": reply.text}, turn("Go on.")]
        assert alike(asked(vlm, said, 3)[1], asked(plain, said, 3)[1])


def test_what_stays_on_the_lane_is_what_was_chosen(eager: None) -> None:
    """The next turn goes on from an answer that was given up in the middle of its guesses."""
    with wrapped() as vlm, wrapped(drafts=False) as plain:
        for count in range(1, 9):
            pieces = vlm.stream(CHAT[:1], max_new_tokens=30, **HOWS["sampled"])
            tokens = [next(pieces).token for _ in range(count)]
            pieces.close()
            assert tokens == asked(plain, CHAT[:1], count, **HOWS["sampled"])[0].tokens
        assert alike(asked(vlm, CHAT, 3)[1], asked(plain, CHAT, 3)[1])
        vlm.runtime.check()


@BOTH
def test_sequences_that_are_joined_while_one_guesses(dtype: torch.dtype, eager: None) -> None:
    chats = [[turn("Look. " * n, picture(n))] for n in (1, 2, 3)]
    how = HOWS["sampled"]
    with wrapped(dtype) as vlm, wrapped(dtype, drafts=False) as plain:
        with Together(vlm) as together:
            first = together.submit(chats[0], max_new_tokens=60, min_new_tokens=60, **how)
            pieces = iter(first)
            started = [next(pieces) for _ in range(3)]
            others = [together.submit(chat, max_new_tokens=9, **how) for chat in chats[1:]]
            replies = [other.result().tokens for other in others]
            tokens = [piece.token for piece in (*started, *pieces) if piece.token is not None]
        for chat, found in zip(chats[1:], replies, strict=True):
            assert plain.chat(chat, max_new_tokens=9, **how).tokens == found
        wanted = plain.chat(chats[0], max_new_tokens=60, min_new_tokens=60, **how)
        assert tokens == wanted.tokens


# -- what it saves ---------------------------------------------------------------------------------


def test_an_answer_given_again_takes_few_passes() -> None:
    with wrapped() as vlm:
        how = {"do_sample": False, "max_new_tokens": 40, "min_new_tokens": 40}
        first = vlm.chat(CHAT, **how)
        steps = vlm.stats()["engine"]["decode_steps"]
        # Whatever this machine does.
        vlm.runtime.engine._costs._times = {1: 1.0, 4: 1.05, 8: 1.1, 16: 1.2}
        again = vlm.chat(CHAT, **how)
        engine = vlm.stats()["engine"]
        assert again.tokens == first.tokens
        assert engine["decode_steps"] - steps <= 12
        assert again.usage.accepted_tokens >= 25
        assert engine["accepted_tokens"] >= again.usage.accepted_tokens


@pytest.mark.parametrize("kind", ["llama4", "qwen3_5"])
def test_models_whose_answers_are_equal_to_rounding_guess_nothing(kind: str) -> None:
    """Nor those with states of fixed size, from which nothing can be taken back."""
    with ks.wrap(*build(kind)) as vlm:
        replies = [vlm.chat(CHAT[:1], max_new_tokens=20) for _ in range(2)]
        assert not any(reply.usage.drafted_tokens for reply in replies)


def test_it_can_be_switched_off_and_nothing_else_is_taken() -> None:
    with pytest.raises(InputError, match="drafts="):
        wrapped(drafts="often").__enter__()


# -- whose words -----------------------------------------------------------------------------------


def test_words_of_another_tenant_are_never_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    latest = drafts._latest

    def watching(said: np.ndarray, where: np.ndarray) -> Any:
        looked.append(len(where) if where is not said else 0)
        return latest(said, where)

    monkeypatch.setattr(drafts, "_latest", watching)
    with wrapped() as vlm:
        vlm.chat(CHAT[:1], max_new_tokens=12, tenant="ada")
        looked.clear()
        vlm.chat(CHAT[:1], max_new_tokens=20, tenant="ben")
        vlm.chat(CHAT[:1], max_new_tokens=20)
        assert not any(looked)
        vlm.chat(CHAT[:1], max_new_tokens=20, tenant="ada")
        assert any(looked)


def test_what_is_forgotten_is_guessed_no_more() -> None:
    with wrapped() as vlm:
        answers = vlm.runtime.engine.answers
        for name in ("ada", "ben"):
            vlm.chat(CHAT[:1], max_new_tokens=4, tenant=name)
        assert len(answers.of("ada")) and len(answers.of("ben"))
        vlm.clear(tenant="ada")
        assert not len(answers.of("ada")) and len(answers.of("ben"))
        words = [turn("Only words.")]
        vlm.chat(words, max_new_tokens=4, tenant="ada")
        vlm.delete(words, tenant="ada")
        assert not len(answers.of("ada")) and len(answers.of("ben"))
        pieces = vlm.stream(CHAT[:1], max_new_tokens=4, tenant="ben")
        next(pieces)
        vlm.clear()
        list(pieces)
        assert not answers._by_tenant  # also what was under way


def test_answers_are_bounded() -> None:
    answers = EarlierAnswers()
    for number in range(drafts.MAX_TENANTS + 9):
        for _ in range(40):
            answers.add(str(number), Prompt(np.arange(900)), list(range(300)))
    assert len(answers._by_tenant) == drafts.MAX_TENANTS
    assert all(len(array) <= drafts.MAX_TOKENS for array in answers._by_tenant.values())


# -- the arithmetic --------------------------------------------------------------------------------


class Run:
    """A given text, decoded whatever a model would say; it counts passes and keeps time."""

    def __init__(
        self,
        text: list[int],
        prompt: list[int],
        prices: dict[int, float] | None = None,
        earlier: list[int] | None = None,
    ) -> None:
        self.tally, self.passes, self.now = DraftCounts(), 0, 0.0
        whole, before = Prompt(np.asarray(prompt, np.int64)), np.asarray(earlier or [], np.int64)
        guesses = Guesses(whole, before, PassCosts(), len(text), self.tally)
        generated = text[:1]
        while len(generated) < len(text):
            asked = guesses.next(generated)
            pairs = zip(asked, text[len(generated) :], strict=False)
            right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            seconds = (prices or {}).get(1 + len(asked), 1 + 0.02 * (1 + len(asked)))
            assert len(generated) + len(asked) < len(text)
            generated += text[len(generated) : len(generated) + right + 1]
            guesses.checked(len(asked), right, seconds)
            self.passes, self.now = self.passes + 1, self.now + seconds


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.data())
@bounded(80)
def test_each_right_guess_saves_a_pass(prompt: list[int], data: st.DataObject) -> None:
    text = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=60))
    earlier = data.draw(st.lists(st.integers(NOTHING, 3), max_size=60))
    run = Run(text, prompt, earlier=earlier)
    assert run.tally.accepted_tokens <= run.tally.drafted_tokens
    assert run.passes + run.tally.accepted_tokens == len(text) - 1


def test_repeated_text_is_several_times_as_fast_and_free_text_not_slower() -> None:
    noise = np.random.default_rng(3)
    story = noise.integers(0, 5000, 300).tolist()
    assert Run(story[40:260], story).now < len(story[40:260]) / 4
    free = noise.integers(0, 12, 3000).tolist()  # pairs come again and again, and mean nothing
    dear = {n: 1 + 0.5 * n for n in range(2, 17)}
    assert Run(free[900:], free[:900], {1: 1.0, **dear}).now < len(free[900:]) * 1.03


def test_nothing_is_guessed_for_pictures_nor_across_answers() -> None:
    said = np.asarray([7, 8])
    where = np.asarray([7, 8, 9, NOTHING, NOTHING, 4, 7, 8, NOTHING, 5])
    agreeing, following = drafts._latest(said, where)
    assert agreeing == 2 and following.tolist() == []
    assert drafts._latest(said, where[:4])[1].tolist() == [9]


def test_a_reply_that_ends_inside_of_guesses_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = build("qwen3_vl")
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
    guessed = list[int]()
    with ks.wrap(model, processor, drafts=False) as vlm:
        tokens = [piece.token for piece in vlm.stream(CHAT, **how)]
    end = next(token for place, token in enumerate(tokens) if place > 2 and token not in tokens[:3])

    def guess(self: Guesses, generated: list[int]) -> list[int]:
        guessed.append(len(generated))
        return tokens[len(generated) : len(generated) + 6]

    monkeypatch.setattr(Guesses, "next", guess)
    monkeypatch.setattr(model.generation_config, "eos_token_id", end)
    kept = list[Any]()
    for drafts_on in (True, False):
        with ks.wrap(model, processor, drafts=drafts_on) as vlm:
            reply = vlm.chat(CHAT, do_sample=False, max_new_tokens=12)
            assert len(reply.tokens) < 12 and bool(reply.usage.drafted_tokens) == drafts_on
            kept.append(vlm.stats()["prefix"])
    assert guessed and kept[0] == kept[1]
