"""Finishes work without a `close()`: at the end of the process, and of dropped objects.

At the end this happens twice, within a few seconds. When the main thread has ended, pending store
writes are written: thread pools, which remote stores need, accept work until then. When all other
threads except daemons have ended, schedulers stop, models are taken from threads that are still at
work (a thread inside PyTorch crashes the process when the interpreter ends), and stores are
finished and closed.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  what is registered behind its end comes before it
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol

logger = logging.getLogger(__name__)

SCHEDULERS, MODELS, STORES = 0, 1, 2  # in the order in which they end
SECONDS = 10.0  # seconds for all of it, each time


class Finishable(Protocol):
    """Something that has to be finished."""

    def before_exit(self, seconds: float) -> object:
        """Finish within this many seconds, or give up. It may be used again afterwards."""


_all: dict[int, weakref.WeakSet[Finishable]] = {
    stage: weakref.WeakSet() for stage in (SCHEDULERS, MODELS, STORES)
}


def finish_before_exit(ending: Finishable, stage: int) -> None:
    """Register an object's `before_exit`, unless it is garbage-collected earlier."""
    _all[stage].add(ending)


def begin(work: Callable[[], object], name: str) -> threading.Thread | None:
    """Start a daemon thread; None if the interpreter is shutting down."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def when_dropped(owner: object, retire: Callable[[], object]) -> None:
    """Call something once an object is gone. It must not wait, and not be a method of that object:
    the garbage collector calls it in any thread and under any lock."""
    weakref.finalize(owner, retire).atexit = False


def _finish(stages: tuple[int, ...]) -> None:
    end = time.monotonic() + SECONDS
    for stage in stages:
        for ending in list(_all[stage]):
            try:
                ending.before_exit(max(0.0, end - time.monotonic()))
            except Exception as error:
                logger.warning("not all could be finished: %s", error)


atexit.register(_finish, (SCHEDULERS, MODELS, STORES))
# The only hook between the ends of the main thread and of the pools. It has no public name.
_register = getattr(threading, "_register_atexit", None)
if _register is not None:
    with contextlib.suppress(RuntimeError):  # imported during shutdown
        _register(partial(_finish, (STORES,)))
