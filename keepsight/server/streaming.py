"""Turns a request into answers as they come, without blocking other requests.

An answer is a stream of `Delta`s; the last one carries usage and report. When the client hangs up
or the time is over, reading stops, which cancels the ticket and frees its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from keepsight.core.structured.formats import Format
from keepsight.core.together import Ticket, Together
from keepsight.errors import Closed
from keepsight.kinds import Message, Options, Record
from keepsight.report import Piece, Report, Usage
from keepsight.server.access import Visit, to_api_error
from keepsight.server.parser import OutputParser, OutputPiece
from keepsight.server.sampling import Recorder, Sampling, TokenLogprob
from keepsight.server.schema import KeepsightOptions
from keepsight.server.served_model import ServedModel
from keepsight.server.turns import Threads, account, is_large

T = TypeVar("T")
Arrived = asyncio.Queue[tuple[int, Piece | Ticket]]  # by the numbers of choices
ScoredToken = tuple[TokenLogprob, list[TokenLogprob]]  # of the answer, and the likeliest ones


@dataclass(frozen=True)
class AnswerRequest:
    """A checked request, from either API."""

    messages: list[Message]
    tenant: str
    sampling: Sampling
    template: Options = field(default_factory=dict)
    tools: list[Record] | None = None
    one_call: bool = False  # at most one tool call per answer
    choices: int = 1
    notes: tuple[str, ...] = ()
    continued: bool = False  # the answer continues the last message
    shows_tokens: bool = False  # send each step, even without new text
    account: str | None = None  # account for fair shares; None: the tenant
    form: Format | None = None  # what the answer has to be

    def rendering(self) -> Record:
        options: Options = {} if self.tools is None else {"tools": self.tools}
        return {**options, "template_kwargs": self.template} if self.template else options


@dataclass
class Delta:
    """What one step added to an answer."""

    pieces: list[OutputPiece] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)  # with their alternatives
    tokens: list[int] = field(default_factory=list)
    end: AnswerEnd | None = None


@dataclass(frozen=True)
class AnswerEnd:
    """How an answer ended, and what it cost."""

    reason: str  # "stop", "length" or "tool_calls"
    usage: Usage
    report: Report
    reasoning_tokens: int
    seconds: float


class SchedulerClient:
    """Sends requests to the scheduler and returns its events."""

    def __init__(self, together: Together, threads: Threads, model: ServedModel) -> None:
        self.together, self._threads, self._model = together, threads, model

    async def submit(self, ask: AnswerRequest, choice: int, arrived: Arrived) -> AnswerStream:
        """Submit one choice; bad input and a full queue are refused here."""
        options, recorder = ask.sampling.of(choice)
        options |= ask.rendering()
        if ask.form is not None:
            options["response_format"] = ask.form

        def work(tell: Callable[[Piece | Ticket], None]) -> Ticket:
            given: Options = {"tenant": ask.tenant or None, "account": ask.account, **options}
            return self.together.submit(ask.messages, on_piece=tell, on_done=tell, **given)

        ticket = await self._handed_in(work, is_large(ask.messages), arrived, choice)
        return AnswerStream(ticket, arrived, ask, recorder, self._model)

    async def prepare(self, messages: list[Message], **options: Any) -> Report:
        """Prefill in turn with other requests; return the report. No thread waits for it, because
        there are few and requests for answers need them."""
        arrived: Arrived = asyncio.Queue()
        ticket = await self._handed_in(
            lambda tell: self.together.prepare(messages, on_done=tell, **options),
            is_large(messages),
            arrived,
        )
        try:
            await arrived.get()
        finally:
            if not ticket.done.is_set():
                ticket.cancel()
        if ticket.error is not None:
            raise ticket.error
        if ticket.report is None:
            raise Closed("the server is shutting down")
        return ticket.report

    async def _handed_in(
        self,
        work: Callable[[Callable[[Piece | Ticket], None]], Ticket],
        large: bool,
        arrived: Arrived,
        number: int = 0,
    ) -> Ticket:
        """Submit from some thread; its events come to a queue."""
        loop = asyncio.get_running_loop()

        def hand_over(what: Piece | Ticket) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(arrived.put_nowait, (number, what))

        future = await self._threads.start(lambda: work(hand_over), large)
        try:
            return await asyncio.wrap_future(future, loop=loop)
        except asyncio.CancelledError:
            future.add_done_callback(_cancel_late)
            raise

    async def change_cache(self, call: Callable[[], T]) -> T:
        """Pin or remove: each account one piece at a time."""
        whose = account.get()

        def in_turn() -> T:
            with self.together.beside(whose):
                return call()

        return await self._threads.wait(in_turn)


def _cancel_late(future: Future[Ticket]) -> None:
    """Cancel a ticket that was made after its client hung up."""
    if not future.cancelled() and future.exception() is None:
        future.result().cancel()


@dataclass
class AnswerStream:
    """One choice (`n`) of one request: what its pieces add to its answer."""

    ticket: Ticket
    arrived: Arrived  # of all choices
    ask: AnswerRequest
    recorder: Recorder | None
    model: ServedModel

    def __post_init__(self) -> None:
        self._speech: OutputParser | None = None  # once the answer has begun
        self._begun = time.perf_counter()
        self._reasoning = self._calls = 0
        self.unpaid = 0  # tokens written but not in any measurement

    def cancel(self) -> None:
        if not self.ticket.done.is_set():
            self.ticket.cancel()

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens of the prompt, once the answer has begun."""
        ids = self.ticket.prompt_ids
        return [] if ids is None else ids.tolist()

    @property
    def prompt_tokens(self) -> int:
        return 0 if self.ticket.prompt_ids is None else len(self.ticket.prompt_ids)

    def delta(self, piece: Piece) -> Delta:
        """What a piece adds."""
        delta = Delta()
        if self._speech is None:
            opened = not self.ask.continued and self.model.opened_thought(self.prompt_ids)
            tools = [tool["function"] for tool in self.ask.tools or ()]
            schemas = {tool["name"]: tool.get("parameters") or {} for tool in tools}
            self._speech = OutputParser(opened, self.model.thinks, bool(tools), schemas)
        if piece.token is not None:
            delta.tokens.append(piece.token)
            self.unpaid += 1
            self._reasoning += self._speech.thinking
            if self.recorder is not None:
                delta.scored.append(self.recorder.take(piece.token))
        delta.pieces += self._allowed(self._speech.push(piece.text))
        if piece.usage is not None and piece.report is not None:
            delta.pieces += self._allowed(self._speech.finish())
            reason = "tool_calls" if self._calls else piece.finish_reason or "stop"
            seconds = time.perf_counter() - self._begun
            piece.report.notes += self.ask.notes
            self.unpaid = 0
            delta.end = AnswerEnd(reason, piece.usage, piece.report, self._reasoning, seconds)
        return delta

    def _allowed(self, pieces: Iterable[OutputPiece]) -> list[OutputPiece]:
        answers = []
        for one in pieces:
            self._calls += one.kind == "call"
            if one.kind != "call" or self._calls == 1 or not self.ask.one_call:
                answers.append(one)
        return answers


Event = tuple[str | None, Record | str]  # name of the event, if any, and its data
STREAMED: dict[int | str, Record] = {
    200: {
        "description": "The answer, whole or as server-sent events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


_ALIVE = 15.0  # seconds of silence after which a comment keeps the connection open


class EventStream(StreamingResponse):
    """Events as they come; an error on the way is the last event. While a long prompt is read,
    comments tell proxies that the answer is still to come."""

    def __init__(
        self, events: AsyncGenerator[Event, None], visit: Visit, answers: Sequence[AnswerStream]
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(_lines(events, visit), media_type="text/event-stream", headers=headers)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Close the generator: one that was never started runs none of its cleanup otherwise."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for answer in self._answers:
                answer.cancel()


async def _lines(events: AsyncGenerator[Event, None], visit: Visit) -> AsyncIterator[str]:
    following: asyncio.Future[Event | None] = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            while not (await asyncio.wait({following}, timeout=_ALIVE))[0]:
                yield ": the answer is still to come\n\n"
            if (event := following.result()) is None:
                return
            following = asyncio.ensure_future(anext(events, None))
            name, data = event
            text = data if isinstance(data, str) else dumped(data)
            yield (f"event: {name}\n" if name else "") + f"data: {text}\n\n"
    except Exception as error:
        yield f"data: {dumped(to_api_error(error, visit).body())}\n\n"
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await events.aclose()


def dumped(data: object) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def cached_of(usage: Usage) -> dict[str, int]:
    """Prompt tokens that were remembered, and those remembered from now on: all that were
    computed."""
    computed = usage.prompt_tokens - usage.cached_tokens
    return {"cached_tokens": usage.cached_tokens, "cache_write_tokens": computed}


def images_of(usage: Usage) -> dict[str, int]:
    names = ("images", "images_encoded", "images_reused")
    return {name: getattr(usage, name) for name in names}


def measured_of(end: AnswerEnd, usage: Record, keepsight: KeepsightOptions | None) -> Record:
    """Usage, timings and, on request, the report."""
    made: Record = {"usage": usage, "timings": timings(end)}
    if keepsight is not None and keepsight.report:
        made["keepsight"] = {"report": report_of(end.report)}
    return made


def timings(end: AnswerEnd) -> dict[str, float | int]:
    stages, usage = end.report.milliseconds, end.usage
    queued = stages.get("queued", 0.0)
    prompt_ms = max(stages.get("first_token", 0.0) - queued, 0.0)
    # Two clocks: on a busy machine the first may have run as long as the whole answer.
    after_first = 1e3 * end.seconds - stages.get("first_token", 0.0)
    predicted_ms = max(after_first, stages.get("decode", 0.0))
    prompt_n = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_second": _rate(prompt_n, prompt_ms),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_second": _rate(usage.completion_tokens, predicted_ms),
        "queued_ms": round(queued, 3),
    }


def _rate(count: int, milliseconds: float) -> float:
    return round(1e3 * count / milliseconds, 3) if milliseconds > 0 else 0.0


def report_of(report: Report) -> Record:
    """The report, with one line on each picture."""
    images: dict[int, Record] = {}
    for segment in report.segments:
        if segment.medium is None:
            continue
        image = images.setdefault(
            segment.medium,
            {"image": segment.medium, "kind": segment.kind, "key": segment.key, "tokens": 0},
        )
        image["tokens"] += segment.tokens
        for name in ("status", "reason", "features", "tier"):
            image[name] = getattr(segment, name)
    return {**report.to_dict(), "images": [images[number] for number in sorted(images)]}
