"""Output of both APIs: server-sent events, usage, timings, reports.

A response that is not streamed also watches its client: hanging up frees the place.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from typing import TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from keepsight.kinds import Record
from keepsight.report import Report, Usage
from keepsight.server.api.answers import AnswerEnd, AnswerStream
from keepsight.server.errors import ApiError
from keepsight.server.limits.middleware import Visit, to_api_error

T = TypeVar("T")
Event = tuple[str | None, Record | str]  # name of the event, if any, and its data
STREAMED: dict[int | str, Record] = {
    200: {
        "description": "The answer, whole or as server-sent events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


async def unless_gone(request: Request, work: Awaitable[T], visit: Visit) -> T:
    """The result of some work, which is cancelled when the client hangs up."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            visit.gone = True
            raise ApiError(400, "the client hung up", code="hung_up")
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Events as they come; an error on the way is the last event."""

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        visit: Visit,
        answers: Sequence[AnswerStream],
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
    try:
        async with aclosing(events) as source:
            async for name, data in source:
                text = data if isinstance(data, str) else dumped(data)
                yield (f"event: {name}\n" if name else "") + f"data: {text}\n\n"
    except Exception as error:
        problem = to_api_error(error, visit)
        yield f"data: {dumped(problem.body())}\n\n"


def dumped(data: object) -> str:
    """JSON on one line."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def cached_of(usage: Usage) -> dict[str, int]:
    """Prompt tokens that were remembered, and those remembered from now on: all that were
    computed."""
    computed = usage.prompt_tokens - usage.cached_tokens
    return {"cached_tokens": usage.cached_tokens, "cache_write_tokens": computed}


def images_of(usage: Usage) -> dict[str, int]:
    """The counts of images, besides OpenAI's fields."""
    return {
        "images": usage.images,
        "images_encoded": usage.images_encoded,
        "images_reused": usage.images_reused,
    }


def timings(end: AnswerEnd) -> dict[str, float | int]:
    """Times and rates in llama.cpp's fields: of the prompt, and of the answer."""
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
