"""With a prefix cache that remembers nothing, every answer stays the same."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import build, picture, turn

import keepsight as ks
from keepsight.prefix.match import Match

LONG = "Please look at this picture very carefully and tell what it is."


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def conversations() -> list[list[dict[str, Any]]]:
    first = [turn(LONG, picture(1))]
    second = [*first, said("A thing."), turn("And what is in this one?", picture(2))]
    return [first, second, [*second, said("More."), turn("Compare them.")], first]


def answers(remembers: bool, kind: str) -> list[tuple[list[int], int]]:
    with ks.wrap(*build(kind)) as vlm:
        if not remembers:
            tree = vlm.runtime.tree
            tree.match = lambda namespace, *_: Match(tree.root(namespace), since=tree.tick)
        given = [vlm.chat(messages, max_new_tokens=4) for messages in conversations()]
        session = vlm.session()
        given += [session.ask(LONG, picture(3), max_new_tokens=4)]
        given += [session.ask("What else?", max_new_tokens=4)]
        given += [session.fork().ask("And again?", picture(1), max_new_tokens=4)]
        assert vlm.explain(conversations()[0]).prompt_tokens > 0
        return [(reply.tokens, reply.usage.cached_tokens) for reply in given]


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5", "gemma3_sliding", "mllama"])
def test_answers_are_the_same_without_a_memory(kind: str) -> None:
    remembered, computed = answers(True, kind), answers(False, kind)
    assert [tokens for tokens, _ in computed] == [tokens for tokens, _ in remembered]
    assert all(cached == 0 for _, cached in computed)
    assert any(cached > 0 for _, cached in remembered)
