"""Guesses tokens from what was said before, so that one pass checks several.

Where any cut of a sequence gives the same bits, a pass over several tokens gives the logits of
single steps. The last tokens are looked up in this sequence and in earlier answers to the same
tenant; what followed them there is the guess. It goes into the pass behind the chosen token. As
long as sampling chooses the guessed token, the next logits are there already; the rest is removed
from the lane.

A longer pass takes more time. Times and luck are measured while answers run, and decide how many
tokens are guessed, possibly none.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from keepsight.prefix.prompt import Prompt

SHORTEST, LONGEST = 2, 32  # matching tokens: fewer are no match, more are not counted
GUESSES = (3, 7, 15)  # tokens guessed at once; plus the chosen one: row counts kernels like
MAX_PLACES = 8  # matches that are compared, the latest first
MAX_TENANTS = 64  # tenants whose answers are kept
MAX_TOKENS = 16_384  # tokens of earlier answers, per tenant
BEFORE = 256  # prompt tokens kept before an answer
NOTHING = -1  # marks places without a token to guess: pictures, and gaps between answers
FEW = 16  # answers shorter than this get no guesses
MARGIN = 1.05  # how much cheaper than steps a pass must be expected to be
LOSS = 0.02  # largest share of an answer's time that guesses may cost
_HOPES = (0.5, 0.7, 0.9)  # the luck of short, middle and long matches, before any was tried
_EMPTY = np.empty(0, np.int64)
_BREAK = np.full(1, NOTHING, np.int64)


@dataclass
class DraftCounts:
    """Tokens that were guessed, and how many of them were right."""

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0  # read in one pass because a grammar left no choice

    def add(self, other: DraftCounts) -> None:
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


class EarlierAnswers:
    """Earlier answers by tenant, each with the end of its prompt, in one array of ids."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, np.ndarray] = OrderedDict()

    def of(self, tenant: str) -> np.ndarray:
        """All answers of one tenant, the latest last."""
        return self._by_tenant.get(tenant, _EMPTY)

    def add(self, tenant: str, prompt: Prompt, answer: list[int]) -> None:
        parts = [self.of(tenant), words_of(prompt)[-BEFORE:], np.asarray(answer, np.int64), _BREAK]
        self._by_tenant[tenant] = np.concatenate(parts)[-MAX_TOKENS:]
        self._by_tenant.move_to_end(tenant)
        while len(self._by_tenant) > MAX_TENANTS:
            self._by_tenant.popitem(last=False)

    def clear(self, tenant: str | None = None) -> None:
        if tenant is None:
            self._by_tenant.clear()
        else:
            self._by_tenant.pop(tenant, None)


def words_of(prompt: Prompt) -> np.ndarray:
    """The ids of a prompt, NOTHING in place of pictures."""
    return np.where(prompt.types == 0, prompt.ids, NOTHING)


class PassCosts:
    """What passes over n tokens cost, and how often guesses are right."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}  # seconds of a pass, by number of tokens
        self._luck = list(_HOPES)

    def passed(self, tokens: int, seconds: float) -> None:
        """Record the time of a pass. First passes are slow, so the minimum counts most."""
        before = self._times.get(tokens, seconds)
        share = 0.5 if seconds < before else 0.1
        self._times[tokens] = before + share * (seconds - before)

    def guessed(self, agreeing: int, right: int, asked: int) -> None:
        """Record how many guesses were checked, and were right before the first wrong one."""
        kind, tried = _kind(agreeing), min(right + 1, asked)
        share = 1 - 0.8**tried
        self._luck[kind] += share * (right / tried - self._luck[kind])

    def declined(self, agreeing: int) -> None:
        """Record that no guess was tried; its estimate moves back towards the initial value."""
        kind = _kind(agreeing)
        self._luck[kind] += 0.01 * (_HOPES[kind] - self._luck[kind])

    def time(self, tokens: int) -> float:
        """Seconds of a pass, estimated if none was measured; 0 before the first step."""
        step = self._times.get(1, 0.0)
        return self._times.get(tokens, step * (1 + 0.02 * tokens))

    def best(self, agreeing: int, there: int) -> int:
        """How many of the guessable tokens to guess."""
        if not self.time(1) or not there:
            return 0
        luck = min(self._luck[_kind(agreeing)], 0.99)
        best, most = 0, MARGIN / self.time(1)
        for count in sorted({min(there, count) for count in GUESSES}):
            expected = (1 - luck ** (count + 1)) / (1 - luck)
            if (worth := expected / self.time(count + 1)) > most:
                best, most = count, worth
        return best


def _kind(agreeing: int) -> int:
    return 0 if agreeing < 4 else 1 if agreeing < 12 else 2


class Guesses:
    """The guesses of one sequence."""

    def __init__(
        self, prompt: Prompt, earlier: np.ndarray, costs: PassCosts, most: int, tally: DraftCounts
    ) -> None:
        self._words, self._earlier, self._costs = words_of(prompt), earlier, costs
        self._most, self._tally = most, tally
        self._agreeing = 0
        self._saved = self._spent = 0.0  # seconds

    def next(self, generated: list[int]) -> list[int]:
        """What may follow the last token."""
        left = self._most - len(generated) - 1  # the last token is chosen, but not computed
        self._agreeing = 0
        if self._most <= FEW or left < 1 or self._saved < -LOSS * self._spent:
            return []
        ids = self._all(generated)
        found = _latest(ids, ids), _latest(ids, self._earlier)
        self._agreeing, following = max(found, key=lambda one: one[0])
        count = self._costs.best(self._agreeing, min(left, len(following)))
        if self._agreeing and not count:
            self._costs.declined(self._agreeing)
        return [int(token) for token in following[:count]]

    def checked(self, asked: int, right: int, seconds: float) -> None:
        """Note a pass over one token and so many guesses, of which the first were right."""
        self._spent += seconds
        self._costs.passed(1 + asked, seconds)
        self._tally.drafted_tokens += asked
        self._tally.accepted_tokens += right
        if asked:
            self._costs.guessed(self._agreeing, right, asked)
            self._saved += self._costs.time(1) * (right + 1) - seconds

    def _all(self, generated: list[int]) -> np.ndarray:
        """The words of the prompt and the answer so far."""
        return np.concatenate([self._words, np.asarray(generated, np.int64)])


def _latest(ids: np.ndarray, where: np.ndarray) -> tuple[int, np.ndarray]:
    """The earlier place in `ids` that matches the most of its last tokens: how many match, and
    what follows. Places with tokens behind them are compared, the latest first."""
    best, following = 0, _EMPTY
    if min(len(ids), len(where) - 1) < SHORTEST:
        return best, following
    found = where[SHORTEST - 1 : -1] == ids[-1]
    for back in range(1, SHORTEST):
        found &= where[SHORTEST - 1 - back : -1 - back] == ids[-1 - back]
    for end in np.flatnonzero(found)[::-1][:MAX_PLACES] + SHORTEST - 1:
        count = min(len(ids), end + 1, LONGEST)
        same = (ids[-count:] == where[end + 1 - count : end + 1])[::-1]
        agreeing = count if same.all() else int(same.argmin())
        if agreeing > best:
            best, following = int(agreeing), where[end + 1 : end + 1 + GUESSES[-1]]
    gaps = np.flatnonzero(following == NOTHING)
    return best, following[: gaps[0]] if len(gaps) else following
