"""Receives request bodies within limits, and handles refused ones.

A refusal is sent at once. Most clients read nothing before they have sent everything, so the rest
of the body is read for a while afterwards.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope

from keepsight.server.errors import ApiError
from keepsight.server.limits.pace import RateLimit

if TYPE_CHECKING:
    from keepsight.server.service import Service

_DISCARDED = 4  # times the largest body: what is read of a refused one, so that its client listens
_QUIET = 1.0  # seconds without a byte after which a refused body is given up
_AT_ONCE = 1 << 20  # bytes of a body that arrive at full speed
_BYTES_A_SECOND = 64 << 20  # of all larger bodies while others are served: receiving costs time
_BODIES_HELD = 8  # times the largest body, of all requests together


class BodyIntake:
    """All bodies that are held or still arriving."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._held = 0
        self._incomplete: set[asyncio.Timeout] = set()  # deadlines of bodies that still arrive
        self._pace = RateLimit(_BYTES_A_SECOND)

    async def whole(self, receive: Receive, announced: int | None) -> bytes:
        """A body within its limits of size and time. `announced`: its length as claimed by the
        client. The caller must call `done` for it."""
        most = self._service.config.bytes("max_body")
        parts: list[bytes] = []
        size, more = 0, True
        limit = asyncio.timeout(self._service.config.seconds("body_timeout"))
        try:
            if announced is not None and announced > most:
                raise _too_large(most)
            async with limit:
                self._incomplete.add(limit)
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "the client hung up", code="hung_up")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._held += len(parts[-1])
                    more = message.get("more_body", False)
                    if size > _AT_ONCE and self._service.active > 1:
                        await self._pace.wait(len(parts[-1]))
                    if size > most:
                        raise _too_large(most)
                    if self._held > _BODIES_HELD * most:
                        raise ApiError(503, "too many large requests", code="busy", retry_after=2)
        except BaseException as error:
            self._held -= size
            parts.clear()
            if isinstance(error, TimeoutError) and self._service.draining:
                raise closing() from None
            if isinstance(error, TimeoutError):
                text = "the body took too long to arrive"
                raise ApiError(408, text, code="body_timeout") from None
            raise
        finally:
            self._incomplete.discard(limit)
        return b"".join(parts)

    def refuse_incomplete(self) -> None:
        """The server closes: refuse bodies that have not arrived by now."""
        now = asyncio.get_running_loop().time()
        for limit in self._incomplete:
            if not limit.expired():
                limit.reschedule(now)

    def done(self, body: bytes) -> None:
        """Release a body."""
        self._held -= len(body)

    async def discard(self, receive: Receive) -> None:
        """Read a refused body to its end for a while, so that its client listens. A client that
        sends nothing more already listens."""
        left = _DISCARDED * self._service.config.bytes("max_body")
        try:
            async with asyncio.timeout(self._service.config.seconds("body_timeout")):
                while left > 0:
                    async with asyncio.timeout(_QUIET):
                        message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            return
        except asyncio.CancelledError:
            if not self._service.draining:  # otherwise the server ends and has said everything
                raise


def closing() -> ApiError:
    """The refusal for requests while the server closes."""
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)


def announced_by(scope: Scope) -> int | None:
    """The claimed length of a body; None if it comes in chunks."""
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return None
    text = headers.get(b"content-length", b"0")
    return int(text) if text.isdigit() else 0  # validated by the protocol


def is_long(announced: int | None) -> bool:
    """Whether reading the rest of a body costs more than closing the connection."""
    return announced is None or announced > _AT_ONCE


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {most} bytes; upload pictures to /v1/files, or make them smaller",
        code="body_too_large",
    )
