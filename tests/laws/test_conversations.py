"""Each call is rendered as if nothing had been rendered before it."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import turn

import keepsight as ks


@pytest.mark.parametrize("source", ["{{ strftime_now('%f') }}", "{{ range(9**5) | random }}"])
def test_a_template_that_asks_for_more_is_asked_each_time(
    demo_parts: dict[str, Any], source: str
) -> None:
    with ks.wrap(*demo_parts["demo"], chat_template=source) as vlm:
        assert len({vlm.render([turn("Hello")]).text for _ in range(9)}) > 1


def test_what_is_changed_in_place_is_read_again(demo_parts: dict[str, Any]) -> None:
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ mode }}"
    talk: list[dict[str, Any]] = [{"role": "user", "content": "x", "weight": [1]}]
    with ks.wrap(*demo_parts["demo"], chat_template=source) as vlm:
        texts = [vlm.render(talk).text]
        for weight in ([True], [1.0], "1", {"<|im_end|>": ["<|im_end|>"]}):
            talk[0]["weight"] = weight
            texts.append(vlm.render(talk).text)
        texts.append(vlm.render(talk, mode=1).text)
        assert len({*texts}) == len(texts)
        assert talk[0]["weight"] == {"<|im_end|>": ["<|im_end|>"]}


def test_a_tokenizer_with_other_names_is_noticed(demo_parts: dict[str, Any]) -> None:
    source = "{{ eos_token }}{{ messages[0].content }}"
    model, processor = demo_parts["demo"]
    with ks.wrap(model, processor, chat_template=source) as vlm:
        tokenizer, talk = vlm.processor.tokenizer, [{"role": "user", "content": "x"}]
        first, eos = vlm.render(talk).text, tokenizer.eos_token
        try:
            tokenizer.eos_token = "</s>"
            assert vlm.render(talk).text == "</s>x" != first
        finally:
            tokenizer.eos_token = eos
        assert vlm.render(talk).text == first


def test_plain_messages_are_rendered_as_transformers_renders_them(dense: Any) -> None:
    """Where this fails, Transformers does something new before it renders."""
    tokenizer, source = dense.processor.tokenizer, dense.runtime.renderer.template
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y <"}]
    talk = [
        turn("Hello"),
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": parts},
    ]
    for generate in (True, False):
        how = {"tokenize": False, "add_generation_prompt": generate, "chat_template": source}
        wanted = tokenizer.apply_chat_template(talk, **how)
        assert dense.render(talk, add_generation_prompt=generate).text == wanted
