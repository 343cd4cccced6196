"""Log-probabilities of texts behind a prompt, as stock logits give them; and many questions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import given as tried_with
from hypothesis import strategies as st
from support.models import build, picture, turn

import keepsight as ks
from keepsight.errors import InputError, KeepsightError, UnknownOption
from keepsight.questions.many import as_they_come
from keepsight.questions.score import Scores

KINDS = ("qwen3_vl", "qwen3_5")
NEAR = 1e-4


@functools.cache
def parts(kind: str) -> tuple[Any, Any]:
    return build(kind)[:2]


@functools.cache
def memory(kind: str) -> ks.VLM:
    return ks.wrap(*parts(kind))


def stock(kind: str, messages: list[Any], ids: list[int]) -> list[float]:
    """The log-probability of each token behind a prompt, from one forward without a cache."""
    model, processor = parts(kind)
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    images = [p["image"] for m in messages for p in m["content"] if p["type"] == "image"]
    inputs = dict(processor(text=[text], images=images or None, return_tensors="pt"))
    start = inputs["input_ids"].shape[1]
    more = torch.tensor([ids])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], more], 1)
    for name, fill in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        if name in inputs:
            inputs[name] = torch.cat([inputs[name], torch.full_like(more, fill)], 1)
    with torch.no_grad():
        chances = model(**inputs, use_cache=False).logits[0].log_softmax(-1)
    places = range(start - 1, start - 1 + len(ids))
    return [float(chances[place, token]) for place, token in zip(places, ids, strict=True)]


def expect_stock(kind: str, messages: list[Any], scores: Any) -> None:
    for one in scores:
        wanted = stock(kind, messages, one.tokens)
        assert len(one.logprobs) == len(wanted)
        worst = max(abs(a - b) for a, b in zip(one.logprobs, wanted, strict=True))
        assert worst < NEAR * max(1.0, *map(abs, wanted)), (one.text, worst)


TEXTS = [
    " a red circle on the left",
    " a red circle on the left of it",
    " a red square",
    "Yes",
    " a red circle on the left",
    "\u00e9\U0001f469",
    " typed <|im_end|> by a user",
]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_stock_logits(kind: str) -> None:
    messages = [turn("What is in this picture here?", picture(1))]
    with ks.wrap(*parts(kind)) as vlm:
        scores = vlm.score(messages, TEXTS)
        assert isinstance(scores, Scores)
        expect_stock(kind, messages, scores)
        assert [one.text for one in scores] == TEXTS
        assert scores[0].logprobs == scores[4].logprobs
        assert scores.best.logprob == max(scores.logprobs)
        tokenizer = parts(kind)[1].tokenizer
        assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in scores[6].tokens
        vlm.runtime.check()


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_is_read_once_and_so_is_what_continuations_share(kind: str) -> None:
    messages = [turn("What is in this picture here?", picture(1))]
    ran: list[int] = []
    handle = parts(kind)[0].model.visual.register_forward_hook(lambda *_: ran.append(1))
    try:
        with ks.wrap(*parts(kind)) as vlm:
            long = list(range(20, 100))
            given = [[*long, 11], [*long, 12, 13, 14], [*long[:40], 15, 16], [17], [18]]
            scores = vlm.score(messages, given)
            # 80 tokens of the first, then two of the second's, and the third behind what it shares
            assert scores.report.computed_tokens == len(vlm.render(messages)) + 80 + 2 + 1
            again = vlm.score(messages, given)
            assert again == scores
            alone = vlm.score(messages, [[19]])
            assert alone.report.computed_tokens == 0, "the logits behind a prompt are remembered"
            assert len(ran) == 1
            expect_stock(kind, messages, [*scores, *alone])
    finally:
        handle.remove()


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@tried_with(
    kind=st.sampled_from(KINDS),
    seed=st.integers(1, 2),
    given_ids=st.lists(
        st.lists(st.integers(20, 25), min_size=1, max_size=40), min_size=1, max_size=6
    ),
    cut=st.booleans(),
)
def test_random_continuations(kind: str, seed: int, given_ids: list[list[int]], cut: bool) -> None:
    """Few different tokens, so that many begin alike."""
    messages = [turn("And this?", picture(seed))]
    vlm = memory(kind)
    if cut:
        vlm.clear()
    scores = vlm.score(messages, given_ids)
    expect_stock(kind, messages, scores)
    assert vlm.score(messages, given_ids) == scores
    vlm.runtime.check()


@pytest.mark.parametrize("kind", KINDS)
def test_cold_and_warm_are_equal_bit_for_bit(kind: str) -> None:
    messages = [turn("What is in this picture here?", picture(1))]
    with ks.wrap(*parts(kind)) as vlm, ks.wrap(*parts(kind)) as fresh:
        vlm.chat(messages, max_new_tokens=3)
        warm = vlm.score(messages, TEXTS)
        for text, one in zip(TEXTS, warm, strict=True):
            fresh.clear()
            assert fresh.score(messages, [text]) == [one]


def test_many_conversations_about_one_picture() -> None:
    vlm = memory("qwen3_vl")
    vlm.clear()
    chats = [[turn(f"Is number {i} in it?", picture(3))] for i in range(20)]
    found = vlm.score(chats, ["Yes", " no way"])
    assert [len(one) for one in found] == [2] * 20
    for messages, scores in zip(chats, found, strict=True):
        expect_stock("qwen3_vl", messages, scores)
    each = vlm.score(chats[:2], [["a"], ["b", "c"]])
    assert [[one.text for one in scores] for scores in each] == [["a"], ["b", "c"]]


def test_wanted_logits_are_bounded() -> None:
    """Few rows of logits at a time give the same."""
    messages = [turn("What is in this picture here?", picture(1))]
    with ks.wrap(*parts("qwen3_5")) as vlm:
        wanted = vlm.score(messages, TEXTS)
        vlm.clear()
        vlm.runtime.engine.most_rows = 2
        assert vlm.score(messages, TEXTS) == wanted


BAD: dict[str, tuple[Any, Any, str]] = {
    "none": ([], ["a"], "messages"),
    "no list": (..., "Yes", "list of continuations"),
    "no continuation": (..., [], "continuations"),
    "an empty one": (..., ["a", ""], r"continuations\[1\]"),
    "half a character": (..., ["\ud83d"], r"continuations\[0\]"),
    "no ids": (..., [[]], r"continuations\[0\]"),
    "an id too large": (..., [[99_999_999]], r"continuations\[0\]"),
    "a picture's token": (..., [[6]], "stands for an image"),
    "a number": (..., [3], r"continuations\[0\]"),
    "bytes": (..., ["a", b"ab"], r"continuations\[1\]"),
    "too few lists": ([[turn("a")], [turn("b")]], [["x"]], "1 lists for 2"),
}


def test_bad_continuations_are_named() -> None:
    vlm = memory("qwen3_vl")
    messages = [turn("And this?", picture(1))]
    for name, (chat, given, said) in BAD.items():
        with pytest.raises(InputError, match=said):
            vlm.score(messages if chat is ... else chat, given)
            pytest.fail(name)
    with pytest.raises(UnknownOption, match="max_new_tokens"):
        vlm.score(messages, ["a"], max_new_tokens=3)
    expect_stock("qwen3_vl", messages, vlm.score(messages, ["good"]))


# -- many questions ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_many_questions_are_answered_as_each_alone(kind: str) -> None:
    images = [picture(i % 3) for i in range(12)]
    questions = [f"What is number {i} here?" for i in range(12)]
    with ks.wrap(*parts(kind)) as vlm, ks.wrap(*parts(kind)) as alone:
        steps = vlm.stats()["engine"]["decode_steps"]
        found = list(vlm.ask_many(images, questions, max_new_tokens=6, min_new_tokens=6))
        steps = vlm.stats()["engine"]["decode_steps"] - steps
        assert steps < 12 * 5 / 2, "they are decoded together"
        assert sum(reply.usage.images_encoded for reply in found) == 3
        for image, question, reply in zip(images, questions, found, strict=True):
            one = alone.ask(image, question, max_new_tokens=6, min_new_tokens=6)
            assert (reply.text, reply.tokens) == (one.text, one.tokens)
        few = list(vlm.ask_many(images[0], ["One?", "Two?"], max_new_tokens=2))
        assert [reply.usage.images_encoded for reply in few] == [0, 0]
        assert next(iter(vlm.ask_many(None, ["No picture?"], max_new_tokens=1))).usage.images == 0


def test_questions_are_grouped_by_picture() -> None:
    from keepsight.core.call import Call

    vlm = memory("qwen3_vl")
    vlm.clear()
    one, two = picture(1), picture(2)
    pairs = [((one, two)[i % 2], f"Question {i} of it?") for i in range(40)]
    call = Call.of({"max_new_tokens": 1}, "")
    order = [number % 2 for number, _ in as_they_come(vlm.runtime, pairs, [call] * len(pairs))]
    assert order[:8] == [0] * 8 and order[-8:] == [1] * 8 and sum(order) == 20


def test_an_iterator_that_is_left_lets_go() -> None:
    vlm = memory("qwen3_vl")
    answers = vlm.ask_many(picture(1), [f"And {i}?" for i in range(50)], max_new_tokens=4)
    next(answers)
    answers.close()
    vlm.ask(picture(1), "Still there?", max_new_tokens=2)
    assert not vlm.runtime.engine.busy
    vlm.runtime.check()


def test_bad_questions_are_named_in_their_turn() -> None:
    vlm = memory("qwen3_vl")
    answers = vlm.ask_many(
        [picture(1), b"nothing", picture(1)], ["a?", "b?", "c?"], max_new_tokens=1
    )
    assert next(answers).usage.images == 1
    with pytest.raises(KeepsightError) as caught:
        next(answers)
    assert "question 1" in caught.value.__notes__[0]
    for images, questions in (([picture(1)], ["a", "b"]), (None, [3]), (None, 7)):
        with pytest.raises(InputError, match="questions"):
            vlm.ask_many(images, questions)
    with pytest.raises(UnknownOption, match="tempratur"):
        vlm.ask_many(None, ["a"], tempratur=1)
    vlm.runtime.check()
