"""What fields of a request do: ends of answers, tokens, how pictures are shown, their names."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from support.server_harness import (
    HELLO,
    QUESTION,
    Live,
    Scripted,
    asked,
    live,
    png,
    scene,
    until,
    uri,
)

import keepsight as ks


def answered(server: Live, **body: Any) -> Any:
    """The choice of an answer, with tokens and usage beside it."""
    body = {"messages": asked(scene(1)), "temperature": 0, "return_token_ids": True, **body}
    status, reply, _ = server.chat(body)
    assert status == 200, reply
    choice = reply["choices"][0]
    return {**choice, "usage": reply["usage"], "prompt": reply["prompt_token_ids"]}


# -- ends and tokens ---------------------------------------------------------------------------


def test_what_is_nearly_as_cold_as_zero_is_greedy(server: Live) -> None:
    plain = answered(server, max_tokens=8)
    for temperature in (5e-324, 1e-40, 1e-6):
        cold = answered(server, max_tokens=8, temperature=temperature)
        assert cold["token_ids"] == plain["token_ids"]


def test_an_answer_ends_where_it_is_told_to(server: Live) -> None:
    tokenizer = server.service.model.tokenizer
    [end] = server.service.model.ends
    plain = answered(server, max_tokens=64)
    assert plain["finish_reason"] == "stop" and plain["token_ids"][-1] == end
    long = len(plain["token_ids"]) + 6
    on = answered(server, max_tokens=long, ignore_eos=True)
    assert on["finish_reason"] == "length" and len(on["token_ids"]) == long
    assert on["token_ids"][: long - 6] == plain["token_ids"]  # the end is a token like others
    later = answered(server, max_tokens=long + 20, min_tokens=long)
    assert end not in later["token_ids"][:long] and len(later["token_ids"]) >= long
    third = plain["token_ids"][2]
    cut = answered(server, max_tokens=64, stop_token_ids=[third])
    assert cut["finish_reason"] == "stop" and cut["token_ids"] == plain["token_ids"][:3]
    both = answered(server, max_tokens=64, stop_token_ids=[third], ignore_eos=True)
    assert both["token_ids"] == cut["token_ids"]
    shown = answered(server, max_tokens=64, skip_special_tokens=False)["message"]["content"]
    assert shown == plain["message"]["content"] + tokenizer.decode([end])
    assert tokenizer.decode(plain["token_ids"][:-1]) == plain["message"]["content"]


def test_as_much_as_fits_and_cuts_that_cut_nothing(server: Live) -> None:
    plain = answered(server, max_tokens=64)
    assert answered(server, max_tokens=-1)["token_ids"] == plain["token_ids"]
    with live(server.service.vlm, script := Scripted("hi"), max_tokens=90) as bounded:
        assert bounded.chat({"messages": asked(text="x"), "max_tokens": -1})[0] == 200
    assert script.asked[0][1]["max_new_tokens"] == 90
    # The checkpoint's own way of choosing (greedy) stays what it is.
    for cut in ({"top_k": -1}, {"top_k": 0}, {"top_p": 1.0, "min_p": 0.0}):
        found = answered(server, max_tokens=64, temperature=None, **cut)
        assert found["token_ids"] == plain["token_ids"]
    body = {"messages": asked(scene(1)), "max_tokens": 64, "return_token_ids": True}
    body |= {"temperature": 2.0, "n": 6, "seed": 1}
    for cut, different in (({"top_k": 1}, False), ({"top_k": -1}, True)):
        choices = server.chat({**body, **cut})[1]["choices"]
        assert (len({tuple(c["token_ids"]) for c in choices}) > 1) is different


def test_an_answer_goes_on_with_the_last_message(server: Live) -> None:
    plain = answered(server, max_tokens=64)
    tokenizer = server.service.model.tokenizer
    half = tokenizer.decode(plain["token_ids"][:4])
    messages = [*asked(scene(1)), {"role": "assistant", "content": half}]
    on = answered(server, messages=messages, continue_final_message=True, max_tokens=64)
    assert on["prompt"] == [*plain["prompt"], *plain["token_ids"][:4]]
    assert half + on["message"]["content"] == plain["message"]["content"]
    for word in ("prefix", "partial"):  # DeepSeek's and Kimi's for the same
        messages[-1] = {"role": "assistant", "content": half, word: True}
        assert answered(server, messages=messages, max_tokens=64)["token_ids"] == on["token_ids"]
    messages[-1] = {"role": "user", "content": half, "prefix": True}
    assert server.chat({"messages": messages})[1]["error"]["param"] == "continue_final_message"
    bare = answered(server, add_generation_prompt=False, max_tokens=1)
    assert bare["prompt"] == plain["prompt"][: len(bare["prompt"])]
    assert tokenizer.decode(plain["prompt"][len(bare["prompt"]) :]).startswith("<|im_start|>")


def test_other_ways_to_write_the_same(server: Live) -> None:
    plain = answered(server, max_tokens=16)["token_ids"]
    for same in ({"stop": ""}, {"stop": []}, {"tool_choice": {"type": "auto"}}):
        assert answered(server, max_tokens=16, **same)["token_ids"] == plain
    unnamed = {"messages": asked(scene(1)), "temperature": 0, "max_tokens": 16}
    status, reply, _ = server.call("/v1/chat/completions", unnamed)
    assert status == 200 and reply["model"] == "demo"
    part = asked(scene(1))[0]["content"][0]
    head, _, body = part["image_url"]["url"].partition(",")
    lines = "\n".join(body[start : start + 76] for start in range(0, len(body), 76))
    for other in (lines, body.rstrip("="), body.replace("+", "-").replace("/", "_")):
        messages = asked(scene(1))
        messages[0]["content"][0]["image_url"]["url"] = f"{head},{other}"
        assert answered(server, messages=messages, max_tokens=16)["token_ids"] == plain


def test_streams_tell_tokens_and_usage_of_each_step(server: Live) -> None:
    plain = answered(server, max_tokens=8)
    body = {"messages": asked(scene(1)), "temperature": 0, "max_tokens": 8}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.stream({**body, "return_token_ids": True})[:-1]
    told = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert told == [plain["prompt"]]
    tokens = [t for c in chunks for choice in c["choices"] for t in choice.get("token_ids", ())]
    assert tokens == plain["token_ids"]
    written = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert written == sorted(written) and written[-1] == 8 and written[0] < 8
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {len(plain["prompt"])}


# -- pictures ----------------------------------------------------------------------------------


def shown(server: Live, part: dict[str, Any], **more: Any) -> Any:
    """Usage of a question about a picture."""
    content = [part, {"type": "text", "text": QUESTION}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}
    status, reply, headers = server.chat(body)
    assert status == 200, reply
    return {**reply["usage"], "unused": headers.get("x-keepsight-unused", "")}


def test_a_picture_is_the_same_by_every_way(server: Live) -> None:
    image = scene(21)
    address = {"url": uri(image)}
    bare = uri(image).partition(",")[2]
    first = shown(server, {"type": "image_url", "image_url": address})
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": address["url"]},
        {"type": "image", "image": address["url"]},
        {"type": "image", "image": address},
        {"type": "image", "url": address["url"]},
        {"type": "image", "base64": bare},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": bare}},
        {"type": "input_image", "image_url": address["url"]},
    ]
    for part in parts:
        usage = shown(server, part)
        assert usage["images_encoded"] == 0 and usage["prompt_tokens"] == first["prompt_tokens"]
    beside = {"role": "user", "content": QUESTION, "images": [bare]}
    usage = server.chat({"messages": [beside], "max_tokens": 2})[1]["usage"]
    assert usage["images_reused"] == 1 and usage["prompt_tokens"] == first["prompt_tokens"]


def test_sizes_of_one_picture_are_the_processors_own(server: Live, demo_parts: Any) -> None:
    """As a model that was loaded with those limits sees it, and named apart from others."""
    image = scene(22)
    where = {"type": "image_url", "image_url": {"url": uri(image)}}
    model, processor = demo_parts["demo"]
    usage = {}
    for least, most in ((None, None), (None, 4096), (14_000, 16_384), (None, 12_000)):
        limits = {"min_pixels": least, "max_pixels": most}
        limits = {name: value for name, value in limits.items() if value is not None}
        usage[least, most] = shown(server, {**where, **limits})
        assert usage[least, most]["unused"] == ""
        size = {"shortest_edge": least or min(9216, most or 9216), "longest_edge": most or 16_384}
        with ks.wrap(model, processor, image_options={"size": size}) as other:
            prompt = other.render(asked(png(image)))
            assert len(prompt.ids) == usage[least, most]["prompt_tokens"]
            keys = [segment.key for segment in other.explain(asked(png(image))).segments]
        body = {"messages": asked(image), **limits}
        report = server.call("/v1/cache/explain", {"model": "demo", **body})[1]["report"]
        assert [s["key"] for s in report["segments"] if s["key"]] == [key for key in keys if key]
        assert report["images"][0]["status"] == "reused"
    tokens = [one["prompt_tokens"] for one in usage.values()]
    assert tokens[1] < tokens[0] and tokens[2] >= tokens[0]
    # The same limits, however they are said.
    for said in (
        {"mm_processor_kwargs": {"max_pixels": 4096}},
        {"mm_processor_kwargs": {"size": {"longest_edge": 4096}}},
    ):
        assert shown(server, where, **said)["images_encoded"] == 0
        assert shown(server, {**where, **said})["prompt_tokens"] == tokens[1]


# -- thoughts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "opened", "unused"),
    [
        ({"reasoning_effort": "high"}, True, "reasoning_effort"),  # on, without a level
        ({"reasoning_effort": "none"}, False, ""),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, True,
         "reasoning.summary, reasoning.effort"),
        ({"reasoning": {"enabled": False}}, False, ""),
        ({"thinking": True}, True, ""),
        ({"enable_thinking": True}, True, ""),
        ({"thinking": {"type": "enabled"}}, True, ""),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
         False, ""),
    ],
)  # fmt: skip
def test_thoughts_are_opened_as_the_template_does(
    thinker: ks.VLM, body: dict[str, Any], opened: bool, unused: str
) -> None:
    with live(thinker, Scripted("hm</think>Yes.")) as server:
        _, reply, headers = server.chat({"messages": HELLO, **body})
    message = reply["choices"][0]["message"]
    assert ("reasoning_content" in message) is opened
    assert headers.get("x-keepsight-unused", "") == unused


# -- what is not used --------------------------------------------------------------------------


def test_what_is_not_used_is_named_everywhere(
    server: Live, caplog: pytest.LogCaptureFixture
) -> None:
    text = {"type": "text", "text": "x", "foo": {"bar": 1}}
    messages = [{"role": "user", "content": [text], "tools": "forged"}]
    body = {"messages": messages, "tempature": 1, "zero": 0, "max_tokens": 1}
    body |= {"a": None, "b": [], "c": {}, "d": "", "e": False}  # say nothing
    body["keepsight"] = {"report": True}
    named = ["tempature", "zero"]  # what is unknown further inside is ignored
    _, reply, headers = server.chat(body)
    assert headers["x-keepsight-unused"] == ", ".join(named)
    notes = [note for note in reply["keepsight"]["report"]["notes"] if "not used" in note]
    assert notes[0] == "not used: tempature: unknown; did you mean temperature?"
    with live(server.service.vlm, script := Scripted("hi")) as other:
        object.__setattr__(other.service.config, "log", True)
        with caplog.at_level(logging.INFO, logger="keepsight.server.requests"):
            other.chat(body)
            until(lambda: caplog.records)  # it is written when the answer is out
    [asked_of_it] = script.asked[0][0]
    assert set(asked_of_it) == {"role", "content"}, "nothing unknown reaches a template"
    line = json.loads(caplog.records[-1].getMessage())
    assert line["unused"] == named
    prepared = server.call("/v1/prepare", {"model": "demo", **body})
    assert prepared[0] == 200 and "tempature" in prepared[2]["x-keepsight-unused"]
    asked_at = server.call("/v1/responses?api-version=1", {"model": "demo", "input": "x"})
    assert asked_at[2]["x-keepsight-unused"] == "?api-version"


def test_hostile_names_stay_short_and_plain(server: Live) -> None:
    names = {f"{number}\r\nset-cookie: a, b\u2028{'x' * 3000}": 1 for number in range(200)}
    status, _, headers = server.chat({**names, "messages": asked(text="x"), "max_tokens": 1})
    told = headers["x-keepsight-unused"]
    assert status == 200 and len(told) < 4000 and told.isascii() and "set-cookie" not in headers
    assert told.endswith("+176") and told.count(",") == 24
