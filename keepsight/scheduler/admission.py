"""Admission control: limits the requests inside, and tells the serving thread about arrivals,
hangups and quiet times. Callers use it in any thread; `wait` is for the serving thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol
from weakref import ref

from keepsight.errors import Busy, Closed
from keepsight.scheduler.intake import Request
from keepsight.system import forks
from keepsight.system.exits import when_dropped

_POLL = 0.05  # seconds; nothing to wait for while a request is being prepared
_FOR_OTHERS = 8  # this share of the places is not for the account with the most
_LONG = 60.0  # seconds; a notification by the garbage collector may get lost


class Arrivals(NamedTuple):
    """Events since the last look."""

    asked: bool  # somebody wants something; otherwise the time is over
    came: list[Request]
    hung_up: bool
    stopped: bool


class Admission:
    """A fixed number of places and a condition variable."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._bell = threading.Condition()  # reentrant for `abandon`
        self._serves: object = None  # the server, kept alive while somebody is inside
        self._came: list[Request] = []
        self._hung_up = self._rung = self._closed = self._stopped = False
        self._number = self.in_flight = 0
        self._inside: Counter[str] = Counter()  # by account
        self._several = False  # whether two accounts were ever inside together
        self._quiet = time.monotonic()  # since when no request was inside
        forks.renew(self._in_child)

    def take_place(
        self, wait: Callable[[], float], serves: object = None, account: str = ""
    ) -> None:
        """Take a place before any work for a request. A refusal says when to try again. If there
        are several accounts, one account never gets all places.

        The server is kept alive while somebody is inside.
        """
        with self._bell:
            if self._closed:
                raise closed()
            self._several |= bool(self._inside) and account not in self._inside
            reserved = self._places // _FOR_OTHERS + 1 if self._several and self._places > 1 else 0
            full = self.in_flight >= self._places
            if full or self._inside[account] >= self._places - reserved:
                raise Busy(self.in_flight, wait())
            self.in_flight += 1
            self._inside[account] += 1
            self._serves = serves

    def free_place(self, account: str = "") -> None:
        """Free the place of a finished request."""
        with self._bell:
            self.in_flight -= 1
            self._inside[account] -= 1
            if not self._inside[account]:
                del self._inside[account]
            if not self.in_flight:
                self._serves = None
            self._quiet = time.monotonic()
            self._bell.notify_all()

    def bring(self, request: Request) -> None:
        """Submit a prepared request, which has its place."""
        with self._bell:
            if self._stopped:
                raise closed()
            self._number += 1
            request.number = self._number
            self._came.append(request)
            self._bell.notify_all()

    def hang_up(self) -> None:
        """Note that a caller cancelled some request."""
        with self._bell:
            self._hung_up = True
            self._bell.notify_all()

    def ring(self) -> None:
        """Wake the serving thread for something other than a request."""
        with self._bell:
            self._rung = True
            self._bell.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether the scheduler has stopped."""
        return self._stopped

    def wait(self, active: bool, quiet: float | None) -> Arrivals:
        """Wait until there is something to do, or no request was inside for `quiet` seconds."""

        def something() -> bool:
            return bool(active or self._came or self._hung_up or self._rung or self._stopped)

        with self._bell:
            while not (asked := something()) and not self._is_quiet(quiet):
                self._bell.wait(self._until(quiet))
            news = Arrivals(asked, self._came, self._hung_up, self._stopped)
            self._came, self._hung_up, self._rung = [], False, False
            return news

    def _is_quiet(self, seconds: float | None) -> bool:
        if seconds is None or self.in_flight:
            return False
        return time.monotonic() - self._quiet >= seconds

    def _until(self, seconds: float | None) -> float:
        if seconds is None:
            return _LONG
        return max(_POLL, self._quiet + seconds - time.monotonic())

    def close(self, drain: float | None) -> None:
        """Admit nothing more; stop when everyone is out, or when the time is over."""
        with self._bell:
            self._closed = True
            self._bell.notify_all()
            self._bell.wait_for(lambda: not self.in_flight or self._stopped, drain)
            self._stopped = True
            self._bell.notify_all()

    def abandon(self) -> None:
        """Called when the owner was dropped without requests. This does not wait: the garbage
        collector calls it."""
        self._stopped = True
        if self._bell.acquire(blocking=False):
            self._bell.notify_all()
            self._bell.release()

    def _in_child(self) -> None:
        """Stop: a forked child has no serving thread."""
        self._bell, self._closed, self._stopped = threading.Condition(), True, True


class Served(Protocol):
    """The interface of a server of requests."""

    def waits(self) -> tuple[bool, float | None]:
        """Whether there is anything to do, and after how much quiet time it wants to run."""

    def go_on(self, news: Arrivals) -> bool:
        """Do what there is to do now; False at the end."""


def begin_serving(served: Served, admission: Admission) -> threading.Thread:
    """Start the thread that serves the admitted requests."""
    thread = threading.Thread(
        target=_serve, args=(ref(served), admission), name="keepsight-together", daemon=True
    )
    thread.start()
    when_dropped(served, admission.abandon)
    return thread


def _serve(found: ref[Served], admission: Admission) -> None:
    """The thread's loop. While it waits it references only the admission, so the server can be
    garbage-collected."""
    while (served := found()) is not None:
        active, quiet = served.waits()
        del served
        news = admission.wait(active, quiet)
        if (served := found()) is None or not served.go_on(news):
            return
        del served, news


def closed() -> Closed:
    """The error for a request that comes too late."""
    return Closed("requests are no longer taken: the scheduler was closed")
