"""Rate limits while answers are computed: for large bodies, and for requests other than answers.

Python computes one thing at a time, so every request takes time from running answers. Meanwhile
other requests (statistics, lists, pages) and refusals are admitted at a limited rate, with clients
in turn. A client that floods the server delays only itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from keepsight.server.errors import ApiError

_SHORT = 0.005  # shorter waits are skipped, in seconds
_PER_SECOND = 40.0  # requests per second; each takes some milliseconds of the GIL
_AT_ONCE = 20  # burst after a pause
_HELD = 1024  # most waiting requests


class RateLimit:
    """A rate limit that all clients share."""

    def __init__(self, per_second: float) -> None:
        self._per_second, self._next = per_second, 0.0

    async def wait(self, count: int) -> None:
        """Wait until `count` more are allowed."""
        now = time.monotonic()
        self._next = max(self._next, now) + count / self._per_second
        if self._next - now > _SHORT:
            await asyncio.sleep(self._next - now)


class FairRateLimit:
    """A rate limit that serves clients in turn, applied while `busy` returns True."""

    def __init__(
        self,
        busy: Callable[[], bool],
        per_second: float = _PER_SECOND,
        at_once: int = _AT_ONCE,
        held: int = _HELD,
    ) -> None:
        self._busy, self._per_second, self._at_once, self._most = busy, per_second, at_once, held
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # clients in order of service
        self._count = 0
        self._level, self._at = float(at_once), time.monotonic()
        self._releasing: asyncio.Task[None] | None = None

    async def wait(self, client: str) -> None:
        """Wait for this client's turn. If too many wait, a request of the client with the most is
        refused."""
        if not self._count and (not self._busy() or self._missing() <= 0):
            self._level -= 1.0
            return
        if self._count >= self._most:
            self._refuse_one()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._count += 1
        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.create_task(self._release())
        await turn

    def _missing(self) -> float:
        """Seconds until the next may pass."""
        now = time.monotonic()
        self._level += (now - self._at) * self._per_second
        self._level, self._at = min(max(self._level, 0.0), float(self._at_once)), now
        return round((1.0 - self._level) / self._per_second, 6)  # long enough that one passes

    async def _release(self) -> None:
        while self._count:
            while self._busy() and (missing := self._missing()) > 0:
                await asyncio.sleep(missing)
            self._let_in()
            await asyncio.sleep(0)

    def _let_in(self) -> None:
        client = next(iter(self._waiting))
        waiting = self._waiting.pop(client)
        turn = waiting.popleft()
        self._count -= 1
        if waiting:
            self._waiting[client] = waiting  # behind all others
        if not turn.done():  # its request may have been cancelled
            self._level -= 1.0
            turn.set_result(None)

    def _refuse_one(self) -> None:
        client = max(self._waiting, key=lambda name: len(self._waiting[name]))
        turn = self._waiting[client].popleft()
        self._count -= 1
        if not self._waiting[client]:
            del self._waiting[client]
        if not turn.done():
            text = "too many requests at a time; wait for answers before asking again"
            turn.set_exception(ApiError(429, text, code="busy", retry_after=1))
