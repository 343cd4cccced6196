"""`/v1/completions` for raw prompts, as evaluation harnesses use it: `echo` with `logprobs` scores
a prompt's own tokens. `/tokenize` and `/detokenize` as in vLLM.

Prompts of one request that begin alike share what they have in common.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from fastapi import APIRouter

from keepsight.core.call import Call
from keepsight.core.order import Order
from keepsight.core.sequence import Sequence as Answer
from keepsight.kinds import Record
from keepsight.models.families.pixels import embedding_of
from keepsight.prefix.prompt import Prompt
from keepsight.prompt.lengths import context_length
from keepsight.questions.score import Scored, score_tokens
from keepsight.report import Report, Usage
from keepsight.server.access import Visit, posts
from keepsight.server.chat import counts
from keepsight.server.errors import invalid
from keepsight.server.forms import text_form
from keepsight.server.sampling import Recorder, Sampling, sampling
from keepsight.server.schema import CompletionRequest, DetokenizeRequest, TokenizeRequest
from keepsight.system.words import check_text

if TYPE_CHECKING:
    from keepsight.server.service import Service

_USUAL = 16  # tokens, if a request does not say, as in OpenAI's API

# The tokens of a stretch, their log-probabilities, and the likeliest ones at each place.
Chances = list[tuple[int, float | None, dict[int, float]]]


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["answers"])
    threads, tokenizer = service.threads, service.model.tokenizer

    @posts(router, "/v1/completions", CompletionRequest, "completions")
    async def completions(body: CompletionRequest, visit: Visit) -> object:
        """What follows raw prompts, and how likely their own tokens are."""
        if body.stream:
            raise invalid("stream", "completions are not streamed here; see /v1/chat/completions")
        work = _Completions(service, body, visit)
        await threads.run(work.prepare, large=True)
        made = await service.on_errand(visit, work.run)
        visit.who().spend(work.usage().total_tokens)
        visit.answered(work.usage(), Report(), "stop")
        return made

    @posts(router, "/tokenize", TokenizeRequest, "tokenize")
    async def tokenize(body: TokenizeRequest, visit: Visit) -> object:
        """The tokens of a text, or of messages with their pictures."""
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "expected either a prompt or messages")
        if (text := body.prompt) is not None:
            special = body.add_special_tokens is not False
            found = await threads.run(lambda: _encoded(service, text, special, "prompt"), True)
        else:
            messages, template, tenant = await service.rendering(body, visit)
            given = (service.vlm.runtime, messages, Call(tenant, template, {}))
            found = await threads.wait(lambda: Order(*given).rendered().prompt.ids.tolist())
        made: Record = {"count": len(found), "max_model_len": context_length(service.vlm.model)}
        made |= {"tokens": found, "token_strs": None}
        if body.return_token_strs:
            made["token_strs"] = await threads.run(lambda: tokenizer.convert_ids_to_tokens(found))
        return made

    @posts(router, "/detokenize", DetokenizeRequest, "detokenize")
    async def detokenize(body: DetokenizeRequest, visit: Visit) -> object:
        """The text of tokens."""

        def decode() -> Record:
            _check_ids(body.tokens, service, "tokens")
            return {"prompt": tokenizer.decode(body.tokens)}

        return await threads.run(decode, large=True)

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
    def __init__(self, service: Service, body: CompletionRequest, visit: Visit) -> None:
        self._service, self._body, self._visit = service, body, visit
        self._runtime, self._tenant = service.vlm.runtime, visit.who().salted(body.cache_salt)
        self._most = _USUAL if body.max_tokens is None else body.max_tokens
        self._sampling = Sampling({})
        self._texts: list[str] = []
        self._prompts: list[Prompt] = []
        self._scored: list[Scored | None] = []
        self._answers: list[tuple[Answer, Recorder | None]] = []
        self._cached = 0

    def prepare(self) -> None:
        """Read the prompts and options; in a thread."""
        body, model = self._body, self._service.model
        if self._most:
            changed = {"logprobs": body.logprobs is not None, "top_logprobs": body.logprobs or 0}
            as_chat = body.model_copy(update={**changed, "max_tokens": self._most})
            longest = self._service.config.max_tokens
            self._sampling = sampling(as_chat, longest, model.vocabulary, model.ends)
        given = body.prompt
        several = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        placed = set(self._runtime.family.placeholders.values())
        for number, one in enumerate(several):
            place = f"prompt[{number}]" if len(several) > 1 else "prompt"
            if isinstance(one, str):
                special = body.add_special_tokens is not False
                ids, text = _encoded(self._service, one, special, place), one
            else:
                ids = list(one)  # type: ignore[arg-type]
                _check_ids(ids, self._service, place)
                text = model.tokenizer.decode(ids)
            if not ids:
                raise invalid(place, f"{place} is empty")
            if found := placed.intersection(ids):
                word = model.tokenizer.convert_ids_to_tokens(min(found))
                what = f"{place} has {word!r}, which stands for a picture; send it as a message"
                raise invalid(place, what)
            self._texts.append(text)
            self._prompts.append(Prompt(np.array(ids, dtype=np.int64)))

    def run(self, run: Callable[[Sequence[Answer]], None]) -> Record:
        """The response; in a thread that waits for the model."""
        body, runtime = self._body, self._runtime
        form = text_form(body, self._visit.unused)
        if body.echo and body.logprobs is not None:
            self._scored = [Scored(one, 1) if len(one) > 1 else None for one in self._prompts]
            several = [one for one in self._scored if one is not None]
            # What is written behind a prompt goes on from what is read of it now.
            ends = [Prompt(one.prompt.ids[:-1]) for one in several] if self._most else []
            if several:
                top = max(1, body.logprobs)
                group = score_tokens(runtime, several, self._tenant, ends, top, run)
                self._cached = group.cached_tokens
        if self._most:
            for number, prompt in enumerate(self._prompts):
                options, recorder = self._sampling.of(number)
                if form is not None:
                    options |= runtime.grammar({"response_format": form}, prompt)
                seq = Answer(prompt, self._tenant, options, tokenizer=runtime.tokenizer())
                self._answers.append((seq, recorder))
            run([seq for seq, _ in self._answers])
            if all(one is None for one in self._scored):
                self._cached = sum(seq.usage().cached_tokens for seq, _ in self._answers)
        usage = self.usage()
        cached = {"cached_tokens": usage.cached_tokens}
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._service.model.name,
            "choices": [self._choice(number) for number in range(len(self._prompts))],
            "usage": counts(
                usage.prompt_tokens, usage.completion_tokens, prompt_tokens_details=cached
            ),
        }

    def usage(self) -> Usage:
        total = sum(map(len, self._prompts))
        written = sum(len(seq.generated) for seq, _ in self._answers)
        return Usage(total, written, max(0, min(self._cached, total)))

    def _choice(self, number: int) -> Record:
        body, text, reason, chances = self._body, "", "length", Chances()
        if body.echo:
            text, ids = self._texts[number], self._prompts[number].ids.tolist()
            scored = self._scored[number] if self._scored else None
            chances.append((ids[0], None, {}))
            if scored is not None:
                chances += zip(ids[1:], scored.logprobs, scored.likeliest, strict=True)
        if self._answers:
            seq, recorder = self._answers[number]
            text += "".join(piece.text for piece in seq.pieces)
            reason = seq.pieces[-1].finish_reason or "stop"
            for token in seq.generated if recorder is not None else ():
                own, *likeliest = recorder.take(token)  # type: ignore[union-attr]
                chances.append((*own, dict(likeliest)))
        logprobs = self._logprobs(chances) if body.logprobs is not None else None
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, chances: Chances) -> Record:
        """As in OpenAI's API: texts of tokens, and where they begin."""
        name = self._service.model.token_text
        texts = [name(token)[0] for token, _, _ in chances]
        tops: list[dict[str, float] | None] = []
        for token, own, top in chances:
            kept = dict(list(top.items())[: self._body.logprobs or 0])
            made: dict[str, float] = {}
            for one, chance in (kept | {token: own or 0.0}).items():  # several may read alike
                text = name(one)[0]
                made[text] = max(chance, made.get(text, chance))
            tops.append(None if own is None else made)
        return {
            "tokens": texts,
            "token_logprobs": [own for _, own, _ in chances],
            "top_logprobs": tops,
            "text_offset": [0, *itertools.accumulate(map(len, texts))][: len(texts)],
        }
