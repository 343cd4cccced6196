"""Stores on disks that are full, read-only, slow or gone: that is no damage, and nobody waits."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import queue
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from file_systems import mounted
from models import picture
from remote_lines import Line
from support.stores import KEYS

import keepsight as ks
from keepsight.core import settings as core_settings
from keepsight.errors import NotStored, StoreError
from keepsight.formats import tensorfile
from keepsight.store import About, DiskStore, Store, health, layout, timeout
from keepsight.store.addresses.remote import RemoteStore
from keepsight.store.addresses.remote_upkeep import Housekeeping
from keepsight.store.folders import catalogue_guard as guard_module
from keepsight.store.folders.catalogue import NAME, Catalogue
from keepsight.store.folders.catalogue_guard import CatalogueGuard
from keepsight.store.folders.folder import Folder
from keepsight.store.health import Health

T = TypeVar("T")

FULL = sqlite3.OperationalError("database or disk is full")


@pytest.fixture(autouse=True)
def _loud(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="keepsight")


@pytest.fixture
def opened() -> Iterator[Callable[..., DiskStore]]:
    made: list[DiskStore] = []

    def make(*arguments: Any, **options: Any) -> DiskStore:
        made.append(DiskStore(*arguments, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()


def put(store: Store, *numbers: int) -> None:
    for number in numbers:
        tensors = {"a": torch.full((100,), float(number))}
        store.put("package", KEYS[number], tensors, {"n": number})


def fill(store: Store, *numbers: int) -> None:
    put(store, *numbers)
    store.flush()


def held(store: DiskStore) -> set[int]:
    """The numbers of all that can be read, and is what was put."""
    found = {n: store.get("package", key) for n, key in enumerate(KEYS)}
    assert all(it is None or (it[0]["a"] == n).all() for n, it in found.items())
    return {n for n, it in found.items() if it is not None}


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refusing(error: BaseException) -> Callable[..., Any]:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise error

    return refuse


# -- what a disk says --------------------------------------------------------------------------


def of_sqlite(path: Path, *statements: str, how: str = "") -> sqlite3.Error:
    """The error that real statements end with."""
    with contextlib.ExitStack() as stack:
        try:
            base = sqlite3.connect(f"file:{path}{how}", uri=True, isolation_level=None)
            stack.callback(base.close)
            for statement in statements:
                base.execute(statement)
        except sqlite3.Error as error:
            return error
    raise AssertionError("nothing went wrong")


def test_what_a_disk_refuses_has_a_name(tmp_path: Path) -> None:
    """Only wrong bytes are damage. Errors of SQLite are told by their codes, whatever they say."""
    for number, state in (
        (errno.ENOSPC, "full"),
        (errno.EDQUOT, "full"),
        (errno.EFBIG, "full"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "denied"),
        (errno.ENOENT, "gone"),
        (errno.ESTALE, "gone"),
        (errno.EIO, "failing"),
        (errno.EMFILE, "failing"),
    ):
        assert health.named(OSError(number, "…")) == state
    small = ("PRAGMA max_page_count = 2", "CREATE TABLE a (b)", "CREATE TABLE c (d)")
    path = tmp_path / "a"
    full = of_sqlite(path, *small)
    assert health.named(full) == "full"
    assert health.named(of_sqlite(path, "CREATE TABLE e (f)", how="?mode=ro")) == "read-only"
    assert health.named(of_sqlite(tmp_path / "no" / "b", "SELECT 1")) == "failing"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        locked = of_sqlite(path, "PRAGMA busy_timeout = 0", "BEGIN IMMEDIATE")
        assert health.named(locked) == "locked"
    assert health.named(of_sqlite(path, "SELECT * FROM nothing")) == "damaged"
    path.write_bytes(b"\xff" * 5000)
    assert health.named(of_sqlite(path, "SELECT * FROM a")) == "damaged"
    assert health.named(FULL) == "full", "also where there is no code"
    ours = StoreError("told")
    ours.__cause__ = full
    assert health.named(ours) == "full", "and through an error of ours"


def test_a_disk_that_refuses_is_told_once_and_left_alone_longer_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    disk = Health("it cannot be written", lambda: now[0])
    pauses = []
    for _ in range(6):
        for _ in range(10):  # entries that fail together
            disk.failed(OSError(errno.ENOSPC, "No space left on device"))
        assert disk.is_aside and disk.state == "full" and disk.since is not None
        pauses.append(disk.wait)
        now[0] += disk.wait or 0.0
        assert not disk.is_aside and disk.state == "full"
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    disk.worked()
    assert (disk.state, disk.since, disk.wait, disk.is_aside) == ("ok", None, None, False)
    disk.failed(OSError(errno.ENOSPC, "No space left on device"))  # it was the last block
    assert disk.wait == 60.0 and [r.levelname for r in caplog.records] == ["WARNING"]
    disk.failed(OSError(errno.EROFS, "Read-only file system"))
    assert disk.state == "read-only" and len(caplog.records) == 2, "another trouble is news"


# -- a catalogue that cannot be written --------------------------------------------------------


@pytest.mark.parametrize(
    "where",
    ["put", "add_facts", "mark", "drop"],
)
def test_a_book_without_room_is_not_a_damaged_one(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    store = opened(tmp_path)
    fill(store, 0, 1)
    assert held(store) == {0, 1}
    catalogue = (tmp_path / NAME).stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(Catalogue, where, refusing(FULL))
        put(store, 2, 3)
        for act in (store.flush, lambda: store.delete("package", KEYS[1]), store.stats):
            with contextlib.suppress(StoreError):
                act()
        assert held(store) >= {0}
        if where == "put":
            assert store.stats()["broken"] and not store.has("package", KEYS[2])
    store.flush()
    assert (tmp_path / NAME).stat().st_ino == catalogue and not list(tmp_path.glob("*.damaged"))
    fill(store, 1, 2, 3)
    assert held(store) == {0, 1, 2, 3} and store.broken is None
    store.check(repair=True)  # a file that was removed while no row could be
    assert store.check() == [] and len(list(store.entries())) == 4


def test_a_full_disk_can_be_emptied(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing needs a few bytes in the catalogue first, and makes room for them itself."""
    store = opened(tmp_path)
    fill(store, 0, 1, 2)
    mark = Catalogue.mark

    def no_room(catalogue: Catalogue, places: Any, state: int) -> None:
        places = list(places)
        if places and (tmp_path / "package" / KEYS[0][:2] / f"{KEYS[0]}.sight").exists():
            raise FULL
        mark(catalogue, places, state)

    monkeypatch.setattr(Catalogue, "mark", no_room)
    assert store.delete("package", KEYS[0]) > 0
    assert held(store) == {1, 2} and store.check() == []


def test_a_book_that_is_damaged_again_and_again_is_not_rebuilt_without_end(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    fill(store, 0, 1)
    store.close()
    set_aside, gone = Folder.set_aside, []

    def noted(folder: Folder, name: str) -> None:
        gone.append(name)
        set_aside(folder, name)

    monkeypatch.setattr(Folder, "set_aside", noted)
    harmed = sqlite3.DatabaseError("database disk image is malformed")
    monkeypatch.setattr(guard_module, "opened", refusing(harmed))
    store = opened(tmp_path)
    for number in range(2, 6):
        fill(store, number)
        assert held(store) == set(range(number + 1))
        assert store.stats()["entries"] == number + 1 and store.check() == []
    assert gone.count(NAME) == 1, "then it is left alone for a time"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_half_a_walk_through_the_files_is_not_taken_for_all(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    fill(store, 0, 1, 2)
    store.close()
    (tmp_path / NAME).unlink()
    names, failed = Folder.names, []

    def torn(folder: Folder, name: str) -> list[str]:
        if name.startswith("package/") and not failed:
            failed.append(name)
            raise OSError(errno.EIO, "Input/output error")
        return names(folder, name)

    monkeypatch.setattr(Folder, "names", torn)
    store = opened(tmp_path)
    with contextlib.suppress(StoreError):
        list(store.entries())
    assert failed and len(list(store.entries())) == 3


def test_a_file_that_says_impossible_times_does_not_stop_the_book(
    tmp_path: Path, opened: Any
) -> None:
    """A row that SQLite refuses would look like damage each time the files are walked through."""
    store = opened(tmp_path)
    store.put_note("alias", KEYS[1], {"a": 1})
    fill(store, 0)
    store.close()
    told = {"created": float("nan"), "ttl": 5.0}
    path = tmp_path / layout.place("alias", KEYS[1])
    wrapped = json.loads(path.read_text()) | {"kept": told}
    wrapped["digest"] = layout._note_digest("alias", KEYS[1], wrapped["body"], told)
    path.write_text(json.dumps(wrapped))
    (tmp_path / NAME).unlink()
    store = opened(tmp_path)
    assert {entry.kind for entry in store.entries()} == {"alias", "package"}
    assert not list(tmp_path.glob("*.damaged")) and os.path.exists(tmp_path / NAME)


# -- statistics wait for no disk ---------------------------------------------------------------


class Stall:
    """A call to a disk that does not come back until it is let go."""

    def __init__(self, real: Callable[..., Any], only: Callable[..., bool] = lambda *a: True):
        self._real, self._only = real, only
        self.reached, self.over = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.over.is_set() and self._only(*arguments):
            self.reached.set()
            assert self.over.wait(60)
        return self._real(*arguments, **options)


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stall]]:
    made: list[Stall] = []

    def make(where: Any, name: str, *only: Callable[..., bool]) -> Stall:
        stall = Stall(getattr(where, name), *only)
        made.append(stall)
        call = lambda *arguments, **options: stall(*arguments, **options)  # noqa: E731
        monkeypatch.setattr(where, name, call)
        return stall

    yield make
    for stall in made:
        stall.over.set()


def soon(call: Callable[[], T]) -> T:
    """What a call gives that must not wait for anything that has been brought to a stop."""
    answer: queue.SimpleQueue[T] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(call()), daemon=True).start()
    return answer.get(timeout=30)


def test_what_a_store_has_is_told_while_its_disk_hangs(
    tmp_path: Path, opened: Any, stalled: Any
) -> None:
    store = opened(tmp_path)
    fill(store, 0, 1)
    before = store.stats()
    assert before["entries"] == 2 and before["complete"] and before["counted"]
    stall = stalled(os, "fsync")
    put(store, 2)
    assert stall.reached.wait(30)
    for _ in range(3):
        told = soon(lambda: store.stats(0.05))
        assert told["entries"] == 2 and told["counted"] == before["counted"]
        assert told["waiting"] > 400 and told["written"] == 2
        assert told["waiting"] < told["waiting_budget"] == 1 << 30
    assert soon(lambda: store.tenant("other").stats(0.05))["counted"] is None
    stall.over.set()
    store.flush()
    assert store.stats()["entries"] == 3 and store.stats()["waiting"] == 0


def test_what_waits_for_a_slow_disk_is_bounded_by_the_budgets_of_memory(
    demo_parts: dict[str, Any], tmp_path: Path, stalled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_settings, "LEAST_WAITING", 0)
    budgets = {"cache_budget": "150KB", "vision_budget": "50KB"}
    with ks.wrap(*demo_parts["demo"], store=tmp_path, **budgets) as vlm:
        stall = stalled(os, "fsync")
        vlm.ask(picture(0), "What is it?", max_new_tokens=2)
        assert stall.reached.wait(30)
        for number in range(1, 6):
            assert soon(lambda n=number: vlm.ask(picture(n), "What is it?", max_new_tokens=2))
            told = soon(vlm.stats)["store"]
            assert 0 < told["waiting"] <= told["waiting_budget"] == 200_000
        assert told["refused"] > 0
        assert soon(lambda: vlm.stats("somebody"))["store"]["waiting"] == 0
        stall.over.set()
        with pytest.raises(NotStored, match="too much waits"):
            vlm.flush()
        assert vlm.stats()["store"]["waiting"] == 0


def test_a_store_that_was_just_written_is_told_without_asking_the_disk(
    tmp_path: Path, opened: Any
) -> None:
    store = opened(tmp_path)
    fill(store, 0)
    assert store.stats()["entries"] == 1
    for number in range(1, 5):
        fill(store, number)
        assert store.stats(0.0)["entries"] == number + 1


def test_an_address_that_does_not_answer_holds_up_no_statistics(stalled: Any) -> None:
    Line.reset()
    far = RemoteStore("trial://somewhere")
    fill(far, 0, 1)
    assert far.stats()["entries"] == 2
    fill(far, 2)
    far._counting.doubt()
    stall = stalled(Housekeeping, "count")
    for _ in range(3):
        assert soon(lambda: far.stats(0.05))["entries"] == 3, "as far as this process knows"
    assert stall.reached.is_set()
    stall.over.set()
    until(lambda: far.stats(5.0)["counted"])
    far.close()


def test_statistics_of_a_model_need_neither_the_model_nor_its_store(
    demo_parts: dict[str, Any], tmp_path: Path, stalled: Any
) -> None:
    """The model's lock may be held for as long as a disk hangs."""
    with ks.wrap(*demo_parts["demo"], store=tmp_path / "store") as vlm:
        vlm.ask(picture(1), "What is it?", max_new_tokens=2)
        vlm.flush()
        before = vlm.stats()
        assert before["store"]["entries"] > 3 and before["features"]["encoded"] == 1
        stall, held, free = stalled(os, "fsync"), threading.Event(), threading.Event()

        def hold() -> None:
            with vlm.runtime.lock:
                held.set()
                assert free.wait(60)

        vlm.ask(picture(2), "What is it?", max_new_tokens=2)
        assert stall.reached.wait(30)
        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(30)
        for tenant in (None, "", "somebody"):
            told = soon(functools.partial(vlm.stats, tenant or None))
            assert told["features"].keys() == before["features"].keys()
        assert soon(vlm.stats)["store"]["entries"] == before["store"]["entries"]
        free.set()
        stall.over.set()
        holder.join()
        vlm.flush()
        assert vlm.stats()["store"]["entries"] > before["store"]["entries"]


def test_asking_for_statistics_of_a_tenant_makes_nothing_of_it(
    demo_parts: dict[str, Any],
) -> None:
    with ks.wrap(*demo_parts["demo"]) as vlm:
        known = set(vlm.runtime.visions)
        for number in range(5):
            told = vlm.stats(f"nobody {number}")["features"]
            assert told["encoded"] == told["packages"] == 0
        assert set(vlm.runtime.visions) == known


# -- a disk that is slow -----------------------------------------------------------------------


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a disk, nor leaves it alone for long."""
    monkeypatch.setattr(timeout, "PATIENCE", 0.1)
    monkeypatch.setattr(health, "FIRST_PAUSE", 0.05)


READS = {
    "whether it is there": (os, "lstat", lambda store: store.has("package", KEYS[0])),
    "its tensors": (tensorfile, "read", lambda store: store.get("package", KEYS[0])),
    "a note": (Path, "read_bytes", lambda store: store.note("alias", KEYS[0])),
}


def test_answers_that_are_slow_each_time_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is in time, and a request makes many calls."""
    now = [0.0]
    monkeypatch.setattr(timeout, "time", SimpleNamespace(monotonic=lambda: now[0]))
    disk = health.Health("a disk", lambda: now[0])
    reach, asked = timeout.DiskCalls(disk), list[int]()
    assert reach.ask_beside(lambda call: True, 0) == []

    def look(call: Any, seconds: float, nbytes: int = 0) -> bool:
        call.expect(nbytes)
        asked.append(nbytes)
        now[0] += seconds
        return True

    assert all(reach.ask(lambda call: look(call, 0.4), False) for _ in range(30))  # a busy machine
    large = 160 << 20  # which takes ten seconds at the least rate
    assert all(reach.ask(lambda call: look(call, 10.0, large), False) for _ in range(3))
    begun = now[0]
    answers = [reach.ask(lambda call: look(call, 1.9), False) for _ in range(20)]
    assert now[0] - begun < 6 and sum(answers) == 3 and disk.state == "slow"
    now[0] += 2 * health.LONGEST_PAUSE  # it is tried again, and what was is forgotten
    assert reach.ask(lambda call: look(call, 1.9), False) and disk.state == "ok"


@pytest.mark.parametrize("what", READS)
def test_a_read_that_hangs_is_left_behind(
    tmp_path: Path, opened: Any, stalled: Any, hurried: None, what: str
) -> None:
    where, name, read = READS[what]
    store = opened(tmp_path)
    store.put_note("alias", KEYS[0], {"a": 1})
    fill(store, 0, 1)
    stall = stalled(where, name, lambda path, *more: KEYS[0] in str(path))
    assert not soon(lambda: read(store)) and stall.reached.is_set()
    for _ in range(50):  # as long as that call has not come back nobody waits for another
        assert soon(lambda: store.get("package", KEYS[1])) is None
    told = soon(lambda: store.stats(0.05))
    assert told["state"] == "slow" and told["since"] and "no answer" in told["broken"]
    assert not [thread for thread in threading.enumerate() if "keepsight-disk" in thread.name][2:]
    stall.over.set()
    until(lambda: read(store))
    assert held(store) == {0, 1} and store.stats()["state"] == "ok"


def test_a_large_entry_may_take_its_time(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch, hurried: None
) -> None:
    monkeypatch.setattr(timeout, "_RATE", 1000)
    real, store = tensorfile.read, opened(tmp_path)

    def slow(*arguments: Any) -> Any:
        time.sleep(0.3)
        return real(*arguments)

    monkeypatch.setattr(tensorfile, "read", slow)
    fill(store, 0)
    assert store.get("package", KEYS[0]) is not None and store.stats()["state"] == "ok"


def test_nothing_that_is_handed_over_waits_for_a_disk(
    tmp_path: Path, opened: Any, stalled: Any
) -> None:
    """Whether it is there already, and what it depends on, the writer looks."""
    store = opened(tmp_path)
    stalls = [stalled(os, name) for name in ("lstat", "open", "fsync")]
    for number, key in enumerate(KEYS):
        on = ("snapshot", KEYS[number - 1]) if number else None
        content = {"a": torch.full((100,), float(number))}
        soon(lambda c=content, k=key, o=on: store.put("snapshot", k, c, {}, About(depends_on=o)))
        soon(lambda k=key: store.put_note("alias", k, {"a": 1}))
        assert soon(lambda k=key: store.note("alias", k)) == {"a": 1}, "readable at once"
    for stall in stalls:
        stall.over.set()
    store.flush()
    assert len(list(store.entries())) == 16 and store.check() == []


def test_answers_stay_right_and_come_while_the_disk_hangs(
    demo_parts: dict[str, Any], tmp_path: Path, stalled: Any, hurried: None
) -> None:
    model, processor = demo_parts["demo"]
    questions = [(picture(number), "What is it?") for number in range(4)]
    with ks.wrap(model, processor) as free:
        wanted = [free.ask(*question, max_new_tokens=3) for question in questions]
    with ks.wrap(model, processor, store=tmp_path / "store") as vlm:
        vlm.ask(*questions[0], max_new_tokens=3)
        vlm.ask(*questions[1], max_new_tokens=3)
        vlm.flush()
        vlm.clear()
        unseen = [{"role": "user", "content": [{"type": "image", "image": picture(9)}]}]
        in_store = lambda path, *more: str(tmp_path) in str(path)  # noqa: E731
        stalls = [stalled(where, name, in_store) for where, name, _ in READS.values()]
        for question, reply in zip(questions, wanted, strict=True):
            assert soon(lambda q=question: vlm.ask(*q, max_new_tokens=3)).text == reply.text
        assert soon(vlm.stats)["store"]["state"] == "slow"
        for stall in stalls:
            stall.over.set()
        vlm.flush()
        until(lambda: vlm.explain(unseen) and vlm.stats()["store"]["state"] == "ok")
        vlm.clear()
        again = vlm.ask(*questions[2], max_new_tokens=3)
        assert again.text == wanted[2].text and again.usage.images_encoded == 0


def called(call: Callable[[], T]) -> queue.SimpleQueue[T | Exception]:
    """Where the result of a call will be, which another thread makes."""
    answer: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            answer.put(call())
        except Exception as error:
            answer.put(error)

    threading.Thread(target=work, daemon=True).start()
    return answer


def shown(seed: int) -> list[Any]:
    parts = [{"type": "image", "image": picture(seed)}, {"type": "text", "text": "What is it?"}]
    return [{"role": "user", "content": parts}]


HOUSEKEEPING: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "delete an image": ("unlink", lambda vlm: vlm.delete(picture(1))),
    "delete a conversation": ("unlink", lambda vlm: vlm.delete(shown(1))),
    "clear": ("unlink", lambda vlm: vlm.clear(store=True)),
    "pin an image": ("fsync", lambda vlm: vlm.pin(picture(1))),
    "pin a conversation": ("fsync", lambda vlm: vlm.pin(shown(1))),
    "look at the catalogue": ("catalogue", lambda vlm: vlm.delete(picture(1))),
}


@pytest.mark.parametrize("what", HOUSEKEEPING)
def test_answers_come_while_housekeeping_waits_for_the_disk(
    demo_parts: dict[str, Any], tmp_path: Path, stalled: Any, hurried: None, what: str
) -> None:
    where, housekeeping = HOUSEKEEPING[what]
    with ks.wrap(*demo_parts["demo"]) as free:
        wanted = [free.chat(shown(n), max_new_tokens=3).text for n in range(4)]
    with ks.wrap(*demo_parts["demo"], store=tmp_path / "store") as vlm:
        for number in range(3):
            vlm.chat(shown(number), max_new_tokens=3)
        vlm.flush()
        stall = stalled(*((CatalogueGuard, "act") if where == "catalogue" else (os, where)))
        done = called(lambda: housekeeping(vlm))
        assert stall.reached.wait(30)
        for number in (0, 2, 3):
            reply = soon(lambda n=number: vlm.chat(shown(n), max_new_tokens=3))
            assert reply.text == wanted[number]
        assert soon(vlm.stats)["prefix"] and done.empty(), "who asked for it waits"
        stall.over.set()
        result = done.get(timeout=30)
        assert not isinstance(result, Exception), result
        vlm.flush()
        told = vlm.explain(shown(1)).segments  # the text before it may be known of another
        known = {segment.status for segment in told if segment.kind == "image"}
        assert known == ({"reused"} if "pin" in what else {"computed"})
        assert vlm.chat(shown(1), max_new_tokens=3).text == wanted[1]
        vlm.runtime.check()


def test_what_is_read_while_it_is_deleted_is_gone_too(
    demo_parts: dict[str, Any], tmp_path: Path, stalled: Any
) -> None:
    with ks.wrap(*demo_parts["demo"], store=tmp_path / "store") as vlm:
        vlm.encode([picture(1), picture(2)])
        vlm.flush()
        stall = stalled(os, "unlink")
        done = called(lambda: vlm.delete(picture(1)))
        assert stall.reached.wait(30)
        soon(lambda: vlm.encode(picture(1)))
        assert vlm.stats()["features"]["packages"] == 2, "it was still on the disk"
        stall.over.set()
        assert done.get(timeout=30)
        assert vlm.stats()["features"]["packages"] == 1
        assert {segment.status for segment in vlm.explain(shown(1)).segments} == {"computed"}


def test_a_disk_that_refuses_a_pin_leaves_none_in_memory(
    demo_parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ks.wrap(*demo_parts["demo"], store=tmp_path / "store") as vlm:
        vlm.chat(shown(1), max_new_tokens=3)
        vlm.flush()
        tree, shelf = vlm.runtime.tree, vlm.runtime.caches.packages
        with monkeypatch.context() as patch:
            patch.setattr(Folder, "write", refusing(OSError(errno.EIO, "broken")))
            with pytest.raises(StoreError, match="no pin"):
                vlm.pin(shown(1))
        assert not shelf.pinning() and not any(node.pinned for node in tree.nodes())
        vlm.pin(shown(1))
        assert shelf.pinning() and any(node.pinned for node in tree.nodes())
        vlm.runtime.check()


# -- a store that is full of pins ----------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"budget": 4000}, {"quota": 4000}])
def test_pins_that_leave_no_room_are_named(
    tmp_path: Path, opened: Any, caplog: pytest.LogCaptureFixture, limits: dict[str, int]
) -> None:
    store = opened(tmp_path, **limits)
    while store.stats()["bytes"] < 3200:
        number = store.stats()["entries"]
        fill(store, number)
        store.pin("package", KEYS[number])
    for number in (6, 7):
        put(store, number)
        with pytest.raises(NotStored, match="pins take .* unpin something") as refused:
            store.flush()
        assert set(refused.value.reasons) == {("package", KEYS[number])}
    told = store.stats()
    assert told["state"] == "pinned" and told["since"] and "pins take" in told["broken"]
    assert told["refused"] == 2 and told["bytes"] <= 4000
    assert len([line for line in caplog.messages if "takes nothing more" in line]) == 1
    store.pin("package", KEYS[0], False)
    assert store.stats()["state"] == "ok"
    fill(store, 5)
    assert store.get("package", KEYS[5]) and store.stats()["state"] == "ok"


@pytest.mark.parametrize("limit", ["budget", "quota"])
def test_what_alone_is_too_large_is_named_and_pushes_nothing_out(
    tmp_path: Path, opened: Any, limit: str
) -> None:
    record = {"said": "x" * 4000}  # counted only once it is written
    store = opened(tmp_path, **{limit: 4000})
    store.put("package", KEYS[0], {"a": torch.zeros(9)}, {})
    store.put("package", KEYS[1], {"a": torch.zeros(9)}, record)
    with pytest.raises(NotStored, match=f"more than the {limit} of") as refused:
        store.flush()
    assert set(refused.value.reasons) == {("package", KEYS[1])}
    assert store.stats()["state"] == "ok" and store.has("package", KEYS[0])


# -- a disk that vanishes ----------------------------------------------------------------------


def test_a_folder_that_is_removed_is_told_and_then_made_anew(
    tmp_path: Path, opened: Any, hurried: None, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "store"
    store = opened(root)
    fill(store, 0, 1)
    shutil.rmtree(root)
    assert held(store) == set() and store.stats()["state"] == "gone"
    assert store.stats()["entries"] == 0 and not root.exists(), "looking makes no folder"
    put(store, 2)
    with contextlib.suppress(StoreError):
        store.flush()
    until(lambda: fill(store, 3) or store.stats()["state"] == "ok")
    assert 3 in held(store) and store.stats()["entries"] == len(held(store))
    assert store.check() == [] and [r.levelname for r in caplog.records] == ["WARNING"]


def test_a_folder_that_comes_back_is_used_again(tmp_path: Path, opened: Any, hurried: None) -> None:
    root, away = tmp_path / "disk" / "store", tmp_path / "away"
    store = opened(root)
    fill(store, 0, 1)
    (tmp_path / "disk").rename(away)
    for number in (2, 3):
        put(store, number)
        with pytest.raises(StoreError, match="gone|No such"):
            store.flush()
        assert held(store) == set() and store.stats()["state"] == "gone"
    assert not root.exists(), "nothing is made where the folder above is gone too"
    away.rename(tmp_path / "disk")
    until(lambda: store.stats()["state"] == "ok")
    assert held(store) == {0, 1} and store.stats()["entries"] == 2
    fill(store, 2, 3)
    assert held(store) == {0, 1, 2, 3} and store.check() == []


def test_nothing_is_written_where_a_disk_was_mounted(
    tmp_path: Path, opened: Any, hurried: None
) -> None:
    """It would lie under the disk when that comes back."""
    disk = tmp_path / "disk"
    for root in (disk, disk / "store"):
        with mounted(disk):
            store = opened(root)
            fill(store, 0)
        for number in (1, 2):
            put(store, number)
            with pytest.raises(StoreError, match="gone|mounted"):
                store.flush()
            assert store.stats()["state"] == "gone" and held(store) == set()
        assert list(disk.iterdir()) == []
        with mounted(disk):  # another, empty one
            until(functools.partial(fills, store, 3))
            assert 3 in held(store) and store.check() == []
            store.close()


def fills(store: Store, number: int) -> bool:
    """Whether the store takes an entry by now."""
    try:
        fill(store, number)
    except StoreError:
        return False
    return True


def test_another_file_in_the_place_of_the_book_is_filled_with_what_it_lacks(
    tmp_path: Path, opened: Any
) -> None:
    """Somebody puts back an older one."""
    store = opened(tmp_path)
    fill(store, 0)
    store.close()
    shutil.copy(tmp_path / NAME, tmp_path / "older")
    store = opened(tmp_path)
    fill(store, 1, 2)
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"{NAME}{suffix}").unlink()
    os.replace(tmp_path / "older", tmp_path / NAME)
    assert held(store) == {0, 1, 2} and len(list(store.entries())) == 3
    assert store.check() == []


def test_answers_stay_right_while_a_store_vanishes_and_comes_back(
    demo_parts: dict[str, Any], tmp_path: Path, hurried: None
) -> None:
    model, processor = demo_parts["demo"]
    root, away = tmp_path / "disk" / "store", tmp_path / "away"
    with ks.wrap(model, processor) as free:
        wanted = [free.ask(picture(n), "What is it?", max_new_tokens=3).text for n in range(3)]
    with ks.wrap(model, processor, store=root) as vlm:

        def answers() -> list[str]:
            return [vlm.ask(picture(n), "What is it?", max_new_tokens=3).text for n in range(3)]

        assert answers() == wanted
        vlm.flush()
        entries = vlm.stats()["store"]["entries"]
        vlm.clear()
        root.parent.rename(away)
        assert answers() == wanted and answers() == wanted
        until(lambda: vlm.stats()["store"]["state"] == "gone")
        vlm.clear()
        assert answers() == wanted
        away.rename(root.parent)
        until(lambda: vlm.stats()["store"]["state"] == "ok")
        vlm.clear()
        before = vlm.stats()["features"]["encoded"]
        assert answers() == wanted and vlm.stats()["features"]["encoded"] == before
        with contextlib.suppress(StoreError):  # of what was lost meanwhile
            vlm.flush()
        assert vlm.stats()["store"]["entries"] == entries


@pytest.mark.parametrize("lost", [False, True])
def test_what_is_no_file_in_the_place_of_one_holds_up_nobody(
    tmp_path: Path, opened: Any, lost: bool
) -> None:
    """Whoever opens a pipe waits for a writer, for ever."""
    store = opened(tmp_path)
    store.put_note("alias", KEYS[0], {"a": 1})
    fill(store, 0, 1)
    store.close()
    for kind in ("package", "alias"):
        path = tmp_path / layout.place(kind, KEYS[0])
        path.unlink()
        os.mkfifo(path)
    if lost:
        (tmp_path / NAME).unlink()
    store = opened(tmp_path)
    if lost:
        assert len(soon(lambda: list(store.entries()))) == 1
    assert soon(lambda: store.note("alias", KEYS[0])) is None
    assert soon(lambda: held(store)) == {1} and store.stats()["state"] == "ok"
    soon(lambda: fill(store, 0))
    assert held(store) == {0, 1} and soon(store.check) == []


def test_a_pipe_in_the_place_of_the_marker_holds_up_nobody(tmp_path: Path, opened: Any) -> None:
    store = opened(tmp_path)
    fill(store, 0)
    store.close()
    (tmp_path / layout.MARKER).unlink()
    os.mkfifo(tmp_path / layout.MARKER)
    store = opened(tmp_path)

    def tried() -> str:
        try:
            fill(store, 1)
        except StoreError as error:
            return str(error)
        return "written"

    assert "is no file" in soon(tried) and held(store) >= {0}
