"""Many questions about many pictures: decoded together, grouped by picture whatever the order.

A picture is opened once, and read once for all its questions. No more prompts are made ready than
are computed next, so a list may be long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keepsight.core.answer import asked
from keepsight.core.call import Call
from keepsight.core.runtime import Runtime
from keepsight.core.sequence import Sequence as Answer
from keepsight.errors import InputError, KeepsightError
from keepsight.media.medium import Medium
from keepsight.prompt.messages import user_message
from keepsight.questions.group import named
from keepsight.report import Reply

Pair = tuple[object, str]  # pictures, and a question about them


def pairs_of(images: object, questions: object) -> list[Pair]:
    """Pictures and questions of a call: one picture (or none) for all, or one entry for each."""
    if isinstance(questions, str):
        questions = [questions]
    if not isinstance(questions, list | tuple):
        raise InputError(f"questions is a {type(questions).__name__}; expected a list of texts")
    for number, question in enumerate(questions):
        if not isinstance(question, str):
            kind = type(question).__name__
            raise InputError(f"questions[{number}] is a {kind}; expected a text")
    if not isinstance(images, list | tuple):
        return [(images, question) for question in questions]
    if len(images) != len(questions):
        raise InputError(
            f"there are {len(images)} images for {len(questions)} questions; give one entry for "
            "each question (a list in it for several pictures), or one picture for all"
        )
    return list(zip(images, questions, strict=True))


def in_order(runtime: Runtime, pairs: Sequence[Pair], call: Call) -> Iterator[Reply]:
    """The answers in the order of the questions, each as soon as it and those before it are
    there."""
    waiting: dict[int, Reply | KeepsightError] = {}
    given = 0
    for number, found in as_they_come(runtime, pairs, [call] * len(pairs)):
        waiting[number] = found
        while given in waiting:
            one = waiting.pop(given)
            if isinstance(one, KeepsightError):
                one.add_note(f"this was question {given}")
                raise one
            given += 1
            yield one


def as_they_come(
    runtime: Runtime, pairs: Sequence[Pair], calls: Sequence[Call]
) -> Iterator[tuple[int, Reply | KeepsightError]]:
    """The number of a question and its answer, or its error, as they end. The calls of one picture
    have one tenant."""
    runtime.require_answers()
    engine = runtime.engine
    ready = _ready(runtime, pairs, calls)
    running: dict[int, Answer] = {}
    more = True
    try:
        while more or running:
            while more and len(running) < 2 * engine.max_running:
                if (item := next(ready, None)) is None:
                    more = False
                    break
                number, seq = item
                if isinstance(seq, KeepsightError):
                    yield number, seq
                    continue
                engine.add(seq)
                running[number] = seq
            with runtime.lock:
                if running and not any(seq.ended for seq in running.values()):
                    engine.step()
            for number in [number for number, seq in running.items() if seq.ended]:
                yield number, _reply(running.pop(number))
    finally:
        for seq in running.values():
            engine.leave(seq)


def _reply(seq: Answer) -> Reply | KeepsightError:
    if isinstance(seq.error, KeepsightError):
        return seq.error
    seq.raise_error()
    return Reply.of(seq.pieces)


def _ready(
    runtime: Runtime, pairs: Sequence[Pair], calls: Sequence[Call]
) -> Iterator[tuple[int, Answer | KeepsightError]]:
    """Sequences in the order in which they run: all of a picture, then all of the next."""
    groups: dict[object, list[int]] = {}
    for number, (images, _) in enumerate(pairs):
        groups.setdefault(_key(images), []).append(number)
    for numbers in groups.values():
        media: list[Medium] | KeepsightError
        try:
            tenant, given = calls[numbers[0]].tenant, pairs[numbers[0]][0]
            media = [named(runtime, one, tenant) for one in _list(given)]
        except KeepsightError as error:
            media = error
        for number in numbers:
            if isinstance(media, KeepsightError):
                yield number, media
                continue
            try:
                messages = [user_message(pairs[number][1], media)]
                yield number, asked(runtime, messages, calls[number])
            except KeepsightError as error:
                yield number, error


def _list(images: object) -> list[object]:
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def _key(images: object) -> object:
    """Equal for what was given alike: an address or a path, or the very same picture."""
    return tuple(one if isinstance(one, str) else id(one) for one in _list(images))
