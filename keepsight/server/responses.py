"""The body of `/v1/responses`, and its translation to the chat API.

Items of an earlier response may come back unchanged, by their ids, or all together by that
response's id; `ResponseStore` resolves ids.
"""

from __future__ import annotations

import functools
import json
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, TypeAdapter

from keepsight.kinds import Record
from keepsight.server import schema
from keepsight.server.access import Visit, posts, to_api_error, visit_of
from keepsight.server.chat import scored_of
from keepsight.server.errors import ApiError, invalid
from keepsight.server.parser import OutputPiece
from keepsight.server.schema import (
    CallItem,
    Item,
    MessageItem,
    OtherItem,
    Reference,
    ResultItem,
    ThoughtItem,
    Unused,
    is_empty,
)
from keepsight.server.streaming import (
    STREAMED,
    AnswerEnd,
    AnswerStream,
    Delta,
    EventStream,
    cached_of,
    images_of,
    measured_of,
)
from keepsight.server.turns import LARGE_BODY

if TYPE_CHECKING:
    from keepsight.server.service import Service

T = TypeVar("T")
_SCORED = "message.output_text.logprobs"
_MOST = 10_000  # responses per key
_LONGEST = 10_000  # responses per chain
_LARGEST = 64 << 20  # bytes of a conversation with all ids resolved
BEFORE = "previous_response_id"  # a client's name for the items of earlier responses
_ITEM: TypeAdapter[Item] = TypeAdapter(Item)
Placed = tuple[Item, str]  # an item, and the client's name for it


def in_its_words(problem: ApiError) -> ApiError:
    """A refusal of the chat API, with this API's names for fields."""
    names = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
    }
    given = problem.param or ""
    name = names.get(given, given.replace(".function.", "."))
    if name != given:
        problem.param, problem.message = name, problem.message.replace(given, name, 1)
    return problem


def items_of(body: schema.ResponsesRequest) -> list[Placed]:
    """The items of a body in any form."""
    if isinstance(body.input, str):
        return [(MessageItem(role="user", content=body.input), "input")]
    return [(item, f"input[{number}]") for number, item in enumerate(body.input)]


def as_chat(
    body: schema.ResponsesRequest,
    items: Sequence[Placed] | None = None,
    unused: Unused | None = None,
) -> schema.ChatRequest:
    """The same request for the chat API. `items` are those of the whole conversation, if it is
    longer than the body, with all references resolved."""
    items = items_of(body) if items is None else items
    unused = Unused() if unused is None else unused
    scored = _SCORED in (body.include or ())
    if body.top_logprobs and not scored:
        raise invalid("top_logprobs", f"it needs include: ['{_SCORED}']")
    _name_unused(body, unused)
    same = {name: getattr(body, name) for name in schema.AnswerOptions.model_fields}
    return schema.ChatRequest.model_construct(
        **same
        | {
            "messages": _messages(body, items, unused),
            "tools": list(_tools(body, unused)) or None,
            "tool_choice": body.tool_choice,
            "response_format": body.text.format if body.text is not None else None,
            "max_completion_tokens": body.max_output_tokens,
            "logprobs": True if scored else None,
            "top_logprobs": body.top_logprobs if scored else None,
            "stream_options": None,
        }
    )


def _name_unused(body: schema.ResponsesRequest, unused: Unused) -> None:
    """Report the known fields that have no effect here."""
    if body.text is not None and not is_empty(body.text.verbosity):
        unused.add("text.verbosity", schema.ChatRequest.IGNORED["verbosity"])
    if body.truncation == "auto":
        unused.add("truncation", "prompts are not cut; what is too long is refused")
    options = body.stream_options
    if options is not None and options.include_usage is not None:
        unused.add("stream_options.include_usage", "the last event of a response has usage")
    if options is not None and options.include_obfuscation:
        unused.add("stream_options.include_obfuscation", "events are not padded here")
    for number, name in enumerate(body.include or ()):
        if name != _SCORED:
            unused.add(f"include[{number}]", f"{name[:100]!r} is not to be had here")


def _tools(body: schema.ResponsesRequest, unused: Unused) -> Iterator[schema.Tool]:
    for number, tool in enumerate(body.tools or ()):
        if isinstance(tool, schema.HostedTool):
            schema.name_hosted(tool, f"tools[{number}]", unused)
            continue
        fields = tool.model_dump(exclude={"type"})
        yield schema.Tool(type="function", function=schema.Function(**fields))


def _messages(
    body: schema.ResponsesRequest, items: Sequence[Placed], unused: Unused
) -> list[schema.ChatMessage]:
    """Items as messages: a thought and calls join their answer."""
    made: list[schema.ChatMessage] = []
    thought = ""

    def add(place: str, content_place: str, **fields: Any) -> None:
        made.append(schema.ChatMessage(**fields).called(place, content_place))

    def answer(place: str, **fields: Any) -> None:
        nonlocal thought
        reasoning, thought = thought or None, ""
        add(place, f"{place}.content", role="assistant", reasoning_content=reasoning, **fields)

    if body.instructions is not None:
        add("instructions", "instructions", role="system", content=body.instructions)
    for item, place in items:
        if isinstance(item, OtherItem):
            unused.add(place, f"items of the type {item.type[:100]!r} have no place in a prompt")
            continue
        if isinstance(item, ThoughtItem):
            text = "".join(part.text for part in item.content or item.summary or [])
            thought = "\n".join(filter(None, (thought, text)))
            continue
        said = isinstance(item, MessageItem) and item.role == "assistant"
        if thought and not (said or isinstance(item, CallItem)):
            answer(place, content="")  # it was cut off before its text began
        if isinstance(item, ResultItem):
            told = {"content": item.output, "tool_call_id": item.call_id}
            add(place, f"{place}.output", role="tool", **told)
        elif isinstance(item, CallItem):
            function = schema.CalledFunction(name=item.name, arguments=item.arguments)
            call = schema.ToolCall(id=item.call_id, function=function)
            if made and made[-1].role == "assistant" and not thought:
                made[-1].tool_calls = [*(made[-1].tool_calls or []), call]
            else:
                answer(place, tool_calls=[call])
        elif isinstance(item, MessageItem) and said:
            answer(place, content=item.content)
        elif isinstance(item, MessageItem):
            inside = place if place == "input" else f"{place}.content"
            add(place, inside, role=item.role, content=item.content)
    if thought:
        answer(BEFORE, content="")
    if not made:
        raise invalid("input", "there is no message in input")
    return made


@dataclass(frozen=True)
class StoredResponse:
    """One response: the request, the answer, and the response that it continues."""

    id: str
    owner: str  # the key's tenant
    whose: str  # the tenant, with its salt
    previous: str | None
    asked: bytes  # the items of the request as JSON
    response: bytes  # the response as its client got it, as JSON
    item_ids: tuple[str, ...]
    expires: float

    @property
    def nbytes(self) -> int:
        return len(self.asked) + len(self.response)

    def output(self) -> list[Record]:
        found: list[Record] = json.loads(self.response)["output"]
        return found


class ResponseStore:
    """All stored responses. `owners`: the number of keys that share the bytes."""

    def __init__(
        self,
        budget: int,
        ttl: float,
        owners: int = 1,
        clock: Callable[[], float] = time.time,
        most: int = _MOST,
        largest: int = _LARGEST,
    ) -> None:
        self.share = budget // max(1, owners)
        self._ttl, self._clock, self._most, self._largest = ttl, clock, most, largest
        self._held: Counter[str] = Counter()  # bytes by key
        # By key, then by (tenant, id); the least recently used first.
        self._stored: dict[str, OrderedDict[tuple[str, str], StoredResponse]] = {}
        self._items: dict[tuple[str, str], StoredResponse] = {}  # by (tenant, item)
        self._lock = threading.Lock()

    def put(self, owner: str, whose: str, asked: list[Item], response: Record) -> bool:
        """Store a response and its request's items; False if it exceeds its key's share."""
        new = StoredResponse(
            response["id"],
            owner,
            whose,
            response["previous_response_id"],
            _json([item.model_dump(mode="json", exclude_none=True) for item in asked]),
            _json(response),
            tuple(item["id"] for item in response["output"]),
            self._clock() + self._ttl,
        )
        if new.nbytes > self.share:
            return False
        with self._lock:
            own = self._stored.setdefault(owner, OrderedDict())
            if (old := own.get((whose, new.id))) is not None:
                self._drop(old)
            own[whose, new.id] = new
            self._held[owner] += new.nbytes
            self._items |= dict.fromkeys(((whose, item) for item in new.item_ids), new)
            while own and (self._held[owner] > self.share or len(own) > self._most):
                self._drop(next(iter(own.values())))
        return True

    def _drop(self, stored: StoredResponse) -> None:
        if self._stored[stored.owner].pop((stored.whose, stored.id), None) is not None:
            self._held[stored.owner] -= stored.nbytes
        for item in stored.item_ids:
            if self._items.get((stored.whose, item)) is stored:
                del self._items[stored.whose, item]

    def _drop_where(self, gone: Callable[[StoredResponse], bool]) -> None:
        with self._lock:
            for own in self._stored.values():
                for stored in list(filter(gone, own.values())):
                    self._drop(stored)

    def sweep(self) -> None:
        now = self._clock()
        self._drop_where(lambda stored: stored.expires <= now)

    def forget(self, whose: str | None = None) -> None:
        self._drop_where(lambda stored: whose in (None, stored.whose))

    def get(
        self, owner: str, whose: str, response_id: str, param: str = "response_id"
    ) -> StoredResponse:
        """A response of this tenant; those of others are unknown."""
        with self._lock:
            stored = self._stored.get(owner, OrderedDict()).get((whose, response_id))
            if stored is not None and stored.expires <= self._clock():
                self._drop(stored)
                stored = None
            if stored is None:
                raise _unknown("response", response_id, param)
            self._stored[owner].move_to_end((whose, response_id))
        return stored

    def delete(self, owner: str, whose: str, response_id: str) -> None:
        stored = self.get(owner, whose, response_id)
        with self._lock:
            self._drop(stored)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return self._held.total()

    def conversation(self, owner: str, whose: str, body: schema.ResponsesRequest) -> list[Placed]:
        """The items of a whole conversation: those of earlier responses, then those of the body
        with ids resolved. Their bytes are limited like those of a body with the full text."""
        left = self._largest

        def take(nbytes: int, param: str) -> None:
            nonlocal left
            left -= nbytes
            if left < 0:
                what = f"the references in this request take more than {self._largest} bytes"
                hint = "begin a new conversation, or send the items that matter as input"
                code = "conversation_too_large"
                raise ApiError(400, f"{what} in full; {hint}", param=param, code=code)

        chain: list[StoredResponse] = []
        last = body.previous_response_id
        while last is not None:
            if len(chain) == _LONGEST:
                raise _unknown("response", last, BEFORE)
            chain.insert(0, self.get(owner, whose, last, BEFORE))
            take(chain[0].nbytes, BEFORE)  # before any of it is read
            last = chain[0].previous
        made: list[Placed] = [
            (_ITEM.validate_python(item), BEFORE)
            for stored in chain
            for item in (*json.loads(stored.asked), *stored.output())
        ]
        outputs: dict[str, dict[str, Record]] = {}  # each response is read once
        for item, place in items_of(body):
            if isinstance(item, Reference):
                with self._lock:
                    there = self._items.get((whose, item.id))
                if there is None or there.expires <= self._clock():
                    raise _unknown("item", item.id, f"{place}.id")
                if there.id not in outputs:
                    self.get(there.owner, whose, there.id)  # used now
                    outputs[there.id] = {one["id"]: one for one in there.output()}
                meant = outputs[there.id][item.id]
                take(len(_json(meant)), f"{place}.id")
                item = _ITEM.validate_python(meant)
            made.append((item, place))
        return made


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(
        errors="surrogatepass"
    )


def _unknown(what: str, given: str, param: str) -> ApiError:
    return ApiError(
        404,
        f"no such {what}: {given[:100]!r}; it was never stored here, was deleted, or has expired. "
        "Send the items of the conversation as input",
        param=param,
        code=f"{what}_not_found",
    )


Event = Record
Salt = Annotated[str | None, Query(min_length=1, max_length=1024)]


def routes(service: Service) -> APIRouter:
    """The routes for answers, and for one stored response."""
    router = APIRouter(tags=["answers"])
    store, threads, one = service.responses, service.threads, "/v1/responses/{response_id}"

    @posts(router, "/v1/responses", schema.ResponsesRequest, "responses", responses=STREAMED)
    async def responses(body: schema.ResponsesRequest, visit: Visit) -> object:
        """An answer to a list of items, whole or streamed."""
        body.check_stream_options()
        if body.store and not store.share:
            visit.unused.add("store", "this server keeps no responses; see --responses-budget")
        caller = visit.who()

        def read() -> tuple[list[Item], schema.ChatRequest]:
            items = store.conversation(caller.tenant, caller.salted(body.cache_salt), body)
            new = [item for item, place in items if place != BEFORE]
            kept = [item for item in new if not isinstance(item, OtherItem)]
            return [*kept], as_chat(body, items, visit.unused)

        asked, chat = await threads.run(read, visit.size > LARGE_BODY)
        [answer] = await service.submit(await service.ask(chat, visit))
        writer = ResponseWriter(service, body, asked, answer, visit)
        if body.stream:
            return EventStream(writer.lines(), visit, [answer])
        return await writer.whole()

    async def stored(call: Callable[..., T], given: str, request: Request, salt: str | None) -> T:
        caller = visit_of(request).who()
        return await threads.run(lambda: call(caller.tenant, caller.salted(salt), given))

    @router.get(one, operation_id="response")
    async def get(response_id: str, request: Request, cache_salt: Salt = None) -> Response:
        """A stored response, as its client got it."""
        found = await stored(store.get, response_id, request, cache_salt)
        return Response(found.response, media_type="application/json")

    @router.get(f"{one}/input_items", operation_id="response_input")
    async def asked(response_id: str, request: Request, cache_salt: Salt = None) -> Response:
        """The request items of a response."""
        items = (await stored(store.get, response_id, request, cache_salt)).asked
        text = b'{"object":"list","data":' + items + b',"has_more":false}'
        return Response(text, media_type="application/json")

    @router.delete(one, operation_id="delete_response")
    async def delete(response_id: str, request: Request, cache_salt: Salt = None) -> Record:
        await stored(store.delete, response_id, request, cache_salt)
        return {"id": response_id, "object": "response", "deleted": True}

    return router


@dataclass
class ResponseWriter:
    """One growing response."""

    service: Service
    body: schema.ResponsesRequest
    asked: list[Item]
    answer: AnswerStream
    visit: Visit

    def __post_init__(self) -> None:
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._output: list[Record] = []
        self._open: str | None = None  # kind of the current item
        self._number = -1
        self._scored: list[Record] = []

    async def whole(self) -> Record:
        last: Event = {}
        async for event in self._events():
            last = event
        response: Record = last["response"]
        return response

    async def lines(self) -> AsyncGenerator[tuple[str | None, Record | str], None]:
        try:
            async for event in self._events():
                yield event["type"], event
        except Exception as error:
            problem = to_api_error(error, self.visit)
            for event in self._failed(problem):
                yield event["type"], event

    async def _events(self) -> AsyncGenerator[Event, None]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))
        merged = self.service.merged([self.answer], self.visit.who(), self.visit)
        end: AnswerEnd | None = None
        async with aclosing(merged) as deltas:
            async for _, delta in deltas:
                end = delta.end or end
                for event in self._said(delta):
                    yield event
        status = "incomplete" if end and end.reason == "length" else "completed"
        for event in self._close(status):
            yield event
        if end is None:
            raise ApiError(500, "the answer ended without its measurements", code="internal_error")
        yield self._event(f"response.{status}", response=await self._stored(status, end))

    async def _stored(self, status: str, end: AnswerEnd) -> Record:
        """The whole response, stored if requested before its client sees its end."""
        responses, caller = self.service.responses, self.visit.who()
        keeps = self.body.store is not False and responses.share > 0
        made = {**self._response(status, end), "store": keeps}
        if keeps:
            whose = caller.salted(self.body.cache_salt)
            put = functools.partial(responses.put, caller.tenant, whose, self.asked, made)
            made["store"] = await self.service.threads.run(put)
        return made

    def _event(self, kind: str, **fields: object) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    # -- items -----------------------------------------------------------------------------------

    def _said(self, delta: Delta) -> Iterator[Event]:
        scored = [scored_of(s, self.service) for s in delta.scored]
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

    def _item(self, kind: str, prefix: str, **fields: object) -> tuple[Record, Event]:
        item = {
            "type": kind,
            "id": f"{prefix}_{uuid.uuid4().hex}",
            "status": "in_progress",
        } | fields
        self._output.append(item)
        spot = self._spot()
        return item, self._event("response.output_item.added", **spot, item=dict(item))

    def _begin(self, kind: str) -> Iterator[Event]:
        self._open, self._scored = kind, []
        if kind == "text":
            item, added = self._item("message", "msg", content=[], role="assistant")
        else:
            item, added = self._item("reasoning", "rs", content=[], summary=[])
        yield added
        item["content"] = [_content(kind, "", [])]
        part = _content(kind, "", [])
        yield self._event("response.content_part.added", **self._place(), part=part)

    def _grow(self, piece: OutputPiece, scored: list[Record]) -> Event:
        self._output[-1]["content"][0]["text"] += piece.text
        if piece.kind == "thought":
            return self._event("response.reasoning_text.delta", **self._place(), delta=piece.text)
        self._scored += scored
        more = {"delta": piece.text, "logprobs": scored}
        return self._event("response.output_text.delta", **self._place(), **more)

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
        about = {"call_id": piece.id, "name": piece.name, "arguments": ""}
        item, added = self._item("function_call", "fc", **about)
        yield added
        spot = {**self._spot(), "item_id": item["id"]}
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
        body = self.body
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
            "model": self.service.model.name,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _dumped(body.text and body.text.format) or {"type": "text"}},
            "tool_choice": _dumped(body.tool_choice) or "auto",
            "tools": [
                t.model_dump() for t in body.tools or [] if isinstance(t, schema.FunctionTool)
            ],
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
        return measured_of(end, counts, self.body.keepsight)


def _dumped(given: BaseModel | str | None) -> object:
    """A part of the request, as it was sent."""
    return given.model_dump(exclude_unset=True) if isinstance(given, BaseModel) else given


def _content(kind: str, text: str, scored: list[Record]) -> Record:
    if kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scored}
