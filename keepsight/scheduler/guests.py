"""Work that others do with the model beside the requests: what is pinned, removed or listed.

It is done in threads of its own, because it may wait for a disk, and takes the model's lock there.
So that nobody has more of the model this way, an account has one such piece of work at a time, and
none begins while the account is held back; what it took is charged to the account.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from keepsight.scheduler.admission import Admission
from keepsight.scheduler.shares import Shares
from keepsight.system.lock import Mutex

_LOOK = 0.5  # seconds after which a thread that waits looks whether anybody still serves


@dataclass(eq=False)
class Guest:
    """One piece of work that waits for its turn, or has it."""

    account: str
    turn: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0  # what it took


class Guests:
    """Who waits, in the order in which they came, and who has a turn. `turn` is for any thread, the
    rest for the one that serves."""

    def __init__(self, shares: Shares, admission: Admission) -> None:
        self._shares, self._admission = shares, admission
        self._lock = Mutex()
        self._came, self._left = list[Guest](), list[Guest]()
        self._waiting, self._inside = list[Guest](), set[Guest]()

    @contextmanager
    def turn(self, account: str) -> Iterator[None]:
        """Wait for a turn, and have it; where nobody serves any more, at once."""
        guest = Guest(account)
        with self._lock:
            self._came.append(guest)
        self._admission.ring()
        while not self._admission.stopped and not guest.turn.wait(_LOOK):
            pass
        begun = time.perf_counter()
        try:
            yield
        finally:
            guest.seconds = time.perf_counter() - begun
            with self._lock:
                self._left.append(guest)
            self._admission.ring()

    def look(self) -> None:
        """Charge for what is done, and let in whose turn it is."""
        with self._lock:
            came, left, self._came, self._left = self._came, self._left, [], []
        for guest in left:
            if guest in self._inside:
                self._inside.remove(guest)
                self._shares.spend([guest.account], guest.seconds)
        for guest in came:
            self._shares.enter(guest.account)
        self._waiting += came
        while (able := self._next()) is not None:
            self._let_in(able)

    def _next(self) -> Guest | None:
        """Who is let in now: each who is may have held back others by waiting."""
        busy = {guest.account for guest in self._inside}
        free = (guest for guest in self._waiting if guest.account not in busy)
        return next((one for one in free if not self._shares.is_held_back(one.account)), None)

    def _let_in(self, guest: Guest) -> None:
        """From here on nobody is held back for it: it may wait for a disk."""
        self._waiting.remove(guest)
        self._shares.leave(guest.account)
        self._inside.add(guest)
        guest.turn.set()
