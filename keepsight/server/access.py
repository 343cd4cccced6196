"""Middleware: everything that is decided before a route sees a request.

It checks the caller and its permissions, the size and duration of the body, and whether the server
is closing. Afterwards it writes one log line, never with words or pictures of anybody.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import hmac
import ipaddress
import json
import logging
import re
import time
import traceback
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepsight import digests as digests
from keepsight.kinds import Record
from keepsight.report import Report, Usage
from keepsight.server import log
from keepsight.server.config import ApiKey
from keepsight.server.errors import ApiError, from_error, from_validation
from keepsight.server.schema import HEADER, ChatRequest, ResponsesRequest, Unused
from keepsight.server.turns import LARGE_BODY, Threads, account
from keepsight.system.accounts import under_salt

if TYPE_CHECKING:
    from keepsight.server.service import Service


_OWN = (".localhost", ".local", ".internal", ".home.arpa")  # not on the public web


def host_of(text: str) -> str:
    """The name or address in a Host header, without port, in lower case."""
    text = text.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def is_own_name(name: str) -> bool:
    """Whether no public site can have this name: an address, a name without a dot, or a name
    reserved for local networks."""
    return "." not in name or name.endswith(_OWN) or _address(name) is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def network_of(host: str) -> str:
    """Network that one client may control: an IPv4 address itself, the /64 of an IPv6 address."""
    address = _address(host)
    if not isinstance(address, ipaddress.IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), 64), strict=False))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


@dataclass
class Bucket:
    """A token bucket: a number per minute, used at once or spread."""

    per_minute: float
    clock: Callable[[], float] = time.monotonic
    level: float = field(init=False)
    at: float = field(init=False)

    def __post_init__(self) -> None:
        self.level, self.at = self.per_minute, self.clock()

    def wait(self, needed: float) -> float:
        """Seconds until the bucket holds this many; 0 if it does."""
        now = self.clock()
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / 60)
        self.at = now
        return max(0.0, (needed - self.level) * 60 / self.per_minute)

    def take(self, count: float) -> None:
        """Take what was used; the level may fall below zero, and then later requests wait."""
        self.wait(0)
        self.level -= count


class Caller:
    """One tenant, with its token buckets; or one address, if there are no keys."""

    def __init__(
        self,
        key: ApiKey | None,
        clock: Callable[[], float] = time.monotonic,
        host: str = "",
        tenant: str = "",
    ) -> None:
        self.key = key
        self.tenant = key.whose if key is not None else tenant
        self.account = self.tenant if key is not None else account_from(host)
        self.name = key.name if key is not None else None
        self.admin = key is None or key.admin
        limits = (
            (key.requests_per_minute, key.tokens_per_minute) if key is not None else (None,) * 2
        )
        self._requests, self._tokens = (Bucket(n, clock) if n else None for n in limits)

    def admit(self) -> None:
        """Admit one request, or raise 429 with the seconds to wait."""
        for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            wait = bucket.wait(1) if bucket is not None else 0.0
            if wait > 0 and bucket is not None:
                raise ApiError(
                    429,
                    f"more than {bucket.per_minute:.0f} {what} a minute; try again in {wait:.0f} s",
                    code="rate_limit_exceeded",
                    retry_after=wait,
                )
        if self._requests is not None:
            self._requests.take(1)

    def spend(self, tokens: int) -> None:
        """Count the tokens that an answer used."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def salted(self, salt: str | None) -> str:
        """The tenant for this key and a salt. It is a digest, so no names can collide; its stored
        entries count against the key's own quota."""
        if salt is None:
            return self.tenant
        return under_salt(self.tenant, digests.digest("salted tenant", self.tenant, salt))


def account_from(host: str) -> str:
    """The account of a client known only by address."""
    return f"from {network_of(host)}"


class Callers:
    """All callers; those without keys share the tenant that the model was loaded for."""

    def __init__(self, keys: tuple[ApiKey, ...], tenant: str = "") -> None:
        self._tenant = tenant
        self._known = [(key.key.encode(), Caller(key)) for key in keys]

    def find(self, authorization: str | None, host: str = "") -> Caller:
        """The caller that a header names; without keys every caller is accepted."""
        if not self._known:
            return Caller(None, host=host, tenant=self._tenant)
        scheme, _, shown = (authorization or "").partition(" ")
        found = None
        for secret, caller in self._known:  # compare all, so that timing reveals nothing
            if hmac.compare_digest(secret, shown.strip().encode(errors="replace")):
                found = caller
        if found is None or scheme.lower() != "bearer":
            what = "no API key" if not authorization else "this API key is not known"
            raise ApiError(
                401, f"{what}; send it as: Authorization: Bearer KEY", code="invalid_api_key"
            )
        return found


_SHORT = 0.005  # shorter waits are skipped, in seconds
_PER_SECOND = 40.0  # requests per second; each takes some milliseconds of the GIL
_BURST = 20  # burst after a pause
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
        at_once: int = _BURST,
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
        most = self._service.config.max_body
        parts: list[bytes] = []
        size, more = 0, True
        limit = asyncio.timeout(self._service.config.body_timeout)
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
        left = _DISCARDED * self._service.config.max_body
        try:
            async with asyncio.timeout(self._service.config.body_timeout):
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


errors = logging.getLogger("keepsight.server")

_OPEN = {"/", "/health", "/docs", "/openapi.json"}  # paths that need no key
_WHILE_CLOSING = {"/health", "/metrics"}
_ANSWERS = {  # the model works for these
    *("/v1/chat/completions", "/v1/responses", "/v1/prepare"),
    *("/v1/systemone", "/v1/decisions", "/v1/score", "/v1/rerank", "/v1/completions"),
}
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
            seconds = self._service.config.request_timeout + _READING
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
        if path in _OPEN or path.startswith("/page/") or scope["method"] == "OPTIONS":
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


def visit_of(request: Request) -> Visit:
    """The middleware's notes on a request."""
    visit: Visit = request.state.visit
    return visit


# -- bodies ----------------------------------------------------------------------------------------

B = TypeVar("B", bound=BaseModel)
MOST_VALUES = 500_000  # commas and brackets in a body; no model reads a text with so many
_SMALL_BODY = 1 << 14  # bytes that are parsed at once, faster than in a thread


def body_of(kind: type[B]) -> Any:
    """The body of a route as its dependency: parsed and checked where nobody waits for it."""

    async def read(request: Request) -> B:
        data = await request.body()
        work = functools.partial(parsed, kind, data, request.headers)
        if len(data) <= _SMALL_BODY:
            return work()
        threads: Threads = request.state.threads
        return await threads.run(work, large=len(data) > LARGE_BODY)

    return Depends(read)


def parsed(kind: type[B], data: bytes, headers: Mapping[str, str]) -> B:
    """A body as its record; without one, all fields are left out."""
    sent_as = headers.get("content-type", "").partition(";")[0].strip().lower()
    if data and not re.fullmatch(r"application/(.*\+)?json", sent_as):
        raise from_validation([{"type": "", "loc": (), "msg": ""}])
    if sum(map(data.count, (b",", b"[", b"{"))) > MOST_VALUES:
        text = f"the body has more than {MOST_VALUES} commas and brackets"
        raise ApiError(400, text, code="body_too_complex")
    try:
        value = from_json(data.removeprefix(codecs.BOM_UTF8) or b"{}", allow_inf_nan=False)
    except ValueError as error:
        packed = headers.get("content-encoding", "identity")
        sent = "" if packed == "identity" else f"; its Content-Encoding is {packed[:50]!r}"
        text = f"the body is not valid JSON: {error}{sent}"
        raise ApiError(400, text, code="invalid_json") from None
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False), kind) from None


def body_schema(kind: type[BaseModel]) -> Record:
    """What a route with such a body adds to the schema."""
    content = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}
