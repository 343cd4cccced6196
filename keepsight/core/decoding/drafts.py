"""Guesses tokens from earlier text and checks several in one pass.

If any cut of a sequence gives the same bits, a pass over several tokens gives the logits of single
steps. So the last tokens are looked up in this sequence and in earlier answers to the same tenant;
the tokens that followed there are the guess. They go into the pass behind the chosen token.
Sampling then proceeds token by token. As long as it chooses the guessed token, the next logits are
already there. Wrong guesses are removed from the lane.

A pass over several tokens may cost more than a step. `PassCosts` measures both, and how often
guesses are right, while answers run. From that it decides how many tokens to guess, possibly none.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from keepsight.core.rendering.conversations import EarlierPrompts
from keepsight.prefix.prompt import Prompt

SHORTEST = 2  # tokens that must agree before the next ones are guessed
LONGEST = 32  # matching tokens are counted up to here
GUESSES = (3, 7, 15)  # tokens guessed at once; plus the chosen one: row counts kernels like
MAX_PLACES = 8  # matches that are compared, the latest first
MAX_TENANTS = 64  # tenants whose answers are kept
MAX_TOKENS = 16_384  # tokens of earlier answers, per tenant
BEFORE = 256  # prompt tokens kept before an answer
NOTHING = -1  # marks places without a token to guess: pictures, and gaps between answers
FEW = 16  # answers shorter than this get no guesses
MARGIN = 1.05  # how much cheaper than steps a pass must be expected to be
LOSS = 0.02  # largest share of an answer's time that guesses may cost


class Rewindable(Protocol):
    """What guessing needs of a sequence that is decoded."""

    @property
    def length(self) -> int:
        """Tokens that went through the model."""

    def forward(self, tokens: list[int]) -> torch.Tensor:
        """Run tokens through the model; return the logits behind each, one row each."""

    def rewind(self, length: int) -> None:
        """Remove tokens from the end."""


@dataclass
class DraftCounts:
    """How many tokens were guessed, and how many of the guesses were right."""

    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, other: DraftCounts) -> None:
        """Add the counts of another tally."""
        self.drafted_tokens += other.drafted_tokens
        self.accepted_tokens += other.accepted_tokens


class EarlierAnswers:
    """Earlier answers by tenant, each with the end of its prompt, in one array of ids; and the
    latest prompts as texts."""

    def __init__(self) -> None:
        self.prompts = EarlierPrompts()
        self._by_tenant: OrderedDict[str, np.ndarray] = OrderedDict()

    def of(self, tenant: str) -> np.ndarray:
        """All answers of one tenant, the latest last."""
        return self._by_tenant.get(tenant, _EMPTY)

    def add(self, tenant: str, prompt: Prompt, answer: list[int]) -> None:
        """Add an answer; drop the oldest to make room."""
        parts = [self.of(tenant), words_of(prompt)[-BEFORE:], np.asarray(answer, np.int64), _BREAK]
        self._by_tenant[tenant] = np.concatenate(parts)[-MAX_TOKENS:]
        self._by_tenant.move_to_end(tenant)
        while len(self._by_tenant) > MAX_TENANTS:
            self._by_tenant.popitem(last=False)

    def clear(self, tenant: str | None = None) -> None:
        """Forget the answers and prompts of one tenant, or of all."""
        self.prompts.clear(tenant)
        if tenant is None:
            self._by_tenant.clear()
        else:
            self._by_tenant.pop(tenant, None)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in list(self._by_tenant.values()))


def words_of(prompt: Prompt) -> np.ndarray:
    """The ids of a prompt, NOTHING in place of pictures."""
    return np.where(prompt.types == 0, prompt.ids, NOTHING)


_EMPTY = np.empty(0, np.int64)
_BREAK = np.full(1, NOTHING, np.int64)


class PassCosts:
    """What passes over n tokens cost, and how often guesses are right."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}  # seconds of a pass, by number of tokens
        self._truth: dict[int, float] = {}  # share of right guesses, by number of matching tokens

    def passed(self, tokens: int, seconds: float) -> None:
        """Record the time of a pass. First passes are slow, so the minimum counts most."""
        before = self._times.get(tokens, seconds)
        share = 0.5 if seconds < before else 0.1
        self._times[tokens] = before + share * (seconds - before)

    def guessed(self, agreeing: int, right: int, asked: int) -> None:
        """Record how many guesses were checked, and were right before the first wrong one."""
        kind = _kind(agreeing)
        tried = min(right + 1, asked)
        share = 1 - 0.8**tried
        self._truth[kind] = self.truth(agreeing) + share * (right / tried - self.truth(agreeing))

    def declined(self, agreeing: int) -> None:
        """Record that no guess was tried; its estimate moves back towards the initial value."""
        kind = _kind(agreeing)
        self._truth[kind] = self.truth(agreeing) + 0.01 * (_HOPES[kind] - self.truth(agreeing))

    def truth(self, agreeing: int) -> float:
        """The share of right guesses where this many tokens matched."""
        kind = _kind(agreeing)
        return self._truth.get(kind, _HOPES[kind])

    def step(self) -> float | None:
        """Seconds of a step, once one was measured."""
        return self._times.get(1)

    def time(self, tokens: int) -> float:
        """Seconds of a pass, estimated if none was measured."""
        step = self._times.get(1, 0.0)
        return self._times.get(tokens, step * (1 + 0.02 * tokens))

    def best(self, agreeing: int, there: int) -> int:
        """How many of the guessable tokens to guess."""
        if self.step() is None or not there:
            return 0
        truth = min(self.truth(agreeing), 0.99)
        best, most = 0, MARGIN / self.time(1)
        for count in sorted({min(there, count) for count in GUESSES}):
            expected = (1 - truth ** (count + 1)) / (1 - truth)
            if (worth := expected / self.time(count + 1)) > most:
                best, most = count, worth
        return best


_HOPES = (0.5, 0.7, 0.9)  # before any guess was tried


def _kind(agreeing: int) -> int:
    return 0 if agreeing < 4 else 1 if agreeing < 12 else 2


@dataclass
class _Pending:
    """A pass with guesses, of which `used` were right so far."""

    tokens: list[int]
    rows: torch.Tensor
    start: int  # length of the lane before the pass
    agreeing: int
    seconds: float
    used: int = 0

    @property
    def next(self) -> int | None:
        """The next guess."""
        return self.tokens[self.used + 1] if self.used + 1 < len(self.tokens) else None


@dataclass(eq=False)
class Drafts:
    """The guesses of one sequence."""

    lane: Rewindable
    ids: np.ndarray  # its prompt, NOTHING in place of pictures
    earlier: np.ndarray
    costs: PassCosts
    most: int  # tokens that may follow the prompt
    tenant: str
    tally: DraftCounts
    _count: int = 0  # tokens chosen after the prompt
    _pending: _Pending | None = None
    _balance: float = 0.0  # seconds that guesses have saved, or lost
    _spent: float = 0.0
    _clock: Callable[[], float] = field(default=time.perf_counter)

    def __post_init__(self) -> None:
        self._all = np.concatenate([self.ids, np.empty(min(self.most, 512), np.int64)])

    def step(self, token: int) -> torch.Tensor:
        """Return the logits after one more token, a row."""
        self._append(token)
        pending = self._pending
        if pending is not None and pending.next == token and self._stands(pending):
            pending.used += 1
            self.tally.accepted_tokens += 1
            return pending.rows[pending.used : pending.used + 1]
        self.settle()
        return self._forward(token)

    def note(self, token: int) -> None:
        """Note a token that went through the model beside other sequences."""
        self._append(token)
        self.settle()

    def settle(self) -> None:
        """Remove guesses that were not chosen."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        asked = len(pending.tokens) - 1
        if asked:
            self.costs.guessed(pending.agreeing, pending.used, asked)
            step = self.costs.step() or 0.0
            self._balance += step * (pending.used + 1) - pending.seconds
            if self._stands(pending) and pending.used < asked:
                self.lane.rewind(pending.start + 1 + pending.used)

    def _stands(self, pending: _Pending) -> bool:
        """Whether the lane is still as that pass left it."""
        return self.lane.length == pending.start + len(pending.tokens)

    def _forward(self, token: int) -> torch.Tensor:
        agreeing, guess = self._guess()
        start = self.lane.length
        begun = self._clock()
        rows = self.lane.forward([token, *guess])
        seconds = self._clock() - begun
        self._spent += seconds
        self.tally.drafted_tokens += len(guess)
        self.costs.passed(1 + len(guess), seconds)
        self._pending = _Pending([token, *guess], rows, start, agreeing, seconds)
        return rows[:1]

    def _append(self, token: int) -> None:
        end = len(self.ids) + self._count
        if end == len(self._all):
            self._all = np.concatenate([self._all, np.empty(end // 2 + 64, np.int64)])
        self._all[end] = token
        self._count += 1

    def _guess(self) -> tuple[int, list[int]]:
        """How many of the last tokens occurred before, and what may follow now."""
        left = self.most - self._count - 1  # the last token is chosen, but not through the model
        if self.most <= FEW or left < 1 or self._balance < -LOSS * self._spent:
            return 0, []
        ids = self._all[: len(self.ids) + self._count]
        agreeing, following = max(
            _latest(ids, ids), _latest(ids, self.earlier), key=lambda found: found[0]
        )
        count = self.costs.best(agreeing, min(left, len(following)))
        if agreeing and not count:
            self.costs.declined(agreeing)
        return agreeing, following[:count].tolist()


def _latest(ids: np.ndarray, where: np.ndarray) -> tuple[int, np.ndarray]:
    """The earlier place in `ids` that matches the most of its last tokens: how many match, and
    what follows."""
    best, following = 0, _EMPTY
    for end in _places(ids, where):
        agreeing = _agreeing(ids, where[: end + 1])
        if agreeing > best:
            best, following = agreeing, where[end + 1 : end + 1 + GUESSES[-1]]
    gaps = np.flatnonzero(following == NOTHING)
    return best, following[: gaps[0]] if len(gaps) else following


def _places(ids: np.ndarray, where: np.ndarray) -> Iterator[int]:
    """Earlier places of the last tokens of `ids` with tokens behind them, the latest first."""
    if len(ids) < SHORTEST or len(where) <= SHORTEST:
        return
    found = where[SHORTEST - 1 : -1] == ids[-1]
    for back in range(1, SHORTEST):
        found &= where[SHORTEST - 1 - back : -1 - back] == ids[-1 - back]
    for place in np.flatnonzero(found)[::-1][:MAX_PLACES]:
        yield int(place) + SHORTEST - 1


def _agreeing(ids: np.ndarray, where: np.ndarray) -> int:
    count = min(len(ids), len(where), LONGEST)
    same = (ids[-count:] == where[-count:])[::-1]
    return count if same.all() else int(same.argmin())
