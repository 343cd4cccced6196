"""Turns a request into answers as they come, without blocking other requests.

An answer is a stream of `Delta`s; the last one carries usage and report. When the client hangs up
or the time is over, reading stops, which cancels the ticket and frees its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from keepsight.core.together import Ticket, Together
from keepsight.errors import Closed
from keepsight.kinds import Message, Options, Record
from keepsight.report import Piece, Report, Usage
from keepsight.server.api.output_parser import OutputParser, OutputPiece
from keepsight.server.api.sampling import Recorder, Sampling, TokenLogprob
from keepsight.server.limits.threads import Threads, is_large
from keepsight.server.limits.turns import ThreadsInTurn, account

T = TypeVar("T")


@dataclass(frozen=True)
class AnswerRequest:
    """A checked request, from either API."""

    messages: list[Message]
    tenant: str
    sampling: Sampling
    template: Options = field(default_factory=dict)
    tools: list[Record] | None = None
    one_call: bool = False  # at most one tool call per answer
    thinking: bool = False  # the template opened a thought
    thinks: bool = False
    choices: int = 1
    notes: tuple[str, ...] = ()
    continued: bool = False  # the answer continues the last message
    shows_tokens: bool = False  # send each step, even without new text
    account: str | None = None  # account for fair shares; None: the tenant

    @property
    def whose(self) -> str | None:
        """The tenant in the form the library takes."""
        return self.tenant or None

    def rendering(self) -> Record:
        """The options that decide the prompt."""
        options: Options = {} if self.tools is None else {"tools": self.tools}
        return {**options, "template_kwargs": self.template} if self.template else options


@dataclass(frozen=True)
class ScoredToken:
    """A token of the answer with its log probability."""

    chosen: TokenLogprob
    likeliest: list[TokenLogprob]


@dataclass
class Delta:
    """What one step added to an answer."""

    pieces: list[OutputPiece] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
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

    def __init__(self, together: Together, threads: Threads) -> None:
        self.together, self._threads = together, threads
        self._others = ThreadsInTurn(8, "keepsight-wait")  # work that no answer waits for
        self._counters = ThreadsInTurn(2, "keepsight-stats")  # nor statistics
        self._cache_threads = ThreadsInTurn(4, "keepsight-cache")  # may wait for a disk
        self.work = self._others.run  # work that computes for long
        self.flush = self._cache_threads.run  # work that waits for a disk, and needs no model
        self.count = self._counters.run  # statistics: short, and waits for nothing else

    async def submit(self, ask: AnswerRequest, choice: int = 0) -> AnswerStream:
        """Submit one choice; bad input and a full queue are refused here."""
        options, recorder = ask.sampling.of(choice)
        options |= ask.rendering()

        def work(tell: Callable[[Piece | Ticket], None]) -> Ticket:
            return self.together.submit(
                ask.messages,
                tenant=ask.whose,
                account=ask.account,
                on_piece=tell,
                on_done=tell,
                **options,
            )

        return AnswerStream(*await self._handed_in(work, is_large(ask.messages)), ask, recorder)

    async def prepare(
        self,
        messages: list[Message],
        tenant: str | None = None,
        account: str | None = None,
        **options: object,
    ) -> Report:
        """Prefill in turn with other requests; return the report. No thread waits for it, because
        there are few and requests for answers need them."""

        def work(tell: Callable[[Piece | Ticket], None]) -> Ticket:
            return self.together.prepare(
                messages, tenant=tenant, account=account, on_done=tell, **options
            )

        ticket, arrived = await self._handed_in(work, is_large(messages))
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
        self, work: Callable[[Callable[[Piece | Ticket], None]], Ticket], large: bool
    ) -> tuple[Ticket, asyncio.Queue[Piece | Ticket]]:
        """Submit from some thread, and return the queue of its events."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Piece | Ticket] = asyncio.Queue()

        def hand_over(what: Piece | Ticket) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(arrived.put_nowait, what)

        future = self._threads.submit(lambda: work(hand_over), large)
        try:
            return await asyncio.wrap_future(future, loop=loop), arrived
        except asyncio.CancelledError:
            future.add_done_callback(_cancel_late)
            raise

    async def change_cache(self, call: Callable[[], T]) -> T:
        """Pin or remove. These wait for disks, in threads of their own. Accounts share their model
        time, as for requests."""
        whose = account.get()

        def in_turn() -> T:
            with self.together.beside(whose):
                return call()

        return await self._cache_threads.run(in_turn)

    def close(self, drain: float) -> None:
        """Let running requests finish."""
        self.together.close(drain)
        self._threads.close()
        for threads in (self._others, self._counters, self._cache_threads):
            threads.close()


def _cancel_late(future: Future[Ticket]) -> None:
    """Cancel a ticket that was made after its client hung up."""
    if not future.cancelled() and future.exception() is None:
        future.result().cancel()


class AnswerStream:
    """Streams one choice (`n`) of one request: the pieces of its answer in order."""

    def __init__(
        self,
        ticket: Ticket,
        arrived: asyncio.Queue[Piece | Ticket],
        ask: AnswerRequest,
        recorder: Recorder | None,
    ) -> None:
        self._ticket, self._arrived, self._ask, self._recorder = ticket, arrived, ask, recorder
        self._speech = OutputParser(ask.thinking, ask.thinks, ask.tools is not None)
        self._begun = time.perf_counter()
        self._reasoning = self._calls = 0
        self.unpaid = 0  # tokens written but not in any measurement

    def cancel(self) -> None:
        """Free the place; safe at any time, and twice."""
        if not self._ticket.done.is_set():
            self._ticket.cancel()

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens of the prompt, once the answer has begun."""
        ids = self._ticket.prompt_ids
        return [] if ids is None else ids.tolist()

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens."""
        return 0 if self._ticket.prompt_ids is None else len(self._ticket.prompt_ids)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """The answer, step by step."""
        try:
            while isinstance(piece := await self._arrived.get(), Piece):
                delta = self._delta(piece)
                if delta.pieces or delta.scored or delta.end or self._ask.shows_tokens:
                    yield delta
            if piece.error is not None:
                raise piece.error
        finally:
            self.cancel()

    def _delta(self, piece: Piece) -> Delta:
        delta = Delta()
        if piece.token is not None:
            delta.tokens.append(piece.token)
            self.unpaid += 1
            self._reasoning += self._speech.thinking
            if self._recorder is not None:
                delta.scored.append(ScoredToken(*self._recorder.take(piece.token)))
        delta.pieces += self._allowed(self._speech.push(piece.text))
        if piece.usage is not None and piece.report is not None:
            delta.pieces += self._allowed(self._speech.finish())
            reason = "tool_calls" if self._calls else piece.finish_reason or "stop"
            seconds = time.perf_counter() - self._begun
            piece.report.notes += self._ask.notes
            self.unpaid = 0
            delta.end = AnswerEnd(reason, piece.usage, piece.report, self._reasoning, seconds)
        return delta

    def _allowed(self, pieces: Iterable[OutputPiece]) -> list[OutputPiece]:
        answers = []
        for one in pieces:
            self._calls += one.kind == "call"
            if one.kind != "call" or self._calls == 1 or not self._ask.one_call:
                answers.append(one)
        return answers
