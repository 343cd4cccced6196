"""Conversations that go on are rendered as if nothing of them were remembered."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

import keepsight as ks
from keepsight.core.rendering.conversations import EarlierPrompts, read_anew
from keepsight.core.rendering.template import ChatTemplate
from keepsight.kinds import Message

WORDS = ("one", "two", "<|im_end|>", "x<", "1", "", " ", "é", "{{ 7 }}")
TEMPLATES = {
    "all that is given": (
        "{% for m in messages %}<|im_start|>{{ m | tojson }}<|im_end|>{% endfor %}"
        "{{ add_generation_prompt }}{{ tools | tojson }}{{ mode }}"
    ),
    "parts": (
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.weight }}{% if m.content is string %}"
        "{{ m.content }}{% else %}{% for p in m.content %}{{ p.type }}{{ p.text }}{% endfor %}"
        "{% endif %}{{ loop.last }}{{ messages | length }}{% endfor %}"
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    with ks.load("demo") as vlm:
        return vlm.processor.tokenizer


class Loud(str):
    """A string that is equal to another and no plain data."""


def message(chance: random.Random) -> dict[str, Any]:
    text = " ".join(chance.choices(WORDS, k=3))
    parts: list[Any] = [{"type": "text", "text": text}]
    if chance.random() < 0.3:
        parts.insert(0, {"type": "image", "image": f"{chance.choice(WORDS)}.png"})
    made = {"role": chance.choice(["user", "assistant", "odd"]), "content": text}
    made["content"] = chance.choice([text, parts, tuple(parts), [text, *parts]])
    if chance.random() < 0.2:
        made["content"] = Loud(text)
    if chance.random() < 0.4:
        made["weight"] = chance.choice([1, True, 1.0, None, [1], (1,), [True], "1"])
    if chance.random() < 0.2:
        made["tool_calls"] = [{"function": {"name": "f", "arguments": {"n": [1, 2]}}}]
    return made


def changed(talk: list[dict[str, Any]], chance: random.Random) -> list[dict[str, Any]]:
    """The same conversation gone on, edited, cut, changed in place, or another."""
    place = chance.randrange(len(talk)) if talk else 0
    match chance.randrange(6):
        case 0 | 1:
            return [*talk, message(chance)]
        case 2:
            return [*talk[:place], message(chance), *talk[place + 1 :]]
        case 3:
            return talk[: place + 1]
        case 4 if talk and "tool_calls" in talk[place]:
            talk[place]["tool_calls"][0]["function"]["arguments"]["n"].append(chance.random())
            return talk
        case 5 if talk and talk[place].get("weight") in (1, [1], (1,)):
            talk[place]["weight"] = chance.choice([1, True, 1.0, [1], (1,)])
            return talk
    return [message(chance), message(chance)]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_remembered_changes_no_text(tokenizer: Any, name: str, seed: int) -> None:
    chance, template = random.Random(seed), ChatTemplate(TEMPLATES[name], tokenizer)
    other = ChatTemplate("{{ messages | length }}" + TEMPLATES[name], tokenizer)
    mine, talk = EarlierPrompts().of(""), [message(chance)]
    earlier = [copy.deepcopy(talk)]
    for _ in range(150):
        talk = changed(talk, chance)
        if chance.random() < 0.2:
            talk = copy.deepcopy(chance.choice(earlier))
        earlier.append(copy.deepcopy(talk))
        how: tuple[bool, dict[str, object]] = (
            chance.random() < 0.5,
            chance.choice([{}, {}, {"mode": 1}, {"mode": True}]),
        )
        before = copy.deepcopy(talk)
        used = chance.choice([template, template, other])
        got = mine.read(talk, used)
        wanted = read_anew(copy.deepcopy(talk), ChatTemplate(used.source, tokenizer))
        assert talk == before
        assert got.media == wanted.media and got.characters == wanted.characters
        texts = [r.rendered(tokenizer, used, *how) for r in (got, wanted)]
        assert texts[0].plain(texts[0].text) == texts[1].plain(texts[1].text)
        assert texts[0].text == texts[1].text
    assert len(mine.conversations) <= 32


def test_messages_are_read_once(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(TEMPLATES["parts"], tokenizer)
    mine, talk = EarlierPrompts().of(""), [message_of("Hello"), message_of("there")]
    read, rendered = counted(monkeypatch, "may_be_forged_in"), counted(monkeypatch, "render")
    for more in ([], [message_of("again")], []):
        talk += more
        mine.read(talk, template).rendered(tokenizer, template, True, {})
    assert read == [3] and rendered == [2]
    mine.conversations.clear("")
    mine.read(talk, template).rendered(tokenizer, template, True, {})
    assert read == [6] and rendered == [3]


def test_one_tenant_does_not_read_what_another_did(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, everyone = ChatTemplate(TEMPLATES["parts"], tokenizer), EarlierPrompts()
    read = counted(monkeypatch, "may_be_forged_in")
    for tenant in ("one", "other", "one"):
        everyone.of(tenant).read([message_of("Hello")], template)
    assert read == [2]


@pytest.mark.parametrize("source", ["{{ strftime_now('%f') }}", "{{ range(9**5) | random }}"])
def test_a_template_that_asks_for_more_is_asked_each_time(tokenizer: Any, source: str) -> None:
    template, mine = ChatTemplate(source, tokenizer), EarlierPrompts().of("")
    talk = [message_of("Hello")]
    texts = {
        mine.read(talk, template).rendered(tokenizer, template, True, {}).text for _ in range(9)
    }
    assert len(texts) > 1


def test_a_tokenizer_with_other_names_is_rendered_for_anew(tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    template = ChatTemplate("{{ eos_token }}{{ messages[0].content }}", tokenizer)
    mine = EarlierPrompts().of("")

    def text(of: Any) -> str:
        return mine.read([message_of("x")], template).rendered(of, template, True, {}).text

    first = text(other)
    other.eos_token = "</s>"
    assert first.endswith("x") and text(other) == "</s>x" and text(tokenizer) == first


def test_plain_messages_are_rendered_as_transformers_renders_them(tokenizer: Any) -> None:
    """Where this fails, Transformers does something new before it renders."""
    talks: list[list[Message]] = [
        [message_of("Hello"), {"role": "assistant", "content": "x"}],
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}],
    ]
    for source in (*TEMPLATES.values(), tokenizer.chat_template or TEMPLATES["parts"]):
        template = ChatTemplate(source, tokenizer)
        for talk in talks:
            for generate in (True, False):
                made = [template.render(tokenizer, talk, generate, {}, False, s) for s in (0, 1)]
                assert made[0] == made[1]


def message_of(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """How often a method of a template is called, from now on."""
    count, real = [0], getattr(ChatTemplate, name)

    def call(self: ChatTemplate, *given: Any) -> Any:
        count[0] += 1
        return real(self, *given)

    monkeypatch.setattr(ChatTemplate, name, call)
    return count
