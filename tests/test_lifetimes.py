"""How things end: by the collector, by a fork, by being dropped, and with the interpreter."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from models import picture, turn

import keepsight as ks
from keepsight import lock as locks
from keepsight.encode.ahead import Ahead
from keepsight.encode.documents import PDFIUM, _Document
from keepsight.lock import FairLock

MESSAGES = [turn("What is it?", picture(1))]
HOUSE = f"{Path(ks.__file__).parent}/"


def within(seconds: float, work: Callable[[], None]) -> None:
    """Do it in a thread of its own, so that what hangs is a failure and not the end of the run."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if failed:
        raise failed[0]


class Steps:
    """Calls something at the n-th step that Python takes in some files: a line, or a part of it."""

    def __init__(self, files: Callable[[str], bool], at: int, then: Callable[[], Any]) -> None:
        self._files, self.left, self._then = files, at, then

    def __enter__(self) -> Steps:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        if not self._files(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        if event in ("opcode", "line"):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self._then()
                sys.settrace(self._trace)
        return self._trace


def only_by_the_collector(thing: Any) -> None:
    """Let go of a thing so that the collector has to end it."""
    cycle = [thing]
    cycle.append(cycle)


def collect() -> None:
    """As the collector does of its own accord: what came last."""
    gc.collect(0)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Only when a test says so."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# -- ended by the collector ------------------------------------------------------------------------


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("others", [0, 2])
def test_what_the_collector_ends_inside_the_lock_leaves_a_note(others: int) -> None:
    lock, done, over = FairLock(), [], threading.Event()

    def stream() -> Iterator[int]:
        try:
            yield 1
        finally:
            lock.leave(lambda: done.append(lock._owner == threading.get_ident()))

    def step(number: int) -> bool:
        going = stream()
        next(going)
        only_by_the_collector(going)
        del going
        with Steps(locks.__file__.__eq__, number, collect) as steps:
            with lock:
                pass
        if steps.left <= 0:
            with lock:  # with others it may be done by one of them, a moment later
                assert len(done) == number
        return steps.left > 0

    def other() -> None:
        while not over.is_set():
            with lock:
                pass

    def work() -> None:
        number = 1
        while not step(number):
            number += 1
        assert number > 60

    threads = [threading.Thread(target=other, daemon=True) for _ in range(others)]
    for thread in threads:
        thread.start()
    try:
        within(60, work)
    finally:
        over.set()
    assert all(done)


@pytest.mark.usefixtures("_no_collector")
def test_a_stream_that_the_collector_ends_anywhere_in_a_call(demo: Any) -> None:
    """The next call goes on as if nobody had ever asked: nothing hangs, and nothing stays held."""
    tree = demo.memory.tree
    expected = demo.chat(MESSAGES, max_new_tokens=2)

    def attempt(number: int) -> bool:
        going = demo.stream(MESSAGES, max_new_tokens=4)
        next(going)
        only_by_the_collector(going)
        del going
        with Steps(lambda name: name.startswith(HOUSE), number, collect) as steps:
            assert demo.chat(MESSAGES, max_new_tokens=2).tokens == expected.tokens
        assert steps.left > 0 or (demo.stats() and not tree.held_bytes())
        tree.check()
        return steps.left > 0

    def work() -> None:
        number = 7
        while not attempt(number):
            number = number * 5 // 4

    within(120, work)


def test_leaving_a_loop_frees_at_once(demo: Any) -> None:
    tree = demo.memory.tree
    for _ in demo.stream(MESSAGES, max_new_tokens=4):
        assert tree.held_bytes()
        break
    assert not tree.held_bytes()
    going = demo.session().stream("What is it?", picture(1), max_new_tokens=4)
    next(going)
    going.close()
    assert not tree.held_bytes()


def test_a_stream_closed_while_another_thread_has_the_model_does_not_wait(demo: Any) -> None:
    tree, go_on, has = demo.memory.tree, threading.Event(), threading.Event()

    def hold() -> None:
        with demo._lock:
            has.set()
            go_on.wait(60)

    going = demo.stream(MESSAGES, max_new_tokens=4)
    next(going)
    thread = threading.Thread(target=hold)
    thread.start()
    has.wait(60)
    try:
        within(60, going.close)
        assert tree.held_bytes()
    finally:
        go_on.set()
        thread.join()
    assert not tree.held_bytes()  # the other one did it


def test_a_turn_that_was_begun_and_dropped_holds_nothing(demo: Any) -> None:
    turn_ = demo._turn(MESSAGES, ks.calls.Call.of({}, ""))
    turn_.ready()
    assert demo.memory.tree.held_bytes()
    del turn_
    gc.collect()
    assert not demo.memory.tree.held_bytes()


def test_what_is_left_while_one_has_the_lock_is_done_when_one_lets_go() -> None:
    lock, done = FairLock(), []
    with lock:
        with lock:
            lock.leave(lambda: done.append(1))
        assert not done
    assert done == [1]


def test_a_note_that_fails_is_told_by_the_next_and_stops_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lock, done = FairLock(), []
    with lock:
        lock.leave(lambda: 1 / 0)
        lock.leave(lambda: done.append(1))
    assert done == [1]
    with caplog.at_level(logging.ERROR), lock:
        pass
    assert "ZeroDivisionError" in caplog.text


def test_waiting_for_the_lock_may_end() -> None:
    lock, order = FairLock(), []

    def late() -> None:
        order.append(lock.acquire(timeout=0.01))

    with lock:
        within(60, late)
    assert order == [False]
    with lock:  # nobody is left in the queue
        assert not lock._waiting


def test_a_document_is_closed_by_who_has_the_library() -> None:
    document, closed = object.__new__(_Document), []
    document._open = type("Open", (), {"close": lambda self: closed.append(1)})()
    with PDFIUM:
        del document
        gc.collect()
        assert not closed
    assert closed == [1]


def test_work_ahead_that_the_collector_ends_waits_for_no_thread() -> None:
    """Its threads may need the very lock under which the collector came."""
    theirs, begun = threading.Lock(), threading.Event()

    def work(number: int) -> int:
        if number:
            begun.set()
            with theirs:
                pass
        return number

    def end() -> None:
        over = Ahead(work, lambda _: 0, lambda _: 0, 2, 10).over(range(100))
        next(over)
        begun.wait(60)
        over.close()

    with theirs:
        within(60, end)
    for thread in threading.enumerate():
        if thread.name.startswith("keepsight-ahead"):
            thread.join(60)
    assert not [t for t in threading.enumerate() if t.name.startswith("keepsight-ahead")]
