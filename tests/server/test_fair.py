"""Nobody who waits for something else holds up those who ask: fetching, preparing, pinning."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import threading
from typing import Any

import pytest
from support.server_harness import CHAT, HELLO, Live, Scripted, answered, asked, live, until, uri

import keepsight as ks
from bench.hostile import flat_png, pdf
from keepsight import Ticket
from keepsight.report import Piece, Report, Usage
from keepsight.server.fetch import Fetcher
from keepsight.server.turns import Threads, account


class Long(Scripted):
    """A scheduler whose prefills last until they are let go."""

    def __init__(self) -> None:
        super().__init__("hi")
        self.prepared: list[Ticket] = []

    def prepare(self, messages: Any, **options: Any) -> Ticket:
        self.prepared.append(ticket := Ticket(on_done=options["on_done"]))
        return ticket

    def let_go(self, error: Exception | None = None) -> None:
        for ticket in self.prepared:
            ticket.put(Piece("", None, Usage(10, 0, 0), Report(prompt_tokens=10)))
            ticket.end(error)


@pytest.mark.parametrize(
    ("path", "more"),
    [("/v1/prepare", {}), ("/v1/cache/pin", {}), ("/v1/cache/pin", {"pinned": False})],
)
def test_many_long_preparations_hold_up_nobody(vlm: Any, path: str, more: Any) -> None:
    script = Long()
    with live(vlm, script) as server:
        answers = server.crowd(path, {"model": "demo", "messages": HELLO, **more}, 12)
        until(lambda: len(script.prepared) == 12)
        assert server.chat({"messages": HELLO})[0] == 200
        assert server.call("/metrics")[0] == 200 and not answers
        script.let_go()
        until(lambda: len(answers) == 12)
        assert {answer[0] for answer in answers} == {200}


def test_a_preparation_has_the_time_of_an_answer_and_its_errors(vlm: Any) -> None:
    script = Long()
    with live(vlm, script, request_timeout=0.3) as server:
        status, told, _ = server.call("/v1/prepare", {"model": "demo", "messages": HELLO})
        assert status == 504 and told["error"]["code"] == "timeout"
        assert script.prepared[0].cancelled
    with live(vlm, script := Long()) as server:
        answers = server.crowd("/v1/prepare", {"model": "demo", "messages": HELLO}, 1)
        until(lambda: script.prepared)
        script.let_go(ks.errors.InputError("not like this"))
        until(lambda: answers)
        assert answers[0][0] == 400 and answers[0][1]["error"]["message"] == "not like this"


SLOW_SITE = "http://slow.example/a.png"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": SLOW_SITE}},
        {"type": "image", "path": SLOW_SITE},
        {"type": "image", "source": {"type": "url", "url": SLOW_SITE}},
        {"type": "image", "base64": SLOW_SITE},
    ],
    ids=lambda part: list(part)[1],
)
def test_slow_sites_hold_up_only_those_who_ask_for_them(
    vlm: Any, monkeypatch: pytest.MonkeyPatch, part: dict[str, Any]
) -> None:
    waiting, over = threading.Semaphore(0), threading.Event()

    def fetch(self: Fetcher, url: str) -> bytes:
        waiting.release()
        over.wait(30)
        return b"no picture"

    monkeypatch.setattr(Fetcher, "fetch", fetch)
    with live(vlm, Scripted("hi")) as server:
        messages = [{"role": "user", "content": [part]}]
        answers = server.crowd(CHAT, {"model": "demo", "messages": messages}, 40)
        for _ in range(24):  # threads of one client; eight are left to others
            assert waiting.acquire(timeout=20)
        assert server.chat({"messages": HELLO})[0] == 200 and not answers
        over.set()
        until(lambda: len(answers) == 40)
        assert {answer[0] for answer in answers} == {400}


@pytest.mark.parametrize("data", [pdf(72, ""), flat_png(2100, 2100)], ids=["page", "picture"])
def test_large_pictures_are_prepared_in_few_threads(vlm: Any, data: bytes) -> None:
    """A page of a PDF is large whatever its size: nobody knows what drawing it costs."""
    with live(vlm, Scripted("hi")) as server:
        over, inside = threading.Event(), threading.Semaphore(0)

        def long() -> None:
            inside.release()
            over.wait(60)

        large = server.service.threads.large.pool
        for _ in range(8):
            large.submit(long)
        assert inside.acquire(timeout=20)
        before = large._work_queue.qsize()
        answers = server.crowd(CHAT, {"messages": asked(uri(data))}, 1)
        until(lambda: answers or large._work_queue.qsize() > before)
        assert server.chat({"messages": HELLO})[0] == 200 and not answers
        over.set()
        until(lambda: answers)
        assert answers[0][0] == 200


# -- clients without keys -------------------------------------------------------------------------

SHOWN = {"x-forwarded-for": "203.0.113.7"}


def accounts(vlm: Any, **settings: Any) -> list[str]:
    """Whose time three requests take: from an address, from another one, and through a proxy."""
    script = Scripted("hi")
    with live(vlm, script, **settings) as server:
        body = json.dumps({"model": "demo", "messages": HELLO}).encode()
        for address, headers in (("127.0.0.1", {}), ("127.0.0.2", {}), ("127.0.0.1", SHOWN)):
            connection = http.client.HTTPConnection(
                "127.0.0.1", server.port, timeout=60, source_address=(address, 0)
            )
            headers = {"content-type": "application/json", **headers}
            connection.request("POST", CHAT, body, headers)
            assert connection.getresponse().read()
            connection.close()
    return [options["account"] for _, options in script.asked]


@pytest.mark.skipif(sys.platform != "linux", reason="one loopback address")
def test_clients_without_keys_count_by_their_addresses(vlm: Any) -> None:
    """What a client says of its address counts only through a proxy that is trusted."""
    one, other, through = accounts(vlm)
    assert one == through == "from 127.0.0.1" and other == "from 127.0.0.2"
    *_, through = accounts(vlm, trusted_proxy=("127.0.0.0/30",))
    assert through == "from 203.0.113.7"


def dripping(server: Live) -> Any:
    """A connection that has sent a part of its body, which the server waits for."""
    connection = server.raw()
    connection.settimeout(20)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{"
    )
    until(lambda: server.service.bodies._incomplete)
    return connection


def test_closing_waits_for_what_was_admitted(vlm: Any) -> None:
    script = Long()
    with live(vlm, script, body_timeout="1h") as server:
        server.server._drain = 3600.0
        answers = server.crowd("/v1/prepare", {"model": "demo", "messages": HELLO}, 1)
        until(lambda: script.prepared)
        with dripping(server) as connection:
            server.service.draining = True
            assert answered(connection)[0] == 503
            assert server.chat({"messages": HELLO})[1]["error"]["code"] == "shutting_down"
            assert not answers and not server.server.should_exit
            script.let_go()
            until(lambda: answers and server.server.should_exit)
        assert answers[0][0] == 200


def test_few_large_pictures_are_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    threads = Threads(lambda: 1)
    over, inside = threading.Event(), threading.Semaphore(0)

    def large() -> None:
        inside.release()
        over.wait(30)

    async def main() -> None:
        tasks = []
        for whose in ("one", "another"):
            account.set(whose)
            tasks += [asyncio.ensure_future(threads.run(large, large=True)) for _ in range(6)]
        for _ in range(4):
            assert await asyncio.to_thread(inside.acquire, timeout=20)
        assert threads.large.pool._work_queue.qsize() == 2, "three of each are let in"
        over.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    threads.close()
