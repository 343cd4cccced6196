"""How likely texts are behind a prompt: log-probabilities of their tokens, nothing is written.

The prompt is read once. Continuations that begin alike share what they have in common, and a
continuation of one token costs no pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from keepsight.core.call import Call
from keepsight.core.decoding.sampling import check_length
from keepsight.core.order import Order
from keepsight.core.runtime import Runtime
from keepsight.errors import InputError, UnsupportedInput
from keepsight.kinds import Message
from keepsight.models.families.pixels import embedding_of
from keepsight.prefix.prompt import Prompt
from keepsight.questions.group import (
    Named,
    Reading,
    Run,
    agreement,
    in_order,
    path_of,
    read_together,
)
from keepsight.report import GroupReport, Usage

Continuation = str | Sequence[int]


@dataclass(frozen=True)
class Score:
    """One continuation, with the log-probability of each of its tokens."""

    text: str
    tokens: list[int]
    logprobs: list[float]

    @property
    def logprob(self) -> float:
        """The log-probability of the whole continuation."""
        return sum(self.logprobs)

    def __float__(self) -> float:
        return self.logprob


class Scores(list[Score]):
    """The scores of all continuations of one prompt, with what they cost."""

    def __init__(self, scores: Sequence[Score], report: GroupReport) -> None:
        super().__init__(scores)
        self.report = report

    @property
    def usage(self) -> Usage:
        """Counts of the whole call."""
        return self.report.usage

    @property
    def logprobs(self) -> list[float]:
        """The log-probability of each continuation."""
        return [one.logprob for one in self]

    @property
    def best(self) -> Score:
        """The likeliest continuation."""
        return max(self, key=float)


@dataclass
class Scored:
    """One prompt of which tokens are scored, from `first` on. Written by `score_tokens`."""

    prompt: Prompt
    first: int
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[dict[int, float]] = field(default_factory=list)  # for each token, if asked for
    greedy: list[bool] = field(default_factory=list)  # whether a token is the likeliest


def score(
    runtime: Runtime,
    conversations: Sequence[list[Message]],
    continuations: Sequence[Sequence[Continuation]],
    call: Call,
    run: Run | None = None,
) -> list[Scores]:
    """The scores of each conversation's continuations; all prompts are read together."""
    runtime.require_answers()
    if not conversations:
        raise InputError("messages: there is no conversation")
    with runtime.lock:
        runtime.refresh(call.tenant)
    rows, prompts = list[list[Scored]](), list[Prompt]()
    media = Named(runtime, call.tenant)
    with runtime.lock.beside():
        for number, (messages, given) in enumerate(zip(conversations, continuations, strict=True)):
            prompt = Order(runtime, media.messages(messages), call).rendered().prompt
            prompts.append(prompt)
            where = f"continuations[{number}]" if len(conversations) > 1 else "continuations"
            several = enumerate(_several(given, where))
            ids = [_ids(runtime, one, f"{where}[{i}]") for i, one in several]
            rows.append([_behind(prompt, one) for one in ids])
    alone = prompts if len(prompts) == 1 else []
    report = score_tokens(runtime, [one for row in rows for one in row], call.tenant, alone, 0, run)
    tokenizer = runtime.tokenizer()
    made = []
    for row, given in zip(rows, continuations, strict=True):
        scores = []
        for scored, one in zip(row, given, strict=True):
            tokens = scored.prompt.ids[scored.first :].tolist()
            text = one if isinstance(one, str) else str(tokenizer.decode(tokens))
            scores.append(Score(text, tokens, scored.logprobs))
        made.append(Scores(scores, report))
    return made


def score_tokens(
    runtime: Runtime,
    scored: Sequence[Scored],
    tenant: str,
    beginnings: Sequence[Prompt] = (),
    likeliest: int = 0,
    run: Run | None = None,
) -> GroupReport:
    """Find the log-probabilities of tokens in prompts, given all before them; and with `likeliest`
    those of so many others at each place."""
    runtime.require_words()
    if runtime.family.reuse == "whole prompt" and any(
        one.first < len(one.prompt) - 1 for one in scored
    ):
        raise UnsupportedInput(
            "in this model every token of a prompt sees all others, so only one token behind a "
            "prompt can be scored"
        )
    for one in scored:
        check_length(runtime.model, len(one.prompt))
    # What is read ends before the last token: nothing behind that one is asked for.
    read = [_cut(one.prompt) for one in scored]
    owners = _owners(scored, read)
    rows: dict[tuple[int, int], _Row] = {}
    readings = []
    for number, one in enumerate(scored):
        own = owners[number]
        for place, owner in enumerate(own, one.first - 1):
            row = rows.setdefault((owner, place), _Row(likeliest))
            row.tokens.append(int(one.prompt.ids[place + 1]))
        if (begin := own.index(number) if number in own else None) is not None:
            runs = [(one.first - 1 + begin, len(read[number]))]
            readings.append(Reading(read[number], runs, partial(_take, rows, number)))
    report = read_together(runtime, readings, beginnings, tenant, run)
    report.prompt_tokens = sum(map(len, read))  # also of those that had nothing to read
    for number, one in enumerate(scored):
        found = [rows[owner, place] for place, owner in enumerate(owners[number], one.first - 1)]
        tokens = one.prompt.ids[one.first :].tolist()
        one.logprobs = [row.found[token] for row, token in zip(found, tokens, strict=True)]
        one.greedy = [row.best == token for row, token in zip(found, tokens, strict=True)]
        one.likeliest = [row.likeliest for row in found]
    return report


@dataclass
class _Row:
    """What is asked of the logits at one place."""

    most: int
    tokens: list[int] = field(default_factory=list)
    found: dict[int, float] = field(default_factory=dict)
    likeliest: dict[int, float] = field(default_factory=dict)
    best: int = -1

    def take(self, logits: torch.Tensor) -> None:
        chances = logits.float().log_softmax(-1)
        wanted = torch.tensor(self.tokens, device=chances.device)
        self.found = dict(zip(self.tokens, chances[wanted].tolist(), strict=True))
        top = chances.topk(min(max(1, self.most), len(chances)))
        self.best = int(top.indices[0])
        if self.most:
            self.likeliest = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def _take(rows: dict[tuple[int, int], _Row], number: int, place: int, logits: torch.Tensor) -> None:
    for at, one in enumerate(logits, place):
        if (row := rows.get((number, at))) is not None:
            row.take(one)


def _owners(scored: Sequence[Scored], read: Sequence[Prompt]) -> list[list[int]]:
    """For each place of each prompt behind which logits are wanted, the prompt that asks for them:
    the first of those that agree up to there."""
    numbers: dict[str, int] = {}
    paths = [path_of(one, numbers) for one in read]
    owners: list[list[int]] = [[] for _ in read]
    before = -1
    for number in in_order(paths):
        one, wanted = scored[number], range(scored[number].first - 1, len(read[number]))
        owners[number] = [number] * len(wanted)
        if before >= 0 and scored[before].first == one.first:
            shared = max(0, agreement(paths[before], paths[number]) - wanted.start)
            owners[number][:shared] = owners[before][:shared]
        before = number
    return owners


def _cut(prompt: Prompt) -> Prompt:
    return replace(prompt, ids=prompt.ids[:-1], text=None)


def _behind(prompt: Prompt, ids: np.ndarray) -> Scored:
    whole = np.concatenate([prompt.ids, ids])
    return Scored(Prompt(whole, prompt.media, prompt.ranges), len(prompt))


def _several(given: Sequence[Continuation], where: str) -> Sequence[Continuation]:
    if isinstance(given, str) or not isinstance(given, list | tuple) or not given:
        raise InputError(f"{where}: expected a list of at least one text")
    return given


def _ids(runtime: Runtime, given: Continuation, where: str) -> np.ndarray:
    """The tokens of a continuation; an error that names it if there are none."""
    if isinstance(given, str):
        renderer = runtime.renderer
        if renderer is None:
            raise InputError("this model was wrapped without a processor: give token ids")
        try:
            ids = renderer.continuation(given)
        except InputError as error:
            raise type(error)(f"{where}: {error}") from error
        if not len(ids):
            raise InputError(f"{where} is {given!r}: the tokenizer makes no token of it")
        unknown = getattr(renderer.tokenizer, "unk_token_id", None)
        if unknown is not None and unknown in ids:
            raise InputError(f"{where}: the tokenizer does not know all of {given[:100]!r}")
        return ids
    size = embedding_of(runtime.model).num_embeddings
    several = isinstance(given, Sequence) and not isinstance(given, bytes | bytearray)
    whole = several and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < size for one in given
    )
    if not whole or not len(given):
        raise InputError(f"{where}: expected a text, or token ids from 0 to {size - 1}")
    if placed := set(runtime.family.placeholders.values()) & set(given):
        raise InputError(f"{where} has the token {min(placed)}, which stands for an image")
    return np.array(given, dtype=np.int64)


def in_lists(
    messages: object, continuations: object
) -> tuple[list[list[Message]], list[Sequence[Continuation]], bool]:
    """The conversations and their continuations of a call; and whether it was for one."""
    if isinstance(messages, dict):
        messages = [messages]
    if not isinstance(messages, list | tuple) or not isinstance(continuations, list | tuple):
        raise InputError("score takes messages, and a list of continuations")
    if not messages or not all(isinstance(one, list) for one in messages):
        return [list(messages)], [continuations], True
    each = all(isinstance(one, list | tuple) for one in continuations)
    ids = each and all(isinstance(part, int) for one in continuations for part in one)
    if not each or ids:
        return list(messages), [continuations] * len(messages), False
    if len(continuations) != len(messages):
        raise InputError(
            f"continuations has {len(continuations)} lists for {len(messages)} conversations"
        )
    return list(messages), list(continuations), False
