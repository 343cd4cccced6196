"""What all routes share: the model, its scheduler, callers, uploads, kept responses, metrics.

A request is admitted, turned into an `AnswerRequest` and answered; the routes only translate
between that and their API.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pydantic.main import IncEx

from keepsight.core.sequence import Sequence as Answer
from keepsight.core.together import Ticket, Together
from keepsight.errors import Closed
from keepsight.kinds import Options, Record
from keepsight.prompt.lengths import characters
from keepsight.report import Piece, Report
from keepsight.server import schema
from keepsight.server.access import BodyIntake, Callers, Visit
from keepsight.server.config import ServerConfig
from keepsight.server.errors import ApiError, invalid, refused
from keepsight.server.files import Files, contents_for
from keepsight.server.forms import form_of
from keepsight.server.media import MessageReader, Waits
from keepsight.server.metrics import Metrics
from keepsight.server.responses import ResponseStore
from keepsight.server.sampling import sampling
from keepsight.server.served_model import ServedModel
from keepsight.server.streaming import AnswerRequest, AnswerStream, Arrived, Delta
from keepsight.server.turns import (
    LARGE_BODY,
    LARGE_TEXT,
    RenderedMessages,
    Threads,
    account,
    is_large,
)

if TYPE_CHECKING:
    from keepsight.vlm import VLM

T = TypeVar("T")
Tell = Callable[[Piece | Ticket], None]
Rendered = tuple[RenderedMessages, Record, str]  # messages, template options, tenant


class Service:
    def __init__(self, vlm: VLM, together: Together, name: str, config: ServerConfig) -> None:
        self.vlm, self.together, self.config = vlm, together, config
        self.model = ServedModel(vlm, config.model_name or name)
        self.active = 0  # requests being served
        self.admitted = 0  # those whose body has arrived
        self.draining = False
        self.bodies = BodyIntake(self)
        self.threads = Threads(lambda: self.active)
        contents = contents_for(vlm.runtime.store)
        self.files = Files(config.files_budget, config.file_ttl, contents=contents)
        self.owners = max(1, len({key.whose for key in config.keys}))  # they share the budgets
        budget, ttl = config.responses_budget, config.file_ttl
        self.responses = ResponseStore(budget, ttl, self.owners, largest=config.max_body)
        self.callers = Callers(config.keys, vlm.tenant)
        self.metrics = Metrics(vlm.runtime.stats, together.stats)

    # -- from bodies to requests -----------------------------------------------------------------

    async def rendering(self, body: schema.Rendering, visit: Visit) -> Rendered:
        """What any request with a prompt is made of."""
        return await self._beside(visit, partial(self._rendering, body, visit))

    async def ask(self, body: schema.ChatRequest, visit: Visit) -> AnswerRequest:
        """The checked request, or an error that names what is not supported."""
        return await self._beside(visit, partial(self._asked, body, visit))

    async def _beside(self, visit: Visit, work: Callable[[bool], T]) -> T:
        """Read a request in a thread. `work` is told whether it may wait for disks and sites; if it
        has to, it begins again in a thread that may."""
        try:
            return await self.threads.run(lambda: work(False), visit.size > LARGE_BODY)
        except Waits:
            return await self.threads.wait(lambda: work(True))

    def reader(
        self, body: schema.PixelLimits, visit: Visit, may_wait: bool = True
    ) -> MessageReader:
        whose, limits, sizes = visit.who().tenant, body.limits(), self.model.sizes
        return MessageReader(self.config, self.files, whose, limits, sizes, visit.unused, may_wait)

    def _rendering(self, body: schema.Rendering, visit: Visit, may_wait: bool) -> Rendered:
        template = self.model.template_options(body, visit.unused)
        if body.shown_tools:
            self.model.check_tools()
        for number, tool in enumerate(body.tools or ()):
            if isinstance(tool, schema.Foreign):
                visit.unused.hosted(tool, f"tools[{number}]")
        tenant = visit.who().salted(body.cache_salt)
        messages = self.reader(body, visit, may_wait).messages(body.messages, self.model.template)
        messages.large |= characters(tools_of(body.shown_tools)) > LARGE_TEXT
        return messages, template, tenant

    def _asked(self, body: schema.ChatRequest, visit: Visit, may_wait: bool) -> AnswerRequest:
        if body.modalities and body.modalities != ["text"]:
            raise refused("modalities", "answers are text; expected ['text']")
        body.check_stream_options()
        _name_unused(body, visit.unused)
        chosen = sampling(body, self.config.max_tokens, self.model.vocabulary, self.model.ends)
        if (body.n or 1) > (most := self.config.max_choices):
            raise invalid("n", f"n is {body.n}, this server gives at most {most}")
        messages, template, tenant = self._rendering(body, visit, may_wait)
        form = form_of(body, self.model.calls, visit.unused)
        notes = visit.unused.notes()
        if body.prompt_cache_key is not None:
            why = "one process answers all, so there is nothing to route by it"
            notes.insert(0, f"prompt_cache_key: {why}")
        return AnswerRequest(
            messages,
            tenant,
            visit.who().account,
            chosen,
            template,
            tools_of(body.shown_tools) if body.tool_choice != "none" else None,
            one_call=body.parallel_tool_calls is False,
            choices=body.n or 1,
            notes=tuple(notes),
            continued=body.continues or body.add_generation_prompt is False,
            shows_tokens=bool(body.return_token_ids),
            form=form,
        )

    # -- from requests to answers ----------------------------------------------------------------

    async def submit(self, ask: AnswerRequest) -> list[AnswerStream]:
        """Submit all choices; bad input and a full queue are refused here."""
        answers: list[AnswerStream] = []
        arrived: Arrived = asyncio.Queue()
        try:
            for choice in range(ask.choices):
                options, recorder = ask.options(choice)

                def work(tell: Tell, options: Options = options) -> Ticket:
                    more = {"on_piece": tell, "on_done": tell, **options}
                    return self.together.submit(ask.messages, **more)

                ticket = await self._handed_in(work, is_large(ask.messages), arrived, choice)
                answers.append(AnswerStream(ticket, arrived, ask, recorder, self.model))
        except BaseException:
            for answer in answers:
                answer.cancel()
            raise
        return answers

    async def prepare(self, messages: list[Record], visit: Visit, **options: object) -> Report:
        """Encode and prefill in turn with other requests; return the report. No thread waits for
        it, because there are few and requests for answers need them."""
        arrived: Arrived = asyncio.Queue()
        more: Options = {"account": visit.who().account, **options}
        async with self.time_limit():
            ticket = await self._handed_in(
                lambda tell: self.together.prepare(messages, on_done=tell, **more),
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
        self, work: Callable[[Tell], Ticket], large: bool, arrived: Arrived, number: int = 0
    ) -> Ticket:
        """Submit from some thread; its events come to a queue."""
        loop = asyncio.get_running_loop()

        def tell(what: Piece | Ticket) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(arrived.put_nowait, (number, what))

        future = await self.threads.start(lambda: work(tell), large)
        try:
            return await asyncio.wrap_future(future, loop=loop)
        except asyncio.CancelledError:
            future.add_done_callback(_cancel_late)
            raise

    @contextlib.asynccontextmanager
    async def time_limit(self, begun: float | None = None) -> AsyncIterator[None]:
        """The longest time of an answer; later it is a 504. `begun` by the loop's clock, if not
        now."""
        seconds = self.config.request_timeout
        begun = asyncio.get_running_loop().time() if begun is None else begun
        try:
            async with asyncio.timeout_at(begun + seconds):
                yield
        except TimeoutError:
            text = f"the answer took longer than {seconds:.0f} s"
            raise ApiError(504, text, code="timeout") from None

    async def merged(
        self, answers: Sequence[AnswerStream], visit: Visit
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """The deltas of all choices as they come, with the number of the choice."""
        left, begun, caller = len(answers), asyncio.get_running_loop().time(), visit.who()
        try:
            while left:
                async with self.time_limit(begun):  # for each: another task may ask for the next
                    number, what = await answers[0].arrived.get()
                if isinstance(what, Ticket):
                    if what.error is not None:
                        raise what.error
                    left -= 1
                    continue
                delta = answers[number].delta(what)
                if (end := delta.end) is not None:
                    # The choices share one prompt.
                    prompt = 0 if number else end.usage.prompt_tokens
                    caller.spend(end.usage.completion_tokens + prompt)
                    visit.answered(end.usage, end.report, end.reason)
                yield number, delta
        finally:
            for answer in answers:
                answer.cancel()
                caller.spend(answer.unpaid)  # of a client that hung up

    async def on_errand(
        self, visit: Visit, work: Callable[[Callable[[Sequence[Answer]], None]], T]
    ) -> T:
        """The result of some work that runs sequences; they end when the client hangs up, or when
        the time is over."""
        errand = self.together.errand(visit.who().account)
        try:
            async with self.time_limit():
                return await self.threads.wait(partial(work, errand.run))
        finally:
            errand.cancel()

    async def change_cache(self, call: Callable[[], T]) -> T:
        """Pin or remove: each account one piece at a time."""
        whose = account.get()

        def in_turn() -> T:
            with self.together.beside(whose):
                return call()

        return await self.threads.wait(in_turn)

    def close(self) -> None:
        self.together.close(self.config.drain)
        self.threads.close()


def _cancel_late(future: Future[Ticket]) -> None:
    """Cancel a ticket that was made after its client hung up."""
    if not future.cancelled() and future.exception() is None:
        future.result().cancel()


def _name_unused(body: schema.ChatRequest, unused: schema.Unused) -> None:
    """Report the known fields of a body that have no effect here."""
    newer = body.max_completion_tokens
    if newer is not None and body.max_tokens not in (None, newer):
        unused.add("max_tokens", "max_completion_tokens, its newer name, is given too and differs")
    if body.service_tier not in (None, "auto", "default"):
        unused.add("service_tier", "there is one tier")
    if body.cache_prompt is False:
        unused.add("cache_prompt", "what is remembered is always used; answers are the same")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        unused.add("stream_options.include_obfuscation", "events are not padded here")


def tools_of(tools: list[schema.Tool]) -> list[Record] | None:
    """Tools as templates want them; `strict` only concerns the server."""
    left_out: IncEx = {"function": {"strict"}}
    return [t.model_dump(exclude_none=True, exclude=left_out) for t in tools] if tools else None
