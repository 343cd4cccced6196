"""`/v1/responses`: items in place of messages, and responses that are kept.

Items of an earlier response may come back unchanged, by their ids, or all together by that
response's id; `ResponseStore` resolves ids. A request becomes one of the chat API.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, TypeAdapter

from keepsight.kinds import Record
from keepsight.server import schema
from keepsight.server.access import Visit, posts, visit_of
from keepsight.server.chat import scored_of
from keepsight.server.errors import ApiError, invalid
from keepsight.server.files import page_of
from keepsight.server.parser import OutputPiece
from keepsight.server.streaming import (
    STREAMED,
    AnswerEnd,
    AnswerStream,
    Delta,
    Event,
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
_LARGEST = 64 << 20  # bytes of a conversation with all ids resolved
_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}  # of ids
_BEFORE = "previous_response_id"  # a client's name for the items of earlier responses
_ITEM: TypeAdapter[schema.Item] = TypeAdapter(schema.Item)
Placed = tuple[schema.Item, str]  # an item, and the client's name for it


# -- to a request of the chat API ------------------------------------------------------------------


def in_its_words(problem: ApiError) -> ApiError:
    """A refusal of the chat API, with this API's names for fields."""
    names = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
    given = problem.param or ""
    name = names.get(given, given.replace(".function.", "."))
    if name != given:
        problem.param, problem.message = name, problem.message.replace(given, name, 1)
    return problem


def _items_of(body: schema.ResponsesRequest) -> list[Placed]:
    if isinstance(body.input, str):
        return [(schema.MessageItem(role="user", content=body.input), "input")]
    return [(item, f"input[{number}]") for number, item in enumerate(body.input)]


def as_chat(
    body: schema.ResponsesRequest, items: Sequence[Placed] = (), unused: schema.Unused | None = None
) -> schema.ChatRequest:
    """The same request for the chat API. `items` are those of the whole conversation, if it is
    longer than the body, with all references resolved."""
    unused = schema.Unused() if unused is None else unused
    scored = _SCORED in (body.include or ())
    if body.top_logprobs and not scored:
        raise invalid("top_logprobs", f"it needs include: ['{_SCORED}']")
    _name_unused(body, unused)
    tools = [
        schema.Tool.model_construct(type="function", function=tool)
        for tool in body.tools or ()
        if isinstance(tool, schema.FunctionTool)
    ]
    return schema.ChatRequest.model_construct(
        **{name: getattr(body, name) for name in schema.AnswerOptions.model_fields}
        | {
            "messages": _messages(body, items or _items_of(body), unused),
            "tools": tools or None,
            "tool_choice": body.tool_choice,
            "response_format": body.text.format if body.text is not None else None,
            "max_completion_tokens": body.max_output_tokens,
            "logprobs": True if scored else None,
            "top_logprobs": body.top_logprobs if scored else None,
            "stream_options": None,
        }
    )


def _name_unused(body: schema.ResponsesRequest, unused: schema.Unused) -> None:
    """Report the known fields that have no effect here."""
    if body.text is not None and not schema.is_empty(body.text.verbosity):
        unused.add("text.verbosity", schema.NO_VERBOSITY)
    if body.truncation == "auto":
        unused.add("truncation", "prompts are not cut; what is too long is refused")
    options = body.stream_options or schema.StreamOptions()
    if options.include_usage is not None:
        unused.add("stream_options.include_usage", "the last event of a response has usage")
    if options.include_obfuscation:
        unused.add("stream_options.include_obfuscation", "events are not padded here")
    for number, name in enumerate(body.include or ()):
        if name != _SCORED:
            unused.add(f"include[{number}]", f"{name[:100]!r} is not to be had here")
    for number, tool in enumerate(body.tools or ()):
        if isinstance(tool, schema.Foreign):
            unused.hosted(tool, f"tools[{number}]")


def _messages(
    body: schema.ResponsesRequest, items: Sequence[Placed], unused: schema.Unused
) -> list[schema.ChatMessage]:
    """Items as messages: a thought and calls join their answer."""
    made: list[schema.ChatMessage] = []
    thought = ""

    def add(place: str, inside: str = ".content", **fields: Any) -> None:
        made.append(schema.ChatMessage.model_construct(**fields).called(place, place + inside))

    def answer(place: str, **fields: Any) -> None:
        nonlocal thought
        reasoning, thought = thought or None, ""
        add(place, role="assistant", reasoning_content=reasoning, **fields)

    if body.instructions is not None:
        add("instructions", "", role="system", content=body.instructions)
    for item, place in items:
        if isinstance(item, schema.Foreign):
            unused.add(place, f"items of the type {item.type[:100]!r} have no place in a prompt")
            continue
        if isinstance(item, schema.ThoughtItem):
            text = "".join(part.text for part in item.content or item.summary or [])
            thought = "\n".join(filter(None, (thought, text)))
            continue
        said = isinstance(item, schema.MessageItem) and item.role == "assistant"
        if thought and not (said or isinstance(item, schema.CallItem)):
            answer(place, content="")  # it was cut off before its text began
        if isinstance(item, schema.ResultItem):
            add(place, ".output", role="tool", content=item.output, tool_call_id=item.call_id)
        elif isinstance(item, schema.CallItem):
            function = schema.CalledFunction(name=item.name, arguments=item.arguments)
            call = schema.ToolCall(id=item.call_id, function=function)
            if made and made[-1].role == "assistant" and not thought:
                made[-1].tool_calls = [*(made[-1].tool_calls or []), call]
            else:
                answer(place, tool_calls=[call])
        elif isinstance(item, schema.MessageItem):
            if said:
                answer(place, content=item.content)
            else:
                inside = "" if place == "input" else ".content"
                add(place, inside, role=item.role, content=item.content)
    if thought:
        answer(_BEFORE, content="")
    if not made:
        raise invalid("input", "there is no message in input")
    return made


# -- responses that are kept -----------------------------------------------------------------------


@dataclass(frozen=True)
class StoredResponse:
    """One response: the request, the answer, and the response that it continues."""

    id: str
    whose: str  # the key's tenant, with a salt
    previous: str | None
    asked: bytes  # the items of the request as JSON
    response: bytes  # the response as its client got it, as JSON
    expires: float

    @property
    def nbytes(self) -> int:
        return len(self.asked) + len(self.response)

    def output(self) -> list[Record]:
        found: list[Record] = json.loads(self.response)["output"]
        return found

    def input(self) -> list[Record]:
        """The items of the request as OpenAI lists them: with ids, and texts as parts."""
        found: list[Record] = json.loads(self.asked)
        for number, item in enumerate(found):
            prefix = _PREFIXES.get(item["type"], "msg")
            item.setdefault("id", f"{prefix}_{self.id[5:]}_in{number}")
            item["status"] = "completed"
            if isinstance(text := item.get("content"), str):
                said = item["role"] == "assistant"
                part = _content("text", text, []) if said else {"type": "input_text", "text": text}
                item["content"] = [part]
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
        self.share = budget // owners
        self._ttl, self._clock, self._most, self._largest = ttl, clock, most, largest
        # By key, then by (tenant, id); the least recently used first.
        self._stored: dict[str, OrderedDict[tuple[str, str], StoredResponse]] = {}
        self._lock = threading.Lock()

    def put(self, owner: str, whose: str, asked: Sequence[schema.Item], response: Record) -> bool:
        """Store a response and its request's items; False if it exceeds its key's share."""
        new = StoredResponse(
            response["id"],
            whose,
            response["previous_response_id"],
            _json([item.model_dump(mode="json", exclude_none=True) for item in asked]),
            _json(response),
            self._clock() + self._ttl,
        )
        if new.nbytes > self.share:
            return False
        with self._lock:
            own = self._stored.setdefault(owner, OrderedDict())
            own[whose, new.id] = new
            held = sum(stored.nbytes for stored in own.values())
            while held > self.share or len(own) > self._most:
                held -= own.popitem(last=False)[1].nbytes
        return True

    def _drop_where(self, gone: Callable[[StoredResponse], bool]) -> None:
        with self._lock:
            for own in self._stored.values():
                for name in [name for name, stored in own.items() if gone(stored)]:
                    del own[name]

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
            if stored is None or stored.expires <= self._clock():
                raise _unknown("response", response_id, param)
            self._stored[owner].move_to_end((whose, response_id))
        return stored

    def delete(self, owner: str, whose: str, response_id: str) -> None:
        self.get(owner, whose, response_id)
        with self._lock:
            self._stored[owner].pop((whose, response_id), None)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(s.nbytes for own in self._stored.values() for s in own.values())

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
            chain.append(self.get(owner, whose, last, _BEFORE))
            take(chain[-1].nbytes, _BEFORE)  # before any of it is read
            last = chain[-1].previous
        made: list[Placed] = [
            (_ITEM.validate_python(item), _BEFORE)
            for stored in reversed(chain)
            for item in (*json.loads(stored.asked), *stored.output())
        ]
        known: dict[str, dict[str, Record]] = {}  # each response is read once
        for item, place in _items_of(body):
            if isinstance(item, schema.Reference):
                with contextlib.suppress(ApiError):  # an item's id has that of its response
                    meant = f"resp_{item.id.partition('_')[2].partition('_')[0]}"
                    if meant not in known:
                        its = self.get(owner, whose, meant)
                        known[meant] = {one["id"]: one for one in its.input() + its.output()}
                found = known.get(meant, {}).get(item.id)
                if found is None:
                    raise _unknown("item", item.id, f"{place}.id")
                take(len(_json(found)), f"{place}.id")
                item = _ITEM.validate_python(found)
            made.append((item, place))
        return made


def _json(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="surrogatepass")


def _unknown(what: str, given: str, param: str) -> ApiError:
    return ApiError(
        404,
        f"no such {what}: {given[:100]!r}; it was never stored here, was deleted, or has expired. "
        "Send the items of the conversation as input",
        param=param,
        code=f"{what}_not_found",
    )


# -- routes ----------------------------------------------------------------------------------------


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["answers"])
    store, threads, one = service.responses, service.threads, "/v1/responses/{response_id}"

    @posts(router, "/v1/responses", schema.ResponsesRequest, "responses", responses=STREAMED)
    async def responses(body: schema.ResponsesRequest, visit: Visit) -> object:
        """An answer to a list of items, whole or streamed."""
        body.check_stream_options()
        if body.store and not store.share:
            visit.unused.add("store", "this server keeps no responses; see --responses-budget")
        caller = visit.who()

        def read() -> tuple[list[schema.Item], schema.ChatRequest, Record]:
            items = store.conversation(caller.tenant, caller.salted(body.cache_salt), body)
            new = [item for item, place in items if place != _BEFORE]
            kept: list[schema.Item] = [item for item in new if not isinstance(item, schema.Foreign)]
            return kept, as_chat(body, items, visit.unused), _repeated(body)

        asked, chat, repeated = await threads.run(read, visit.size > LARGE_BODY)
        [answer] = await service.submit(await service.ask(chat, visit))
        writer = _Writer(service, body, asked, repeated, answer, visit)
        if body.stream:
            return EventStream(writer.lines(), visit, [answer])
        return await writer.whole()

    async def stored(call: Callable[..., T], given: str, request: Request, salt: str | None) -> T:
        caller = visit_of(request).who()
        return await threads.run(lambda: call(caller.tenant, caller.salted(salt), given))

    @router.get(one, operation_id="response")
    async def get(response_id: str, request: Request, cache_salt: _Salt = None) -> Response:
        """A stored response, as its client got it."""
        found = await stored(store.get, response_id, request, cache_salt)
        return Response(found.response, media_type="application/json")

    @router.get(f"{one}/input_items", operation_id="response_input")
    async def asked(
        response_id: str,
        request: Request,
        cache_salt: _Salt = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """The request items of a response, the last first; the first first with `order=asc`."""

        def page(owner: str, whose: str, given: str) -> bytes:
            items = store.get(owner, whose, given).input()
            return _json(page_of(items if order == "asc" else items[::-1], after, limit))

        text = await stored(page, response_id, request, cache_salt)
        return Response(text, media_type="application/json")

    @router.delete(one, operation_id="delete_response")
    async def delete(response_id: str, request: Request, cache_salt: _Salt = None) -> Record:
        await stored(store.delete, response_id, request, cache_salt)
        return {"id": response_id, "object": "response", "deleted": True}

    return router


_Salt = Annotated[schema.Salt | None, Query()]


@dataclass
class _Writer:
    """One growing response, as its events."""

    service: Service
    body: schema.ResponsesRequest
    asked: list[schema.Item]
    repeated: Record  # what responses repeat of their requests
    answer: AnswerStream
    visit: Visit

    def __post_init__(self) -> None:
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._output: list[Record] = []
        self._open = ""  # kind of the current item
        self._number = -1
        self._scored: list[Record] = []

    async def whole(self) -> Record:
        last: Record = {}
        async for event in self._events():
            last = event
        response: Record = last["response"]
        return response

    async def lines(self) -> AsyncGenerator[Event, None]:
        try:
            async for event in self._events():
                yield event["type"], event
        except Exception as error:
            problem = self.visit.problem(error)
            response = self._response("failed")
            code = problem.code or "server_error"
            response["error"] = {"code": code, "message": problem.message}
            about = {"code": problem.code, "message": problem.message, "param": problem.param}
            yield "error", self._event("error", **about)
            yield "response.failed", self._event("response.failed", response=response)

    async def _events(self) -> AsyncGenerator[Record, None]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))
        end: AnswerEnd | None = None
        async with aclosing(self.service.merged([self.answer], self.visit)) as deltas:
            async for _, delta in deltas:
                end = delta.end or end
                for event in self._said(delta):
                    yield event
        if end is None:
            raise ApiError(500, "the answer ended without its measurements", code="internal_error")
        status = "incomplete" if end.reason == "length" else "completed"
        for event in self._close(status):
            yield event
        yield self._event(f"response.{status}", response=await self._kept(status, end))

    async def _kept(self, status: str, end: AnswerEnd) -> Record:
        """The whole response, stored if requested before its client sees its end."""
        responses, caller = self.service.responses, self.visit.who()
        keeps = self.body.store is not False and responses.share > 0
        made = {**self._response(status), "store": keeps, "completed_at": int(time.time())}
        used, cached = end.usage, cached_of(end.usage)
        usage = counted(used.prompt_tokens, cached, used.completion_tokens, end.reasoning_tokens)
        made |= measured_of(end, usage | images_of(used), self.body.keepsight)
        if keeps:
            whose = caller.salted(self.body.cache_salt)
            put = functools.partial(responses.put, caller.tenant, whose, self.asked, made)
            made["store"] = await self.service.threads.run(put)
        return made

    def _event(self, kind: str, /, **fields: object) -> Record:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    # -- items -----------------------------------------------------------------------------------

    def _said(self, delta: Delta) -> Iterator[Record]:
        scored = [scored_of(one, self.service.model) for one in delta.scored]
        for piece in delta.pieces:
            if piece.kind != self._open:
                yield from self._close("completed")
            if piece.kind == "call":
                yield from self._call(piece)
                continue
            if not self._open:
                yield from self._begin(piece.kind)
            self._output[-1]["content"][0]["text"] += piece.text
            if piece.kind == "thought":
                yield self._inside("reasoning_text.delta", delta=piece.text)
            else:
                self._scored += scored
                yield self._inside("output_text.delta", delta=piece.text, logprobs=scored)
            scored = []

    def _item(self, kind: str, prefix: str, **fields: object) -> Record:
        """Begin an item; the event that says so."""
        made = {"type": kind, "status": "in_progress"}
        made["id"] = f"{prefix}_{self._id[5:]}_{len(self._output)}"
        self._output.append(made | fields)
        return self._outside("output_item.added", item=dict(self._output[-1]))

    def _begin(self, kind: str) -> Iterator[Record]:
        self._open, self._scored = kind, []
        if kind == "text":
            yield self._item("message", "msg", content=[], role="assistant")
        else:
            yield self._item("reasoning", "rs", content=[], summary=[])
        self._output[-1]["content"] = [_content(kind, "", [])]
        yield self._inside("content_part.added", part=_content(kind, "", []))

    def _close(self, status: str) -> Iterator[Record]:
        if not self._open:
            return
        item, kind, self._open = self._output[-1], self._open, ""
        text = item["content"][0]["text"]
        part = _content(kind, text, self._scored)
        item |= {"status": status, "content": [part]}
        name = "output_text" if kind == "text" else "reasoning_text"
        more = {"logprobs": self._scored} if kind == "text" else {}
        yield self._inside(f"{name}.done", text=text, **more)
        yield self._inside("content_part.done", part=part)
        yield self._outside("output_item.done", item=item)

    def _call(self, piece: OutputPiece) -> Iterator[Record]:
        yield self._item("function_call", "fc", call_id=piece.id, name=piece.name, arguments="")
        item, name = self._output[-1], "function_call_arguments"
        yield self._outside(f"{name}.delta", item_id=item["id"], delta=piece.text)
        item |= {"arguments": piece.text, "status": "completed"}
        done = {"arguments": piece.text, "name": piece.name}
        yield self._outside(f"{name}.done", item_id=item["id"], **done)
        yield self._outside("output_item.done", item=item)

    def _outside(self, name: str, /, **fields: object) -> Record:
        """An event of the current item."""
        return self._event(f"response.{name}", output_index=len(self._output) - 1, **fields)

    def _inside(self, name: str, /, **fields: object) -> Record:
        """An event of the content of the current item."""
        return self._outside(name, item_id=self._output[-1]["id"], content_index=0, **fields)

    def _response(self, status: str) -> Record:
        short = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": short,
            "model": self.service.model.name,
            "output": [dict(item) for item in self._output],
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **self.repeated,
        }


def counted(prompt: int, cached: dict[str, int], written: int = 0, thought: int = 0) -> Record:
    """Token counts in the fields of this API."""
    return {
        "input_tokens": prompt,
        "input_tokens_details": cached,
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": prompt + written,
    }


def _repeated(body: schema.ResponsesRequest) -> Record:
    return {
        "instructions": body.instructions,
        "max_output_tokens": None if body.max_output_tokens == -1 else body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
        "temperature": body.temperature,
        "text": {"format": _as_sent(body.text and body.text.format) or {"type": "text"}},
        "tool_choice": _as_sent(body.tool_choice) or "auto",
        "tools": [t.model_dump() for t in body.tools or () if isinstance(t, schema.FunctionTool)],
        "top_p": body.top_p,
    }


def _as_sent(given: BaseModel | str | None) -> object:
    return given.model_dump(exclude_unset=True) if isinstance(given, BaseModel) else given


def _content(kind: str, text: str, scored: list[Record]) -> Record:
    if kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scored}
