"""What is decided before a route sees a request: who asks, their limits, and the body's.

Afterwards one line goes to the log, never with words or pictures of anybody.
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
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepsight.kinds import Record
from keepsight.report import Report, Usage
from keepsight.server import log
from keepsight.server.config import ApiKey
from keepsight.server.errors import ApiError, from_error, from_validation
from keepsight.server.schema import HEADER, Body, Unused
from keepsight.server.turns import LARGE_BODY, account
from keepsight.system import digests as digests
from keepsight.system.accounts import under_salt

if TYPE_CHECKING:
    from keepsight.server.service import Service

T = TypeVar("T")

_OWN = (".localhost", ".local", ".internal", ".home.arpa")  # not on the public web


def host_of(text: str) -> str:
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
    at_once: float | None = None  # most at once, if not all of a minute
    level: float = field(init=False)
    at: float = field(init=False)

    def __post_init__(self) -> None:
        self._most = self.per_minute if self.at_once is None else self.at_once
        self.level, self.at = self._most, self.clock()

    def wait(self, needed: float) -> float:
        """Seconds until the bucket holds this many; 0 if it does."""
        now = self.clock()
        self.level = min(self._most, self.level + (now - self.at) * self.per_minute / 60)
        self.at = now
        return max(0.0, (needed - self.level) * 60 / self.per_minute)

    def take(self, count: float) -> None:
        self.wait(0)
        self.level -= count


class Caller:
    """One key with its limits; or one address, if there are no keys."""

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
        self.answering = 0  # requests that the model works for
        self._buckets = {
            what: Bucket(limit, clock)
            for what in ("requests", "tokens")
            if (limit := getattr(key, f"{what}_per_minute", None)) is not None
        }

    def admit(self, answers: bool = False) -> None:
        """Admit one request, or raise 429 with the seconds to wait."""
        for what, bucket in self._buckets.items():
            if (wait := bucket.wait(1)) > 0:
                raise _too_many(f"{bucket.per_minute:.0f} {what} a minute", wait)
        most = self.key.answers if self.key is not None and answers else None
        if most is not None and self.answering >= most:
            raise _too_many(f"{most} answers at the same time", 1)
        if "requests" in self._buckets:
            self._buckets["requests"].take(1)

    def spend(self, tokens: int) -> None:
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(tokens)

    def salted(self, salt: str | None) -> str:
        """The tenant for this key and a salt. It is a digest, so no names can collide; its stored
        entries count against the key's own quota."""
        if salt is None:
            return self.tenant
        return under_salt(self.tenant, digests.digest("salted tenant", self.tenant, salt))


def _too_many(what: str, wait: float) -> ApiError:
    text = f"more than {what}; try again in {wait:.0f} s"
    return ApiError(429, text, code="rate_limit_exceeded", retry_after=wait)


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
        secret = shown.strip().encode(errors="replace")
        # All are compared, so that timing reveals nothing.
        found = [one for key, one in self._known if hmac.compare_digest(key, secret)]
        if not found or scheme.lower() != "bearer":
            what = "this API key is not known" if authorization else "no API key"
            text = f"{what}; send it as: Authorization: Bearer KEY"
            raise ApiError(401, text, code="invalid_api_key")
        return found[0]


_DISCARDED = 4  # times the largest body: what is read of a refused one, so that its client listens
_QUIET = 1.0  # seconds without a byte after which a refused body is given up
_LONG = 1 << 20  # bytes of a body that arrive at full speed; a longer refused one is not read out
_BYTES_A_SECOND = 64 << 20  # of all longer bodies while others are served: receiving costs time
_BODIES_HELD = 8  # times the largest body, of all requests together


class BodyIntake:
    """All bodies that are held or still arriving."""

    def __init__(self, service: Service) -> None:
        self._service, self._most = service, service.config.max_body
        self._held, self._next = 0, 0.0
        self._incomplete: set[asyncio.Timeout] = set()  # deadlines of bodies that still arrive

    async def whole(self, receive: Receive, announced: int | None) -> bytes:
        """A body within its limits of size and time. `announced`: its length as claimed by the
        client. The caller must call `done` for it."""
        parts: list[bytes] = []
        size, more = 0, True
        limit = asyncio.timeout(self._service.config.body_timeout)
        try:
            if (announced or 0) > self._most:
                raise self._too_large()
            async with limit:
                self._incomplete.add(limit)
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise hung_up()
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._held += len(parts[-1])
                    more = message.get("more_body", False)
                    if size > _LONG and self._service.active > 1:
                        await self._pace(len(parts[-1]))
                    if size > self._most:
                        raise self._too_large()
                    if self._held > _BODIES_HELD * self._most:
                        raise ApiError(503, "too many large requests", code="busy", retry_after=2)
        except BaseException as error:
            self._held -= size
            if isinstance(error, TimeoutError):
                text = "the body took too long to arrive"
                late = ApiError(408, text, code="body_timeout")
                raise (closing() if self._service.draining else late) from None
            raise
        finally:
            self._incomplete.discard(limit)
        return b"".join(parts)

    async def _pace(self, count: int) -> None:
        now = time.monotonic()
        self._next = max(self._next, now) + count / _BYTES_A_SECOND
        if self._next - now > 0.005:
            await asyncio.sleep(self._next - now)

    def _too_large(self) -> ApiError:
        text = f"the body is larger than {self._most} bytes; upload pictures to /v1/files"
        return ApiError(413, text, code="body_too_large")

    def refuse_incomplete(self) -> None:
        """The server closes: refuse bodies that have not arrived by now."""
        now = asyncio.get_running_loop().time()
        for limit in self._incomplete:
            if not limit.expired():
                limit.reschedule(now)

    def done(self, body: bytes) -> None:
        self._held -= len(body)

    async def discard(self, receive: Receive) -> None:
        """Read a refused body to its end for a while, so that its client listens. A client that
        sends nothing more already listens."""
        left, more = _DISCARDED * self._most, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._service.config.body_timeout):
                while more and left > 0:
                    async with asyncio.timeout(_QUIET):
                        message = await receive()
                    left -= len(message.get("body", b""))
                    more = message.get("more_body", False)


def hung_up() -> ApiError:
    return ApiError(400, "the client hung up", code="hung_up")


def closing() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)


def announced_by(scope: Scope) -> int | None:
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return None
    text = headers.get(b"content-length", b"0")
    return int(text) if text.isdigit() else 0  # validated by the protocol


errors = logging.getLogger("keepsight.server")

_OPEN = {"/", "/health", "/docs", "/openapi.json"}  # paths that need no key
_WHILE_CLOSING = {"/health", "/metrics"}
ANSWERS = {  # the model works for these
    *("/v1/chat/completions", "/v1/responses", "/v1/prepare"),
    *("/v1/systemone", "/v1/decisions", "/v1/score", "/v1/rerank", "/v1/completions"),
}
_PER_SECOND, _AT_ONCE = 40, 20  # requests of one client while others are answered: each takes GIL
_LONGEST_TURN = 25.0  # seconds
_READING = 60.0  # seconds for clients that do not read, beside the time of an answer


@dataclass
class Visit:
    """One request, as the log will show it."""

    id: str
    method: str
    path: str
    service: Service
    caller: Caller | None = None
    begun: float = field(default_factory=time.perf_counter)
    status: int = 0
    fields: Record = field(default_factory=dict)
    gone: bool = False  # the client hung up
    size: int = 0  # bytes of the body
    unused: Unused = field(default_factory=Unused)  # fields without effect

    def who(self) -> Caller:
        if self.caller is None:
            raise ApiError(401, "no API key", code="invalid_api_key")
        return self.caller

    def answered(self, usage: Usage, report: Report, reason: str) -> None:
        self.service.metrics.answered(usage, report)
        written = self.fields.get("completion_tokens", 0) + usage.completion_tokens
        self.fields |= {
            "completion_tokens": written,
            "choices": self.fields.get("choices", 0) + 1,
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
        self._answering: Counter[str] = Counter()  # by account
        self._paces: dict[str, Bucket] = {}  # by account

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, metrics = self._service, self._service.metrics
        path = _shown_path(scope, self._paths)
        visit = Visit(f"req_{uuid.uuid4().hex}", scope["method"], path, service)
        metrics.active.inc()
        service.active += 1
        try:
            await self._through(scope, receive, send, visit)
        finally:
            service.active -= 1
            metrics.active.dec()
            if visit.gone:
                visit.fields["hung_up"] = True
                metrics.hung_up.inc()
            seconds = time.perf_counter() - visit.begun
            metrics.finished(visit.path, visit.status or 499, seconds)
            if service.config.log:
                log.note(visit.record())

    async def _through(self, scope: Scope, receive: Receive, send: Send, visit: Visit) -> None:
        complete = read = False

        async def send_on(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", visit.id.encode())]
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

        bodies = self._service.bodies
        try:
            with self._admitted(scope, visit):
                await self._turn(scope, visit)
                body = await bodies.whole(receive_on, announced_by(scope))
                await self._served(scope, visit, body, receive_on, send_on)
        except Exception as error:
            if isinstance(error, TimeoutError):
                text = "the answer took too long, or was not read"
                error = ApiError(504, text, code="timeout")
            problem = to_api_error(error, visit)
            if not visit.status and not visit.gone:
                if visit.caller is None:
                    with contextlib.suppress(ApiError):  # it is a refusal already
                        await self._turn(scope, visit)
                waits = not read and problem.status != 408  # its wait is over
                rest = functools.partial(bodies.discard, receive_on) if waits else None
                announced = announced_by(scope)
                long = announced is None or announced > _LONG
                await respond(send_on, problem, rest, long)

    async def _turn(self, scope: Scope, visit: Visit) -> None:
        """While others are answered, one client's requests wait for each other."""
        name = visit.caller.account if visit.caller is not None else account_from(_host(scope))
        others = self._answering.total() - self._answering[name]
        if others <= 0 or self._service.draining:
            return
        if len(self._paces) > 1000:
            self._paces = {one: pace for one, pace in self._paces.items() if pace.wait(_AT_ONCE)}
        pace = self._paces.setdefault(name, Bucket(60 * _PER_SECOND, at_once=_AT_ONCE))
        if (wait := pace.wait(1)) > _LONGEST_TURN:
            text = "too many requests at a time; wait for answers before asking again"
            raise ApiError(429, text, code="busy", retry_after=1)
        pace.take(1)
        await asyncio.sleep(wait)

    async def _served(
        self, scope: Scope, visit: Visit, body: bytes, receive: Receive, send: Send
    ) -> None:
        visit.size = len(body)
        self._service.admitted += 1
        try:
            scope.setdefault("state", {})["visit"] = visit
            # Answers have their own limit; this one is for clients that do not read.
            async with asyncio.timeout(self._service.config.request_timeout + _READING):
                # HEAD is served as GET: the connection leaves out the body.
                method = "GET" if scope["method"] == "HEAD" else scope["method"]
                await self._app({**scope, "method": method}, _replayed(body, receive), send)
        finally:
            self._service.admitted -= 1
            self._service.bodies.done(body)

    @contextlib.contextmanager
    def _admitted(self, scope: Scope, visit: Visit) -> Iterator[None]:
        """Refuse who may not come in; count an answer of a key while it lasts."""
        path, posts = scope["path"], scope["method"] == "POST"
        if self._service.draining and path not in _WHILE_CLOSING:
            raise closing()
        headers = dict(scope["headers"])
        self._refuse_other_names(headers)
        self._refuse_other_sites(scope["method"], headers)
        if path in _OPEN or path.startswith("/page/") or scope["method"] == "OPTIONS":
            yield
            return
        shown = headers.get(b"authorization", b"").decode("latin-1")
        visit.caller = caller = self._service.callers.find(shown or None, _host(scope))
        account.set(caller.account)
        answers = posts and path in ANSWERS
        if posts and path.startswith("/v1/"):
            caller.admit(answers)
        caller.answering += answers
        self._answering[caller.account] += answers
        try:
            yield
        finally:
            caller.answering -= answers
            self._answering[caller.account] -= answers
            self._answering += Counter()  # without those that are zero

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
        answers. Without keys, reaching the server is all that is needed."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or method in ("GET", "HEAD", "OPTIONS"):
            return
        allowed = self._service.config.allow_origin
        own = origin.partition("//")[2] == headers.get(b"host", b"").decode("latin-1")
        if not (own or origin in allowed or "*" in allowed):
            text = "requests from pages of other sites are not allowed; see --allow-origin"
            raise ApiError(403, text, code="origin_not_allowed")


def _host(scope: Scope) -> str:
    """The client's address, from a trusted proxy or the connection."""
    return str((scope.get("client") or ("",))[0])


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


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body once, then the connection's own events."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_again


async def respond(
    send: Send, problem: ApiError, rest: Callable[[], Awaitable[None]] | None, long: bool
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
    visit: Visit = request.state.visit
    return visit


# -- routes with bodies ------------------------------------------------------------------------

B = TypeVar("B", bound=BaseModel)
MOST_VALUES = 500_000  # commas and brackets in a body; no model reads a text with so many
BODIES: dict[type[BaseModel], None] = {}  # all kinds, in the order of their routes
_SMALL_BODY = 1 << 14  # bytes that are parsed at once, faster than in a thread


def posts(
    router: APIRouter, path: str, kind: type[B], name: str, **more: Any
) -> Callable[[Callable[[B, Visit], Awaitable[object]]], None]:
    """Add a route: its handler gets a checked body, and ends when the client hangs up. Body and
    answer are read and written in a thread unless they are small."""

    def add(handler: Callable[[B, Visit], Awaitable[object]]) -> None:
        async def endpoint(request: Request) -> Response:
            visit, data = visit_of(request), await request.body()

            async def work() -> Response:
                body = await _beside(visit, lambda: parsed(kind, data, request.headers, visit))
                visit.service.model.check_name(getattr(body, "model", None))
                made = await handler(body, visit)
                if isinstance(made, Response):
                    return made
                return await _beside(visit, lambda: JSONResponse(made))

            return await unless_gone(request, work(), visit)

        endpoint.__doc__ = handler.__doc__
        BODIES[kind] = None
        content = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
        described = {"required": True, "content": {"application/json": content}}
        router.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            operation_id=name,
            openapi_extra={"requestBody": described},
            response_model=None,
            **more,
        )

    return add


async def _beside(visit: Visit, work: Callable[[], T]) -> T:
    """Work on a body where nobody waits for it."""
    if visit.size <= _SMALL_BODY:
        return work()
    return await visit.service.threads.run(work, large=visit.size > LARGE_BODY)


def parsed(kind: type[B], data: bytes, headers: Mapping[str, str], visit: Visit | None = None) -> B:
    """A body as its record; without one, all fields are left out. Unknown fields go to `visit`."""
    sent_as = headers.get("content-type", "").partition(";")[0].strip().lower()
    if data and not re.fullmatch(r"application/(.*\+)?json", sent_as):
        raise from_validation([{"type": "", "loc": (), "msg": ""}])
    if sum(map(data.count, (b",", b"[", b"{"))) > MOST_VALUES:
        text = f"the body has more than {MOST_VALUES} commas and brackets"
        raise ApiError(400, text, code="body_too_complex")
    try:
        value = from_json(data.removeprefix(codecs.BOM_UTF8) or b"{}", allow_inf_nan=False)
        body = kind.model_validate(value)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False), kind) from None
    except ValueError as error:
        packed = headers.get("content-encoding", "identity")
        sent = "" if packed == "identity" else f"; its Content-Encoding is {packed[:50]!r}"
        text = f"the body is not valid JSON: {error}{sent}"
        raise ApiError(400, text, code="invalid_json") from None
    if visit is not None and isinstance(body, Body):
        visit.unused.sift(body)
        user = getattr(body, "safety_identifier", None) or getattr(body, "user", None)
        noted = {"model": getattr(body, "model", None), "user": user}
        if hasattr(body, "stream"):
            noted["stream"] = bool(body.stream)
        visit.fields |= {name: value for name, value in noted.items() if value is not None}
    return body


async def unless_gone(request: Request, work: Awaitable[T], visit: Visit) -> T:
    """The result of some work, which is cancelled when the client hangs up."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            visit.gone = True
            raise hung_up()
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
