"""The application: routes, errors in one form, the schema, and the page at `/`.

`build` makes it for a model; `running.py` listens. Routes validate bodies with the schema at
`/openapi.json`.
"""

from __future__ import annotations

import functools
from threading import Lock

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from keepsight import __version__
from keepsight.errors import KeepsightError
from keepsight.kinds import Record
from keepsight.models.loading import DEMOS
from keepsight.server import cache, chat, completions, decisions, files, responses, schema, site
from keepsight.server.access import ANSWERS, BODIES, RequestMiddleware, visit_of
from keepsight.server.errors import ApiError, from_validation, unknown
from keepsight.server.metrics import CONTENT_TYPE
from keepsight.server.service import Service

_TEXT, _OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
_PARTS = {"message": _TEXT, "type": _TEXT, "param": _OR_NULL, "code": _OR_NULL}
_INNER = {"type": "object", "required": [*_PARTS], "properties": _PARTS}
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": _INNER}}
_REFUSED: dict[int | str, Record] = {
    "default": {
        "description": "A refusal; with 429 and 503, Retry-After says when to come again.",
        "content": {"application/json": {"schema": _ERROR}},
    }
}
_CLOSING: dict[int | str, Record] = {
    503: {"description": "The server is shutting down.", "content": {"application/json": {}}}
}
# What routes without messages call the text that they are asked.
_ASKED: dict[str, str | None] = {
    "/v1/completions": "prompt",
    "/v1/systemone": "state",
    "/v1/decisions": "input",
    "/v1/score": None,  # one of several fields
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), "documents"),
}
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 400: "invalid_body"}


def build(service: Service) -> ASGIApp:
    app = FastAPI(
        title="Keepsight",
        version=__version__,
        description="An OpenAI-compatible server over a vision-language model that remembers.",
        redoc_url=None,
        openapi_url=None,
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        dependencies=[Depends(_only_known)],
    )
    routers = [
        room.routes(service) for room in (chat, responses, completions, decisions, files, cache)
    ]
    for router in routers:
        app.include_router(router, responses=_REFUSED)
    app.include_router(site.routes(demo=service.model.name in DEMOS))
    _plain_routes(app, service)
    for kind in (ApiError, KeepsightError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _refused)
    known = [*app.routes, *(route for router in routers for route in router.routes)]
    paths = {"/", *site.FILES, "/docs", *(one.path for one in known if isinstance(one, APIRoute))}
    app.state.paths = paths
    outer: ASGIApp = RequestMiddleware(app, service, paths)
    if service.config.allow_origin:
        outer = CORSMiddleware(
            outer,
            allow_origins=service.config.allow_origin,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # clients send many of their own, and cookies mean nothing
            expose_headers=["x-request-id", "retry-after", schema.HEADER],
        )
    return outer


def _schema(app: FastAPI, model: str) -> Record:
    made = app.openapi()
    parts = made.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        parts.pop(name, None)
    bodies = models_json_schema(
        [(kind, "validation") for kind in BODIES], ref_template="#/components/schemas/{model}"
    )[1]
    parts |= bodies["$defs"]
    for part in parts.values():
        if "model" in part.get("properties", {}):
            wanted = "model" in part.get("required", ())
            part["properties"]["model"] = {"enum": [model] if wanted else [model, None]}
    for kind in schema.TABLE.values():
        fields = parts[kind.__name__]["properties"]
        for word, why in (("Refused", kind.REFUSED), ("Accepted, not used", kind.IGNORED)):
            fields |= {name: {"description": f"{word}: {reason}."} for name, reason in why.items()}
    for path in made["paths"].values():
        for operation in path.values():
            operation.get("responses", {}).pop("422", None)  # invalid requests get a 400
    return made


def _plain_routes(app: FastAPI, service: Service) -> None:
    made, one_at_a_time = functools.cache(lambda: _schema(app, service.model.name)), Lock()

    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:  # in a thread: the first call takes longer than a token
        with one_at_a_time:  # two that make it would change what the other reads
            described = made()
        return JSONResponse(described)

    @app.get("/health", tags=["server"], operation_id="health", responses=_CLOSING)
    async def health() -> Response:
        """Whether the server accepts requests."""
        status = "closing" if service.draining else "ok"
        return JSONResponse({"status": status}, 503 if service.draining else 200)

    @app.get(
        "/metrics",
        tags=["server"],
        operation_id="metrics",
        response_class=PlainTextResponse,
        responses=_REFUSED,
    )
    async def metrics(request: Request) -> Response:
        """Counters and times for Prometheus; with API keys, for an administrator only."""
        if not visit_of(request).who().admin:
            text = "metrics cover all keys: they need an administrator's key"
            raise ApiError(403, text, code="admin_key_required")
        return Response(await service.threads.wait(service.metrics.text), media_type=CONTENT_TYPE)

    @app.get("/v1/models", tags=["server"], operation_id="models", responses=_REFUSED)
    async def models() -> Record:
        """The list of models: the one that is served."""
        return {"object": "list", "data": [service.model.as_json()]}

    @app.get("/v1/models/{name:path}", tags=["server"], operation_id="model", responses=_REFUSED)
    async def model(name: str) -> Record:
        """The model by its name."""
        service.model.check_name(name)
        return service.model.as_json()


async def _refused(request: Request, error: Exception) -> Response:
    """The response for any error, in OpenAI's form."""
    path, visit, headers = request.url.path, visit_of(request), {}
    if isinstance(error, RequestValidationError):  # of an address; bodies are checked apart
        error = from_validation([{**one, "loc": one["loc"][1:]} for one in error.errors()])
    elif isinstance(error, HTTPException):
        status, headers = error.status_code, dict(error.headers or {})
        text = {
            404: f"there is nothing at {path[:200]!r}; {_hint(path, request.app.state.paths)}",
            405: f"{request.method} is not allowed at {path[:200]!r}; see /docs",
        }.get(status, str(error.detail))
        error = ApiError(status, text, code=_HTTP_CODES.get(status))
    problem = visit.problem(error)
    if problem.param == "messages":
        problem.param = _ASKED.get(path, "messages")
    if path == "/v1/responses":
        problem = responses.in_its_words(problem)
    return JSONResponse(problem.body(), problem.status, headers={**headers, **problem.headers()})


def _hint(path: str, known: set[str]) -> str:
    """`/v1` is often missing in the address that a client was given, or there twice."""
    near = [one for one in known if one != "/" and (one.endswith(path) or path.endswith(one))]
    return f"did you mean {min(near, key=len)}?" if near else "see /docs"


async def _only_known(request: Request) -> None:  # a thread costs more than this
    """Refuse unknown query parameters; only report them on routes for answers, and those that ask
    for more to be included."""
    path = request.url.path
    known = {field.alias for field in request.scope["route"].dependant.query_params}
    for name in request.query_params if path.startswith("/v1/") else ():
        if name not in known and path not in ANSWERS and name not in ("include", "include[]"):
            raise unknown(name, known)
        if name not in known:
            visit_of(request).unused.add(f"?{name}", "unknown; see /docs")
