"""`/v1/chat/completions`: OpenAI's chat API.

Thoughts come as `reasoning_content`, tool calls as OpenAI's `tool_calls`. `usage` says what was
reused, `timings` how long it took, and `keepsight`, on request, why.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import APIRouter

from keepsight.kinds import Record
from keepsight.server.access import Visit, posts
from keepsight.server.parser import OutputPiece
from keepsight.server.sampling import ScoredToken
from keepsight.server.schema import ChatRequest, StreamOptions
from keepsight.server.served_model import ServedModel
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

if TYPE_CHECKING:
    from keepsight.server.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["answers"])

    @posts(router, "/v1/chat/completions", ChatRequest, "chat", responses=STREAMED)
    async def chat(body: ChatRequest, visit: Visit) -> object:
        """An answer to a conversation, whole or streamed."""
        ask = await service.ask(body, visit)
        # Before the first byte is sent, so that bad input gets its own status.
        chat = _Chat(service, body, await service.submit(ask), visit)
        if body.stream:
            return EventStream(chat.events(), visit, chat.answers)
        return await chat.whole()

    return router


@dataclass
class _Choice:
    text: str = ""
    thought: str = ""
    calls: list[Record] = field(default_factory=list)
    scored: list[Record] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    end: AnswerEnd | None = None

    def take(self, piece: OutputPiece) -> Record:
        """Add a piece; it as the delta of a chunk."""
        if piece.kind == "thought":
            self.thought += piece.text
            return {"reasoning_content": piece.text}
        if piece.kind == "text":
            self.text += piece.text
            return {"content": piece.text}
        function = {"name": piece.name, "arguments": piece.text}
        self.calls.append({"id": piece.id, "type": "function", "function": function})
        return {"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1]}]}

    def message(self) -> Record:
        made: Record = {"role": "assistant", "content": self.text, "refusal": None}
        if self.thought:
            made["reasoning_content"] = self.thought
        if self.calls:
            made |= {"content": self.text or None, "tool_calls": self.calls}
        return made


class _Chat:
    def __init__(
        self, service: Service, body: ChatRequest, answers: list[AnswerStream], visit: Visit
    ) -> None:
        self._service, self._body, self._visit, self.answers = service, body, visit, answers
        self._options = body.stream_options or StreamOptions()
        self._choices = [_Choice() for _ in answers]
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.model.name,
            "service_tier": "default",
            "system_fingerprint": None,
        }

    async def _steps(self) -> AsyncGenerator[tuple[int, Delta, list[Record], list[Record]], None]:
        """Each step of a choice: its number, what was added, as deltas, and probabilities."""
        async with aclosing(self._service.merged(self.answers, self._visit)) as deltas:
            async for number, delta in deltas:
                choice = self._choices[number]
                choice.end = delta.end
                choice.tokens += delta.tokens
                scored = [scored_of(one, self._service.model) for one in delta.scored]
                choice.scored += scored
                yield number, delta, [choice.take(piece) for piece in delta.pieces], scored

    async def whole(self) -> Record:
        async for _ in self._steps():
            pass
        choices = [
            {
                "index": number,
                "message": choice.message(),
                "logprobs": _logprobs(choice.scored),
                "finish_reason": choice.end.reason if choice.end else None,
                **({"token_ids": choice.tokens} if self._body.return_token_ids else {}),
            }
            for number, choice in enumerate(self._choices)
        ]
        made = {**self._head, **self._prompt_ids(), "object": "chat.completion"}
        return {**made, "choices": choices, **self._measurements()}

    async def events(self) -> AsyncGenerator[Event, None]:
        started: set[int] = set()
        async for number, delta, parts, scored in self._steps():
            tokens = delta.tokens if self._body.return_token_ids else []
            if (scored or tokens) and not parts:
                parts = [{}]  # a token without text, such as part of a character
            for spot, part in enumerate(parts):
                if number not in started:
                    part = {"role": "assistant", **(part or {"content": ""})}
                chunk = self._chunk(number, part, None, scored if spot == 0 else [])
                if self._body.return_token_ids:
                    chunk["choices"][0]["token_ids"] = tokens if spot == 0 else []
                    chunk |= {} if started else self._prompt_ids()
                started.add(number)
                yield None, chunk
            if delta.end is not None:
                first = {} if number in started else {"role": "assistant", "content": ""}
                yield None, self._chunk(number, first, delta.end.reason)
        measured = self._measurements()
        if not self._options.include_usage:
            measured.pop("usage", None)
        if "usage" in measured or "keepsight" in measured:
            yield None, {**self._head, "object": _CHUNK, "choices": [], **measured}
        yield None, "[DONE]"

    def _chunk(
        self, number: int, delta: Record, reason: str | None, scored: Sequence[Record] = ()
    ) -> Record:
        choice = {"index": number, "delta": delta, "logprobs": _logprobs([*scored])}
        choice["finish_reason"] = reason
        chunk = {**self._head, "object": _CHUNK, "choices": [choice]}
        if self._options.continuous_usage_stats:
            prompt = len(self.answers[0].prompt_ids)
            chunk["usage"] = counts(prompt, sum(len(choice.tokens) for choice in self._choices))
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _prompt_ids(self) -> Record:
        given = self._body.return_token_ids
        return {"prompt_token_ids": self.answers[0].prompt_ids} if given else {}

    def _measurements(self) -> Record:
        """With several choices the times and the report are those of the first one."""
        ends = [choice.end for choice in self._choices if choice.end is not None]
        return measured_of(ends[0], _usage_of(ends), self._body.keepsight) if ends else {}


_CHUNK = "chat.completion.chunk"


def _logprobs(scored: list[Record]) -> Record | None:
    return {"content": scored, "refusal": None} if scored else None


def scored_of(scored: ScoredToken, model: ServedModel) -> Record:
    """A token with its log probability and those of its alternatives."""
    rows = []
    for token, logprob in scored:
        text, data = model.token_text(token)
        rows.append({"token": text, "logprob": logprob, "bytes": data})
    return {**rows[0], "top_logprobs": rows[1:]}


def counts(prompt: int, written: int, **details: object) -> Record:
    """Token counts in the fields of OpenAI's chat API."""
    made = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
    return {**made, **details}


def _usage_of(ends: list[AnswerEnd]) -> Record:
    """The counts of an answer: the prompt counts once, however many choices it has."""
    usages = [end.usage for end in ends]
    right = sum(usage.accepted_tokens for usage in usages)
    return counts(
        usages[0].prompt_tokens,
        sum(usage.completion_tokens for usage in usages),
        prompt_tokens_details=cached_of(usages[0]),
        completion_tokens_details={
            "reasoning_tokens": sum(end.reasoning_tokens for end in ends),
            # Guessed tokens, in the fields of predicted outputs.
            "accepted_prediction_tokens": right,
            "rejected_prediction_tokens": sum(u.drafted_tokens for u in usages) - right,
        },
        **images_of(usages[0]),
    )
