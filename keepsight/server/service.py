"""What all routes share: the model, callers, uploads, the client of the scheduler, metrics.

A request is admitted, turned into an `AnswerRequest` and answered; the routes only translate
between that and their API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

from fastapi import Request
from pydantic.main import IncEx

from keepsight.core.together import Together
from keepsight.kinds import Message, Record
from keepsight.prompt.lengths import characters
from keepsight.report import Report
from keepsight.server.api import schema
from keepsight.server.api.answers import AnswerRequest, AnswerStream, Delta, SchedulerClient
from keepsight.server.api.response_store import ResponseStore
from keepsight.server.api.responses_schema import ResponsesRequest
from keepsight.server.api.sampling import sampling
from keepsight.server.api.unused import Unused, is_empty
from keepsight.server.config import ServerConfig
from keepsight.server.errors import ApiError, invalid, refused
from keepsight.server.limits.callers import Caller, Callers
from keepsight.server.limits.intake import BodyIntake
from keepsight.server.limits.middleware import Visit
from keepsight.server.limits.threads import LARGE_BODY, LARGE_TEXT, RenderedMessages, Threads
from keepsight.server.limits.turns import ThreadsInTurn
from keepsight.server.media.bindings import Bindings
from keepsight.server.media.content import MessageReader
from keepsight.server.media.files import Files
from keepsight.server.media.origins import BodyOrigin, origin_of
from keepsight.server.media.parts import PixelLimits
from keepsight.server.media.uploads import contents_for
from keepsight.server.metrics import Metrics
from keepsight.server.served_model import ServedModel

if TYPE_CHECKING:
    from keepsight.vlm import VLM

T = TypeVar("T")
_KEY_NOTE = "prompt_cache_key: one process answers all, so there is nothing to route by it"


class Service:
    """One served model."""

    def __init__(self, vlm: VLM, together: Together, name: str, config: ServerConfig) -> None:
        self.vlm, self.config = vlm, config
        self.model = ServedModel(vlm, config.model_name or name)
        self.active = 0  # requests being served
        self.admitted = 0  # those whose body has arrived
        self.bodies = BodyIntake(self)
        self.threads = Threads(lambda: self.active)
        self.scheduler = SchedulerClient(together, self.threads)
        contents = contents_for(vlm.runtime.store)
        self.files = Files(
            config.bytes("files_budget"), config.seconds("file_ttl"), contents=contents
        )
        self.bindings = Bindings()
        self.owners = len({key.whose for key in config.keys})  # they share the budgets
        budget, ttl = config.bytes("responses_budget"), config.seconds("file_ttl")
        self.responses = ResponseStore(budget, ttl, self.owners, largest=config.bytes("max_body"))
        self.callers = Callers(config.keys, vlm.tenant)
        self.metrics = Metrics()
        self.metrics.watch(vlm.runtime.stats, together.stats)
        self.draining = False
        # These mostly wait for other servers, so they have separate threads.
        self._fetching = ThreadsInTurn(32, "keepsight-fetch")
        self._for_files = ThreadsInTurn(8, "keepsight-files")  # and these for a disk
        self.with_files = self._for_files.run

    # -- from bodies to requests -----------------------------------------------------------------

    async def rendering(
        self, body: schema.Rendering, visit: Visit
    ) -> tuple[list[Record], Record, str]:
        """Messages, template options and tenant of any request with a prompt."""
        caller, unused = visit.who(), visit.unused
        self.model.check_name(body.model)
        template = self.model.template_options(body, unused)
        if body.shown_tools:
            self.model.check_tools()
        for i, tool in enumerate(body.tools or ()):
            if isinstance(tool, schema.HostedTool):
                tool.name_unused(f"tools[{i}]", unused)
            elif tool.function.strict:
                why = "a hint: arguments are not constrained here"
                unused.add(f"tools[{i}].function.strict", why)
        self._check_names(body.messages, unused)
        tenant = caller.salted(body.cache_salt)
        messages = await self.gathered(body, body.messages, visit, tenant)
        messages.large |= characters(tools_of(body.shown_tools)) > LARGE_TEXT
        return messages, template, tenant

    async def gathered(
        self, body: PixelLimits, messages: list[schema.ChatMessage], visit: Visit, tenant: str
    ) -> RenderedMessages:
        """Messages for the library, with all their media. `tenant` is the salted one."""
        gatherer = MessageReader(
            self.config,
            self.files,
            visit.who().tenant,
            body.limits(),
            self.model.sizes,
            visit.unused,
            self.bindings,
            tenant,
        )

        def work() -> RenderedMessages:
            return gatherer.messages(messages, self.model.template)

        origin = origin_of(messages)
        if origin is BodyOrigin.ELSEWHERE:
            return await self._fetching.run(work)
        if origin is BodyOrigin.DISK:
            return await self.with_files(work)
        return await self.threads.run(work, large=visit.size > LARGE_BODY)

    def _check_names(self, messages: list[schema.ChatMessage], unused: Unused) -> None:
        """Report speaker names that the template does not show the model."""
        for number, message in enumerate(messages):
            role = "system" if message.role == "developer" else message.role
            named = message.name is not None and role != "tool"  # it has the id of its call
            if named and not self.model.places_name(role):
                why = "the chat template of this model has no place for the names of speakers"
                unused.add(f"{message.places(number)[0]}.name", why)

    async def ask(self, body: schema.ChatRequest, visit: Visit) -> AnswerRequest:
        """The checked request, or an error that names what is not supported."""
        self._refuse(body)
        _name_unused(body, visit.unused)
        chosen = sampling(body, self.config.max_tokens, self.model.vocabulary, self.model.ends)
        if (body.n or 1) > self.config.max_choices:
            raise invalid(
                "n", f"n is {body.n}, this server gives at most {self.config.max_choices}"
            )
        messages, template, tenant = await self.rendering(body, visit)
        use_tools = body.tool_choice != "none"
        continued = body.continues or body.add_generation_prompt is False
        notes = (_KEY_NOTE,) if body.prompt_cache_key is not None else ()
        return AnswerRequest(
            messages,
            tenant,
            chosen,
            template,
            tools_of(body.shown_tools) if use_tools else None,
            one_call=body.parallel_tool_calls is False,
            thinking=not continued and self.model.opens_thinking(template, tenant),
            thinks=self.model.thinks,
            choices=body.n or 1,
            notes=(*notes, *visit.unused.notes()),
            continued=continued,
            shows_tokens=bool(body.return_token_ids),
            account=visit.who().account,
        )

    def _refuse(self, body: schema.ChatRequest) -> None:
        for name, why in schema.UNSUPPORTED.items():
            value = getattr(body, name)
            if not is_empty(value) or (name == "web_search_options" and value is not None):
                raise refused(name, why)
        if body.response_format is not None and body.response_format.type != "text":
            raise refused("response_format", "only {'type': 'text'} can be honoured here")
        if body.modalities and body.modalities != ["text"]:
            raise refused("modalities", "answers are text; expected ['text']")
        if body.tool_choice == "required" or isinstance(body.tool_choice, schema.ChatToolChoice):
            raise refused("tool_choice", "a call cannot be forced here; expected 'auto' or 'none'")
        refuse_stream_options(body)

    # -- from requests to answers ----------------------------------------------------------------

    async def submit(self, ask: AnswerRequest) -> list[AnswerStream]:
        """Submit all choices of a request, or none of them."""
        answers: list[AnswerStream] = []
        try:
            for choice in range(ask.choices):
                answers.append(await self.scheduler.submit(ask, choice))
        except BaseException:
            for answer in answers:
                answer.cancel()
            raise
        return answers

    async def prepare(
        self,
        messages: list[Message],
        tenant: str | None = None,
        account: str | None = None,
        **options: object,
    ) -> Report:
        """Encode and prefill; return the report."""
        seconds = self.config.seconds("request_timeout")
        try:
            async with asyncio.timeout(seconds):
                return await self.scheduler.prepare(messages, tenant, account, **options)
        except TimeoutError:
            raise _too_long(seconds) from None

    async def merged(
        self, answers: list[AnswerStream], caller: Caller, visit: Visit
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """The deltas of all choices as they come, with the number of the choice."""
        arrived: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue()

        async def read(number: int, answer: AnswerStream) -> None:
            try:
                async with aclosing(answer.deltas()) as deltas:
                    async for delta in deltas:
                        arrived.put_nowait((number, delta))
                arrived.put_nowait((number, None))
            except Exception as error:
                arrived.put_nowait((number, error))

        readers = [asyncio.create_task(read(*pair)) for pair in enumerate(answers)]
        seconds = self.config.seconds("request_timeout")
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            left = len(answers)
            while left:
                # Not `wait_for`: Python 3.11's drops a cancellation that comes with a result.
                async with asyncio.timeout_at(deadline):
                    number, delta = await arrived.get()
                if isinstance(delta, BaseException):
                    raise delta
                if delta is None:
                    left -= 1
                    continue
                self._count(delta, caller, visit, number)
                yield number, delta
        except TimeoutError:
            raise _too_long(seconds) from None
        finally:
            for answer in answers:
                answer.cancel()
                caller.spend(answer.unpaid)  # of a client that hung up
            for reader in readers:
                reader.cancel()

    def _count(self, delta: Delta, caller: Caller, visit: Visit, number: int) -> None:
        if delta.end is None:
            return
        usage = delta.end.usage
        self.metrics.answered(usage, delta.end.report)
        # The choices share one prompt.
        caller.spend(usage.completion_tokens + (0 if number else usage.prompt_tokens))
        visit.answered(usage, delta.end.report, delta.end.reason)

    def close(self) -> None:
        """Let running answers finish, then release everything."""
        self.scheduler.close(self.config.seconds("drain"))
        for threads in (self._fetching, self._for_files):
            threads.close()


def _too_long(seconds: float) -> ApiError:
    return ApiError(504, f"the answer took longer than {seconds:.0f} s", code="timeout")


def refuse_stream_options(body: schema.ChatRequest | ResponsesRequest) -> None:
    """Refuse stream options without a stream."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only allowed when stream is true")


def _name_unused(body: schema.ChatRequest, unused: Unused) -> None:
    """Report the known fields of a body that have no effect here."""
    for name, why in schema.NAMED.items():
        if not is_empty(getattr(body, name)):
            unused.add(name, why)
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


def visit_of(request: Request) -> Visit:
    """The middleware's notes on a request."""
    visit: Visit = request.state.visit
    return visit
