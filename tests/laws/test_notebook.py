"""What a person at a prompt or in a notebook meets: short displays, free order, `await`."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.models import picture

import keepsight as ks
from keepsight.errors import ImageError, InputError, UnknownOption
from keepsight.prompt.question import user_turn

QUESTION = "What is it?"


# -- the question and the pictures -----------------------------------------------------------------


def test_question_and_pictures_come_in_either_order(dense: Any) -> None:
    image = picture(1)
    said = dense.ask(image, QUESTION, max_new_tokens=4).tokens
    for call in (
        lambda: dense.ask(QUESTION, image, max_new_tokens=4),
        lambda: dense.ask(QUESTION, images=[image], max_new_tokens=4),
        lambda: dense.ask(image, question=QUESTION, max_new_tokens=4),
        lambda: dense.session().ask(QUESTION, image, max_new_tokens=4),
        lambda: dense.session().ask(image, QUESTION, max_new_tokens=4),
        lambda: dense.session().ask([image], text=QUESTION, max_new_tokens=4),
        lambda: dense.session().ask(images=image, question=QUESTION, max_new_tokens=4),
    ):
        assert call().tokens == said


def test_two_texts_stand_in_the_order_of_the_method(dense: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "cat.png")
    picture(1).save(path)
    said = dense.ask(path, QUESTION, max_new_tokens=4).tokens
    assert dense.session().ask(QUESTION, path, max_new_tokens=4).tokens == said
    with pytest.raises(InputError, match=r"is a picture and 'What is it\?' is not; write ask\("):
        dense.ask(QUESTION, path)
    with pytest.raises(InputError, match=rf"write ask\('What is it\?', '{path}'\)"):
        dense.session().ask(path, QUESTION)
    with pytest.raises(ImageError, match="gone.png"):  # never a question about the other picture
        dense.ask("gone.png", "also-gone.png")


@pytest.mark.parametrize(
    ("given", "options", "why"),
    [
        ((QUESTION,), {"image": 1}, "ask has no option 'image'; did you mean 'images'?"),
        ((QUESTION,), {"pictures": 1}, "did you mean 'images'?"),
        ((), {"prompt": "?"}, "did you mean 'question'?"),
        ((1, 2), {}, "the question is a int, expected a string"),
        ((QUESTION, "a.png", "b.png"), {}, "several pictures go into one list: images=[...]"),
        ((QUESTION, 1), {"images": [2]}, "were given twice"),
        ((QUESTION,), {"text": "?", "question": "?"}, "two names of one option"),
    ],
)
def test_what_ask_refuses(dense: Any, given: Any, options: Any, why: str) -> None:
    for ask in (dense.ask, dense.session().ask):
        with pytest.raises((InputError, UnknownOption)) as caught:
            ask(*given, **options)
        assert why in str(caught.value)


@pytest.mark.parametrize("picture_first", [True, False])
def test_films_and_sounds_stand_behind_the_pictures(picture_first: bool) -> None:
    options: dict[str, Any] = {"videos": "a.mp4", "audio": ["b.wav", "c.wav"], "images": "d.png"}
    message = user_turn(("What happens?",), {**options, "max_new_tokens": 3}, picture_first)
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["image", "video", "audio", "audio", "text"]
    assert message["content"][-1]["text"] == "What happens?"
    with pytest.raises(InputError, match="for frames or samples write"):
        user_turn(("What?",), {"videos": [Image.new("RGB", (8, 8))] * 2}, picture_first)
    with pytest.raises(UnknownOption, match="did you mean 'videos'"):
        user_turn(("What?",), {"video": "a.mp4"}, picture_first)


def test_pictures_without_a_question(dense: Any) -> None:
    with pytest.raises(InputError, match="there is no question; write ask"):
        dense.ask(picture(1))
    with pytest.raises(InputError, match="there is no question; write ask"):
        dense.ask("holiday.jpg")  # not there, but spelled like a file
    for words in ("Hello!", "hello", "Is 3.5 more than 3.25?"):
        for ask in (dense.ask, dense.session().ask):
            assert ask(words, max_new_tokens=2).usage.images == 0


# -- what they look like ---------------------------------------------------------------------------


def test_displays_are_short_and_escaped(dense: Any) -> None:
    chat = dense.session("Answer <b>shortly</b>.")
    reply = chat.ask(QUESTION, picture(1), max_new_tokens=4)
    package = dense.encode(picture(1))
    for shown in (dense, chat, reply, reply.report, package):
        assert len(repr(shown)) < 200 and "\n" not in repr(shown) and repr(shown)[0] == "<", shown
        assert shown._repr_html_().count("<table") >= 1
    assert "1 of 1 images encoded" in repr(reply) and "1 turn, 1 image" in repr(chat)
    page = chat._repr_html_()
    assert "&lt;b&gt;shortly" in page and "<b>" not in page and "[image 1, " in page
    assert "reused" in reply.report._repr_html_() and "<details>" in reply._repr_html_()
    assert dense.model.config.model_type in repr(dense)
    assert re.fullmatch(
        r"<Medium image, \d+ tokens, key \w{12}…>", repr(chat.messages[1]["content"][0]["image"])
    )
    reply.text = "<script>"
    assert "<script>" not in reply._repr_html_()


# -- await -----------------------------------------------------------------------------------------


def test_awaited_answers_are_those_of_plain_calls(dense: Any) -> None:
    image, message = picture(1), {"role": "user", "content": "Hello!"}

    async def talk() -> tuple[Any, ...]:
        chat = dense.session()
        first = await chat.aask(QUESTION, image, max_new_tokens=6)
        pieces = [piece async for piece in chat.astream("And now?", max_new_tokens=6)]
        both = await asyncio.gather(
            dense.aask(image, QUESTION, max_new_tokens=6), dense.achat([message], max_new_tokens=6)
        )
        return chat, first, ks.Reply.of(pieces), both

    chat, first, second, (asked, greeted) = asyncio.run(talk())
    plain = dense.session()
    assert plain.ask(QUESTION, image, max_new_tokens=6).tokens == first.tokens == asked.tokens
    assert plain.ask("And now?", max_new_tokens=6).tokens == second.tokens
    assert dense.chat([message], max_new_tokens=6).tokens == greeted.tokens
    assert [m["role"] for m in chat.messages] == [m["role"] for m in plain.messages]
    again = asyncio.run(dense.aask(image, QUESTION, max_new_tokens=6))
    assert again.usage.cached_tokens == again.usage.prompt_tokens  # one memory, whatever the thread


def test_a_cancelled_task_cancels_the_answer(dense: Any) -> None:
    chat = dense.session()
    chat.ask("Hello!", max_new_tokens=2)

    async def leave() -> None:
        started = asyncio.Event()

        async def listen() -> None:
            async for _ in chat.astream("Tell me all.", max_new_tokens=400, min_new_tokens=400):
                started.set()

        task = asyncio.create_task(listen())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    steps = dense.stats()["engine"]["decode_steps"]
    asyncio.run(leave())
    for thread in threading.enumerate():
        if thread.name == "keepsight-answer":
            thread.join(20)
            assert not thread.is_alive()
    assert dense.stats()["engine"]["decode_steps"] - steps < 300  # it did not go on to the end
    assert len(chat.messages) == 2
    assert dense.stats()["prefix"]["held_bytes"] == 0
    plain = dense.session()
    plain.ask("Hello!", max_new_tokens=2)
    after = chat.ask("And now?", max_new_tokens=2).tokens
    assert after == plain.ask("And now?", max_new_tokens=2).tokens


def test_a_session_answers_one_awaited_turn_at_a_time(dense: Any) -> None:
    async def twice() -> list[Any]:
        chat = dense.session()
        turns = (chat.aask(QUESTION, max_new_tokens=4), chat.aask("And?", max_new_tokens=4))
        return await asyncio.gather(*turns, return_exceptions=True)

    first, second = asyncio.run(twice())
    assert isinstance(first, ks.Reply)
    assert isinstance(second, InputError) and "await that, or ask a fork()" in str(second)


def test_errors_of_an_awaited_answer_reach_the_caller(dense: Any) -> None:
    with pytest.raises(ImageError, match=r"gone\.png"):
        asyncio.run(dense.aask("gone.png", QUESTION))
    with pytest.raises(UnknownOption, match="images"):
        asyncio.run(dense.session().aask(QUESTION, image=picture(1)))


def test_an_error_in_a_notebook_is_one_sentence(dense: Any) -> None:
    cells = {"vlm": dense}
    exec(compile("def mine():\n    vlm.ask('gone.png', 'Hm?')\n", "<cell 1>", "exec"), cells)
    for line, own in (("vlm.ask('gone.png', 'What is it?')", 0), ("mine()", 1)):
        with pytest.raises(ImageError) as caught:
            exec(compile(line, "<cell 2>", "exec"), cells)
        caught.value.__traceback__ = caught.value.__traceback__.tb_next  # pytest's own frame
        *shown, said = caught.value._render_traceback_()  # as IPython calls it
        assert (
            said == "ImageError: gone.png: no image can be read there (No such file or directory)"
        )
        assert len(shown) == own and all("mine" in one for one in shown)
