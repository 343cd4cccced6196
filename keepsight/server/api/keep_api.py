"""A conversation as a `.keep` file, which `keepsight chat` and `vlm.resume` continue.

What is not remembered yet is computed in turn with other requests before the file is sent, from
memory: a conversation is private, so it is written to no disk here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from keepsight.kinds import Record
from keepsight.server.api.schema import Rendering
from keepsight.server.api.streaming import unless_gone
from keepsight.server.errors import refused
from keepsight.server.limits.body import BodyRoute
from keepsight.server.limits.threads import is_large
from keepsight.server.service import Service, visit_of
from keepsight.session import Session, keep_file

_PIECE = 1 << 20  # bytes sent at once
_TEMPLATE = ("tools", "chat_template_kwargs")
_FILE: dict[int | str, Record] = {
    200: {"content": {"application/octet-stream": {}}, "description": "A `.keep` file."}
}


def routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["cache"], route_class=BodyRoute)

    @router.post(
        "/v1/cache/save",
        operation_id="cache_save",
        response_class=StreamingResponse,
        responses=_FILE,
    )
    async def save(body: Rendering, request: Request) -> StreamingResponse:
        """A conversation with features and states as a `.keep` file, computed if missing."""
        for name in _TEMPLATE:
            if getattr(body, name):
                raise refused(name, "a .keep file holds only messages and pictures")
        return await unless_gone(request, _saved(service, body, request), visit_of(request))

    return router


async def _saved(service: Service, body: Rendering, request: Request) -> StreamingResponse:
    visit = visit_of(request)
    visit.unused.sift(body)
    given, template, tenant = await service.rendering(body, visit)
    if template:
        raise refused("chat_template_kwargs", "a .keep file holds only messages and pictures")
    # Pictures are opened and prompts computed where no other client's tokens wait for them.
    named = await service.threads.run(
        lambda: service.scheduler.together.named(given, tenant), is_large(given)
    )
    await service.prepare(named, tenant or None, account=visit.who().account)
    session = Session(service.vlm.runtime, tenant=tenant)
    session.messages = [_of_session(message) for message in named]
    parts = await service.scheduler.change_cache(lambda: list(keep_file.spelled(session)))
    headers = {
        "content-disposition": 'attachment; filename="conversation.keep"',
        "content-length": str(sum(map(len, parts))),
    }
    return StreamingResponse(_pieces(parts), media_type="application/octet-stream", headers=headers)


async def _pieces(parts: Sequence[bytes | memoryview]) -> AsyncIterator[bytes]:
    for part in parts:
        for start in range(0, len(part), _PIECE):
            yield bytes(part[start : start + _PIECE])


def _of_session(message: Record) -> Record:
    """A message in a session's form: text as a part, and only pictures as media."""
    content = message["content"]
    if isinstance(content, str) and message["role"] != "system":
        content = [{"type": "text", "text": content}]
    for part in content if isinstance(content, list) else ():
        if part["type"] not in ("text", "image"):
            raise refused("messages", f"a .keep file holds pictures, and no {part['type']}")
    return {"role": message["role"], "content": content}
