"""Stop strings: the token at which Transformers' own criterion ends, without what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.hostile import bounded
from transformers import StopStringCriteria
from transformers.generation import stopping_criteria as upstream

import keepsight as ks
from keepsight.core.decoding.sampling import _overlap
from keepsight.core.decoding.stops import StopStrings
from keepsight.errors import InputError

STOPS = ["a", "is", " is", ".", "\n", "circle", "e c", "é", "日本", "ld, w", "<|im_end|>", "x" * 30]
TEXTS = ["The red circle is large.", "Hello world, what é is 日本 it?\n\nA. b", "<|im_end|>\nxxxx"]


@pytest.fixture(scope="module")
def tokenizer(demo_parts: dict[str, Any]) -> Any:
    return demo_parts["demo"][1].tokenizer


@pytest.mark.parametrize("stop", STOPS)
@bounded(15)
@given(data=st.data())
def test_it_ends_where_upstreams_criterion_does(tokenizer: Any, stop: str, data: Any) -> None:
    """Over texts that may hold the string, cut at any token, and over any tokens at all."""
    text = data.draw(st.sampled_from([*TEXTS, *(f"{one}{stop}{one}" for one in TEXTS)]))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids += data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=4))
    stops = [stop, *data.draw(st.lists(st.sampled_from(STOPS), max_size=2))]
    theirs, ours = StopStringCriteria(tokenizer, stops), StopStrings(tokenizer, stops)
    for end in range(1, len(ids) + 1):
        seen = torch.tensor([ids[:end], ids[:end][::-1]])
        assert ours(seen, None).tolist() == theirs(seen, None).tolist(), (stops, ids[:end])


def test_an_id_that_no_token_has_ends_nothing(tokenizer: Any) -> None:
    [word] = tokenizer("a", add_special_tokens=False)["input_ids"]
    ours = StopStrings(tokenizer, ["aa"])
    beyond = len(tokenizer) + 5
    assert ours(torch.tensor([[word, word], [beyond, word], [word, beyond]]), None).tolist() == [
        True,
        False,
        False,
    ]


def test_nothing_is_laid_out_against_the_vocabulary(
    demo_parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate` with stop strings gives stock sequences, `chat` cuts its text there."""
    model, processor = demo_parts["demo"]
    with ks.wrap(model, processor) as vlm:
        messages = [{"role": "user", "content": "Hello!"}]
        text = vlm.chat(messages, max_new_tokens=20).text
        stop, inputs = text[4:7], vlm.inputs(messages)
        wanted = model.generate(
            **inputs, max_new_tokens=20, stop_strings=[stop], tokenizer=processor.tokenizer
        )

        def laid_out(*given: Any) -> None:
            raise AssertionError("upstream's criterion was built")

        monkeypatch.setattr(upstream.StopStringCriteria, "__init__", laid_out)
        same = vlm.generate(**vlm.inputs(messages), max_new_tokens=20, stop_strings=[stop])
        assert torch.equal(same, wanted)
        config = model.generation_config
        monkeypatch.setattr(config, "stop_strings", [stop])
        assert torch.equal(vlm.generate(**vlm.inputs(messages), max_new_tokens=20), wanted)
        cut = vlm.chat(messages, max_new_tokens=20, stop=stop)
        assert cut.text == text[: text.find(stop)] and cut.finish_reason == "stop"
        pieces = vlm.stream(messages, max_new_tokens=20, stop=[stop])
        assert "".join(piece.text for piece in pieces) == cut.text
        assert cut.tokens == wanted[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize(
    ("stop", "why"),
    [
        (["x"] * 129, "129 stop strings"),
        (["a", "x" * 4097], "the longest of 4097 characters"),
        ([""], "non-empty"),
        ([5], "non-empty"),
    ],
)
def test_too_many_or_too_long_are_refused(demo_parts: dict[str, Any], stop: Any, why: str) -> None:
    with ks.wrap(*demo_parts["demo"]) as vlm:
        messages = [{"role": "user", "content": "Hello!"}]
        with pytest.raises(InputError, match=why):
            vlm.chat(messages, stop=stop)
        with pytest.raises(InputError, match=why):
            vlm.generate(**vlm.inputs(messages), stop_strings=stop)


@bounded(200)
@given(text=st.text("ab", max_size=12), stop=st.text("ab", min_size=1, max_size=8))
def test_what_may_become_a_stop_string_is_held_back(text: str, stop: str) -> None:
    longest = next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
    assert _overlap(text, stop) == longest
