"""Threads that clients take in turn, and what each kind of work of one leaves to another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
from server_harness import Live, Scripted, live

from keepsight.server.config import ApiKey
from keepsight.server.fetch import Fetcher
from keepsight.server.files import Files
from keepsight.server.responses import ResponseStore
from keepsight.server.turns import ThreadsInTurn, account

HELLO = [{"role": "user", "content": "hello"}]


class Worked:
    """Threads in turn, and calls that end when they are told to."""

    def __init__(self, count: int) -> None:
        self.threads = ThreadsInTurn(count, "test")
        self.begun: list[str] = []
        self.go_on = threading.Semaphore(0)

    def submit(self, whose: str) -> Any:
        def call() -> str:
            self.begun.append(whose)
            assert self.go_on.acquire(timeout=20)
            return whose

        token = account.set(whose)
        try:
            return self.threads.submit(call)
        finally:
            account.reset(token)


@pytest.fixture
def one() -> Iterator[Worked]:
    it = Worked(1)
    yield it
    it.go_on.release(100)
    it.threads.close()


@pytest.fixture
def four() -> Iterator[Worked]:
    it = Worked(4)
    yield it
    it.go_on.release(100)
    it.threads.close()


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_comes_late_with_little_waits_for_no_line_of_others(one: Worked) -> None:
    done = [one.submit(whose) for whose in "aaaaabbc"]
    one.go_on.release(len(done))
    assert [future.result(20) for future in done] == list("aaaaabbc")
    assert "".join(one.begun) == "aabcabaa" or "".join(one.begun) == "abcabaaa"


def test_nobody_has_all_threads_at_a_time(four: Worked) -> None:
    done = [four.submit("a") for _ in range(10)]
    until(lambda: len(four.begun) == 3)
    time.sleep(0.1)
    assert four.begun == ["a"] * 3 and four.threads.waiting == 7
    done.append(four.submit("b"))
    until(lambda: "b" in four.begun)
    four.go_on.release(100)
    assert [future.result(20) for future in done] == [*"aaaaaaaaaab"]
    until(lambda: not four.threads._running)  # accounts that are gone leave nothing


def test_what_is_cancelled_is_held_no_longer_and_not_begun(one: Worked) -> None:
    class Large:
        gone = threading.Event()

        def __call__(self) -> None:
            raise AssertionError("nobody wants this")

        def __del__(self) -> None:
            self.gone.set()

    first = one.submit("a")
    until(lambda: one.begun)
    waiting = one.threads.submit(Large())
    assert waiting.cancel() and Large.gone.wait(20)
    one.go_on.release(2)
    assert first.result(20) == "a" and one.submit("a").result(20) == "a"


def test_errors_and_the_end(one: Worked) -> None:
    def fails() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        one.threads.submit(fails).result(20)
    running = one.submit("a")
    until(lambda: one.begun)
    waiting = one.submit("a")
    one.threads.close()
    with pytest.raises(CancelledError):
        waiting.result(20)
    with pytest.raises(RuntimeError):
        one.submit("b")
    one.go_on.release()
    assert running.result(20) == "a"


# -- in a server -----------------------------------------------------------------------------------

KEYS = (ApiKey("much", "much-key"), ApiKey("little", "little-key"))
RESPONSE = ("/v1/responses", {"model": "demo", "input": "hello"})
URL = {"type": "image_url", "image_url": {"url": "http://slow.example/a.png"}}


@pytest.mark.parametrize(
    ("kind", "method", "count", "path", "body"),
    [
        (ResponseStore, "conversation", 8, *RESPONSE),
        (ResponseStore, "get", 8, "/v1/responses/resp_0", None),
        (Files, "get", 8, "/v1/files/file-0", None),
        (Files, "of", 2, "/v1/cache/stats", None),
        (Fetcher, "fetch", 32, "/v1/chat/completions",
         {"model": "demo", "messages": [{"role": "user", "content": [URL]}]}),
    ],
)  # fmt: skip
def test_what_one_client_waits_for_no_other_waits_for(
    demo: Any,
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
    with live(demo, Scripted("hi"), keys=KEYS) as server:
        answers = _asked(server, path, body, 2 * count)
        until(lambda: len(stuck) >= max(1, count * 3 // 4))
        time.sleep(0.2)
        first.set()
        begun = time.monotonic()
        who = {"authorization": "Bearer little-key"}
        assert server.call(path, body, headers=who)[0] in (200, 400, 404)
        assert time.monotonic() - begun < 20  # what the first client asked waits for 60
        over.set()
        until(lambda: len(answers) == 2 * count)


def _asked(server: Live, path: str, body: Any, count: int) -> list[Any]:
    answers: list[Any] = []

    def ask() -> None:
        who = {"authorization": "Bearer much-key"}
        answers.append(server.call(path, body, headers=who))

    for _ in range(count):
        threading.Thread(target=ask, daemon=True).start()
    return answers
