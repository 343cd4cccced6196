"""The encoding run: items in, results out, in order, with the tower kept busy.

A result comes when its package is safe: an image reported as encoded can be found afterwards in any
case. A refusal by the store is a result too. If a store evicts packages already reported, because
its budget is too small, the run ends with an error. While the tower runs, threads read, decode and
preprocess the next items (`Ahead`), in order and with bounded memory.
"""

from __future__ import annotations

import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from keepsight.encode.items import Item
from keepsight.encode.results import Encoded, EncodeTarget

T = TypeVar("T")
R = TypeVar("R")
_DEEP = 16  # most waiting items per thread, whatever their bytes
_POLL = 0.5  # seconds; closing notifies the threads, unless one of them holds the lock
_TOGETHER, _LIGHT = 64, 1 << 20  # most items and bytes in one group
# Python threads take turns, and a tower releases the GIL at each of its hundreds of small steps.
# With the usual switch interval of 5 ms, threads that work ahead would slow it down.
_TURN = 0.0002


def usual_threads() -> int:
    """One thread per processor besides the one that feeds the tower, up to a limit."""
    have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(8, (have or 1) - 1))


@dataclass(frozen=True)
class _SubmittedGroup(Generic[R]):
    """Some items that a thread processes one after the other."""

    sizes: list[int]
    results: Future[list[R]]


class _Window:
    """The amount of work in progress. Adding waits while it is full; one item always fits."""

    def __init__(self, most: int, budget: int) -> None:
        self._most, self._budget = most, budget
        self._count = self._bytes = 0
        self.closed = False  # no more work is admitted
        self._changed = threading.Condition()

    def enter(self, count: int, nbytes: int) -> bool:
        """Wait for room; False after `close`."""
        with self._changed:
            while not self.closed and self._full():
                self._changed.wait(_POLL)
            self._count += count
            self._bytes += nbytes
            return not self.closed

    def _full(self) -> bool:
        return self._count >= self._most or (self._count > 0 and self._bytes >= self._budget)

    def grow(self, nbytes: int) -> None:
        with self._changed:
            self._bytes += nbytes

    def leave(self, nbytes: int) -> None:
        with self._changed:
            self._count -= 1
            self._bytes -= nbytes
            self._changed.notify()

    def close(self) -> None:
        """Admit nothing more. This does not wait: the garbage collector may call it."""
        self.closed = True
        if self._changed.acquire(blocking=False):
            self._changed.notify_all()
            self._changed.release()


class Ahead(Generic[T, R]):
    """Runs `work` on items in threads before their results are requested.

    `before` and `after` give the bytes that an item holds while it waits and those its work adds.
    Where work adds none, it was only a lookup; then groups grow, because handing one over costs as
    much as one lookup.
    """

    def __init__(
        self,
        work: Callable[[T], R],
        before: Callable[[T], int],
        after: Callable[[R], int],
        threads: int,
        budget: int,
    ) -> None:
        self._work, self._before, self._after = work, before, after
        self._threads, self._window = threads, _Window(_DEEP * threads, budget)
        self._lane: queue.SimpleQueue[_SubmittedGroup[R] | Exception | None] = queue.SimpleQueue()
        self._together = 1

    def over(self, things: Iterable[T]) -> Iterator[R]:
        """The results, in the order of the items."""
        feeder = threading.Thread(
            target=self._feed, args=(iter(things),), name="keepsight-ahead-feed", daemon=True
        )
        wait = True
        with _short_turns():
            feeder.start()
            try:
                while (found := self._lane.get()) is not None:
                    if isinstance(found, Exception):
                        raise found
                    for nbytes, result in zip(found.sizes, found.results.result(), strict=True):
                        yield result
                        self._window.leave(nbytes + self._after(result))
            except GeneratorExit:  # perhaps from the garbage collector; the threads see it and end
                wait = False
                raise
            finally:
                self._window.close()
                if wait:
                    feeder.join()

    def _feed(self, things: Iterator[T]) -> None:
        with ThreadPoolExecutor(self._threads, "keepsight-ahead") as pool:
            try:
                while group := self._group(things):
                    sizes = [self._before(thing) for thing in group]
                    if not self._window.enter(len(group), sum(sizes)):
                        return
                    self._lane.put(_SubmittedGroup(sizes, pool.submit(self._work_on, group)))
                self._lane.put(None)
            except Exception as error:  # raised where the result is requested
                self._lane.put(error)

    def _group(self, things: Iterator[T]) -> list[T]:
        group: list[T] = []
        nbytes, most = 0, self._together
        for thing in things:
            group.append(thing)
            nbytes += self._before(thing)
            if len(group) >= most or nbytes > _LIGHT:
                break
        return group

    def _work_on(self, group: list[T]) -> list[R]:
        results, added = [], 0
        for thing in group:
            if self._window.closed:
                break
            results.append(self._work(thing))
            size = self._after(results[-1])
            self._window.grow(size)
            added += size
        self._together = 1 if added else min(_TOGETHER, 2 * self._together)
        return results


@contextmanager
def _short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


BUDGET = 512 << 20  # bytes of images and pixels waiting for the tower
_SECONDS, _BYTES = 1.0, 64 << 20  # images between two flushes


def run(
    items: Iterable[Item],
    target: EncodeTarget,
    shard: tuple[int, int] | None = None,
    threads: int | None = None,
    budget: int = BUDGET,
    back: int | None = None,
) -> Generator[Encoded]:
    """The results of all items. One that cannot be used is a result too.

    At the end, `back` of the packages reported first, or all, must still exist.
    """
    mine = (item for item in items if item.in_shard(shard))
    ahead: Ahead[Item, Any] = Ahead(
        target.look,
        lambda item: item.nbytes,
        lambda look: int(look.nbytes),
        threads or usual_threads(),
        budget,
    )
    waiting: list[Encoded] = []
    written, since = 0, time.monotonic()
    looks = ahead.over(mine)
    while group := list(itertools.islice(looks, target.batch)):
        for number, look in enumerate(group):
            next_ones = [one.looked for one in group[number + 1 :] if one.looked is not None]
            result = target.settle(look, next_ones)
            waiting.append(result)
            written += result.nbytes
            if written > _BYTES or time.monotonic() - since > _SECONDS:
                yield from _confirmed(target, waiting)
                waiting.clear()
                written, since = 0, time.monotonic()
    yield from _confirmed(target, waiting)
    target.look_back(back)


def _confirmed(target: EncodeTarget, results: list[Encoded]) -> list[Encoded]:
    target.flush()
    return [target.confirm(result) for result in results]
