"""Where requests come in: how many may be inside, who has come, who hung up, and how long it has
been quiet. Callers use it in any thread; `wait` is for the one thread that serves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from keepsight.errors import Busy, Closed
from keepsight.together.reception import Request

_POLL = 0.05  # seconds; while a request is being made ready there is nothing to wait for


class News(NamedTuple):
    """What has happened since somebody looked."""

    asked: bool  # somebody wants something; else the time given is over
    came: list[Request]
    hung_up: bool
    stopped: bool


class Door:
    """So many places, and a bell."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._bell = threading.Condition()
        self._came: list[Request] = []
        self._hung_up = self._closed = self._stopped = False
        self._number = self.in_flight = 0
        self._quiet = time.monotonic()  # since when nobody was inside

    def take_place(self, wait: Callable[[], float]) -> None:
        """One place, before anything is done for a request; `wait` says when to come again."""
        with self._bell:
            if self._closed:
                raise closed()
            if self.in_flight >= self._places:
                raise Busy(self.in_flight, wait())
            self.in_flight += 1

    def free_place(self) -> None:
        """A request is over."""
        with self._bell:
            self.in_flight -= 1
            self._quiet = time.monotonic()
            self._bell.notify_all()

    def bring(self, request: Request) -> None:
        """A request that is ready, and has its place."""
        with self._bell:
            if self._stopped:
                raise closed()
            self._number += 1
            request.number = self._number
            self._came.append(request)
            self._bell.notify_all()

    def hang_up(self) -> None:
        """Some request was cancelled by its caller."""
        with self._bell:
            self._hung_up = True
            self._bell.notify_all()

    def wait(self, active: Callable[[], bool], quiet: float | None) -> News:
        """Until there is something to do, or nobody has been inside for `quiet` seconds."""

        def something() -> bool:
            return bool(active() or self._came or self._hung_up or self._stopped)

        with self._bell:
            while not (asked := something()) and not self._is_quiet(quiet):
                self._bell.wait(self._until(quiet))
            news = News(asked, self._came, self._hung_up, self._stopped)
            self._came, self._hung_up = [], False
            return news

    def _is_quiet(self, seconds: float | None) -> bool:
        if seconds is None or self.in_flight:
            return False
        return time.monotonic() - self._quiet >= seconds

    def _until(self, seconds: float | None) -> float | None:
        if seconds is None:
            return None
        return max(_POLL, self._quiet + seconds - time.monotonic())

    def close(self, drain: float | None) -> None:
        """Let nobody in any more; stop when all are out, or when time is over."""
        with self._bell:
            self._closed = True
            self._bell.notify_all()
            self._bell.wait_for(lambda: not self.in_flight or self._stopped, drain)
            self._stopped = True
            self._bell.notify_all()


def closed() -> Closed:
    """What those are told who come too late."""
    return Closed("requests are no longer taken: the scheduler was closed")
