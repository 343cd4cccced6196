"""Which thread waits for whom: no answer waits for what others have asked to be prepared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from support.server_harness import asked, live, scene, until

from keepsight.report import Piece
from keepsight.server.access import Caller
from keepsight.server.config import ServerConfig
from keepsight.server.service import Service
from keepsight.server.streaming import Delta, EventStream


def test_who_hangs_up_on_a_preparation_frees_the_real_engine(demo: Any) -> None:
    with live(demo) as server:
        text = "One more line of a long text. " * 200
        connection = server.sending("/v1/prepare", {"messages": asked(scene(1), text=text)})
        together = server.service.together
        until(lambda: together.stats()["in_flight"])
        connection.close()
        until(lambda: not together.stats()["in_flight"])
        stats = together.stats()
        assert stats["finished"] + stats["cancelled"] == 1
        told = server.call("/v1/prepare", {"model": "demo", "messages": asked(scene(1), text=text)})
        assert told[0] == 200 and demo.stats()["prefix"]["held_bytes"] == 0


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
        merged: Any = Service.merged(service, [talker], visit)
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

    visit: Any = SimpleNamespace(who=lambda: Caller(None))
    service: Any = Service.__new__(Service)
    service.config = ServerConfig()
    talker: Any = Talker()
    listener: Any = None
    asyncio.run(main())
