"""From messages to the pieces of an answer: the path of every call that answers.

`chat`, `ask`, sessions and the server all use it.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepsight.core.call import Call
from keepsight.core.decoding.sampling import DEFAULT_CHAT_TOKENS
from keepsight.core.decoding.text import pieces
from keepsight.core.runtime import Runtime
from keepsight.core.turn import Turn
from keepsight.kinds import Message
from keepsight.report import Piece, Report


def turn_of(runtime: Runtime, messages: list[Message], call: Call) -> Turn:
    """Create the turn that answers messages; compute nothing yet."""
    runtime.require_answers()
    runtime.tokenizer()
    return Turn(
        runtime,
        lambda: runtime.render(messages, call),
        call.decoding,
        call.exact,
        DEFAULT_CHAT_TOKENS,
        call.tenant,
    )


def answer(runtime: Runtime, messages: list[Message], call: Call) -> Iterator[Piece]:
    """Yield the answer piece by piece; the last piece carries usage and report."""
    return pieces(turn_of(runtime, messages, call), runtime.tokenizer())


def prepare(runtime: Runtime, messages: list[Message], call: Call) -> Report:
    """Encode and prefill messages now; return the report of what was reused."""
    turn = turn_of(runtime, messages, call)
    with runtime.lock:
        try:
            turn.begin(sample=False)
            turn.prefill()
            return turn.report()
        finally:
            turn.finish()
