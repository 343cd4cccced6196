"""What is finished without a `close()`: by the end of the process, and of what is dropped.

At the end it is done twice, within a few seconds. As soon as the main thread has ended, what was
handed to stores is written: pools of threads, which remote stores need, take work until then. Once
all other threads but daemons have ended too, schedulers stop, models are taken from threads that
are still at work (one that is inside PyTorch when the interpreter ends takes the process down), and
stores are finished and closed.
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
SECONDS = 10.0  # that all of it may take, each time


class Ending(Protocol):
    """Something that has to be finished."""

    def before_exit(self, seconds: float) -> object:
        """Finish within so many seconds, or leave it. It may be used again afterwards."""


_all: dict[int, weakref.WeakSet[Ending]] = {
    stage: weakref.WeakSet() for stage in (SCHEDULERS, MODELS, STORES)
}


def finish_before_exit(ending: Ending, stage: int) -> None:
    """Have its `before_exit` called, unless it is gone by then."""
    _all[stage].add(ending)


def begin(work: Callable[[], object], name: str) -> threading.Thread | None:
    """Start a daemon thread; None where the interpreter is shutting down and starts no more."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def when_dropped(owner: object, retire: Callable[[], object]) -> None:
    """Have something called once an object is gone. It must wait for nothing, and be no method of
    that object: the collector calls it, in any thread and under any lock."""
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
# The only hook between the end of the main thread and that of the pools. It has no public name.
_register = getattr(threading, "_register_atexit", None)
if _register is not None:
    with contextlib.suppress(RuntimeError):  # imported when all is over
        _register(partial(_finish, (STORES,)))
