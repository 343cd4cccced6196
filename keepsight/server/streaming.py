"""Answers as they come: what each step adds, and how it is sent.

An answer is a stream of `Delta`s; the last one carries usage and report. The routes translate them
to their APIs. When the client hangs up or the time is over, reading stops, which cancels the ticket
and frees its place.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from keepsight.core.structured.formats import Format
from keepsight.core.together import Ticket
from keepsight.kinds import Message, Options, Record
from keepsight.report import Piece, Report, Usage
from keepsight.server.access import Visit
from keepsight.server.parser import OutputParser, OutputPiece
from keepsight.server.sampling import Recorder, Sampling, ScoredToken
from keepsight.server.schema import KeepsightOptions
from keepsight.server.served_model import ServedModel

Arrived = asyncio.Queue[tuple[int, Piece | Ticket]]  # by the numbers of choices
Event = tuple[str | None, Record | str]  # name of the event, if any, and its data
STREAMED: dict[int | str, Record] = {
    200: {
        "description": "The answer, whole or as server-sent events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}
_ALIVE = 15.0  # seconds of silence after which a comment keeps the connection open


@dataclass(frozen=True)
class AnswerRequest:
    """A checked request, from any API."""

    messages: list[Message]
    tenant: str
    account: str  # for fair shares
    sampling: Sampling
    template: Options
    tools: list[Record] | None = None
    one_call: bool = False  # at most one tool call per answer
    choices: int = 1
    notes: tuple[str, ...] = ()
    continued: bool = False  # the answer continues the last message
    shows_tokens: bool = False  # send each step, even without new text
    form: Format | None = None  # what the answer has to be

    def options(self, choice: int) -> tuple[Options, Recorder | None]:
        """The library's options for one of the choices, and what records its probabilities."""
        options, recorder = self.sampling.of(choice)
        more: Options = {"tools": self.tools, "template_kwargs": self.template or None}
        more["response_format"] = self.form
        options |= {name: value for name, value in more.items() if value is not None}
        return {"tenant": self.tenant or None, "account": self.account, **options}, recorder


@dataclass(frozen=True)
class AnswerEnd:
    """How an answer ended, and what it cost."""

    reason: str  # "stop", "length" or "tool_calls"
    usage: Usage
    report: Report
    reasoning_tokens: int
    seconds: float


@dataclass
class Delta:
    """What one step added to an answer."""

    pieces: list[OutputPiece] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)  # with their alternatives
    tokens: list[int] = field(default_factory=list)
    end: AnswerEnd | None = None


@dataclass
class AnswerStream:
    """One choice (`n`) of one request: what its pieces add to its answer."""

    ticket: Ticket
    arrived: Arrived  # of all choices
    ask: AnswerRequest
    recorder: Recorder | None
    model: ServedModel
    unpaid: int = 0  # tokens written but not in any measurement
    _parser: OutputParser | None = None  # once the answer has begun
    _begun: float = field(default_factory=time.perf_counter)
    _reasoning: int = 0
    _calls: int = 0

    def cancel(self) -> None:
        if not self.ticket.done.is_set():
            self.ticket.cancel()

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens of the prompt, once the answer has begun."""
        ids = self.ticket.prompt_ids
        return [] if ids is None else ids.tolist()

    def delta(self, piece: Piece) -> Delta:
        """What a piece adds."""
        delta = Delta()
        if self._parser is None:
            opened = not self.ask.continued and self.model.opened_thought(self.prompt_ids)
            tools = [tool["function"] for tool in self.ask.tools or ()]
            schemas = {tool["name"]: tool.get("parameters") or {} for tool in tools}
            self._parser = OutputParser(opened, self.model.thinks, bool(tools), schemas)
        if piece.token is not None:
            delta.tokens.append(piece.token)
            self.unpaid += 1
            self._reasoning += self._parser.thinking
            if self.recorder is not None:
                delta.scored.append(self.recorder.take(piece.token))
        delta.pieces += self._allowed(self._parser.push(piece.text))
        if piece.usage is not None and piece.report is not None:
            delta.pieces += self._allowed(self._parser.finish())
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
        """A generator that was never started runs none of its cleanup, so it is done here."""
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
            if isinstance(data, str):
                text = data
            elif "response" in data:  # it repeats what was asked
                text = await visit.beside(partial(_dumped, data))
            else:
                text = _dumped(data)
            yield (f"event: {name}\n" if name else "") + f"data: {text}\n\n"
    except Exception as error:
        yield f"data: {_dumped(visit.problem(error).body())}\n\n"
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await events.aclose()


def _dumped(data: object) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


# -- what an answer cost ---------------------------------------------------------------------------


def cached_of(usage: Usage) -> dict[str, int]:
    """Prompt tokens that were remembered, and those remembered from now on: all computed ones."""
    computed = usage.prompt_tokens - usage.cached_tokens
    return {"cached_tokens": usage.cached_tokens, "cache_write_tokens": computed}


def images_of(usage: Usage) -> dict[str, int]:
    names = ("images", "images_encoded", "images_reused")
    return {name: getattr(usage, name) for name in names}


def measured_of(end: AnswerEnd, usage: Record, keepsight: KeepsightOptions | None) -> Record:
    """Usage, timings and, on request, the report."""
    made: Record = {"usage": usage, "timings": _timings(end)}
    if keepsight is not None and keepsight.report:
        made["keepsight"] = {"report": report_of(end.report)}
    return made


def _timings(end: AnswerEnd) -> dict[str, float | int]:
    """The timings of llama.cpp."""
    stages, usage = end.report.milliseconds, end.usage
    queued, first = stages.get("queued", 0.0), stages.get("first_token", 0.0)
    prompt_ms = max(first - queued, 0.0)
    # Two clocks: on a busy machine the first may have run as long as the whole answer.
    predicted_ms = max(1e3 * end.seconds - first, stages.get("decode", 0.0))
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
        about = {"image": segment.medium, "kind": segment.kind, "key": segment.key, "tokens": 0}
        image = images.setdefault(segment.medium, about)
        image["tokens"] += segment.tokens
        for name in ("status", "reason", "features", "tier"):
            image[name] = getattr(segment, name)
    return {**report.to_dict(), "images": [images[number] for number in sorted(images)]}
