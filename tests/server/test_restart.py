"""A real server with a store: ended in order or killed in the middle of work, and started again."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.server_harness import Client, Process, asked, live, png, scene, served

import keepsight as ks
from keepsight.store import open_store

TEXTS = ("What is in the picture?", "What color is the shape in the picture?")
CHATS = [(seed, text) for seed in (60, 61, 62) for text in TEXTS]


def body(seed: int, text: str) -> dict[str, Any]:
    told = {"keepsight": {"report": True}}
    return {"messages": asked(scene(seed), text=text), "max_tokens": 24, **told}


def answer(server: Client, seed: int, text: str) -> tuple[str, Any]:
    """The text, and all of the reply."""
    status, reply, _ = server.chat(body(seed, text))
    assert status == 200, reply
    return reply["choices"][0]["message"]["content"], reply


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[tuple[int, str], str]]:
    """What a server without a store says."""
    with ks.load("demo") as vlm, live(vlm) as server:
        yield {chat: answer(server, *chat)[0] for chat in CHATS}


def test_what_was_remembered_is_remembered_after_a_restart_and_a_kill(
    tmp_path: Path, expected: dict[Any, str]
) -> None:
    """One server ends in order, the next one is killed at work, and a third one looks."""
    store = str(tmp_path / "store")
    with served("--store", store) as server:
        text, first = answer(server, *CHATS[0])
        assert text == expected[CHATS[0]] and first["usage"]["images_encoded"] == 1
        sent = server.upload(png(scene(60)))[1]
        assert server.stop() == 0  # drained and flushed
    assert open_store(store).check() == []
    with served("--store", store) as server:
        messages = {"model": "demo", "messages": asked(scene(60), text=TEXTS[0])}
        for _ in range(2):  # explained twice, and still on the disk alone
            told = server.call("/v1/cache/explain", messages)[1]["report"]
            assert {s["reason"] for s in told["segments"]} == {"whole prompt"}
            assert {s["tier"] for s in told["segments"]} == {"disk"}
            assert server.call("/v1/cache/stats")[1]["prefix"]["bytes"] == 0
        text, again = answer(server, *CHATS[0])
        usage, report = again["usage"], again["keepsight"]["report"]
        assert text == expected[CHATS[0]]
        assert usage["images_encoded"] == 0 and usage["images_reused"] == 1
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
        assert [image["tier"] for image in report["images"]] == ["disk"]
        # Another question about the picture: what is before the question comes from the disk.
        text, other = answer(server, *CHATS[1])
        assert text == expected[CHATS[1]] and other["usage"]["images_encoded"] == 0
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert answer(server, *CHATS[0])[1]["keepsight"]["report"]["images"][0]["tier"] == "memory"
        part = {"type": "file", "file": {"file_id": sent["id"]}}
        words = {"type": "text", "text": TEXTS[0]}
        meant = {"messages": [{"role": "user", "content": [part, words]}], "max_tokens": 24}
        assert server.chat(meant)[1]["choices"][0]["message"]["content"] == expected[CHATS[0]]
        sent = server.upload(png(scene(63)))[1]
        killed_at_work(server, expected)
    look_after_a_kill(store, sent["id"], expected)


def killed_at_work(server: Process, expected: dict[Any, str]) -> None:
    """Have it acknowledge that all is stored, and kill it while four threads use it."""

    def work(number: int) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # until the server is gone
            for turn in itertools.count(number):
                chat = CHATS[turn % len(CHATS)]
                assert answer(server, *chat)[0] == expected[chat]
                server.upload(png(scene(100 + turn)))

    assert server.call("/v1/cache/flush", {})[1] == {"object": "cache.flush", "stored": True}
    with ThreadPoolExecutor(4) as pool:
        working = [pool.submit(work, number) for number in range(4)]
        try:
            for chat in CHATS[1:3]:  # in the middle of the others' work
                answer(server, *chat)
        finally:
            server.stop(signal.SIGKILL)
    for one in working:
        one.result()


def look_after_a_kill(store: str, sent: str, expected: dict[Any, str]) -> None:
    """Nothing is lost that was acknowledged."""
    with served("--store", store) as server:
        prompt = {"model": "demo", "messages": body(*CHATS[1])["messages"]}
        told = server.call("/v1/cache/explain", prompt)[1]["report"]
        assert told["cached_tokens"] == told["prompt_tokens"]
        assert server.call(f"/v1/files/{sent}/content")[0] == 200
        for chat in CHATS:
            assert answer(server, *chat)[0] == expected[chat]
        for file in server.call("/v1/files")[1]["data"]:  # each whole, or not there
            assert server.call(f"/v1/files/{file['id']}/content")[0] == 200
        assert server.stop() == 0
    assert open_store(store).check() == []
