"""Answers prefilled while their readers read: what a client sends back is remembered by then."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from server_harness import Client, asked, live, scene, served

import keepsight as ks
from keepsight.errors import InputError
from keepsight.scheduler import Together
from keepsight.server.api.output_parser import OutputParser, spoken_message
from keepsight.server.config import ServerConfig
from keepsight.server.media.content import MessageReader

QUESTION = "Describe the picture."
SOON = 20.0  # seconds


def answered(server: Client, **more: Any) -> list[dict[str, Any]]:
    """A conversation as a client goes on with it, one answer and one more question long."""
    first = asked(scene(50), scene(51), text="Compare the two pictures.")
    status, reply, _ = server.chat({"messages": first, "max_tokens": 64, **more})
    assert status == 200
    said = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
    return [*first, said, *asked(text="What is in picture 1?")]


def remembered(server: Client, messages: list[dict[str, Any]]) -> int:
    body = {"model": "demo", "messages": messages}
    found = server.call("/v1/cache/explain", body)[1]
    return int(found["report"]["cached_tokens"])


def soon_more_than(server: Client, messages: list[dict[str, Any]], before: int) -> bool:
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        if remembered(server, messages) > before:
            return True
        time.sleep(0.05)
    return False


def test_a_real_server_does_it_by_itself() -> None:
    with ks.load("demo") as vlm, live(vlm) as server:  # which prefills nothing ahead
        without = remembered(server, answered(server))
    with served() as server:
        then = answered(server)
        assert soon_more_than(server, then, without)
        reply = server.chat({"messages": then, "max_tokens": 16})[1]
        details = reply["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] > without and reply["usage"]["images_encoded"] == 0


@pytest.mark.parametrize(("more", "waits"), [({}, 1), ({"n": 2}, 0)])
def test_of_several_choices_none_is_followed(more: dict[str, Any], waits: int) -> None:
    with ks.load("demo") as vlm, Together(vlm, ahead=60.0) as together:
        with live(vlm, together) as server:
            answered(server, **more)
            assert len(together._ahead) == waits


def test_another_salt_knows_nothing_of_it() -> None:
    with ks.load("demo") as vlm, Together(vlm, ahead=0.0) as together:
        with live(vlm, together) as server:
            then = answered(server, cache_salt="one")
            end = time.monotonic() + SOON
            while len(together._ahead) and time.monotonic() < end:
                time.sleep(0.01)
            assert together.stats()["ahead_tokens"] > 0
            assert remembered(server, then) == 0


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    "text", ["Red.", "<think>\nHm.\n</think>\n\nRed.", f"Let me see.\n{CALL}", f"{CALL}\n{CALL}"]
)
def test_an_answer_becomes_what_its_client_sends_back(text: str) -> None:
    """Compared with the way that a body goes; only the ids of calls are anybody's."""
    from keepsight.server.api import schema

    speech = OutputParser(False, True, True)
    said = [*speech.push(text), *speech.finish()]
    words = "".join(one.text for one in said if one.kind == "text")
    calls = [
        {"id": "x", "type": "function", "function": {"name": c.name, "arguments": c.text}}
        for c in said
        if c.kind == "call"
    ]
    sent = {"role": "assistant", "content": words or None, "tool_calls": calls or None}
    gatherer = MessageReader(ServerConfig(), None, "", None)  # type: ignore[arg-type]
    body = schema.ChatMessage.model_validate(sent)
    wanted = gatherer._message(body, *body.places(0))
    found = spoken_message(OutputParser(False, True, True), text)
    for call in found.get("tool_calls", []):
        call["id"] = "x"
    assert json.dumps(found, sort_keys=True) == json.dumps(wanted, sort_keys=True)


def test_one_call_where_one_was_asked_for() -> None:
    found = spoken_message(OutputParser(False, False, True), f"{CALL}\n{CALL}", 1)
    assert len(found["tool_calls"]) == 1


def test_how_long_it_must_be_quiet() -> None:
    assert ServerConfig().quiet == 0.25
    assert ServerConfig(prefill_ahead="never").quiet is None
    assert ServerConfig(prefill_ahead="2s").quiet == 2
    with pytest.raises(InputError, match="is not a time"):
        ServerConfig(prefill_ahead="sometimes")
