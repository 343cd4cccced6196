"""From a request to its answers while they come: tickets, read without holding up anybody.

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

from keepsight.errors import Closed
from keepsight.kinds import Message, Options, Record
from keepsight.report import Piece, Report, Usage
from keepsight.scheduler import Ticket, Together
from keepsight.server.output_parser import OutputParser, OutputPiece, spoken_message
from keepsight.server.sampling import Recorder, Sampling, TokenLogprob
from keepsight.server.threads import Threads, is_large
from keepsight.server.turns import ThreadsInTurn, account

T = TypeVar("T")


@dataclass(frozen=True)
class AnswerRequest:
    """What a request comes to, whichever API it came by."""

    messages: list[Message]
    tenant: str
    sampling: Sampling
    template: Options = field(default_factory=dict)
    tools: list[Record] | None = None
    one_call: bool = False  # no more than one tool call in an answer
    thinking: bool = False  # the template opened a thought
    thinks: bool = False
    choices: int = 1
    notes: tuple[str, ...] = ()
    continued: bool = False  # the answer goes on in the last message
    shows_tokens: bool = False  # each step is sent, also one that adds no text yet
    account: str | None = None  # whose time it takes; None: the tenant's

    @property
    def whose(self) -> str | None:
        """The tenant, as the library wants it."""
        return self.tenant or None

    def rendering(self) -> Record:
        """The options that decide the prompt."""
        options: Options = {} if self.tools is None else {"tools": self.tools}
        return {**options, "template_kwargs": self.template} if self.template else options

    def follow(self, text: str) -> Record | None:
        """The message that an answer becomes when its client sends it back."""
        if self.choices > 1 or self.continued:  # which of them, or joined to what, is unknown
            return None
        speech = OutputParser(self.thinking, self.thinks, self.tools is not None)
        return spoken_message(speech, text, 1 if self.one_call else None)


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
    """Takes requests to the scheduler and brings back what it says."""

    def __init__(self, together: Together, threads: Threads) -> None:
        self.together, self._threads = together, threads
        self._others = ThreadsInTurn(8, "keepsight-wait")  # no answer waits for these
        self._counters = ThreadsInTurn(2, "keepsight-stats")  # nor do statistics
        self._cache_threads = ThreadsInTurn(4, "keepsight-cache")  # may wait for a disk
        self.work = self._others.run  # what takes time and computes
        self.flush = self._cache_threads.run  # what waits for a disk, and needs no model
        self.count = self._counters.run  # statistics: they take a moment, and wait for nothing else

    async def submit(self, ask: AnswerRequest, choice: int = 0) -> AnswerStream:
        """Hand in one choice; bad input and a full queue are refused here."""
        options, recorder = ask.sampling.of(choice)
        options |= ask.rendering()

        def work(tell: Callable[[Piece | Ticket], None]) -> Ticket:
            return self.together.submit(
                ask.messages,
                tenant=ask.whose,
                account=ask.account,
                on_piece=tell,
                on_done=tell,
                follow=ask.follow,
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
        """Prefill in turn with the others; the report when it is done. No thread waits for it:
        there are few, and who asks for an answer needs one."""

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
        """What some thread has handed in to the scheduler, and where it will be heard of."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Piece | Ticket] = asyncio.Queue()

        def hand_over(what: Piece | Ticket) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(arrived.put_nowait, what)

        future = self._threads.submit(lambda: work(hand_over), large)
        try:
            return await asyncio.wrap_future(future, loop=loop), arrived
        except asyncio.CancelledError:
            future.add_done_callback(_cancel_late)
            raise

    async def change_cache(self, call: Callable[[], T]) -> T:
        """Pins and removals: they wait for disks, and whatever else is asked for does not. Their
        time with the model is shared by accounts, as that of requests is."""
        whose = account.get()

        def in_turn() -> T:
            with self.together.beside(whose):
                return call()

        return await self._cache_threads.run(in_turn)

    def close(self, drain: float) -> None:
        """Let what runs finish."""
        self.together.close(drain)
        self._threads.close()
        for threads in (self._others, self._counters, self._cache_threads):
            threads.close()


def _cancel_late(future: Future[Ticket]) -> None:
    """A ticket that was made after its client had gone."""
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
        self.unpaid = 0  # tokens written that no measurement has counted

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
        """How many those are."""
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
