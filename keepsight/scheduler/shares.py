"""Fair shares among accounts: more requests at once do not get more of the model's time.

An account with one running request is never held back. An account with several waits while another
has had less model time since both had work: its requests together get no more than a single
request. Beside a single request it gets a third of that one's time, and waits until that one has
had as much as its own next piece of work takes, because pieces are never interrupted. Salts of one
tenant are one account.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from keepsight.scheduler.admission import Admission
from keepsight.system.lock import Mutex

# Weight of the time of an account with several requests. Pieces of work are never interrupted, and
# many requests also cost interpreter time. With equal shares, an account with few requests would
# wait for more than half of the time.
_SEVERAL = 3.0


class Shares:
    """Seconds of model time by account, for accounts with running requests."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self._piece: dict[str, float] = {}  # recent time per piece of an account
        self.under_way: Counter[str] = Counter()

    def enter(self, account: str) -> None:
        """One more request of an account runs. A newcomer starts with the time of those present:
        idle time is not made up for."""
        if account not in self._spent:
            self._spent[account] = min(self._spent.values(), default=0.0)
        self.under_way[account] += 1

    def leave(self, account: str) -> None:
        """A request of an account ended."""
        self.under_way[account] -= 1
        if not self.under_way[account]:
            del self.under_way[account], self._spent[account]
            self._piece.pop(account, None)

    def spend(self, accounts: Sequence[str], seconds: float) -> None:
        """Charge time that requests shared; one entry per request."""
        for account, count in Counter(accounts).items():
            if account in self._spent:
                weight = _SEVERAL if self.under_way[account] > 1 else 1.0
                had = weight * seconds * count / len(accounts)
                self._spent[account] += had
                self._piece[account] = max(had, 0.9 * self._piece.get(account, 0.0))

    def spend_beside(self, account: str, seconds: float) -> None:
        """Charge CPU time besides the model's, which slows everybody. An account with a single
        request is not charged."""
        if self.under_way[account] > 1:
            self._spent[account] += _SEVERAL * seconds

    def is_held_back(self, account: str) -> bool:
        """Whether an account with several requests has had at least as much time as another one."""
        if self.under_way[account] < 2:
            return False
        mine, piece = self._spent.get(account, 0.0), self._piece.get(account, 0.0)
        return any(
            spent <= mine + (piece if self.under_way[other] == 1 else 0.0)
            for other, spent in self._spent.items()
            if other != account
        )


_LOOK = 0.5  # seconds after which a waiting thread checks that the server still runs


@dataclass(eq=False)
class SideJob:
    """One piece of work that waits for its turn, or runs."""

    account: str
    turn: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0  # seconds it took


class SideJobs:
    """Work with the model besides requests: pin, remove or list. It runs in separate threads,
    because it may wait for a disk. An account has one such piece at a time. They start in order of
    arrival while their account is not held back, and are charged to it. `turn` is for any thread,
    the rest for the serving thread."""

    def __init__(self, shares: Shares, admission: Admission) -> None:
        self._shares, self._admission = shares, admission
        self._lock = Mutex()
        self._came, self._left = list[SideJob](), list[SideJob]()
        self._waiting, self._inside = list[SideJob](), set[SideJob]()

    @contextmanager
    def turn(self, account: str) -> Iterator[None]:
        """Wait for a turn, and take it; at once if the scheduler has stopped."""
        guest = SideJob(account)
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
        """Charge finished work, and start the next."""
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

    def _next(self) -> SideJob | None:
        """The next to start: a waiting one may have held back others."""
        busy = {guest.account for guest in self._inside}
        free = (guest for guest in self._waiting if guest.account not in busy)
        return next((one for one in free if not self._shares.is_held_back(one.account)), None)

    def _let_in(self, guest: SideJob) -> None:
        """Start it; from now on it holds back no request, because it may wait for a disk."""
        self._waiting.remove(guest)
        self._shares.leave(guest.account)
        self._inside.add(guest)
        guest.turn.set()
