"""How things end: by the collector, by a fork, by being dropped, and with the interpreter."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.common import until
from support.hostile import ROOT
from support.models import picture, turn

import keepsight as ks
from keepsight import Together
from keepsight.encode.documents import Document, pdf_lock
from keepsight.encode.run import work_ahead
from keepsight.store import DiskStore, files, open_store
from keepsight.store.remote import RemoteStore
from keepsight.system import lock as locks
from keepsight.system.lock import FairLock

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


def script(text: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own; it ends, or the test fails."""
    path = [str(ROOT), str(ROOT / "tests")]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


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
    tree = demo.runtime.tree
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
            number = number * 3 // 2

    within(120, work)


def test_leaving_a_loop_frees_at_once(demo: Any) -> None:
    tree = demo.runtime.tree
    for _ in demo.stream(MESSAGES, max_new_tokens=4):
        assert tree.held_bytes()
        break
    assert not tree.held_bytes()
    going = demo.session().stream("What is it?", picture(1), max_new_tokens=4)
    next(going)
    going.close()
    assert not tree.held_bytes()


def test_a_stream_closed_while_another_thread_has_the_model_does_not_wait(demo: Any) -> None:
    tree, go_on, has = demo.runtime.tree, threading.Event(), threading.Event()

    def hold() -> None:
        with demo.runtime.lock:
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


def test_an_answer_that_was_begun_and_dropped_holds_nothing(demo: Any) -> None:
    going = demo.session().stream("What is it?", picture(1), max_new_tokens=4)
    next(going)
    assert demo.runtime.tree.held_bytes()
    only_by_the_collector(going)
    del going
    gc.collect()
    assert not demo.runtime.tree.held_bytes()


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
    document, closed = object.__new__(Document), []
    document._lock = pdf_lock()
    document._open = type("Open", (), {"close": lambda self: closed.append(1)})()
    with pdf_lock():
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
        over = work_ahead(work, range(100), 2, 10, lambda _: 0, lambda _: 0)
        next(over)
        begun.wait(60)
        over.close()

    with theirs:
        within(60, end)
    for thread in threading.enumerate():
        if thread.name.startswith("keepsight-ahead"):
            thread.join(60)
    assert not [t for t in threading.enumerate() if t.name.startswith("keepsight-ahead")]


# -- ended with the interpreter --------------------------------------------------------------------

_UNFINISHED = """
import json, sys, threading, time, torch
from support.models import picture, turn
import keepsight as ks
from keepsight.store import files
from keepsight import Together

torch.set_num_threads(1)
finish = files.together
def slowly(*steps):
    time.sleep(0.2)
    return finish(*steps)
files.together = slowly

messages = [turn("What is it?", picture(1))]
vlm = ks.load("demo", store=sys.argv[1])
def work():
    while True:
        vlm.chat(messages, max_new_tokens=20)
threading.Thread(target=work, daemon=True).start()
together = Together(vlm)
tickets = [together.submit(messages, max_new_tokens=500) for _ in range(3)]
going = vlm.stream(messages)
next(going)
vlm.prepare([turn("Please describe all that you see in this picture. " * 20, picture(2))])
print(json.dumps([[p.kind, p.key] for p in vlm.runtime.store.keeper.jobs]))
"""


def test_a_script_that_closes_nothing_ends_quietly_and_loses_nothing(tmp_path: Path) -> None:
    """With a batch to be written, a stream open, requests in flight and a thread that answers."""
    done = script(_UNFINISHED, tmp_path)
    told = [line for line in done.stderr.split("\n") if line and "Loading weights" not in line]
    assert done.returncode == 0 and not told, done.stderr
    waiting = json.loads(done.stdout)
    assert waiting
    store = open_store(tmp_path)
    assert all(store.has(kind, key) for kind, key in waiting)
    assert store.check() == []


def _put(store: Any, key: str = "ab" * 32) -> None:
    store.put("package", key, {"x": torch.zeros(4)}, {"tokens": 1})


def test_a_disk_that_hangs_does_not_keep_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, go_on = DiskStore(tmp_path), threading.Event()
    finish = files.together
    monkeypatch.setattr(files, "together", lambda *p: go_on.wait(60) and finish(*p))
    _put(store)
    within(60, lambda: store.keeper.before_exit(0.01))
    go_on.set()
    store.close()
    assert DiskStore(tmp_path).has("package", "ab" * 32)


@pytest.mark.parametrize("where", ["disk", "remote", "both"])
def test_stores_are_written_where_no_thread_begins_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As while the interpreter ends: neither threads nor pools of them."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    near, far = (tmp_path, "memory://end-of-all")
    stores = {
        "disk": lambda: open_store(near),
        "remote": lambda: open_store(far),
        "both": lambda: open_store(near, remote=far),
    }
    store = stores[where]()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(files.ThreadPoolExecutor, "submit", refuse)
    for number in range(3):
        _put(store, f"{number}b" * 32)
    store.flush()
    _put(store)
    store.close()
    monkeypatch.undo()
    found = stores[where]()
    assert found.has("package", "2b" * 32) and found.has("package", "ab" * 32)
    found.clear()
    found.close()


# -- dropped ---------------------------------------------------------------------------------------


def _handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def _ours() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("keepsight")]


def test_models_that_are_dropped_leave_no_threads_and_no_handles(
    demo_parts: dict[str, Any], tmp_path: Path
) -> None:
    def use(number: int) -> None:
        far = f"memory://dropped-{number}" if number % 2 else None
        vlm = ks.wrap(*demo_parts["demo"], store=tmp_path / str(number), remote=far)
        vlm.chat(MESSAGES, max_new_tokens=1)
        vlm.stats()

    use(4)  # the first one starts the thread that all stores share
    gc.collect()
    before, handles = len(_ours()), _handles()
    for number in range(4):
        use(number)
    gc.collect()
    until(lambda: len(_ours()) <= before and _handles() <= handles)
    for number in range(5):  # and what waited was written
        assert len(list(open_store(tmp_path / str(number)).entries())) >= 4


def test_a_store_that_was_only_read_leaves_no_handles(tmp_path: Path) -> None:
    with contextlib.closing(DiskStore(tmp_path)) as store:
        _put(store)
    gc.collect()
    before = _handles()
    assert len(list(DiskStore(tmp_path).entries())) == 1
    gc.collect()
    until(lambda: _handles() <= before)


def test_what_was_written_is_not_kept_by_the_thread_that_wrote_it(tmp_path: Path) -> None:
    for store in (DiskStore(tmp_path), RemoteStore("memory://kept-by-nobody")):
        tensor = torch.zeros(4)
        store.put("package", "cd" * 32, {"x": tensor}, {"tokens": 1})
        gone = weakref.ref(tensor)
        del tensor
        store.flush()
        until(lambda gone=gone: gone() is None)
        store.close()


def test_a_scheduler_that_is_dropped_ends_and_what_it_took_is_served(demo: Any) -> None:
    before = len(_ours())
    ticket = Together(demo).submit(MESSAGES, max_new_tokens=8)
    gc.collect()
    assert ticket.result().tokens == demo.chat(MESSAGES, max_new_tokens=8).tokens
    del ticket
    gc.collect()
    until(lambda: len(_ours()) <= before)


# -- forked ----------------------------------------------------------------------------------------

_FORKS = """
import faulthandler, json, os, sys, threading, torch
from support.models import picture, turn
import keepsight as ks
from keepsight.system import forks
from keepsight import Together

torch.set_num_threads(1)
messages = [turn("What is it?", picture(1))]
vlm = ks.load("demo", store=sys.argv[1])
expected = vlm.chat(messages, max_new_tokens=4).tokens
together = Together(vlm)

def forked(work):
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(40, exit=True)
        told = "nothing"
        try:
            told = work()
        except Exception as error:
            told = type(error).__name__
        print(json.dumps(told), flush=True)
        os._exit(0)
    os.waitpid(child, 0)

def answers():
    return vlm.chat(messages, max_new_tokens=4).tokens == expected

def stored():
    return vlm.runtime.store.check() == [] and len(list(vlm.runtime.store.entries())) > 0

def loaded():
    with ks.load("demo") as fresh:
        return fresh.chat(messages, max_new_tokens=4).tokens == expected

def scheduled():
    together.submit(messages)

stop = threading.Event()
def work():
    while not stop.is_set():
        together.submit(messages, max_new_tokens=4)
        vlm.chat(messages, max_new_tokens=4)
        vlm.clear()
        list(vlm.runtime.store.entries())
thread = threading.Thread(target=work)
thread.start()
for child in (answers, vlm.close, stored, loaded, scheduled):
    forked(child)
stop.set()
thread.join()
vlm.flush()
print(json.dumps(vlm.runtime.store.check()), flush=True)

forks.PATIENCE = 0.1
has, go_on = threading.Event(), threading.Event()
def hold(lock):
    with lock:
        has.set()
        go_on.wait()
guard = vlm.runtime.store.keeper._index._lock
thread = threading.Thread(target=hold, args=(guard,))
thread.start()
has.wait()
forked(stored)
go_on.set()
thread.join()
with vlm.runtime.lock:
    forked(answers)
print(json.dumps(answers()))
"""


def test_a_forked_child_is_refused_the_model_and_has_the_store(tmp_path: Path) -> None:
    done = script(_FORKS, tmp_path)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    named = ["Forked", None, True, True, "Closed", [], "StoreError", "Forked", True]
    assert told == named, done.stderr
    assert open_store(tmp_path).check() == []
