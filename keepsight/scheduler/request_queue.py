"""The requests of one scheduler: waiting, in prefill, and decoding.

Requests of accounts with the fewest running begin first, and of these the shortest.
"""

from __future__ import annotations

from keepsight.core.engine import Run
from keepsight.scheduler.decoding import Decoding
from keepsight.scheduler.intake import Request
from keepsight.scheduler.policy import SequenceSizes, next_of
from keepsight.scheduler.shares import Shares


class RequestQueue:
    """Holds all requests and chooses the next one. At most `most` run at once, in `budget` bytes;
    if all of them belong to one account, one more of another account may run."""

    def __init__(self, sizes: SequenceSizes, decoding: Decoding, most: int, budget: int) -> None:
        self._sizes, self._decoding, self._most, self._budget = sizes, decoding, most, budget
        self.waiting, self.prefilling = list[Request](), list[Request]()
        self.running: dict[Run, Request] = {}
        self.shares = Shares()
        self._begun: set[Request] = set()

    def all(self) -> list[Request]:
        """Every request, wherever it is."""
        return [*self.waiting, *self.under_way()]

    def under_way(self) -> list[Request]:
        """Those that have begun."""
        return [*self.prefilling, *self.running.values()]

    def stats(self, inside: int) -> dict[str, int]:
        """The number in each state, of so many that were accepted."""
        prefilling, running = len(self.prefilling), len(self.running)
        waiting = inside - prefilling - running
        return {
            "in_flight": inside,
            "waiting": waiting,
            "prefilling": prefilling,
            "running": running,
        }

    def came(self, requests: list[Request]) -> None:
        """Add requests that arrived."""
        self.waiting += requests

    def next_to_begin(self) -> Request | None:
        """The waiting request to begin now; None while there is no room."""
        counts = self.shares.under_way
        least = min((counts[one.account] for one in self.waiting), default=0)
        able = [one for one in self.waiting if counts[one.account] == least]
        beside = least == 0 and len({one.account for one in self._begun}) == 1
        if not able or len(self._begun) >= self._most + beside:
            return None
        request = next_of(able)
        if not self._fits(request):
            return None
        self.waiting.remove(request)
        self.prefilling.append(request)
        self._begun.add(request)
        self.shares.enter(request.account)
        return request

    def held_back(self) -> set[Request]:
        """Those held back in this round for other accounts; never all of them."""
        under_way = self.under_way()
        held = {one for one in under_way if self.shares.is_held_back(one.account)}
        return held if len(held) < len(under_way) else set()

    def leave(self, request: Request) -> Run | None:
        """Remove a request; return its run if it was decoding."""
        if request in self._begun:
            self._begun.remove(request)
            self.shares.leave(request.account)
        for place in (self.waiting, self.prefilling):
            if request in place:
                place.remove(request)
        run = next((run for run, other in self.running.items() if other is request), None)
        if run is not None:
            del self.running[run]
        return run

    def _fits(self, new: Request) -> bool:
        """Whether its states fit beside the others'; a single request always fits."""
        if not self.prefilling and not self.running:
            return True
        planned = self._decoding.planned(lambda run: self.running[run].longest)
        coming = [*self.prefilling, new]
        # In a batch it may be padded to the length of a longer one.
        columns = max(one.longest for one in [*coming, *self.running.values()])
        padded = self._sizes.of(len(coming), columns)
        return planned + padded <= self._budget
