"""The encoding run: items in, results out, in order, with the tower kept busy.

A result comes when its package is safe: an image reported as encoded can be found afterwards in any
case. A refusal by the store is a result too. If a store evicts packages already reported, because
its budget is too small, the run ends with an error. While the tower runs, threads read, decode and
preprocess the next items (`work_ahead`), in order and with bounded memory.
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
from typing import TypeVar

from keepsight.encode.items import Item
from keepsight.encode.places import Encoded, Place

T = TypeVar("T")
R = TypeVar("R")
BUDGET = 512 << 20  # bytes of images and pixels waiting for the tower
_DEEP = 16  # most waiting items per thread, whatever their bytes
_SECONDS, _BYTES = 1.0, 64 << 20  # time, or bytes written, between two flushes
# Python threads take turns, and a tower releases the GIL at each of its hundreds of small steps.
# With the usual switch interval of 5 ms, threads that work ahead would slow it down.
_TURN = 0.0002


def run(
    items: Iterable[Item],
    place: Place,
    shard: tuple[int, int] | None = None,
    threads: int | None = None,
    back: int | None = None,
) -> Generator[Encoded]:
    """The results of all items. One that cannot be used is a result too.

    At the end, `back` of the packages reported first, or all, must still exist.
    """
    mine = (item for item in items if item.in_shard(shard))
    sizes = (lambda item: item.nbytes), (lambda look: look.nbytes)
    looks = work_ahead(place.look, mine, threads or _usual_threads(), BUDGET, *sizes)
    waiting: list[Encoded] = []
    written, since = 0, time.monotonic()
    while group := list(itertools.islice(looks, place.making.batch)):
        for number, look in enumerate(group):
            waiting.append(place.settle(look, group[number + 1 :]))
            written += waiting[-1].nbytes
            if written > _BYTES or time.monotonic() - since > _SECONDS:
                place.flush()
                yield from map(place.confirm, waiting)
                waiting, written, since = [], 0, time.monotonic()
    place.flush()
    yield from map(place.confirm, waiting)
    place.look_back(back)


def _usual_threads() -> int:
    """One thread per processor besides the one that feeds the tower, up to a limit."""
    have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(8, (have or 1) - 1))


def work_ahead(
    work: Callable[[T], R],
    things: Iterable[T],
    threads: int,
    budget: int,
    before: Callable[[T], int],
    after: Callable[[R], int],
) -> Iterator[R]:
    """The results of `work` in the order of the things; threads start before they are requested.

    `before` and `after` are the bytes that a thing holds while it waits, and those its result adds.
    Nothing more is started while so many wait; one thing always fits.
    """
    lane: queue.SimpleQueue[tuple[int, Future[R]] | Exception | None] = queue.SimpleQueue()
    changed = threading.Condition()
    count = held = 0
    closed = False

    def add(things: int, nbytes: int) -> None:
        nonlocal count, held
        with changed:
            count, held = count + things, held + nbytes
            changed.notify()

    def may_go_on() -> bool:
        return closed or count == 0 or (count < _DEEP * threads and held < budget)

    def work_on(thing: T) -> R:
        result = work(thing)
        add(0, after(result))
        return result

    def feed() -> None:
        try:
            for thing in things:
                with changed:
                    changed.wait_for(may_go_on)
                if closed:
                    return
                add(1, before(thing))
                lane.put((before(thing), pool.submit(work_on, thing)))
            lane.put(None)
        except Exception as error:  # raised where the result is requested
            lane.put(error)

    pool = ThreadPoolExecutor(threads, "keepsight-ahead")
    feeder = threading.Thread(target=feed, name="keepsight-ahead-feed", daemon=True)
    usual = sys.getswitchinterval()
    wait = True
    try:
        sys.setswitchinterval(min(usual, _TURN))
        feeder.start()
        while (found := lane.get()) is not None:
            if isinstance(found, Exception):
                raise found
            nbytes, future = found
            result = future.result()
            yield result
            add(-1, -nbytes - after(result))
    except GeneratorExit:  # perhaps from the garbage collector, which must not wait
        wait = False
        raise
    finally:
        sys.setswitchinterval(usual)
        with changed:
            closed = True
            changed.notify_all()
        pool.shutdown(wait=False, cancel_futures=True)
        if wait:
            feeder.join()
            pool.shutdown()
