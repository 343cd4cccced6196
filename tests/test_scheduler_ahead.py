"""Answers prefilled while nobody asks: the next turn finds them, and nobody else notices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import build, picture, turn
from test_scheduler import check

import keepsight as ks
from keepsight.errors import ImageError, InputError
from keepsight.media.medium import Medium
from keepsight.scheduler import Together

GREEDY = {"do_sample": False, "min_new_tokens": 40, "max_new_tokens": 40}
FIRST = [turn("Look at this one. " * 3, picture(1))]
SOON = 20.0  # seconds; a test that waits so long has failed


@contextmanager
def served(kind: str = "qwen3_vl", **options: Any) -> Iterator[Together]:
    with ks.wrap(*build(kind), grain=16) as vlm:
        with Together(vlm, **{"ahead": 0.0, **options}) as together:
            yield together
        check(vlm)


def until_quiet(together: Together) -> int:
    """Wait until nothing is left to do ahead; the tokens that were prefilled so."""
    end = time.monotonic() + SOON
    while len(together._ahead):
        assert time.monotonic() < end
        time.sleep(0.005)
    return int(together.stats()["ahead_tokens"])


def after(reply: ks.Reply, text: str = "And what else?") -> list[Any]:
    return [*FIRST, turn(reply.text, role="assistant"), turn(text)]


def behind_the_answer(together: Together, reply: ks.Reply, text: str = "Why?") -> int:
    """The last boundary of the next prompt before its question."""
    vlm, then = together._vlm, after(reply, text)
    history = len(vlm.render(then[:-1], False))
    cuts = vlm.render(then).boundaries(vlm.runtime.rule)
    return max(cut for cut in cuts if cut <= history)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5", "gemma3_sliding", "llava"])
def test_the_next_turn_computes_only_its_question(kind: str) -> None:
    with served(kind) as together:
        reply = together.submit(FIRST, **GREEDY).result()
        assert until_quiet(together) > 0
        then = after(reply)
        found = together.submit(then, max_new_tokens=6, do_sample=False).result()
        assert together._vlm.verify(then).equal
    with ks.wrap(*build(kind), grain=16) as vlm:
        first = vlm.chat(FIRST, **GREEDY)
        late = vlm.chat(then, max_new_tokens=6, do_sample=False)
    assert reply.tokens == first.tokens and found.tokens == late.tokens
    # What was prefilled by itself had to be prefilled with the next turn otherwise.
    assert found.usage.cached_tokens > late.usage.cached_tokens
    assert found.usage.prompt_tokens - found.usage.cached_tokens < 16 + 20


def test_it_was_the_last_boundary_that_any_next_turn_has() -> None:
    with served() as together:
        reply = together.submit(FIRST, **GREEDY).result()
        until_quiet(together)
        for text in ("Why?", "Another question that nobody has thought of."):
            told = together.explain(after(reply, text))
            assert told.cached_tokens == behind_the_answer(together, reply, text)


def test_a_picture_in_the_next_turn_changes_nothing() -> None:
    with served() as together:
        reply = together.submit(FIRST, **GREEDY).result()
        until_quiet(together)
        then = [*FIRST, turn(reply.text, role="assistant"), turn("And this?", picture(2, 160, 96))]
        found = together.submit(then, max_new_tokens=6, do_sample=False).result()
        assert found.usage.images_encoded == 1 and together._vlm.verify(then).equal


def test_nothing_is_done_unless_asked_for() -> None:
    with served(ahead=None) as together:
        together.submit(FIRST, **GREEDY).result()
        assert not len(together._ahead)


def test_nothing_is_done_where_there_is_no_next_turn() -> None:
    with served() as together:
        together.submit(FIRST, follow=None, **GREEDY).result()
        together.submit(FIRST, follow=lambda text: None, **GREEDY).result()
        together.submit(FIRST, exact=False, **GREEDY).result()
        assert not len(together._ahead) and until_quiet(together) == 0


def test_an_answer_stands_whatever_goes_wrong_behind_it() -> None:
    def fail(text: str) -> None:
        raise ValueError(text)

    with served() as together:
        reply = together.submit(FIRST, follow=fail, **GREEDY).result()
        assert len(reply.tokens) == 40 and not len(together._ahead)
        assert together.stats()["failed"] == 0 and together.stats()["finished"] == 1


def test_what_was_deleted_does_not_come_back() -> None:
    with served(ahead=0.3) as together:
        vlm = together._vlm
        reply = together.submit(FIRST, **GREEDY).result()
        vlm.delete(FIRST)
        assert until_quiet(together) == 0
        assert together.explain(after(reply)).cached_tokens == 0
        assert vlm.runtime.caches.packages.nbytes == 0


def test_deleted_words_do_not_come_back_either() -> None:
    """No picture in them says that something is gone: only what memory stood on does."""
    words = [turn("Words. " * 25), turn("Well. " * 25, role="assistant"), turn("And?")]
    with served(ahead=0.3) as together:
        together.submit(words, **GREEDY).result()
        together._vlm.delete(words)
        assert until_quiet(together) == 0


def test_no_question_is_guessed() -> None:
    """With so fine a grain a boundary stands behind the question too, and nobody has asked it."""
    with ks.wrap(*build("qwen3_vl"), grain=1) as vlm, Together(vlm, ahead=0.0) as together:
        reply = together.submit(FIRST, **GREEDY).result()
        until_quiet(together)
        wanted = behind_the_answer(together, reply)
        for question in ("And?", "Why so?", "Else"):
            assert together.explain(after(reply, question)).cached_tokens <= wanted + 4


def test_changed_weights_are_no_ones_next_turn() -> None:
    model, processor = build("qwen3_vl")
    head = model.lm_head.weight
    with ks.wrap(model, processor, grain=16) as vlm, Together(vlm, ahead=0.3) as together:
        together.submit(FIRST, **GREEDY).result()
        with torch.no_grad():
            head.mul_(-1)
            try:
                assert until_quiet(together) == 0
            finally:
                head.mul_(-1)


def test_somebody_who_asks_meanwhile_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane and the path are let go of, and the work is taken up again later."""
    with served(ahead=0.3) as together:
        ahead = together._ahead
        reply = together.submit(FIRST, **GREEDY).result()
        with together._vlm.runtime.lock:
            ahead._begin(ahead._followers[-1])
            next(iter(ahead._followers[-1].work or ()))
        other = [turn("Words. " * 25)]
        together.submit(other, max_new_tokens=2, follow=None).result()
        assert ahead._followers[-1].turn is None
        until_quiet(together)
        wanted = behind_the_answer(together, reply)
        assert together.explain(after(reply)).cached_tokens == wanted


def test_an_error_ends_it_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(ahead=0.3) as together:
        together.submit(FIRST, **GREEDY).result()

        def fail(*args: Any) -> None:
            raise RuntimeError("no memory")

        with monkeypatch.context() as broken:
            broken.setattr(together._vlm.runtime.engine, "start", fail)
            assert until_quiet(together) == 0
        assert together.submit(FIRST, max_new_tokens=2).result().tokens


def test_what_waits_is_bounded_and_holds_no_pictures() -> None:
    with served(ahead=60.0) as together:
        for number in range(20):
            chat = [turn("Look at this one. " * 3, picture(number))]
            together.submit(chat, **{**GREEDY, "min_new_tokens": 2, "max_new_tokens": 2}).result()
        followers = list(together._ahead._followers)
        assert len(followers) == 16
        parts = [part for f in followers for part in f.messages[0]["content"]]
        assert all(isinstance(part.get("image"), Medium | None) for part in parts)
        with pytest.raises(ImageError):  # a name, and nothing to look at
            followers[0].media[0].recall()


def test_calls_of_tools_are_followed_by_their_results() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked: list[Any] = []
    with served() as together:
        render = together._ahead._render

        def watched(messages: Any, *rest: Any) -> Any:
            asked.append(messages[-1])
            return render(messages, *rest)

        together._ahead._render = watched
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        together.submit(FIRST, follow=lambda text: dict(message), **GREEDY).result()
        until_quiet(together)
    assert {one["role"] for one in asked} == {"tool"}
    assert {one["tool_call_id"] for one in asked} == {"call_1"}


@pytest.mark.parametrize("wrong", [-1, "soon"])
def test_a_wrong_pause_is_refused(wrong: Any) -> None:
    with ks.wrap(*build("qwen3_vl"), grain=16) as vlm:
        with pytest.raises(InputError, match="ahead="):
            Together(vlm, ahead=wrong)
