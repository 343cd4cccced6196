"""What is no answer is let in at a rate while answers are being made, the clients in turn."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from server_harness import Scripted, asked, live

from keepsight.server import access as middleware
from keepsight.server import access as pace
from keepsight.server.access import FairRateLimit
from keepsight.server.errors import ApiError


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._sleep = 0.0, asyncio.sleep
        monkeypatch.setattr(pace.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(pace.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await self._sleep(0)


def run(fair: FairRateLimit, clock: Clock, clients: str) -> list[tuple[str, float]]:
    """Who was let in, and when, of clients that all come at once."""
    came: list[tuple[str, float]] = []

    async def one(client: str) -> None:
        try:
            await fair.wait(client)
            came.append((client, round(clock.now, 3)))
        except ApiError as error:
            came.append((f"{client} {error.status}", round(clock.now, 3)))

    async def main() -> None:
        await asyncio.gather(*map(one, clients))

    asyncio.run(main())
    return came


def test_a_client_that_asks_without_end_waits_behind_one_that_asks_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    fair = FairRateLimit(lambda: True, per_second=10, at_once=2)
    came = run(fair, clock, "aaaaaaab")
    assert "".join(client for client, _ in came) == "aaabaaaa"
    assert [when for _, when in came] == [0, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


def test_nobody_waits_while_no_answer_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    busy = [False]
    fair = FairRateLimit(lambda: busy[0], per_second=10, at_once=1)
    assert run(fair, clock, "aaaa") == [("a", 0)] * 4
    busy[0] = True
    # What went before it mattered is not held against anybody for longer than a moment.
    assert [when for _, when in run(fair, clock, "aa")] == [0.1, 0.2]


def test_where_too_many_wait_one_of_whoever_has_most_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    fair = FairRateLimit(lambda: True, per_second=10, at_once=1, held=3)
    came = run(fair, clock, "aaaab")
    assert sorted(client for client, _ in came) == ["a", "a", "a", "a 429", "b"]


def test_who_gives_up_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    fair = FairRateLimit(lambda: True, per_second=10, at_once=1)

    async def main() -> float:
        await fair.wait("a")
        gone = [asyncio.ensure_future(fair.wait("a")) for _ in range(5)]
        await clock._sleep(0)
        for one in gone:
            one.cancel()
        await fair.wait("b")
        return clock.now

    assert asyncio.run(main()) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/metrics", None, 200),
        ("/v1/cache/stats", None, 200),
        ("/health", None, 200),
        ("/nowhere", None, 404),
        ("/v1/chat/completions", {"model": "another", "messages": asked()}, 404),
    ],
)
def test_only_what_is_no_answer_waits_and_only_beside_answers(
    demo: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, status: int
) -> None:
    waited: list[str] = []

    class Noted(FairRateLimit):
        async def wait(self, client: str) -> None:
            if self._busy():
                waited.append(client)

    monkeypatch.setattr(middleware, "FairRateLimit", Noted)
    script = Scripted("one", "two", "three", wait=0.3)
    with live(demo, script) as server:
        assert server.call(path, body)[0] == status and not waited
        answer = threading.Thread(target=server.chat, args=({"messages": asked()},))
        answer.start()
        assert script.begun.wait(20)
        assert server.call(path, body)[0] == status
        assert waited == ["from 127.0.0.1"]
        answer.join()
