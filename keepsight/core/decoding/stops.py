"""Ends a sequence when its text reaches a stop string.

Transformers' own criterion matches the whole vocabulary with each string before the first token:
that takes seconds and hundreds of megabytes for a large one. Here the last tokens are decoded to
text at each step. Both end a sequence at the same token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from keepsight.errors import InputError
from keepsight.system.words import check_text

MOST, LONGEST = 128, 4096  # strings, and characters of each
_BEFORE = "abcdef"  # text before the tokens, because some decoders strip the first space


def stop_strings(given: str | Iterable[str] | None) -> list[str]:
    """Stop strings as a list, from one or several; anything else is refused."""
    several = isinstance(given, Iterable | None) and not isinstance(given, str)
    stops: list[Any] = list(given or []) if several else [given]
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise InputError(f"stop must be one or more non-empty strings, got {str(given)[:200]!r}")
    for stop in stops:
        check_text(stop, "a stop string")
    if len(stops) > MOST or any(len(stop) > LONGEST for stop in stops):
        raise InputError(
            f"{len(stops)} stop strings, the longest of {max(map(len, stops))} characters; "
            f"expected at most {MOST}, of {LONGEST} characters each"
        )
    return stops


class StopStrings(StoppingCriteria):
    """Ends a sequence when a string ends inside its last token, wherever the string began."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: list[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._window = max(len(stop.encode()) for stop in stops)  # a token has at least one byte
        ids = tokenizer(_BEFORE, add_special_tokens=False)["input_ids"]
        self._before: list[str] = tokenizer.convert_ids_to_tokens(ids)

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **more: object
    ) -> torch.Tensor:
        tails = input_ids[:, -self._window :].tolist()
        ends = [self._ends(tail) for tail in tails]
        return torch.tensor(ends, dtype=torch.bool, device=input_ids.device)

    def _ends(self, ids: list[int]) -> bool:
        tokens = self._tokenizer.convert_ids_to_tokens(ids)
        while None in tokens:  # an id that no token has
            tokens = tokens[tokens.index(None) + 1 :]
        text = self._text(tokens)
        start = len(self._text(tokens[:-1]).rstrip("\ufffd"))  # of a character begun there
        return any(text.find(stop, max(0, start - len(stop) + 1)) >= 0 for stop in self._stops)

    def _text(self, tokens: list[str]) -> str:
        text: str = self._tokenizer.convert_tokens_to_string([*self._before, *tokens])
        return text[text.index(_BEFORE) + len(_BEFORE) :]
