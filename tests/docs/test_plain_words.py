"""Docs are written in sentences that are read once."""

from __future__ import annotations

from scripts import plain_words


def test_few_sentences_are_long() -> None:
    found = [plain_words.sentences(page.read_text("utf-8")) for page in plain_words.pages()]
    long = [plain_words.long_ones(page.read_text("utf-8")) for page in plain_words.pages()]
    count = sum(map(len, found))
    assert count > 1000 and sum(map(len, long)) < plain_words.PLAIN_ENOUGH * count
    text = "One two three. " + "word " * 31 + "end. `code` is left out."
    assert len(plain_words.long_ones(text)) == 1 and len(plain_words.sentences(text)) == 3
