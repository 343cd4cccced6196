"""Threads that clients take in turn, and what each kind of work of one leaves to another."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import pytest
from support.server_harness import Scripted, bearer, live, until

from keepsight.server.config import ApiKey
from keepsight.server.fetch import Fetcher
from keepsight.server.files import Files
from keepsight.server.responses import ResponseStore
from keepsight.server.turns import ThreadsInTurn, account

_LONG = 120  # seconds


class Worked:
    """Threads in turn, and calls that end when they are told to."""

    def __init__(self, count: int) -> None:
        self.threads = ThreadsInTurn(count, "test")
        self.begun: list[str] = []
        self.go_on = threading.Semaphore(0)

    def ask(self, whose: str) -> asyncio.Task[str]:
        def call() -> str:
            self.begun.append(whose)
            assert self.go_on.acquire(timeout=_LONG)
            return whose

        account.set(whose)
        return asyncio.ensure_future(self.threads.run(call))

    async def until(self, begun: str) -> None:
        async with asyncio.timeout(_LONG):
            while sorted(self.begun) != sorted(begun):
                await asyncio.sleep(0.005)


def test_nobody_has_all_threads_even_by_hanging_up() -> None:
    async def main() -> None:
        four = Worked(4)
        gone = [four.ask("a") for _ in range(5)]
        await four.until("aaa")
        for task in gone:
            task.cancel()
        tasks = [four.ask("a") for _ in range(5)]
        await asyncio.sleep(0)
        tasks.append(four.ask("b"))
        await four.until("aaab")
        four.go_on.release(100)
        assert await asyncio.gather(*tasks) == [*"aaaaab"]
        del tasks, gone, task
        account.set("c")
        async with asyncio.timeout(_LONG):
            while "a" in four.threads._free:  # a thread may still hold the call that it has made
                await four.threads.run(gc.collect)  # takes seconds behind thousands of tests
        assert "a" not in four.threads._free, "accounts that are gone leave nothing"

    asyncio.run(main())


# -- in a server -----------------------------------------------------------------------------------

KEYS = (ApiKey("much", "much-key"), ApiKey("little", "little-key"))
RESPONSE = ("/v1/responses", {"model": "demo", "input": "hello"})
URL = {"type": "image_url", "image_url": {"url": "http://slow.example/a.png"}}
UPLOAD = {"type": "file", "file": {"file_id": "file-x"}}


@pytest.mark.parametrize(
    ("kind", "method", "count", "path", "body"),
    [
        (ResponseStore, "conversation", 8, *RESPONSE),
        (ResponseStore, "get", 8, "/v1/responses/resp_0", None),
        (Files, "get", 8, "/v1/files/file-0", None),
        (Files, "of", 2, "/v1/cache/stats", None),
        (Fetcher, "fetch", 32, "/v1/chat/completions",
         {"model": "demo", "messages": [{"role": "user", "content": [URL]}]}),
        (Files, "read", 32, "/v1/chat/completions",
         {"model": "demo", "messages": [{"role": "user", "content": [UPLOAD]}]}),
    ],
)  # fmt: skip
def test_what_one_client_waits_for_no_other_waits_for(
    vlm: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    method: str,
    count: int,
    path: str,
    body: Any,
) -> None:
    over = threading.Event()
    stuck: list[int] = []
    real = getattr(kind, method)
    first = threading.Event()  # all that come before it is set are the first client's

    def slow(this: Any, *given: Any, **more: Any) -> Any:
        if not first.is_set():
            stuck.append(1)
            over.wait(60)
        return b"nothing" if kind is Fetcher else real(this, *given, **more)

    monkeypatch.setattr(kind, method, slow)
    with live(vlm, Scripted("hi"), keys=KEYS) as server:
        answers = server.crowd(path, body, 2 * count, "much")
        until(lambda: len(stuck) >= max(1, count * 3 // 4))
        time.sleep(0.2)
        first.set()
        begun = time.monotonic()
        assert server.call(path, body, headers=bearer("little"))[0] in (200, 400, 404)
        assert time.monotonic() - begun < 20  # what the first client asked waits for 60
        over.set()
        until(lambda: len(answers) == 2 * count)
