"""From messages to a sequence, and from a sequence to an answer: the way of every call.

Messages are rendered and media named in the caller's thread; the engine then runs the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepsight.core.call import Call
from keepsight.core.decoding.sampling import DEFAULT_CHAT_TOKENS, check_length
from keepsight.core.order import Order
from keepsight.core.runtime import Runtime
from keepsight.core.sequence import Sequence
from keepsight.kinds import Message
from keepsight.prefix.prompt import Prompt
from keepsight.report import Piece, Report
from keepsight.system.accounts import account_of


def asked(
    runtime: Runtime,
    messages: list[Message],
    call: Call,
    answers: bool = True,
    generate: bool = True,
) -> Sequence:
    """The sequence of a call: rendered and named in this thread, nothing computed yet. With
    `answers` false only its prompt is read; `generate` adds the beginning of an answer to it."""
    runtime.require_answers()
    tokenizer = runtime.tokenizer()
    seq = Sequence(Prompt.nothing(), call.tenant, account=account_of(call.tenant))
    with seq.stage("render"), runtime.lock.beside():
        order = Order(runtime, messages, call, generate).rendered()
    check_length(runtime.model, len(order.prompt))
    seq.prompt, seq.current, seq.tokenizer = order.prompt, order.current, tokenizer
    if answers:
        seq.options = {**call.decoding, **runtime.grammar(call.decoding, seq.prompt)}
        seq.default_tokens = DEFAULT_CHAT_TOKENS
        with runtime.lock.beside():
            runtime.engine.choose(seq)
    return seq


def answer(runtime: Runtime, messages: list[Message], call: Call) -> Iterator[Piece]:
    """Yield the answer piece by piece; the last piece carries usage and report."""
    yield from runtime.engine.answer(asked(runtime, messages, call))


def prepare(runtime: Runtime, messages: list[Message], call: Call) -> Report:
    """Encode and prefill messages now; return the report of what was reused."""
    return read(runtime, asked(runtime, messages, call, answers=False)).report()


def read(runtime: Runtime, seq: Sequence) -> Sequence:
    """Read a prompt to its end; what was read is remembered."""
    runtime.engine.run([seq])
    return seq
