"""Middleware: everything that is decided before a route sees a request.

It checks the caller and its permissions, the size and duration of the body, and whether the server
is closing. Afterwards it writes one log line, never with words or pictures of anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import re
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepsight.kinds import Record
from keepsight.report import Report, Usage
from keepsight.server import log
from keepsight.server.api.responses_schema import ResponsesRequest
from keepsight.server.api.schema import ChatRequest
from keepsight.server.api.unused import HEADER, Unused
from keepsight.server.errors import ApiError, from_error
from keepsight.server.limits.callers import Caller, account_from, host_of, is_loopback, is_own_name
from keepsight.server.limits.intake import announced_by, closing, is_long
from keepsight.server.limits.pace import FairRateLimit
from keepsight.server.limits.turns import account
from keepsight.server.site import FILES

if TYPE_CHECKING:
    from keepsight.server.service import Service

errors = logging.getLogger("keepsight.server")

_OPEN = {"/", *FILES, "/health", "/docs", "/openapi.json"}  # paths that need no key
_WHILE_CLOSING = {"/health", "/metrics"}
_ANSWERS = {"/v1/chat/completions", "/v1/responses", "/v1/prepare"}  # the model works for these
_READING = 60.0
_LAST_WORDS = 1.0  # seconds for clients that do not read, at shutdown
_EVENTS = b"text/event-stream"


@dataclass
class Visit:
    """One request, as the log will show it."""

    id: str
    method: str
    path: str
    caller: Caller | None = None
    begun: float = field(default_factory=time.perf_counter)
    status: int = 0
    fields: Record = field(default_factory=dict)
    gone: bool = False  # the client hung up
    size: int = 0  # bytes of the body
    unused: Unused = field(default_factory=Unused)  # fields without effect
    streams: bool = False  # events are being sent, and may end at any time
    answers: bool = False  # the request uses the model; others wait for a turn
    had_turn: bool = False

    def who(self) -> Caller:
        """The caller, whom the middleware has identified."""
        if self.caller is None:
            raise ApiError(401, "no API key", code="invalid_api_key")
        return self.caller

    def asked(self, body: ChatRequest | ResponsesRequest) -> None:
        """Note who asks for what, according to the client, but nothing of the content. Unknown
        fields are removed from the body here."""
        self.unused.sift(body)
        self.fields |= {"model": body.model, "stream": bool(body.stream)}
        user = body.safety_identifier or body.user
        if user is not None:
            self.fields["user"] = user

    def answered(self, usage: Usage, report: Report, reason: str) -> None:
        """Count an answer; with several choices the counts add up."""
        counts = {"completion_tokens": usage.completion_tokens, "choices": 1}
        for name, count in counts.items():
            self.fields[name] = self.fields.get(name, 0) + count
        self.fields |= {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "images": usage.images,
            "images_encoded": usage.images_encoded,
            "finish_reason": reason,
        }
        for name in ("queued", "first_token"):
            if name in report.milliseconds:
                self.fields[f"{name}_ms"] = round(report.milliseconds[name], 1)

    def record(self) -> Record:
        """The log record."""
        unused = self.unused.names()
        return {
            "time": round(time.time(), 3),
            "id": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "ms": round(1e3 * (time.perf_counter() - self.begun), 1),
            "key": self.caller.name if self.caller is not None else None,
            **self.fields,
            **({"unused": unused} if unused else {}),
        }


def to_api_error(error: Exception, visit: Visit) -> ApiError:
    """The error for the client; unexpected ones go to the log with their traceback."""
    problem = from_error(error)
    if problem is None:
        errors.error("%s: %s", visit.id, "".join(traceback.format_exception(error)))
        problem = ApiError(500, f"internal error; quote {visit.id}", code="internal_error")
    visit.fields["error"] = problem.code
    return problem


class RequestMiddleware:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, service: Service, paths: set[str]) -> None:
        self._app, self._service = app, service
        self._paths = {re.sub(r"\{[^}]*\}", "{id}", path) for path in paths}
        self._bodies = service.bodies
        self._answering = 0
        self._turns = FairRateLimit(lambda: self._answering > 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request from its first byte to its log line."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = Visit(f"req_{uuid.uuid4().hex}", scope["method"], _shown_path(scope, self._paths))
        visit.unused.refuse = self._service.config.unknown_fields == "refuse"
        metrics = self._service.metrics
        metrics.active.inc()
        visit.answers = visit.method == "POST" and scope["path"] in _ANSWERS
        self._service.active += 1
        self._answering += visit.answers
        try:
            await self._through(scope, receive, send, visit)
        finally:
            self._service.active -= 1
            self._answering -= visit.answers
            metrics.active.dec()
            seconds = time.perf_counter() - visit.begun
            if visit.gone:
                visit.fields["hung_up"] = True
                metrics.hung_up.inc()
            metrics.finished(visit.path, visit.status or 499, seconds)
            if self._service.config.log:
                log.note(visit.record())

    async def _through(self, scope: Scope, receive: Receive, send: Send, visit: Visit) -> None:
        started = complete = read = False

        async def send_on(message: Message) -> None:
            nonlocal started, complete
            if message["type"] == "http.response.start":
                if message["status"] >= 400 and not visit.had_turn:
                    with contextlib.suppress(ApiError):  # already a refusal
                        await self._turn(scope, visit)
                started = True
                visit.status = message["status"]
                headers = list(message.get("headers", ()))
                visit.streams = any(value.startswith(_EVENTS) for _, value in headers)
                headers.append((b"x-request-id", visit.id.encode()))
                if unused := visit.unused.header():
                    headers.append((HEADER.encode(), unused.encode()))
                message["headers"] = headers
            complete = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        async def receive_on() -> Message:
            nonlocal read
            message = await receive()
            visit.gone |= message["type"] == "http.disconnect" and not complete
            read |= not message.get("more_body", False)
            return message

        try:
            self._admit(scope, visit)
            if not visit.answers:
                await self._turn(scope, visit)
            body = await self._bodies.whole(receive_on, announced_by(scope))
            await self._served(scope, visit, body, receive_on, send_on)
        except asyncio.CancelledError:
            # If even ending the engine did not end it, the server does, with a reason.
            if not self._service.draining or visit.gone or (started and not visit.streams):
                raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS):
                    await (last_event if started else respond)(
                        send_on, to_api_error(closing(), visit)
                    )
        except Exception as error:
            if isinstance(error, TimeoutError):
                text = "the answer took too long, or was not read"
                error = ApiError(504, text, code="timeout")
            problem = to_api_error(error, visit)
            if not started and not visit.gone:
                waits = not read and problem.status != 408  # its wait is over
                rest = functools.partial(self._bodies.discard, receive_on) if waits else None
                await respond(send_on, problem, rest, is_long(announced_by(scope)))

    async def _served(
        self, scope: Scope, visit: Visit, body: bytes, receive: Receive, send: Send
    ) -> None:
        """Pass an admitted and complete request to the application."""
        visit.size = len(body)
        self._service.admitted += 1
        try:
            more = {"visit": visit, "threads": self._service.threads}
            scope.setdefault("state", {}).update(more)
            # Answers have their own limit; this one is for clients that do not read.
            seconds = self._service.config.seconds("request_timeout") + _READING
            async with asyncio.timeout(seconds):
                await self._app(_as_get(scope), _replayed(body, receive), send)
        finally:
            self._service.admitted -= 1
            self._bodies.done(body)

    async def _turn(self, scope: Scope, visit: Visit) -> None:
        """Wait for the client's turn while answers of others are computed."""
        visit.had_turn = True
        self._answering -= visit.answers
        visit.answers = False
        if not (visit.gone or self._service.draining):
            name = visit.caller.name if visit.caller is not None else None
            await self._turns.wait(account_from(_host(scope)) if name is None else f"key {name}")

    def _admit(self, scope: Scope, visit: Visit) -> None:
        path = scope["path"]
        if self._service.draining and path not in _WHILE_CLOSING:
            raise closing()
        headers = dict(scope["headers"])
        self._refuse_other_names(headers)
        self._refuse_other_sites(scope["method"], headers)
        if path in _OPEN or scope["method"] == "OPTIONS":
            return
        shown = headers.get(b"authorization", b"").decode("latin-1")
        visit.caller = self._service.callers.find(shown or None, _host(scope))
        account.set(visit.caller.account)
        if path.startswith("/v1/") and scope["method"] == "POST":
            visit.caller.admit()

    def _refuse_other_names(self, headers: dict[bytes, bytes]) -> None:
        """A site may point its own name to this machine (DNS rebinding). Then its page has the
        origin of this server and may read everything that a server without keys shows."""
        config = self._service.config
        if config.keys or not is_loopback(config.host):
            return
        name = host_of(headers.get(b"host", b"").decode("latin-1"))
        known = {host_of(origin.partition("//")[2]) for origin in config.allow_origin}
        if not (is_own_name(name) or name in known or "*" in config.allow_origin):
            text = f"this server is not called {name[:100]!r}; see --allow-origin"
            raise ApiError(403, text, code="host_not_allowed")

    def _refuse_other_sites(self, method: str, headers: dict[bytes, bytes]) -> None:
        """A page of another site may make a browser send requests, although it cannot read the
        answers.

        Without keys, reaching the server is all that is needed.
        """
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or method in ("GET", "HEAD", "OPTIONS"):
            return
        allowed = self._service.config.allow_origin
        own = origin.partition("//")[2] == headers.get(b"host", b"").decode("latin-1")
        if not (own or origin in allowed or "*" in allowed):
            text = "requests from pages of other sites are not allowed; see --allow-origin"
            raise ApiError(403, text, code="origin_not_allowed")


def _shown_path(scope: Scope, known: set[str]) -> str:
    """The path for logs and metrics: without ids, and one label for all unknown paths."""
    path: str = scope["path"]
    if path in known:
        return path
    parts = path.split("/")
    if path.startswith("/v1/") and len(parts) > 3:
        parts[3] = "{id}"
    shown = "/".join(parts)
    return shown if shown in known else "other"


def _host(scope: Scope) -> str:
    """The client's address, from a trusted proxy or the connection."""
    host, _ = scope.get("client") or ("", 0)
    return str(host)


def _as_get(scope: Scope) -> Scope:
    """HEAD as GET: the connection leaves out the body."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body once, then the connection's own events."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


async def last_event(send: Send, problem: ApiError) -> None:
    """An error as the last event of a stream."""
    body = f"data: {json.dumps(problem.body())}\n\n".encode()
    await send({"type": "http.response.body", "body": body})


async def respond(
    send: Send,
    problem: ApiError,
    rest: Callable[[], Awaitable[None]] | None = None,
    long: bool = False,
) -> None:
    """Send an error as a response without waiting for the rest of the body. After a long body the
    connection is closed."""
    body = json.dumps(problem.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    if problem.status in (408, 413) or (rest is not None and long):
        headers["connection"] = "close"  # part of the body may be unread
    if problem.status == 401:
        headers["www-authenticate"] = "Bearer"
    headers |= problem.headers()
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": rest is not None})
    if rest is not None:
        await rest()
        await send({"type": "http.response.body", "body": b""})
