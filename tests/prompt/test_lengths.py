"""Texts that cannot fit a model's context are refused before a tokenizer has seen all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

import keepsight as ks
from keepsight import Together
from keepsight.errors import PromptTooLong
from keepsight.prompt.lengths import Lengths, characters

LIMIT = 512


@pytest.fixture
def vlm(demo_parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    model, processor = demo_parts["demo"]
    text_config = model.config.get_text_config()
    monkeypatch.setattr(text_config, "max_position_embeddings", LIMIT)
    with ks.wrap(model, processor) as it:
        yield it


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


class Counted:
    """A tokenizer that says how much text it was given in one call, at most."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.most = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.most = max(self.most, len(text))
        return self._tokenizer(text, **options)


@pytest.mark.parametrize("many", [LIMIT * 16 + 1, 5_000_000])
def test_a_text_that_cannot_fit_is_not_tokenized(vlm: Any, many: int) -> None:
    counted = vlm.runtime.renderer.tokenizer = Counted(vlm.runtime.renderer.tokenizer)
    for call in (vlm.chat, vlm.prepare, vlm.explain, vlm.inputs):
        with pytest.raises(PromptTooLong, match=f"the texts have {many + 4} characters"):
            call(user("x" * many))
    with pytest.raises(PromptTooLong):
        vlm.session().ask("x" * many)
    with pytest.raises(PromptTooLong):
        vlm.chat(user("x"), tools=[{"function": {"name": "f", "description": "x" * many}}])
    assert not counted.most


def test_what_lies_between_is_counted_piece_by_piece(
    vlm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepsight.prompt.lengths._PIECE", 1024)
    counted = vlm.runtime.renderer.tokenizer = Counted(vlm.runtime.renderer.tokenizer)
    with pytest.raises(PromptTooLong, match="more than"):
        vlm.chat(user("x y " * 1500))
    assert counted.most == 1024


def test_what_fits_is_answered(vlm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ordinary tokens the longest, over and over: more characters than usual for so many."""
    monkeypatch.setattr("keepsight.prompt.lengths._ORDINARY", 4)
    monkeypatch.setattr("keepsight.prompt.lengths._PIECE", 1024)
    tokenizer = vlm.processor.tokenizer
    words = set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder)
    text = max((tokenizer.decode([word]) for word in words), key=len) * 400
    reply = vlm.chat(user(text), max_new_tokens=1)
    assert len(text) > LIMIT * 4 and 400 <= reply.usage.prompt_tokens < LIMIT


def test_characters_of_what_is_read_are_counted() -> None:
    tools = [{"type": "function", "function": {"name": "ab", "x" * 100: ["cd", 5, None, ("e",)]}}]
    assert characters(tools) == 105
    assert characters([{"role": "user", "content": [{"type": "text", "text": "abc"}]}]) == 7


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"decoder": decoders.ByteLevel()}, 6),
        ({"decoder": decoders.ByteLevel(), "normalizer": normalizers.NFC()}, 24),
        ({}, 1024),  # what it does not know may be one token, however long
    ],
)
def test_how_much_a_token_covers(
    demo_parts: dict[str, Any], more: dict[str, Any], expected: int
) -> None:
    made = Tokenizer(models.BPE({"a": 0, "abcdef": 1, "[UNK]": 2}, [], unk_token="[UNK]"))
    for name, value in more.items():
        setattr(made, name, value)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    assert Lengths(demo_parts["demo"][0], tokenizer).longest == expected


class Slow(Counted):
    """A tokenizer that holds long texts up."""

    began, go_on = threading.Event(), threading.Event()

    def __call__(self, text: str, **options: Any) -> Any:
        if len(text) > 4000:
            self.began.set()
            assert self.go_on.wait(30)
        return super().__call__(text, **options)


def test_a_short_text_does_not_wait_for_a_long_one(vlm: Any) -> None:
    with Together(vlm) as together:
        together.submit(user("Hello!"), max_new_tokens=1).result()
        slow = vlm.runtime.renderer.tokenizer = Slow(vlm.runtime.renderer.tokenizer)
        ended = threading.Event()

        def long() -> None:
            with pytest.raises(PromptTooLong):
                together.submit(user("x y " * 1500), max_new_tokens=1)
            ended.set()

        thread = threading.Thread(target=long)
        thread.start()
        assert slow.began.wait(30)
        assert together.submit(user("Hello!"), max_new_tokens=1).result().tokens
        assert not ended.is_set()
        slow.go_on.set()
        thread.join(30)
        assert ended.is_set()
