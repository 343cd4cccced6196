"""Counters of the scheduler. They use numbers and the clock, and know nothing about requests.

The scheduler's thread writes and any thread reads; each number is consistent by itself.
"""

from __future__ import annotations

import time
from collections import deque

from keepsight.kinds import Record

_WINDOW = 10.0  # seconds over which the token rate is measured


class Counts:
    """Counts since the start, and rates of the last seconds."""

    def __init__(self) -> None:
        self.finished = self.cancelled = self.failed = self.refused = 0
        self.chunks = self.joint = self.towers = self.steps = self.tokens = 0
        self.ahead_tokens = 0  # tokens prefilled without a request
        self._recent: deque[tuple[float, int]] = deque()
        self._seconds = 1.0  # seconds per request, averaged with more weight on the latest

    @property
    def passes(self) -> int:
        """Passes of the tower and of prefill."""
        return self.chunks + self.joint + self.towers

    def took(self, tokens: int) -> None:
        """Count tokens that were handed out in one step."""
        now = time.monotonic()
        self.tokens += tokens
        self._recent.append((now, tokens))
        while self._recent and self._recent[0][0] < now - _WINDOW:
            self._recent.popleft()

    def ended(self, outcome: str, seconds: float) -> None:
        """Count how a request ended, and its time since it was ready."""
        setattr(self, outcome, getattr(self, outcome) + 1)
        if outcome == "finished":
            self._seconds += 0.2 * (seconds - self._seconds)

    def refuse(self, ahead: int, places: int) -> float:
        """Count a refusal; return when to try again."""
        self.refused += 1
        return self.wait(ahead, places)

    def wait(self, ahead: int, places: int) -> float:
        """Estimated seconds until one of this many requests ahead leaves its place."""
        return max(1.0, self._seconds * (1 + ahead // max(1, places)))

    def stats(self) -> Record:
        """As plain data."""
        recent = list(self._recent)
        now = time.monotonic()
        fresh = [(when, tokens) for when, tokens in recent if when >= now - _WINDOW]
        span = max(1e-3, now - fresh[0][0]) if fresh else 1.0
        names = ["finished", "cancelled", "failed", "refused", "chunks"]
        names += ["joint", "towers", "steps", "ahead_tokens"]
        stats: Record = {name: getattr(self, name) for name in names}
        stats["tokens"] = self.tokens
        stats["tokens_per_second"] = round(sum(tokens for _, tokens in fresh) / span, 2)
        return stats
