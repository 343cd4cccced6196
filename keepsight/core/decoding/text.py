"""The text of a turn's answer, piece by piece, in the order of its tokens.

Each piece is yielded as soon as its token exists, before the next one is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from keepsight.core.decoding.sampling import Detokenizer
from keepsight.core.turn import Turn
from keepsight.report import Piece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def pieces(turn: Turn, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """Yield the text of a turn as its tokens come; the last piece carries usage and report."""
    tokens = turn.tokens()
    detokenizer: Detokenizer | None = None
    try:
        for token in tokens:
            if detokenizer is None:
                detokenizer = Detokenizer.of(turn.sampler, tokenizer)
            yield Piece(detokenizer.push(token), token)
            if detokenizer.stopped:  # Transformers' criterion misses some strings inside a token
                break
        rest = detokenizer.rest() if detokenizer is not None else ""
        reason = turn.sampler.finish_reason if turn.sampler else "stop"
        if detokenizer is not None and detokenizer.stopped:
            reason = "stop"
        yield Piece(rest, None, turn.usage(), turn.report(), reason)
    finally:
        tokens.close()  # type: ignore[attr-defined]
