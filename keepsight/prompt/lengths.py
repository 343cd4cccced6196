"""Refuses texts that cannot fit a model's context, before a tokenizer works on them for minutes.

No token covers more characters than the longest in the vocabulary. So a text with more characters
than a full context of such tokens is surely too long. Shorter ones are counted piece by piece until
they are too long.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keepsight.errors import PromptTooLong

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FOLDED = 4  # characters a normalizer may merge into one, such as a letter and its accents
_UNKNOWN = 1024  # characters a token for unknown text may cover
_ORDINARY = 8  # characters per token in any language; for longer texts, tokens are counted
_PIECE = 1 << 15  # characters
_LONG_NAME = 64


def context_length(model: PreTrainedModel) -> int | None:
    """The number of tokens the language model was made for."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def characters(value: object) -> int:
    """Characters of all texts in messages, tools or settings, with long field names."""
    count = 0
    waiting: list[object] = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, dict):
            for name, inside in value.items():
                if name != "type":  # names the kind of a part and is not read
                    if type(inside) is str:
                        count += len(inside)
                    else:
                        waiting.append(inside)
                if isinstance(name, str) and len(name) > _LONG_NAME:
                    count += len(name)
        elif isinstance(value, list | tuple):
            waiting.extend(value)
    return count


class Lengths:
    """The limits of one model's context, for its tokenizer."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.limit, self._tokenizer = context_length(model), tokenizer

    def check(self, *given: object) -> None:
        """Refuse texts that cannot fit, however they are spelled."""
        count = characters(given)
        if self.limit is not None and count > self.limit and count > self.limit * self.longest:
            raise PromptTooLong(
                f"the texts have {count} characters, the model's context is {self.limit} tokens of "
                f"at most {self.longest} characters each; shorten the conversation"
            )

    def check_rendered(self, text: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a prompt with too many tokens before all of it is tokenized. The tokenizer must be
        the calling thread's."""
        if self.limit is None or len(text) <= self.limit * _ORDINARY:
            return
        count = 0
        for start in range(0, len(text), _PIECE):
            piece = tokenizer(text[start : start + _PIECE], add_special_tokens=False)
            # Cutting may add tokens to the whole text, but no more than this.
            count += max(0, len(piece["input_ids"]) - self.longest)
            if count >= self.limit:
                raise PromptTooLong(
                    f"the prompt has more than {count} tokens, the model's context is "
                    f"{self.limit}; shorten the conversation"
                )

    @functools.cached_property
    def longest(self) -> int:
        """The most characters that one token covers."""
        longest = max(map(len, self._tokenizer.get_vocab()))
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not _has_bytes(backend):
            return max(longest, _UNKNOWN)
        return longest * (1 if backend.normalizer is None else _FOLDED)


def _has_bytes(backend: Tokenizer) -> bool:
    """Whether the tokenizer falls back to bytes, so that it has tokens for every text."""
    return "ByteLevel" in repr(backend.decoder) or bool(
        getattr(backend.model, "byte_fallback", False)
    )
