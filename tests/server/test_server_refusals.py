"""Bodies and addresses that are refused: a status, the parameter, and what was expected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.server_harness import Live, asked, live, png, refusal, scene, uri

import keepsight as ks
from keepsight.server.access import MOST_VALUES, parsed
from keepsight.server.schema import Rendering

CHAT, RESPONSES, DECISIONS = "/v1/chat/completions", "/v1/responses", "/v1/decisions"
SYSTEM_ONE, COMPLETIONS = "/v1/systemone", "/v1/completions"
PICTURE = uri(scene(1))
TEXT = {"type": "input_text", "text": "x"}
PREDICATE = {"type": "predicate", "instructions": "x"}
TWICE = {"type": "choice", "instructions": "x", "choices": [{"value": "a"}, {"value": "a"}]}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


def said(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [TEXT, *parts], **more}]}


def shown(**more: Any) -> dict[str, Any]:
    return user([{"type": "image_url", "image_url": {"url": PICTURE}, **more}])


def pictured(**fields: str) -> dict[str, Any]:
    return said({"type": "input_image", **fields})


UNKNOWN = "0" * 64  # the key of a picture that nobody has
BROKEN = "data:image/png;base64,???"
CUT = uri(png(scene(1))[:60])  # it has a head, and no pixels
IMAGE = {"type": "input_image", "image_url": 5}
FIVE = said(*({"type": "input_image", "image_url": url} for url in
    [*(uri(scene(n)) for n in range(4)), BROKEN]))  # fmt: skip
BEGUN: dict[str, dict[str, Any]] = {
    CHAT: user("x"),
    RESPONSES: {"input": "x"},
    DECISIONS: {"input": "x"},
    SYSTEM_ONE: {
        "state": "<a>",
        "questions": {"q": {"type": "noul"}},
        "assets": {"<a>": {"data_base64": PICTURE.partition(",")[2]}},
    },
}
# What is pinned or deleted: a conversation, or pictures by their keys.
OF_PICTURES: list[tuple[dict[str, Any], str | None]] = [
    ({}, "messages"),
    ({"images": []}, "images"),
    ({"images": ["x"]}, "images[0]"),
    ({"images": [UNKNOWN], "messages": asked(scene(1))}, "images"),
    ({"images": [UNKNOWN], "pictures_only": True}, "pictures_only"),
    ({"images": [UNKNOWN], "max_pixels": 4096}, "max_pixels"),
    ({"images": [UNKNOWN], "model": "gpt"}, "model"),
]
WRONG: dict[str, list[tuple[dict[str, Any], str | None]]] = {
    CHAT: [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        (user(5), "messages[0].content"),
        (user([]), "messages[0].content"),
        (user(None), "messages[0].content"),
        (user("x", images=[5]), "messages[0].images[0]"),
        (user("x", function_call={"name": "a"}), "messages[0].function_call"),
        (user([{"type": "pictur"}]), "messages[0].content[0]"),
        (user([{"type": "image_url", "image_url": "x"}]), "messages[0].content[0].image_url"),
        ({"messages": [{"role": "bishop", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": asked("http://127.0.0.1/x.png")}, "messages[0].content[0]"),
        ({"messages": asked("file:///etc/passwd")}, "messages[0].content[0].image_url"),
        ({"messages": asked("aGVsbG8h")}, "messages[0].content[0].image_url"),
        ({"messages": asked(*[scene(1)] * 5)}, "messages[0].content[4]"),
        ({"messages": asked(scene(1), uri(b"GIF89a"))}, "messages[0].content[1]"),
        (shown(min_pixels=12_000, max_pixels=10_000), "messages[0].content[0]"),
        (shown(min_pixels=1_000_000), "messages[0].content[0].min_pixels"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 65}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"n": 9}, "n"),
        ({"n": True}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a"] * 129}, "stop"),
        ({"stop_token_ids": [99_999_999]}, "stop_token_ids[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        (user([{"type": "input_json", "data": None}]), "messages[0].content[0].data"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"nam": "f"}}},
            "tool_choice.function.name"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"keepsight": {"repot": True}}, "keepsight.repot"),
        ({"functions": [{}]}, "functions"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"best_of": 2}, "best_of"),
        ({"truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"model": "gpt"}, "model"),
    ],
    RESPONSES: [
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"max_output_tokens": 65}, "max_output_tokens"),
        ({"input": "x y " * 20_000}, "input"),
        (said(type="mesage"), "input[0]"),
        (pictured(image_url="nowhere"), "input[0].content[1].image_url"),
        (pictured(image_url=uri(b"GIF89a")), "input[0].content[1]"),
        (pictured(image_url="http://[::1]/"), "input[0].content[1]"),
        (pictured(file_id="file-x"), "input[0].content[1].file_id"),
        ({"instructions": "x", "input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": []}]},
            "input[0].output"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        *(({"previous_response_id": one}, "previous_response_id") for one in ("", "x" * 5000)),
    ],
    SYSTEM_ONE: [
        ({"questions": {}}, "questions"),
        ({"questions": {str(i): {"type": "noul"} for i in range(401)}}, "questions"),
        ({"questions": {"q": {"type": "essay"}}}, "questions"),
        ({"state": "none"}, "assets['<a>']"),
        ({"assets": {"<a>": {"data_base64": "aGVsbG8="}}}, "assets['<a>'].data_base64"),
        ({"assets": {"<a>": {"data_base64": "\u00e4"}}}, "assets['<a>'].data_base64"),
        ({"model": "other"}, "model"),
        ({"state": 3}, "state"),
    ],
    DECISIONS: [
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": [{"type": "box"}]}, "questions[0]"),
        ({"questions": [TWICE]}, "questions[0].choices[1].value"),
        ({"questions": [PREDICATE], **pictured(file_id="f")}, "input[0].content[1].image_url"),
        ({"questions": [PREDICATE], **pictured(image_url=BROKEN)}, "input[0].content[1].image_url"),
        ({"questions": [PREDICATE], **pictured(image_url=CUT)}, "input[0].content[1]"),
        ({"questions": [PREDICATE], **FIVE}, "input[0].content[5]"),  # before the fifth is read
        ({"questions": [{"type": "choice"}]}, "questions[0].instructions"),
        ({"questions": [{**TWICE, "choices": [{"value": None}] * 2}]},
            "questions[0].choices[0].value"),
        ({"questions": [PREDICATE], "input": "x y " * 20_000}, "input"),
    ],
    "/v1/score": [
        ({"text_1": "a"}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ({"text_1": "a", "text_2": ["b", {}]}, "text_2[1].text"),
        ({"queries": ["a"], "documents": {"content": [TEXT, IMAGE]}},
            "documents.content[1].image_url"),
        ({"text_1": "a", "text_2": "x y " * 20_000}, None),
    ],
    "/v1/rerank": [
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": [{"content": [{"type": "text"}]}]},
            "documents[0].content[0].text"),
        ({"query": "a", "documents": ["b", {"content": [TEXT, {**IMAGE, "image_url": CUT}]}]},
            "documents[1].content[1]"),
        ({"query": "a", "documents": ["x y " * 20_000]}, "documents"),
    ],
    COMPLETIONS: [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": "x y " * 20_000}, "prompt"),
        ({"prompt": [3, 99999]}, "prompt[1]"),
        ({"prompt": "a <|image_pad|> b"}, "prompt"),
        ({"prompt": "a", "stream": True}, "stream"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 99}, "logprobs"),
        ({"prompt": "a", "guided_choice": []}, "guided_choice"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ],
    "/v1/cache/pin": OF_PICTURES,
    "/v1/cache/delete": OF_PICTURES,
    "/tokenize": [({}, "prompt"), ({"messages": []}, "messages")],
    "/detokenize": [({"tokens": [1, 99999]}, "tokens[1]")],
}  # fmt: skip


@pytest.fixture(scope="module")
def server(demo_parts: dict[str, Any]) -> Iterator[Live]:
    with ks.wrap(*demo_parts["demo"]) as vlm, live(vlm, max_tokens=64, max_images=4) as it:
        yield it


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [(path, *row) for path, rows in WRONG.items() for row in rows],
)
def test_what_is_wrong_is_named(server: Live, path: str, more: Any, param: str | None) -> None:
    body = {"model": "demo", **BEGUN.get(path, {}), **more}
    status = 404 if param is not None and param.endswith(("file_id", "model")) else 400
    error = refusal(server.call(path, body), status)
    assert error["param"] == param
    assert path != RESPONSES or "messages" not in error["message"], "it speaks as it was spoken to"


@pytest.mark.parametrize(
    ("path", "more", "hint"),
    [
        ("chat/completions", {"keepsight": {"reprot": True}}, "'keepsight.reprot'; see /docs"),
        ("cache/pin", {"num_predict": 5}, "'num_predict'; see /docs"),
        ("cache/reset", {"everone": True}, "did you mean everyone?"),
        ("models?api-version=1", None, "'api-version'; see /docs"),
        ("files?ordr=asc", None, "did you mean order?"),
        ("cache/images?store=true", None, "did you mean stored?"),
    ],
)
def test_what_must_not_be_guessed_is_answered_with_what_is_known(
    server: Live, path: str, more: dict[str, Any], hint: str
) -> None:
    body = {"model": "demo", **user("x"), **more} if path != "cache/reset" and more else more
    error = refusal(server.call(f"/v1/{path}", body))
    assert error["code"] == "unknown_parameter" and error["message"].endswith(hint)
    assert server.call("/health?x=1")[0] == 200


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "auto", "x": 1}, "maybe", 5, [], {}])
def test_a_choice_of_tools_says_what_it_may_be(server: Live, choice: Any) -> None:
    for path in (CHAT, RESPONSES):
        error = refusal(server.call(path, {**BEGUN[path], "tool_choice": choice}))
        assert error["param"] == "tool_choice" and error["message"].startswith(
            "invalid value for 'tool_choice': expected 'none', 'auto', 'required', or a function"
        )


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (CHAT, user([{"type": "pictur"}]), "its type is 'pictur', expected one of 'text',"),
        (CHAT, user([{"text": "x"}]), "it has no type"),
        (CHAT, user([{"type": "image_url", "image_url": 1}]), "a valid string"),
        (CHAT, user([{"type": "image_url", "image_url": []}]), "Input should be an object"),
        (CHAT, {**user("x"), "response_format": "json"}, "Input should be an object"),
        (RESPONSES, {"input": [{"type": "item_referral"}]},
            "its type is 'item_referral', expected one of 'message',"),
        (RESPONSES, {"input": [{"type": "item_referral"}]}, "'item_reference', '*_call'"),
        (CHAT, {"messages": asked(BROKEN)}, "cannot be decoded"),
        (CHAT, {"messages": asked("data:nothing")}, "no comma"),
        (CHAT, {"messages": asked(uri(b"not a picture"))}, "not an image in a format"),
        (CHAT, {"messages": asked(CUT)}, "is it truncated?"),
        (CHAT, user([{"type": "file", "file": {}}]), "one of file_id, file_data"),
        (CHAT, user([{"type": "file", "file": {"file_data": uri(b"%PDF-1.4 nonsense")}}]), "PDF"),
    ],
    ids=lambda one: str(one)[:40],
)  # fmt: skip
def test_the_reason_is_told_in_the_words_of_json(
    server: Live, path: str, body: Any, why: str
) -> None:
    assert why in refusal(server.call(path, body))["message"]


@pytest.mark.parametrize(
    ("body", "headers", "why"),
    [
        (b'{"model": "d\xff"}', {}, "not valid JSON: invalid unicode"),
        (b'{"seed": ' + b"9" * 5000 + b"}", {}, "number out of range"),
        (b"\x1f\x8b123", {"content-encoding": "gzip"}, "Content-Encoding is 'gzip'"),
        (b'{"model": "demo", "messages": [], "\\ud800": 1}', {}, "unexpected end of hex escape"),
        (b"", {}, "missing required parameter"),
        (b"{", {}, "not valid JSON"),
        (b"null", {}, "not a JSON object"),
        (b'{"model": "demo", "messages": NaN}', {}, "not valid JSON"),
        (b'{"temperature": Infinity}', {}, "not valid JSON"),
        (b"[" * 1000 + b"]" * 1000, {}, "recursion limit"),
        (b"[" + b"1," * MOST_VALUES + b"1]", {}, "commas and brackets"),
        (b"{" + b",".join(b'"%d":0' % n for n in range(MOST_VALUES + 1)) + b"}", {}, "commas and"),
        (b"[" * (MOST_VALUES + 1) + b"]", {}, "commas and brackets"),
        (b'["' + b"A" * (2 << 20) + b'",' + b"1," * MOST_VALUES + b"1]", {}, "commas and brackets"),
        (json.dumps(user("x")).encode(), {"content-type": "text/plain"}, "Content-Type: app"),
    ],
    ids=lambda one: str(one)[:20],
)
def test_a_body_that_cannot_be_read_is_refused_with_its_reason(
    server: Live, body: bytes, headers: dict[str, str], why: str
) -> None:
    for path in (CHAT, RESPONSES, "/v1/prepare"):
        assert why in refusal(server.call(path, body, "POST", headers))["message"]


def test_what_any_client_may_send_is_parsed() -> None:
    history = [{"role": "user", "content": "x, y [z] {w}"}] * 50_000
    long = user("data:image/png;base64," + "AAAA" * (1 << 20), name="é" * 99)["messages"]
    for messages in (history, long):
        body = "\ufeff" + json.dumps({"messages": messages}, ensure_ascii=False)
        sent = parsed(Rendering, body.encode(), {"content-type": "application/json; charset=utf-8"})
        assert [one.content for one in sent.messages] == [one["content"] for one in messages]
