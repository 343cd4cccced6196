"""Which thread waits for whom: no answer waits for what others have asked to be prepared."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from server_harness import Live, Scripted, asked, live, scene, until

from keepsight import Ticket
from keepsight.report import Piece, Report, Usage
from keepsight.server.access import Caller
from keepsight.server.config import ServerConfig
from keepsight.server.service import Service
from keepsight.server.streaming import Delta, EventStream

MANY = 20  # more than the client has threads


class Slow(Scripted):
    """A scheduler that answers, and that never comes to what it is asked to prepare."""

    def __init__(self) -> None:
        super().__init__("Hello")
        self.prepared: list[Ticket] = []

    def prepare(self, messages: Any, on_done: Any = None, **options: Any) -> Ticket:
        ticket = Ticket(on_done=on_done)
        ticket.wake = lambda: ticket.done.is_set() or ticket.end()
        self.prepared.append(ticket)
        return ticket


def send(server: Live, path: str, body: dict[str, Any]) -> socket.socket:
    data = json.dumps({"model": "demo", **body}).encode()
    connection = server.raw()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


@pytest.mark.parametrize("path", ["/v1/prepare", "/v1/cache/pin"])
def test_an_answer_waits_for_nothing_that_is_prepared(demo: Any, path: str) -> None:
    script = Slow()
    with live(demo, script) as server:
        waiting = [send(server, path, {"messages": asked(text=f"{n}")}) for n in range(MANY)]
        until(lambda: len(script.prepared) == MANY)
        assert server.chat({"messages": asked(text="Hi.")})[0] == 200
        assert server.call("/v1/cache/stats")[0] == 200
        first, rest = script.prepared[0], script.prepared[1:]
        for connection in waiting:
            connection.close()  # and who hangs up frees the place
        until(lambda: all(ticket.cancelled for ticket in rest))
        assert first.cancelled


def test_nobody_waits_for_a_slow_site_that_others_speak_of(demo: Any) -> None:
    """More of them than there are threads that fetch."""
    with (
        socket.create_server(("127.0.0.1", 0)) as site,
        live(demo, Scripted("Hello"), allow_private_urls=True, url_timeout="40s") as server,
    ):
        url = f"http://127.0.0.1:{site.getsockname()[1]}/a.png"  # it takes calls and says nothing
        waiting = [
            send(server, "/v1/chat/completions", {"messages": asked(url)}) for _ in range(40)
        ]
        time.sleep(0.5)
        begun = time.monotonic()
        assert server.chat({"messages": asked(scene(1))})[0] == 200
        assert time.monotonic() - begun < 30
        for connection in waiting:
            connection.close()


def test_what_is_prepared_is_reported_and_what_fails_is_an_error(demo: Any) -> None:
    script = Slow()
    with live(demo, script) as server:
        connection = send(server, "/v1/prepare", {"messages": asked(text="1")})
        until(lambda: script.prepared)
        script.prepared[0].put(Piece("", None, Usage(10, 0, 4), Report(prompt_tokens=10), None))
        script.prepared[0].end()
        assert b"200 OK" in connection.recv(100)
        connection.close()
        connection = send(server, "/v1/prepare", {"messages": asked(text="2")})
        until(lambda: len(script.prepared) == 2)
        script.prepared[1].end(MemoryError("none left"))
        assert b" 5" in connection.recv(100)
        connection.close()


def test_who_hangs_up_on_a_preparation_frees_the_real_engine(demo: Any) -> None:
    with live(demo) as server:
        text = "One more line of a long text. " * 200
        before = demo.stats()["engine"]["prefill_tokens"]
        connection = send(server, "/v1/prepare", {"messages": asked(scene(1), text=text)})
        together = server.service.scheduler.together
        until(lambda: together.stats()["in_flight"])
        connection.close()
        until(lambda: not together.stats()["in_flight"])
        stats = together.stats()
        assert stats["finished"] + stats["cancelled"] == 1
        assert demo.stats()["engine"]["prefill_tokens"] >= before
        told = server.call("/v1/prepare", {"model": "demo", "messages": asked(scene(1), text=text)})
        assert told[0] == 200 and demo.stats()["prefix"]["held_bytes"] == 0


@pytest.mark.parametrize("later", range(4))
def test_who_hangs_up_as_a_word_comes_is_heard(later: int) -> None:
    """Whichever step of the event loop both fall into: the word, and the end of its listener."""

    class Talker:
        unpaid, ended = 0, False

        def delta(self, piece: Piece) -> Delta:
            return Delta()

        def cancel(self) -> None:
            self.ended = True

    async def talk() -> None:
        await asyncio.sleep(0.01)
        talker.arrived.put_nowait((0, Piece("word")))
        for _ in range(later):
            await asyncio.sleep(0)
        listener.cancel()

    async def listen() -> None:
        merged: Any = Service.merged(service, [talker], Caller(None), None)
        async with aclosing(merged) as deltas:
            async for _ in deltas:
                pass

    async def main() -> None:
        nonlocal listener
        talker.arrived = asyncio.Queue()
        listener = asyncio.create_task(listen())
        talking = asyncio.create_task(talk())
        done, _ = await asyncio.wait({listener}, timeout=20)
        await talking
        assert done and listener.cancelled() and talker.ended

    service: Any = Service.__new__(Service)
    service.config = ServerConfig()
    talker: Any = Talker()
    listener: Any = None
    asyncio.run(main())


def test_who_hangs_up_before_the_head_of_a_stream_is_out_frees_their_place() -> None:
    """Its socket is full of what came before, so nothing of the stream has begun."""
    answer: Any = SimpleNamespace(ended=[])
    answer.cancel = lambda: answer.ended.append(True)

    async def events() -> AsyncGenerator[tuple[str | None, Any], None]:
        yield None, "never read"

    async def main() -> None:
        begun = asyncio.Event()

        async def receive() -> Any:
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            begun.set()
            await asyncio.sleep(3600)

        visit: Any = SimpleNamespace(gone=False)
        response = EventStream(events(), visit, [answer])
        async with asyncio.timeout(20):
            await response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)

    asyncio.run(main())
    assert answer.ended
