"""`/v1/responses`: OpenAI's newer API over the same service.

One function writes the events of a stream; a response that is not streamed is the content of the
last event. Thoughts, texts and tool calls are output items, in their order.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from keepsight.kinds import Record
from keepsight.server.api.answers import AnswerEnd, AnswerRequest, AnswerStream, Delta
from keepsight.server.api.chat_api import scored_of
from keepsight.server.api.items import Item, OtherItem
from keepsight.server.api.output_parser import OutputPiece
from keepsight.server.api.response_store import BEFORE, StoredResponse
from keepsight.server.api.responses_schema import FunctionTool, ResponsesRequest, as_chat
from keepsight.server.api.streaming import (
    STREAMED,
    EventStream,
    cached_of,
    images_of,
    report_of,
    timings,
    unless_gone,
)
from keepsight.server.errors import ApiError
from keepsight.server.limits.body import BodyRoute
from keepsight.server.limits.middleware import Visit, to_api_error
from keepsight.server.service import Service, refuse_stream_options, visit_of

Event = Record
Salt = Annotated[str | None, Query(min_length=1, max_length=1024)]
_TYPES = {"text": "message", "thought": "reasoning"}


def routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["answers"], route_class=BodyRoute)

    @router.post("/v1/responses", operation_id="responses", responses=STREAMED)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """An answer to a list of items, whole or streamed."""
        visit = visit_of(request)
        visit.asked(body)
        refuse_stream_options(body)
        caller, keeps = visit.who(), body.store is not False
        if keeps and body.store and not service.responses.share:
            visit.unused.add("store", "this server keeps no responses; see --responses-budget")

        asked: list[Item] = []

        async def asking() -> AnswerRequest:
            whose = caller.salted(body.cache_salt)
            items = await service.scheduler.work(
                lambda: service.responses.conversation(caller.tenant, whose, body)
            )
            asked.extend(
                item for item, place in items if place != BEFORE and not isinstance(item, OtherItem)
            )
            chat = await service.scheduler.work(lambda: as_chat(body, items, visit.unused))
            return await service.ask(chat, visit)

        ask = await unless_gone(request, asking(), visit)
        [answer] = await unless_gone(request, service.submit(ask), visit)
        writer = ResponseWriter(service, body, asked, answer, visit)
        if body.stream:
            return EventStream(writer.lines(), visit, [answer])
        return JSONResponse(await unless_gone(request, writer.whole(), visit))

    _add_one(router, service)
    return router


def _add_one(router: APIRouter, service: Service) -> None:
    """Add the routes for one stored response."""

    async def stored(response_id: str, request: Request, salt: str | None) -> StoredResponse:
        caller = visit_of(request).who()
        whose = caller.salted(salt)
        return await service.scheduler.work(
            lambda: service.responses.get(caller.tenant, whose, response_id)
        )

    @router.get("/v1/responses/{response_id}", operation_id="response")
    async def one(response_id: str, request: Request, cache_salt: Salt = None) -> Response:
        """A stored response, as its client got it."""
        found = await stored(response_id, request, cache_salt)
        return Response(found.response, media_type="application/json")

    @router.get("/v1/responses/{response_id}/input_items", operation_id="response_input")
    async def asked(response_id: str, request: Request, cache_salt: Salt = None) -> Record:
        """The request items of a response."""
        items = json.loads((await stored(response_id, request, cache_salt)).asked)
        return {"object": "list", "data": items, "has_more": False}

    @router.delete("/v1/responses/{response_id}", operation_id="delete_response")
    async def delete(response_id: str, request: Request, cache_salt: Salt = None) -> Record:
        """Delete a response. Its continuations cannot be continued any more."""
        caller = visit_of(request).who()
        whose = caller.salted(cache_salt)
        await service.scheduler.work(
            lambda: service.responses.delete(caller.tenant, whose, response_id)
        )
        return {"id": response_id, "object": "response", "deleted": True}


class ResponseWriter:
    """One growing response."""

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        asked: list[Item],
        answer: AnswerStream,
        visit: Visit,
    ) -> None:
        self._asked = asked
        self._service, self._body, self._answer, self._visit = service, body, answer, visit
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._output: list[Record] = []
        self._open: str | None = None  # kind of the current item
        self._number = -1
        self._scored: list[Record] = []

    async def whole(self) -> Record:
        """The response if it is not streamed."""
        last: Event = {}
        async for event in self._events():
            last = event
        response: Record = last["response"]
        return response

    async def lines(self) -> AsyncGenerator[tuple[str | None, Record | str], None]:
        """The numbered events of a stream; an error on the way is an event too."""
        try:
            async for event in self._events():
                yield event["type"], event
        except Exception as error:
            problem = to_api_error(error, self._visit)
            for event in self._failed(problem):
                yield event["type"], event

    async def _events(self) -> AsyncGenerator[Event, None]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))
        merged = self._service.merged([self._answer], self._visit.who(), self._visit)
        end: AnswerEnd | None = None
        async with aclosing(merged) as deltas:
            async for _, delta in deltas:
                end = delta.end or end
                for event in self._said(delta):
                    yield event
        for event in self._close("incomplete" if end and end.reason == "length" else "completed"):
            yield event
        if end is None:
            raise ApiError(500, "the answer ended without its measurements", code="internal_error")
        status = "incomplete" if end.reason == "length" else "completed"
        yield self._event(f"response.{status}", response=await self._stored(status, end))

    async def _stored(self, status: str, end: AnswerEnd) -> Record:
        """The whole response, stored if requested before its client sees its end."""
        body, responses = self._body, self._service.responses
        keeps = body.store is not False and responses.share > 0
        made = {**self._response(status, end), "store": keeps}
        if keeps:
            caller = self._visit.who()
            whose = caller.salted(body.cache_salt)
            made["store"] = await self._service.scheduler.work(
                lambda: responses.put(caller.tenant, whose, self._asked, made)
            )
        return made

    def _event(self, kind: str, **fields: object) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    # -- items -----------------------------------------------------------------------------------

    def _said(self, delta: Delta) -> Iterator[Event]:
        scored = [scored_of(s, self._service) for s in delta.scored]
        for piece in delta.pieces:
            if piece.kind == "call":
                yield from self._close("completed")
                yield from self._call(piece)
                continue
            if self._open != piece.kind:
                yield from self._close("completed")
                yield from self._begin(piece.kind)
            yield self._grow(piece, scored)
            scored = []

    def _begin(self, kind: str) -> Iterator[Event]:
        self._open, self._scored = kind, []
        item: Record = {"type": _TYPES[kind], "status": "in_progress", "content": []}
        if kind == "text":
            item |= {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
        else:
            item |= {"id": f"rs_{uuid.uuid4().hex}", "summary": []}
        self._output.append(item)
        yield self._event("response.output_item.added", **self._spot(), item=dict(item))
        item["content"] = [_content(kind, "", [])]
        place = self._place()
        yield self._event("response.content_part.added", **place, part=_content(kind, "", []))

    def _grow(self, piece: OutputPiece, scored: list[Record]) -> Event:
        self._output[-1]["content"][0]["text"] += piece.text
        if piece.kind == "thought":
            return self._event("response.reasoning_text.delta", **self._place(), delta=piece.text)
        self._scored += scored
        return self._event(
            "response.output_text.delta", **self._place(), delta=piece.text, logprobs=scored
        )

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        item, kind = self._output[-1], self._open
        text = item["content"][0]["text"]
        part = _content(kind, text, self._scored)
        item |= {"status": status, "content": [part]}
        name = "output_text" if kind == "text" else "reasoning_text"
        more = {"logprobs": self._scored} if kind == "text" else {}
        yield self._event(f"response.{name}.done", **self._place(), text=text, **more)
        yield self._event("response.content_part.done", **self._place(), part=part)
        yield self._event("response.output_item.done", **self._spot(), item=item)
        self._open = None

    def _call(self, piece: OutputPiece) -> Iterator[Event]:
        item = {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": piece.id,
            "name": piece.name,
            "arguments": "",
            "status": "in_progress",
        }
        self._output.append(item)
        spot = {**self._spot(), "item_id": item["id"]}
        yield self._event("response.output_item.added", **self._spot(), item=dict(item))
        name = "response.function_call_arguments"
        yield self._event(f"{name}.delta", **spot, delta=piece.text)
        item |= {"arguments": piece.text, "status": "completed"}
        yield self._event(f"{name}.done", **spot, arguments=piece.text, name=piece.name)
        yield self._event("response.output_item.done", **self._spot(), item=item)

    def _spot(self) -> dict[str, int]:
        return {"output_index": len(self._output) - 1}

    def _place(self) -> Record:
        return {**self._spot(), "item_id": self._output[-1]["id"], "content_index": 0}

    # -- the response ----------------------------------------------------------------------------

    def _failed(self, problem: ApiError) -> Iterator[Event]:
        about = {"code": problem.code, "message": problem.message, "param": problem.param}
        yield self._event("error", **about)
        response = self._response("failed")
        response["error"] = {"code": problem.code or "server_error", "message": problem.message}
        yield self._event("response.failed", response=response)

    def _response(self, status: str, end: AnswerEnd | None = None) -> Record:
        body = self._body
        made: Record = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": body.instructions,
            "max_output_tokens": None if body.max_output_tokens == -1 else body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._service.model.name,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else "auto",
            "tools": [t.model_dump() for t in body.tools or [] if isinstance(t, FunctionTool)],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        if end is not None:
            made |= {"completed_at": int(time.time()), **self._measured(end)}
        return made

    def _measured(self, end: AnswerEnd) -> Record:
        usage = end.usage
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": cached_of(usage),
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
            "total_tokens": usage.total_tokens,
            **images_of(usage),
        }
        made = {"usage": counts, "timings": timings(end)}
        if self._body.keepsight is not None and self._body.keepsight.report:
            made["keepsight"] = {"report": report_of(end.report)}
        return made


def _content(kind: str, text: str, scored: list[Record]) -> Record:
    if kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scored}
