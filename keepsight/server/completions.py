"""`/v1/completions` for raw prompts, as evaluation harnesses use it: `echo` with `logprobs` scores
a prompt's own tokens. `/tokenize` and `/detokenize` as in vLLM.

Prompts of one request that begin alike share what they have in common.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field

from keepsight.core.call import Call
from keepsight.core.order import Order
from keepsight.core.sequence import Sequence as Answer
from keepsight.core.structured.formats import Format
from keepsight.kinds import Record
from keepsight.models.families.pixels import embedding_of
from keepsight.prefix.prompt import Prompt
from keepsight.prompt.lengths import context_length
from keepsight.questions.score import Scored, score_tokens
from keepsight.report import GroupReport, Report, Usage
from keepsight.server.access import body_of, body_schema, visit_of
from keepsight.server.decisions import on_errand
from keepsight.server.errors import invalid
from keepsight.server.forms import text_form
from keepsight.server.sampling import Recorder, Sampling, sampling
from keepsight.server.schema import AnswerOptions, Body, ChatMessage, Rendering, Text, Tokens
from keepsight.server.streaming import unless_gone
from keepsight.system.words import check_text

if TYPE_CHECKING:
    from keepsight.server.service import Service

Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
MOST_PROMPTS = 1024
_USUAL = 16  # tokens, if a request does not say, as in OpenAI's API

# The tokens of a stretch, their log-probabilities, and the likeliest ones at each place.
Chances = list[tuple[int, float | None, dict[int, float] | None]]


class CompletionRequest(AnswerOptions):
    """The body of `/v1/completions`: one prompt or many, as texts or token ids."""

    IGNORED: ClassVar[dict[str, str]] = {"metadata": "answers are not stored"}
    REFUSED: ClassVar[dict[str, str]] = {
        "best_of": "of several answers all are given",
        "suffix": "answers only go on behind a prompt",
        "n": "one answer is given to each prompt; send the prompt several times",
        "prompt_logprobs": "send echo and logprobs",
        "response_format": "send structured_outputs, or a field such as guided_json",
    }

    prompt: Text | Ids | Annotated[list[Text] | list[Ids], Field(max_length=MOST_PROMPTS)]
    max_tokens: Tokens | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(Rendering):
    """The body of `/tokenize`: a text, or messages as `/v1/chat/completions` takes them."""

    messages: list[ChatMessage] | None = None  # type: ignore[assignment]
    prompt: Text | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


BODIES = (CompletionRequest, TokenizeRequest, DetokenizeRequest)
PATHS = ("/v1/completions",)


def routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["answers"])

    @router.post(
        "/v1/completions", operation_id="completions", openapi_extra=body_schema(CompletionRequest)
    )
    async def completions(
        body: Annotated[CompletionRequest, body_of(CompletionRequest)], request: Request
    ) -> Record:
        """What follows raw prompts, and how likely their own tokens are."""
        visit = visit_of(request)
        visit.asked(body)  # type: ignore[arg-type]
        service.model.check_name(body.model)
        if body.stream:
            raise invalid("stream", "completions are not streamed here; see /v1/chat/completions")
        tenant = visit.who().salted(body.cache_salt)
        work = _Completions(service, body, tenant, text_form(body, visit.unused))
        await unless_gone(request, service.threads.run(work.prepare, large=True), visit)
        made = await on_errand(service, request, visit, work.run)
        usage, report = work.usage(), Report()
        service.metrics.answered(usage, report)
        visit.who().spend(usage.total_tokens)
        visit.answered(usage, report, "stop")
        return made

    @router.post("/tokenize", operation_id="tokenize", openapi_extra=body_schema(TokenizeRequest))
    async def tokenize(
        body: Annotated[TokenizeRequest, body_of(TokenizeRequest)], request: Request
    ) -> Record:
        """The tokens of a text, or of messages with their pictures."""
        visit = visit_of(request)
        visit.unused.sift(body)
        service.model.check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "expected either a prompt or messages")
        tokenizer = service.model.tokenizer
        if body.prompt is not None:
            given = (body.prompt, body.add_special_tokens is not False, "prompt")
            found = await service.threads.run(lambda: _encoded(service, *given), large=True)
        else:
            messages, template, tenant = await service.rendering(body, visit)
            call = Call(tenant, template, {})

            def render() -> list[int]:
                order = Order(service.vlm.runtime, messages, call).rendered()
                return [int(one) for one in order.prompt.ids]

            found = await service.threads.wait(render)
        names = tokenizer.convert_ids_to_tokens(found) if body.return_token_strs else None
        longest = context_length(service.vlm.model)
        return {
            "count": len(found),
            "max_model_len": longest,
            "tokens": found,
            "token_strs": names,
        }

    @router.post(
        "/detokenize", operation_id="detokenize", openapi_extra=body_schema(DetokenizeRequest)
    )
    async def detokenize(
        body: Annotated[DetokenizeRequest, body_of(DetokenizeRequest)], request: Request
    ) -> Record:
        """The text of tokens."""
        visit_of(request).unused.sift(body)
        service.model.check_name(body.model)
        _check_ids(body.tokens, service, "tokens")

        def decode() -> str:
            text: str = service.model.tokenizer.decode(body.tokens)
            return text

        return {"prompt": await service.threads.run(decode, large=True)}

    return router


def _encoded(service: Service, text: str, special: bool, place: str) -> list[int]:
    """The tokens of a raw text: control tokens in it are such."""
    check_text(text, place)
    renderer = service.vlm.runtime.renderer
    if renderer is not None:
        renderer.lengths.check_rendered(text, renderer.tokenizer)
    ids: list[int] = service.model.tokenizer(text, add_special_tokens=special)["input_ids"]
    return ids


def _check_ids(ids: Sequence[int], service: Service, place: str) -> None:
    size = embedding_of(service.vlm.model).num_embeddings
    for number, one in enumerate(ids):
        if one >= size:
            where = f"{place}[{number}]"
            raise invalid(where, f"{where}: {one} is not a token id; expected 0 to {size - 1}")


class _Completions:
    """One request on its way to its choices."""

    def __init__(
        self, service: Service, body: CompletionRequest, tenant: str, form: Format | None
    ) -> None:
        self._service, self._body, self._tenant, self._form = service, body, tenant, form
        self._runtime = service.vlm.runtime
        self._texts: list[str] = []
        self._prompts: list[Prompt] = []
        self._scored: list[Scored | None] = []
        self._answers: list[Answer] = []
        self._recorders: list[Recorder | None] = []
        self._group: GroupReport | None = None
        self._most = _USUAL if body.max_tokens is None else body.max_tokens
        self._sampling = self._chosen() if self._most else Sampling({})

    def _chosen(self) -> Sampling:
        body = self._body
        changed = {"logprobs": body.logprobs is not None, "top_logprobs": body.logprobs or 0}
        changed["max_tokens"] = self._most
        service, model = self._service, self._service.model
        as_chat = body.model_copy(update=changed)
        return sampling(as_chat, service.config.max_tokens, model.vocabulary, model.ends)

    def prepare(self) -> None:
        """The tokens of all prompts; in a thread."""
        given = self._body.prompt
        several = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        placed = set(self._runtime.family.placeholders.values())
        for number, one in enumerate(several):
            place = f"prompt[{number}]" if len(several) > 1 else "prompt"
            ids = self._ids(one, place)
            if found := placed.intersection(ids):
                word = self._service.model.tokenizer.convert_ids_to_tokens(min(found))
                what = f"{place} has {word!r}, which stands for a picture; send it as a message"
                raise invalid(place, what)
            self._prompts.append(Prompt(np.array(ids, dtype=np.int64)))

    def _ids(self, given: object, place: str) -> list[int]:
        tokenizer = self._service.model.tokenizer
        if not isinstance(given, str):
            ids = [one for one in given if isinstance(one, int)] if isinstance(given, list) else []
            _check_ids(ids, self._service, place)
            self._texts.append(tokenizer.decode(ids))
            return ids
        special = self._body.add_special_tokens is not False
        ids = _encoded(self._service, given, special, place)
        if not ids:
            raise invalid(place, f"{place} is empty")
        self._texts.append(given)
        return ids

    def run(self, run: Callable[[Sequence[Answer]], None]) -> Record:
        """The response; in a thread that waits for the model."""
        body, runtime = self._body, self._runtime
        if body.echo and body.logprobs is not None:
            scored = [Scored(one, 1) if len(one) > 1 else None for one in self._prompts]
            several = [one for one in scored if one is not None]
            # What is written behind a prompt goes on from what is read of it now.
            ends = [Prompt(one.prompt.ids[:-1]) for one in several] if self._most else []
            if several:
                top = max(1, body.logprobs)
                self._group = score_tokens(runtime, several, self._tenant, ends, top, run)
            self._scored = scored
        if self._most:
            for number, prompt in enumerate(self._prompts):
                options, recorder = self._sampling.of(number)
                if self._form is not None:
                    options |= runtime.grammar({"response_format": self._form}, prompt)
                seq = Answer(prompt, self._tenant, options, tokenizer=runtime.tokenizer())
                self._answers.append(seq)
                self._recorders.append(recorder)
            run(self._answers)
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._service.model.name,
            "choices": [self._choice(number) for number in range(len(self._prompts))],
            "usage": self._usage_record(),
        }

    def usage(self) -> Usage:
        """Counts of all prompts."""
        total = sum(map(len, self._prompts))
        written = sum(len(seq.generated) for seq in self._answers)
        if self._group is not None:
            cached = self._group.cached_tokens
        else:
            cached = sum(seq.usage().cached_tokens for seq in self._answers)
        return Usage(total, written, max(0, min(cached, total)))

    def _usage_record(self) -> Record:
        usage = self.usage()
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }

    def _choice(self, number: int) -> Record:
        body, text, chances = self._body, "", Chances()
        reason = "length"
        if body.echo:
            text = self._texts[number]
            chances += self._of_prompt(number)
        if self._answers:
            seq = self._answers[number]
            last = seq.pieces[-1]
            text += "".join(piece.text for piece in seq.pieces)
            reason = last.finish_reason or "stop"
            recorder = self._recorders[number]
            for token in seq.generated if recorder is not None else ():
                taken, likeliest = recorder.take(token) if recorder is not None else (None, [])
                one = taken.logprob if taken is not None else None
                chances.append((token, one, {like.token: like.logprob for like in likeliest}))
        scored = self._logprobs(chances) if body.logprobs is not None else None
        return {"index": number, "text": text, "logprobs": scored, "finish_reason": reason}

    def _of_prompt(self, number: int) -> Chances:
        ids = self._prompts[number].ids.tolist()
        scored = self._scored[number] if self._scored else None
        made: Chances = [(ids[0], None, None)]
        if scored is not None:
            made += zip(ids[1:], scored.logprobs, scored.likeliest, strict=True)
        return made

    def _logprobs(self, chances: Chances) -> Record:
        """As in OpenAI's API: texts of tokens, and where they begin."""
        name = self._service.model.token_text
        texts = [name(token)[0] for token, _, _ in chances]
        offsets, at = list[int](), 0
        for text in texts:
            offsets.append(at)
            at += len(text)
        tops: list[dict[str, float] | None] = []
        for token, own, top in chances:
            if top is None or own is None:
                tops.append(None)
                continue
            kept = dict(list(top.items())[: self._body.logprobs or 0])
            made: dict[str, float] = {}
            for one, chance in (kept | {token: own}).items():  # several tokens may read alike
                text = name(one)[0]
                made[text] = max(chance, made.get(text, chance))
            tops.append(made)
        return {
            "tokens": texts,
            "token_logprobs": [own for _, own, _ in chances],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
