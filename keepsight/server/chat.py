"""`/v1/chat/completions`: OpenAI's chat API.

Thoughts come as `reasoning_content`, tool calls as OpenAI's `tool_calls`. `usage` says what was
reused, `timings` how long it took, and `keepsight`, on request, why.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import APIRouter

from keepsight.kinds import Record
from keepsight.report import Usage
from keepsight.server.access import Visit, posts
from keepsight.server.parser import OutputPiece
from keepsight.server.schema import ChatRequest, StreamOptions
from keepsight.server.streaming import (
    STREAMED,
    AnswerEnd,
    AnswerRequest,
    AnswerStream,
    Delta,
    Event,
    EventStream,
    ScoredToken,
    cached_of,
    images_of,
    measured_of,
)

if TYPE_CHECKING:
    from keepsight.server.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["answers"])

    @posts(router, "/v1/chat/completions", ChatRequest, "chat", responses=STREAMED)
    async def chat(body: ChatRequest, visit: Visit) -> object:
        """An answer to a conversation, whole or streamed."""
        ask = await service.ask(body, visit)
        # Before the first byte is sent, so that bad input gets its own status.
        answers = await service.submit(ask)
        chat = ChatResponse(service, body, ask, answers, visit)
        if body.stream:
            return EventStream(chat.events(), visit, answers)
        return await chat.whole()

    return router


@dataclass
class ChatChoice:
    text: str = ""
    thought: str = ""
    calls: list[Record] = field(default_factory=list)
    scored: list[Record] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    end: AnswerEnd | None = None

    def message(self) -> Record:
        made: Record = {"role": "assistant", "content": self.text, "refusal": None}
        if self.thought:
            made["reasoning_content"] = self.thought
        if self.calls:
            made |= {"content": self.text or None, "tool_calls": self.calls}
        return made


class ChatResponse:
    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        ask: AnswerRequest,
        answers: list[AnswerStream],
        visit: Visit,
    ) -> None:
        self._service, self._body, self._ask, self._visit = service, body, ask, visit
        self._answers, self._options = answers, body.stream_options or StreamOptions()
        self._choices = [ChatChoice() for _ in answers]
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.model.name,
            "service_tier": "default",
            "system_fingerprint": None,
        }

    async def _deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        merged = self._service.merged(self._answers, self._visit.who(), self._visit)
        async with aclosing(merged) as deltas:
            async for number, delta in deltas:
                self._choices[number].end = delta.end
                self._choices[number].tokens += delta.tokens
                if delta.pieces or delta.scored or delta.end or self._ask.shows_tokens:
                    yield number, delta

    async def whole(self) -> Record:
        async for number, delta in self._deltas():
            choice = self._choices[number]
            choice.scored += [scored_of(s, self._service) for s in delta.scored]
            for piece in delta.pieces:
                if piece.kind == "call":
                    choice.calls.append(_call(piece))
                elif piece.kind == "thought":
                    choice.thought += piece.text
                else:
                    choice.text += piece.text
        choices = [
            {
                "index": number,
                "message": choice.message(),
                "logprobs": self._logprobs(choice.scored),
                "finish_reason": choice.end.reason if choice.end else None,
                **({"token_ids": choice.tokens} if self._ask.shows_tokens else {}),
            }
            for number, choice in enumerate(self._choices)
        ]
        head = {**self._head, **self._prompt_ids()}
        return {**head, "object": "chat.completion", "choices": choices, **self._measurements()}

    def _prompt_ids(self) -> Record:
        if not self._ask.shows_tokens:
            return {}
        return {"prompt_token_ids": self._answers[0].prompt_ids}

    async def events(self) -> AsyncGenerator[Event, None]:
        started: set[int] = set()
        first_chunk = True
        async for number, delta in self._deltas():
            parts = [_part(piece, self._choices[number]) for piece in delta.pieces]
            if number not in started:
                started.add(number)
                first = parts.pop(0) if parts else {"content": ""}
                parts.insert(0, {"role": "assistant", **first})
            scored = self._logprobs([scored_of(s, self._service) for s in delta.scored])
            tokens = delta.tokens if self._ask.shows_tokens else []
            if (scored or tokens) and not parts:
                parts = [{}]  # a token without text, such as part of a character
            for spot, part in enumerate(parts):
                chunk = self._chunk(number, part, None, scored if spot == 0 else None)
                if self._ask.shows_tokens:
                    chunk["choices"][0]["token_ids"] = tokens if spot == 0 else []
                    chunk |= self._prompt_ids() if first_chunk else {}
                    first_chunk = False
                yield None, chunk
            if delta.end is not None:
                yield None, self._chunk(number, {}, delta.end.reason)
        measured = self._measurements()
        if not self._options.include_usage:
            measured.pop("usage", None)
        if "usage" in measured or "keepsight" in measured:
            yield None, {**self._head, "object": _CHUNK, "choices": [], **measured}
        yield None, "[DONE]"

    def _chunk(
        self, number: int, delta: Record, reason: str | None, logprobs: Record | None = None
    ) -> Record:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "object": _CHUNK, "choices": [choice]}
        if self._options.continuous_usage_stats:
            prompt = self._answers[0].prompt_tokens
            chunk["usage"] = counts(prompt, sum(len(choice.tokens) for choice in self._choices))
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _measurements(self) -> Record:
        """With several choices the times and the report are those of the first one."""
        ends = [choice.end for choice in self._choices if choice.end is not None]
        return measured_of(ends[0], usage_of(ends), self._body.keepsight) if ends else {}

    def _logprobs(self, scored: list[Record]) -> Record | None:
        if not self._ask.sampling.logprobs or not scored:
            return None
        return {"content": scored, "refusal": None}


_CHUNK = "chat.completion.chunk"


def scored_of(scored: ScoredToken, service: Service) -> Record:
    """A token with its log probability and those of its alternatives."""
    rows = []
    for likely in (scored[0], *scored[1]):
        text, data = service.model.token_text(likely.token)
        rows.append({"token": text, "logprob": likely.logprob, "bytes": data})
    return {**rows[0], "top_logprobs": rows[1:]}


def counts(prompt: int, written: int, **details: object) -> Record:
    """Token counts in the fields of OpenAI's chat API."""
    total = prompt + written
    return {
        "prompt_tokens": prompt, "completion_tokens": written, "total_tokens": total, **details
    }  # fmt: skip


def usage_of(ends: list[AnswerEnd]) -> Record:
    """The counts of an answer: the prompt counts once, however many choices it has."""
    usages = [end.usage for end in ends]
    return counts(
        usages[0].prompt_tokens,
        sum(usage.completion_tokens for usage in usages),
        prompt_tokens_details=cached_of(usages[0]),
        completion_tokens_details={
            "reasoning_tokens": sum(end.reasoning_tokens for end in ends),
            **guessed_of(usages),
        },
        **images_of(usages[0]),
    )


def guessed_of(usages: list[Usage]) -> Record:
    """Numbers of guessed tokens, right and wrong, in the fields of predicted outputs."""
    right = sum(usage.accepted_tokens for usage in usages)
    asked = sum(usage.drafted_tokens for usage in usages)
    return {"accepted_prediction_tokens": right, "rejected_prediction_tokens": asked - right}


def _call(piece: OutputPiece) -> Record:
    function = {"name": piece.name, "arguments": piece.text}
    return {"id": piece.id, "type": "function", "function": function}


def _part(piece: OutputPiece, choice: ChatChoice) -> Record:
    """A piece as the delta of a chunk."""
    if piece.kind == "thought":
        return {"reasoning_content": piece.text}
    if piece.kind == "text":
        return {"content": piece.text}
    choice.calls.append(_call(piece))
    return {"tool_calls": [{"index": len(choice.calls) - 1, **choice.calls[-1]}]}
