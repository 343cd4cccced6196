"""What is decided before a route sees a request: who asks, their limits, and the body's.

Afterwards one line goes to the log, never with words or pictures of anybody.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import hmac
import ipaddress
import logging
import re
import time
import traceback
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
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
from keepsight.system import digests
from keepsight.system.accounts import under_salt

if TYPE_CHECKING:
    from keepsight.server.service import Service

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
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
_DISCARDED = 4  # times the largest body: what is read of a refused one
_QUIET = 1.0  # seconds without a byte after which a refused body is given up
_BODIES_HELD = 8  # times the largest body, of all requests together
_LONG = 1 << 20  # bytes of a body that arrive at full speed
_BYTES_A_SECOND = 64 << 20  # of all longer bodies while others are served: receiving costs time
_SMALL_BODY = 1 << 14  # bytes that are parsed at once, faster than in a thread
MOST_VALUES = 500_000  # commas and brackets in a body; no model reads a text with so many
_OWN = (".localhost", ".local", ".internal", ".home.arpa")  # not on the public web


# -- who asks --------------------------------------------------------------------------------------


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _account_of(scope: Scope) -> str:
    """The account of a client known only by its address, told by a trusted proxy or the
    connection."""
    return f"from {(scope.get('client') or ('',))[0]}"


@dataclass
class Bucket:
    """A token bucket: a number per minute, used at once or spread."""

    per_minute: float
    clock: Callable[[], float] = time.monotonic
    at_once: float | None = None  # most at once, if not all of a minute

    def __post_init__(self) -> None:
        self._most = self.per_minute if self.at_once is None else self.at_once
        self._level, self._at = self._most, self.clock()

    def wait(self, needed: float) -> float:
        """Seconds until the bucket holds this many; 0 if it does."""
        now = self.clock()
        self._level = min(self._most, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return max(0.0, (needed - self._level) * 60 / self.per_minute)

    def take(self, count: float) -> None:
        self.wait(0)
        self._level -= count


class Caller:
    """One key with its limits; or one address, if there are no keys."""

    def __init__(
        self,
        key: ApiKey | None,
        clock: Callable[[], float] = time.monotonic,
        tenant: str = "",
        account: str = "",
    ) -> None:
        self.key = key
        self.tenant = key.whose if key is not None else tenant
        self.account = key.whose if key is not None else account
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


class Callers:
    """All callers; those without keys share the tenant that the model was loaded for."""

    def __init__(self, keys: tuple[ApiKey, ...], tenant: str = "") -> None:
        self._tenant = tenant
        self._known = [(key.key.encode(), Caller(key)) for key in keys]

    def find(self, authorization: str, account: str = "") -> Caller:
        """The caller that a header names; without keys every caller is accepted."""
        if not self._known:
            return Caller(None, tenant=self._tenant, account=account)
        scheme, _, shown = authorization.partition(" ")
        secret = shown.strip().encode(errors="replace")
        # All are compared, so that timing reveals nothing.
        found = [one for key, one in self._known if hmac.compare_digest(key, secret)]
        if not found or scheme.lower() != "bearer":
            what = "this API key is not known" if authorization else "no API key"
            text = f"{what}; send it as: Authorization: Bearer KEY"
            raise ApiError(401, text, code="invalid_api_key")
        return found[0]


# -- bodies ----------------------------------------------------------------------------------------


class BodyIntake:
    """All bodies that are held or still arriving."""

    def __init__(self, service: Service) -> None:
        self._service, self._most = service, service.config.max_body
        self._held, self._next = 0, 0.0
        self._incomplete: set[asyncio.Timeout] = set()  # deadlines of bodies that still arrive

    @contextlib.asynccontextmanager
    async def whole(self, receive: Receive, announced: int) -> AsyncIterator[bytes]:
        """A body within its limits of size and time. `announced`: its length, if the client has
        told it."""
        parts: list[bytes] = []
        size, more = 0, announced <= self._most
        limit = asyncio.timeout(self._service.config.body_timeout)
        try:
            try:
                async with limit:
                    self._incomplete.add(limit)
                    while more:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            raise hung_up()
                        parts.append(message.get("body", b""))
                        size += len(parts[-1])
                        self._held += len(parts[-1])
                        more = message.get("more_body", False) and size <= self._most
                        if size > _LONG and self._service.active > 1:
                            await self._pace(len(parts[-1]))
                        if self._held > _BODIES_HELD * self._most:
                            what = "too many large requests"
                            raise ApiError(503, what, code="busy", retry_after=2)
            except TimeoutError:
                late = ApiError(408, "the body took too long to arrive", code="body_timeout")
                raise (closing() if self._service.draining else late) from None
            finally:
                self._incomplete.discard(limit)
            if max(size, announced) > self._most:
                text = f"the body is larger than {self._most} bytes; upload pictures to /v1/files"
                raise ApiError(413, text, code="body_too_large")
            yield b"".join(parts)
        finally:
            self._held -= size

    async def _pace(self, count: int) -> None:
        now = time.monotonic()
        self._next = max(self._next, now) + count / _BYTES_A_SECOND
        if self._next - now > 0.005:
            await asyncio.sleep(self._next - now)

    def refuse_incomplete(self) -> None:
        """The server closes: refuse bodies that have not arrived by now."""
        for limit in self._incomplete:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def discard(self, receive: Receive) -> None:
        """Read a refused body for a while: a client that is still sending does not listen."""
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


# -- one request -----------------------------------------------------------------------------------


@dataclass
class Visit:
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
    logged: Exception | None = None  # the error that the log has

    def who(self) -> Caller:
        if self.caller is None:
            raise ApiError(401, "no API key", code="invalid_api_key")
        return self.caller

    async def beside(self, work: Callable[[], T]) -> T:
        """Work that grows with the body: in a thread unless it is small."""
        if self.size <= _SMALL_BODY:
            return work()
        return await self.service.threads.run(work, large=self.size > LARGE_BODY)

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
        unused, key = self.unused.names(), self.caller.key if self.caller is not None else None
        return {
            "time": round(time.time(), 3),
            "id": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "ms": round(1e3 * (time.perf_counter() - self.begun), 1),
            "key": None if key is None else key.name,
            **self.fields,
            **({"unused": unused} if unused else {}),
        }

    def problem(self, error: Exception) -> ApiError:
        """The error for the client; unexpected ones go to the log with their traceback."""
        problem = from_error(error)
        if problem is None:
            if error is not self.logged:  # it comes by again on its way out
                errors.error("%s: %s", self.id, "".join(traceback.format_exception(error)))
            self.logged = error
            problem = ApiError(500, f"internal error; quote {self.id}", code="internal_error")
        self.fields["error"] = problem.code
        return problem


def visit_of(request: Request) -> Visit:
    visit: Visit = request.state.visit
    return visit


class RequestMiddleware:
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
        visit = Visit(f"req_{uuid.uuid4().hex}", scope["method"], self._shown(scope), service)
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

    def _shown(self, scope: Scope) -> str:
        """The path for logs and metrics: without ids, and one label for all unknown paths."""
        path: str = scope["path"]
        if path in self._paths:
            return path
        parts = path.split("/")
        if path.startswith("/v1/") and len(parts) > 3:
            parts[3] = "{id}"
        shown = "/".join(parts)
        return shown if shown in self._paths else "other"

    async def _through(self, scope: Scope, receive: Receive, send: Send, visit: Visit) -> None:
        complete, read, headers = False, False, dict(scope["headers"])

        async def send_on(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                added = [(b"x-request-id", visit.id.encode())]
                if unused := visit.unused.names():
                    added.append((HEADER.encode(), ", ".join(unused).encode()))
                message["headers"] = [*message.get("headers", ()), *added]
            complete = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        async def receive_on() -> Message:
            nonlocal read
            message = await receive()
            read |= not message.get("more_body", False)
            visit.gone |= message["type"] == "http.disconnect" and not complete
            return message

        chunked = b"transfer-encoding" in headers
        told = 0 if chunked else int(headers.get(b"content-length", b"0"))
        try:
            with self._admitted(scope, headers, visit):
                await self._turn(visit.who().account if visit.caller else _account_of(scope))
                async with self._service.bodies.whole(receive_on, told) as body:
                    await self._served(scope, visit, body, receive_on, send_on)
        except Exception as error:
            if isinstance(error, TimeoutError):
                text = "the answer took too long, or was not read"
                error = ApiError(504, text, code="timeout")
            problem = visit.problem(error)
            if not visit.status and not visit.gone:
                if visit.caller is None:
                    with contextlib.suppress(ApiError):  # it is a refusal already
                        await self._turn(_account_of(scope))
                more = {"www-authenticate": "Bearer"} if problem.status == 401 else {}
                if problem.status == 408 or (not read and (chunked or told > _LONG)):
                    more["connection"] = "close"  # else the rest is taken in until it is idle
                answer = JSONResponse(problem.body(), problem.status, {**more, **problem.headers()})
                start: Message = {"type": "http.response.start", "status": problem.status}
                await send_on({**start, "headers": answer.raw_headers})
                rest: Message = {"type": "http.response.body"}
                await send_on({**rest, "body": answer.body, "more_body": True})
                if not read and problem.status != 408:  # its wait is over
                    await self._service.bodies.discard(receive_on)
                await send_on(rest)

    async def _turn(self, name: str) -> None:
        """While others are answered, one client's requests wait for each other."""
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
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return waiting.pop() if waiting else await receive()

        self._service.admitted += 1
        try:
            scope.setdefault("state", {})["visit"] = visit
            # Answers have their own limit; this one is for clients that do not read.
            async with asyncio.timeout(self._service.config.request_timeout + _READING):
                # HEAD is served as GET: the connection leaves out the body.
                method = "GET" if scope["method"] == "HEAD" else scope["method"]
                await self._app({**scope, "method": method}, replayed, send)
        finally:
            self._service.admitted -= 1

    @contextlib.contextmanager
    def _admitted(self, scope: Scope, headers: dict[bytes, bytes], visit: Visit) -> Iterator[None]:
        """Refuse who may not come in; count an answer of a key while it lasts."""
        path, method = scope["path"], scope["method"]
        if self._service.draining and path not in _WHILE_CLOSING:
            raise closing()
        self._refuse_strangers(method, headers)
        if path in _OPEN or path.startswith("/page/") or method == "OPTIONS":
            yield
            return
        shown = headers.get(b"authorization", b"").decode("latin-1")
        visit.caller = caller = self._service.callers.find(shown, _account_of(scope))
        account.set(caller.account)
        answers = method == "POST" and path in ANSWERS
        if method == "POST" and path.startswith("/v1/"):
            caller.admit(answers)
        caller.answering += answers
        self._answering[caller.account] += answers
        try:
            yield
        finally:
            caller.answering -= answers
            self._answering[caller.account] -= answers
            self._answering += Counter()  # without those that are zero

    def _refuse_strangers(self, method: str, headers: dict[bytes, bytes]) -> None:
        """A page of another site may make a browser send requests, although it cannot read the
        answers. A site may also point its own name to this machine (DNS rebinding): then its page
        has the origin of this server and may read everything that a server without keys shows."""
        config = self._service.config
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if "*" in config.allow_origin:
            return
        here = _address(config.host)
        if not config.keys and (config.host == "localhost" if here is None else here.is_loopback):
            name = _host_of(host)
            own = "." not in name or name.endswith(_OWN) or _address(name) is not None
            if not own and name not in (
                _host_of(o.partition("//")[2]) for o in config.allow_origin
            ):
                text = f"this server is not called {name[:100]!r}; see --allow-origin"
                raise ApiError(403, text, code="host_not_allowed")
        allowed = method in ("GET", "HEAD", "OPTIONS") or origin in ("", *config.allow_origin)
        if not allowed and origin.partition("//")[2] != host:
            text = "requests from pages of other sites are not allowed; see --allow-origin"
            raise ApiError(403, text, code="origin_not_allowed")


def _host_of(text: str) -> str:
    text = text.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


# -- routes with bodies ------------------------------------------------------------------------

BODIES: dict[type[BaseModel], None] = {}  # all kinds, in the order of their routes


def posts(
    router: APIRouter, path: str, kind: type[B], name: str, **more: Any
) -> Callable[[Callable[[B, Visit], Awaitable[object]]], None]:
    """Add a route: its handler gets a checked body, and ends when the client hangs up. Body and
    answer are read and written in a thread unless they are small."""

    def add(handler: Callable[[B, Visit], Awaitable[object]]) -> None:
        async def endpoint(request: Request) -> Response:
            visit, data = visit_of(request), await request.body()

            async def answer() -> Response:
                body = await visit.beside(lambda: parsed(kind, data, request.headers, visit))
                visit.service.model.check_name(getattr(body, "model", None))
                made = await handler(body, visit)
                if isinstance(made, Response):
                    return made
                return await visit.beside(lambda: JSONResponse(made))

            return await _unless_gone(request, answer(), visit)

        endpoint.__doc__ = handler.__doc__
        BODIES[kind] = None
        content = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
        required = any(field.is_required() for field in kind.model_fields.values())
        described = {"required": required, "content": {"application/json": content}}
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
        raise from_validation(error.errors(include_url=False), kind.model_fields) from None
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


async def _unless_gone(request: Request, work: Awaitable[T], visit: Visit) -> T:
    """The result of some work, which is cancelled when the client hangs up."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
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
