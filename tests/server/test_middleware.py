"""What must not break a server: bad bodies, slow and dead clients, crowds, other people's keys."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.server_harness import (
    CHAT,
    TEMPLATE,
    Live,
    Scripted,
    answered,
    asked,
    bearer,
    live,
    refusal,
    scene,
    until,
    uri,
)

import keepsight as ks
from keepsight.report import Piece
from keepsight.server import access as intake
from keepsight.server import streaming
from keepsight.server.config import ApiKey

KEYS = (
    ApiKey("ann", "ann-key"),
    ApiKey("bob", "bob-key"),
    ApiKey("root", "root-key", admin=True),
    ApiKey("slow", "slow-key", requests_per_minute=2),
    ApiKey("small", "small-key", files_bytes=600),
)


@pytest.fixture(scope="module")
def server(vlm: Any) -> Iterator[Live]:
    limits = {"max_body": "2MiB", "body_timeout": 1, "idle_timeout": 1, "max_images": 4}
    with live(vlm, max_tokens=64, allow_private_urls=False, **limits) as it:
        yield it


@pytest.fixture(scope="module")
def locked(vlm: Any) -> Iterator[Live]:
    with live(vlm, keys=KEYS) as it:
        yield it


# -- bad bodies --------------------------------------------------------------------------------


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def test_whatever_answers_get_answers_head(server: Live) -> None:
    paths = ["/health", "/", "/docs", "/metrics", "/openapi.json", "/page/docs.js", "/v1/models"]
    paths += ["/v1/models/demo", "/v1/files", "/v1/cache/stats", "/v1/cache/images"]
    for path in paths:
        status, text, headers = server.call(path, method="HEAD")
        assert (status, text) == (200, "") and int(headers["content-length"]) > 0, path
    assert server.call(CHAT, method="HEAD")[0] == 405
    assert server.call("/v1/files/file-0", method="HEAD")[0] == 404
    other = server.call("/v1/files", {}, "PUT")
    assert refusal(other, 405)["code"] == "method_not_allowed" and other[2]["allow"]


def test_places_models_and_methods(server: Live) -> None:
    assert refusal(server.chat({"model": "gpt", **user("x")}), 404)["code"] == "model_not_found"
    refusal(server.call("/v1/models/gpt"), 404)
    for path, hint in (
        ("/v1/nothing", "see /docs"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "did you mean /v1/models?"),
        ("/v1/tokenize", "did you mean /tokenize?"),
    ):
        assert refusal(server.call(path), 404)["message"].endswith(f"{path!r}; {hint}")
    refusal(server.call(CHAT), 405)
    for path in ("v1/files/file-0", "page/nothing.js", "page/..%2Fapp.py", "page/%2e%2e/app.py"):
        refusal(server.call(f"/{path}"), 404)
    for fields in (b"", b"--x--\r\n"):
        kind = {"content-type": "multipart/form-data; boundary=x"}
        refusal(server.call("/v1/files", fields, "POST", kind))
    refusal(server.call("/v1/files", b"x", "POST", {"content-type": "multipart/form-data"}))


def test_bodies_that_are_too_large(server: Live) -> None:
    large = uri(b"x" * (5 << 20))
    assert refusal(server.chat({"messages": asked(large)}), 413)["code"] == "body_too_large"
    # The same without saying how large it will be.
    with server.raw() as connection:
        connection.sendall(
            b"POST /v1/prepare HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        for _ in range(40):
            try:
                connection.sendall(chunk)
            except OSError:
                break
        assert b" 413 " in connection.recv(4096)[:40]


def test_a_refusal_comes_before_the_body_does(vlm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it may take: the rest is read behind it, and a short one costs no connection."""
    with live(vlm, keys=(ApiKey("ann", "ann-key", requests_per_minute=1),)) as server:
        monkeypatch.setattr(intake, "_QUIET", 3600.0)
        body = b'{"model": "demo"}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        length = b"Content-Length: %d\r\n" % len(body)
        known = b"Authorization: Bearer ann-key\r\n"
        server.call("/v1/cache/explain", {}, headers=bearer("ann"))  # all that may be asked
        for status, headers, keeps in (
            (401, length, True),
            (401, b"Transfer-Encoding: chunked\r\n", False),
            (401, b"Content-Length: 2000000\r\n", False),
            (401, length + b"Expect: 100-continue\r\n", True),
            (429, length + known, True),
            (503, length + known, True),
        ):
            server.service.draining = status == 503
            with server.raw() as connection:
                connection.settimeout(20)
                connection.sendall(head + headers + b"\r\n" + body[:5])
                answer = http.client.HTTPResponse(connection)
                answer.begin()
                assert answer.status == status and json.loads(answer.read())["error"]
                assert (answer.getheader("connection") != "close") == keeps, headers
                if keeps:
                    connection.sendall(body[5:] + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert answered(connection)[0] == (503 if status == 503 else 200)


def test_ten_thousand_messages(server: Live) -> None:
    words = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    answer = server.chat({"messages": words * 5000, "max_tokens": 1})
    assert refusal(answer)["code"] == "context_length_exceeded"
    refusal(server.chat({"messages": words * 10_001}))


# -- clients that are slow, dead, or many ------------------------------------------------------


def test_slow_and_half_closed_clients(server: Live) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with server.raw() as slow, server.raw() as half, server.raw() as idle, server.raw() as drip:
        slow.sendall(head)
        half.sendall(head)
        half.shutdown(socket.SHUT_WR)
        drip.sendall(b"POST / HT")
        assert server.chat({**user("Hello"), "max_tokens": 1})[0] == 200  # nobody else waits
        assert b" 408 " in slow.recv(4096)[:40]
        assert half.recv(4096) == b""  # half of a body will never be whole
        assert idle.recv(10) == b"" and drip.recv(4096)[:10] in (b"", b"HTTP/1.1 4")


class Paused(Scripted):
    """Says its first word, and the others when it may go on."""

    def __init__(self, *pieces: str) -> None:
        super().__init__(*pieces)
        self.go_on = threading.Event()

    def _say(self, ticket: Any) -> None:
        ticket.put(Piece("first ", 0))
        self.go_on.wait(120)
        super()._say(ticket)


def test_nonsense_instead_of_http(server: Live) -> None:
    for data in (
        b"\x16\x03\x01" * 100,
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20000,
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 2750 + b"\r\n",  # whole, but long
    ):
        with server.raw() as connection:
            connection.sendall(data)
            assert connection.recv(100)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431", b"")
    assert server.call("/health")[0] == 200


def test_a_client_that_hangs_up_frees_its_place(vlm: Any) -> None:
    for stream in (True, False):
        script = Scripted(*["word "] * 1000, wait=0.01)
        with live(vlm, script) as server:
            body = {**user("x"), "stream": stream}
            connection = server.sending(CHAT, body)
            until(script.begun.is_set)
            if stream:
                assert b"200" in connection.recv(100)
            connection.close()
            assert script.tickets[0].done.wait(60) and script.tickets[0].cancelled


def test_a_full_queue_says_when_to_come_again(vlm: Any) -> None:
    with live(vlm, Scripted(busy=True)) as server:
        answer = server.chat(user("x"))
        assert refusal(answer, 429)["code"] == "queue_full" and answer[2]["retry-after"] == "8"


def test_an_answer_that_takes_too_long(vlm: Any) -> None:
    script = Scripted(*["word "] * 1000, wait=0.05)
    with live(vlm, script, request_timeout=0.5) as server:
        assert refusal(server.chat(user("x")), 504)["code"] == "timeout"
        assert script.tickets[0].done.wait(60)
        assert server.stream(user("x"))[-1]["error"]["code"] == "timeout"


# -- keys and tenants --------------------------------------------------------------------------


def test_keys(locked: Live) -> None:
    for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "Basic ann-key"}):
        refusal(locked.chat(user("x"), headers=headers), 401)
        refusal(locked.call("/v1/models", headers=headers), 401)
        refusal(locked.call("/metrics", headers=headers), 401)
    assert locked.call("/health")[0] == 200
    assert locked.call("/v1/models", headers=bearer("ann"))[0] == 200
    metrics = refusal(locked.call("/metrics", headers=bearer("ann")), 403)
    assert metrics["code"] == "admin_key_required"
    assert locked.call("/metrics", headers=bearer("root"))[0] == 200
    reset = locked.call("/v1/cache/reset", {"everyone": True}, headers=bearer("ann"))
    assert refusal(reset, 403)["code"] == "admin_key_required"


def test_a_key_has_so_many_answers_at_the_same_time(vlm: Any) -> None:
    keys = (ApiKey("ann", "ann-key", answers=1), ApiKey("bob", "bob-key"))
    with live(vlm, script := Paused("second"), keys=keys) as server:
        first = server.crowd(CHAT, user("x"), 1, "ann")
        assert script.begun.wait(20)
        more = server.chat(user("x"), headers=bearer("ann"))
        assert refusal(more, 429)["code"] == "rate_limit_exceeded" and more[2]["retry-after"]
        assert server.call("/v1/files", headers=bearer("ann"))[0] == 200
        script.go_on.set()
        assert server.chat(user("x"), headers=bearer("bob"))[0] == 200
        until(lambda: first)
        assert first[0][0] == server.chat(user("x"), headers=bearer("ann"))[0] == 200


def test_one_who_asks_without_end_waits_while_others_are_answered(
    vlm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake.Bucket, "wait", lambda bucket, needed: 3600.0)
    keys = (ApiKey("ann", "ann-key"), ApiKey("bob", "bob-key"))
    with live(vlm, script := Paused("second"), keys=keys) as server:
        assert server.call("/v1/files", headers=bearer("bob"))[0] == 200
        hers = server.crowd(CHAT, user("x"), 1, "ann")
        assert script.begun.wait(20)
        refused = [server.call("/v1/files", headers=bearer("bob")), server.call("/metrics")]
        assert refusal(refused[0], 429)["code"] == "busy" and refused[1][0] == 401
        own = server.call("/v1/files", headers=bearer("ann"))
        assert own[0] == 200, "her own answer is no other"
        script.go_on.set()
        until(lambda: hers)
        assert server.call("/v1/files", headers=bearer("bob"))[0] == 200


def test_a_silent_stream_says_that_it_lives(vlm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_ALIVE", 0.02)

    class Silent(Scripted):
        def _say(self, ticket: Any) -> None:
            assert heard.wait(20)
            super()._say(ticket)

    heard = threading.Event()
    with live(vlm, Silent("at last")) as server:
        body = {"model": "demo", **user("x"), "stream": True}
        with server.opened(CHAT, body) as answer:
            assert answer.readline().startswith(b": ")
            heard.set()
            rest = answer.read().decode()
    assert "at last" in rest and rest.rstrip().endswith("data: [DONE]")


def test_a_key_has_an_equal_part_of_the_room_for_files(vlm: Any) -> None:
    """Two keys of one tenant have one part; who has a limit of its own has that one."""
    keys = (*KEYS, ApiKey("wide", "wide-key", files_bytes=900), ApiKey("ann2", "x", tenant="ann"))
    with live(vlm, Scripted("hi"), keys=keys, files_budget=1800) as server:  # 300 for each of six
        for who, most in (("ann", 300), ("bob", 300), ("wide", 900)):
            refused = refusal(server.upload(b"x" * (most + 1), bearer(who)), 413)
            assert refused["code"] == "files_quota_exceeded" and str(most) in refused["message"]
            assert server.upload(b"x" * most, bearer(who))[0] == 200
            refusal(server.upload(b"y", bearer(who)), 413)
    with live(vlm, Scripted("hi"), files_budget=1800) as server:  # nobody is told apart
        assert server.upload(b"x" * 1800, bearer("ann"))[0] == 200
        assert refusal(server.upload(b"y", bearer("ann")), 413)["code"] == "files_full"


def test_other_websites_may_not_ask_unless_allowed(vlm: Any, server: Live) -> None:
    headers = {"origin": "http://evil", "access-control-request-method": "POST"}
    refused = server.call(CHAT, method="OPTIONS", headers=headers)[2]
    assert "access-control-allow-origin" not in refused
    sent = server.call("/v1/cache/reset", b"", "POST", {"origin": "http://evil"})
    assert refusal(sent, 403)["code"] == "origin_not_allowed"
    assert server.call("/v1/cache/reset", {}, headers={"origin": server.url})[0] == 200
    with live(vlm, Scripted(), allow_origin=("http://good",)) as other:
        allowed = other.call(CHAT, method="OPTIONS", headers={**headers, "origin": "http://good"})
        assert allowed[2]["access-control-allow-origin"] == "http://good"
        refused = other.call(CHAT, method="OPTIONS", headers=headers)[2]
        assert "access-control-allow-origin" not in refused
        # OpenAI's client in a browser has headers of its own.
        sent = "authorization,content-type,x-stainless-os,x-stainless-retry-count"
        asked = {**headers, "origin": "http://good", "access-control-request-headers": sent}
        status, _, told = other.call(CHAT, method="OPTIONS", headers=asked)
        allowed = told["access-control-allow-headers"].lower().replace(" ", "").split(",")
        assert status == 200 and set(sent.split(",")) <= set(allowed)


def test_a_name_of_the_web_does_not_reach_a_server_of_this_machine(vlm: Any) -> None:
    own = ["127.0.0.1:8000", "localhost", "LocalHost.:8000", "[::1]:8000", "192.168.1.7:80"]
    own += ["box:8000", "box.local", "app.localhost:3000", "good.example"]
    others = ["evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"]
    with live(vlm, Scripted("hi"), allow_origin=("https://good.example",)) as server:
        for name in (*own, *others, "[evil.example]"):
            for path in ("/v1/files", "/", "/v1/cache/stats"):
                status, told, _ = server.call(path, headers={"host": name})
                assert status == (200 if name in own else 403), (name, path)
                assert name in own or told["error"]["code"] == "host_not_allowed"


# -- thinking and tools ------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


NAMED = TEMPLATE.replace(
    "}}\n{% if message.content is", "}} {{ message.name }}\n{% if message.content is"
)


def test_names_are_told_to_the_model_or_named(server: Live, demo_parts: dict[str, Any]) -> None:
    speaking = [{"role": "user", "name": "ann", "content": "x"}]
    later = [*user("x")["messages"], {"role": "assistant", "name": "b", "content": "y"}, *speaking]
    unused = server.chat({"messages": later, "max_tokens": 1})[2]["x-keepsight-unused"]
    assert unused == "messages[1].name, messages[2].name"
    assert NAMED != TEMPLATE
    with ks.wrap(*demo_parts["demo"], chat_template=NAMED) as named:
        with live(named, script := Scripted("hi")) as other:
            assert "x-keepsight-unused" not in other.chat({"messages": later})[2]
        assert script.asked[0][0][2]["name"] == "ann"


def test_thinking_and_calls_come_apart(thinker: Any) -> None:
    said = ("hm", "m</thi", "nk>\n\nI ", "look.\n<tool_", 'call>{"name": "look", "argu',
            'ments": {"at": 1}}</tool_call>')  # fmt: skip
    body: dict[str, Any] = {**user("x"), "tools": TOOLS}
    body["chat_template_kwargs"] = {"enable_thinking": True}
    script = Scripted(*said)
    with live(thinker, script) as server:
        choice = server.chat(body)[1]["choices"][0]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls" and message["content"] == "I look."
        assert message["reasoning_content"] == "hmm"
        call = message["tool_calls"][0]["function"]
        assert call == {"name": "look", "arguments": '{"at": 1}'}
        assert script.asked[0][1]["tools"] == TOOLS
        chunks = server.stream(body)
        deltas = [c["choices"][0]["delta"] for c in chunks[:-1] if c["choices"]]
        assert "".join(d.get("reasoning_content") or "" for d in deltas) == "hmm"
        assert "".join(d.get("content") or "" for d in deltas) == "I look."
        assert [d["tool_calls"][0]["function"] for d in deltas if "tool_calls" in d] == [call]
        none = server.chat({**body, "tool_choice": "none"})[1]["choices"][0]
        assert "tool_calls" not in none["message"] and "tools" not in script.asked[-1][1]
        forced = server.chat({**body, "tool_choice": "required"})
        assert forced[0] == 200 and script.asked[-1][1]["response_format"].kind == "calls"
        strict = json.loads(json.dumps(TOOLS))
        strict[0]["function"]["strict"] = True
        bound = server.chat({**body, "tools": strict})
        assert "x-keepsight-unused" not in bound[2]
        assert script.asked[-1][1]["response_format"].kind == "calls"
        assert script.asked[-1][1]["tools"] == TOOLS  # the template is not told of it
        flat = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
        asked_for = {"model": "demo", "input": "x", "tools": flat}
        asked_for["chat_template_kwargs"] = {"enable_thinking": True}
        response = server.call("/v1/responses", asked_for)[1]
        kinds = [item["type"] for item in response["output"]]
        assert kinds == ["reasoning", "message", "function_call"]
        items = [{"role": "user", "content": "x"}, *response["output"]]
        items.append({"type": "function_call_output", "call_id": response["output"][2]["call_id"],
                      "output": "A ring."})  # fmt: skip
        assert server.call("/v1/responses", {**asked_for, "input": items})[0] == 200
        sent = script.asked[-1][0]
        assert [m["role"] for m in sent] == ["user", "assistant", "tool"]
        assert sent[1]["tool_calls"][0]["function"]["arguments"] == {"at": 1}
        thinker.render(sent, tools=TOOLS)


def test_tools_of_the_real_engine(thinker: Any) -> None:
    with live(thinker) as server:
        body = {"messages": asked(scene(1)), "tools": TOOLS, "max_tokens": 3}
        first = server.chat(body)[1]["usage"]
        again = server.chat(body)[1]["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] == first["prompt_tokens"]
        fewer = server.chat({**body, "tools": None})[1]["usage"]["prompt_tokens"]
        assert fewer < first["prompt_tokens"]
