"""What clients heard, and what it comes to: ratios within one repetition, and equal answers.

Every ratio says how many times faster Keepsight's server was: above 1 it was the faster one. Times
stand beside the ratios for those who want to know what they are ratios of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from keepsight.bench.workloads import Workload

KEEPSIGHT = "keepsight serve"
GOAL = 1.05  # what the server may cost, in times to the first token of the bare engine


@dataclass
class Heard:
    """One answer as a client hears it: milliseconds since the request was sent, and counts."""

    text: str = ""
    first: float = 0.0
    total: float = 0.0
    tokens: int = 0
    prompt: int = 0
    cached: int | None = None  # None where the server does not say

    @property
    def rate(self) -> float:
        """Tokens per second, after the first."""
        return 1e3 * max(0, self.tokens - 1) / max(self.total - self.first, 1e-3)

    def hears(self, text: str, now: float) -> None:
        """A piece of the answer; pieces without text are not heard."""
        if text:
            self.first = self.first or now
            self.text += text

    def counts(self, usage: dict[str, Any]) -> None:
        """What the server says about tokens."""
        self.tokens, self.prompt = usage["completion_tokens"], usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        self.cached = details.get("cached_tokens")


@dataclass
class Clients:
    """Answers to all clients, and how long they took together."""

    heard: list[Heard]
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second, of all answers."""
        return sum(one.tokens for one in self.heard) / self.seconds


@dataclass
class Round:
    """What one server answered in one repetition: by workload, and by round of clients."""

    alone: dict[str, list[Heard]]
    clients: dict[str, Clients]


Rounds = dict[str, list[Round]]  # by server, one for each repetition


def workload_told(workload: Workload, rounds: Rounds) -> dict[str, Any]:
    """Each step of a workload: medians of every server, and its ratios."""
    own = [round_.alone[workload.name] for round_ in rounds[KEEPSIGHT]]
    steps: list[dict[str, Any]] = []
    for number, step in enumerate(workload.steps):
        told: dict[str, Any] = {}
        for name, met in rounds.items():
            heard = [round_.alone[workload.name][number] for round_ in met]
            told[name] = _server(heard, [one[number] for one in own])
        steps.append({"name": step.name, "servers": told})
    later = {
        name: {
            ratio: _rounded(step["servers"][name][ratio] for step in steps[1:] or steps)
            for ratio in RATIOS
        }
        for name in rounds
    }
    return {"name": workload.name, "about": workload.about, "steps": steps, "later": later}


RATIOS = ("first_token_ratio", "total_ratio", "rate_ratio")


def _server(heard: list[Heard], own: list[Heard]) -> dict[str, Any]:
    """One server's answers to one request, beside Keepsight's of the same repetitions."""
    pairs = list(zip(heard, own, strict=False))
    return {
        "prompt_tokens": heard[0].prompt,
        "cached_tokens": heard[0].cached,
        "tokens": min(one.tokens for one in heard),
        "first_token_ms": _rounded((one.first for one in heard), 1),
        "total_ms": _rounded((one.total for one in heard), 1),
        "tokens_per_second": _rounded((one.rate for one in heard), 1),
        "first_token_ratio": _rounded(one.first / mine.first for one, mine in pairs),
        "total_ratio": _rounded(one.total / mine.total for one, mine in pairs),
        "rate_ratio": _rounded(mine.rate / max(one.rate, 1e-3) for one, mine in pairs),
    }


def _rounded(values: Any, digits: int = 3) -> float:
    return round(float(median(values)), digits)


def clients_told(rounds: Rounds) -> dict[str, Any]:
    """Clients who ask at the same moment: all their tokens per second, and the first of each."""
    told: dict[str, Any] = {}
    own = [round_.clients for round_ in rounds[KEEPSIGHT]]
    for name in own[0]:
        told[name] = {}
        for server, met in rounds.items():
            if name not in met[0].clients:
                continue
            pairs = [(a.clients[name], b[name]) for a, b in zip(met, own, strict=False)]
            told[name][server] = {
                "tokens_per_second": _rounded((one.rate for one, _ in pairs), 1),
                "rate_ratio": _rounded(mine.rate / one.rate for one, mine in pairs),
                "first_token_ms": _rounded((_first(one) for one, _ in pairs), 1),
                "first_token_ratio": _rounded(_first(one) / _first(mine) for one, mine in pairs),
            }
    return told


def _first(clients: Clients) -> float:
    """When the clients had their first text, on average."""
    return sum(one.first for one in clients.heard) / len(clients.heard)


# -- are the answers the same? -------------------------------------------------------------------


COUNTS = ("answers", "same_prompt", "equal", "tokens", "tokens_agree")


def identity(rounds: Rounds, tokenizer: Tokenizer) -> dict[str, Any]:
    """Every answer beside Keepsight's of the first repetition, as the tokenizer reads the texts.

    `same_prompt` counts those whose prompt had as many tokens, pictures and all.
    """
    own = rounds[KEEPSIGHT][0]
    told: dict[str, Any] = {}
    for server, met in rounds.items():
        counts: dict[str, Any] = dict.fromkeys(COUNTS, 0)
        for where, heard, mine in _answers(met, own):
            text, own_text = _whole(heard.text), _whole(mine.text)
            expected = tokenizer.encode(own_text, add_special_tokens=False).ids
            given = tokenizer.encode(text, add_special_tokens=False).ids
            counts["answers"] += 1
            counts["same_prompt"] += heard.prompt == mine.prompt
            counts["equal"] += text == own_text
            counts["tokens"] += len(expected)
            counts["tokens_agree"] += _agree(given, expected)
            if text != own_text and "first_difference" not in counts:
                told_ = {"where": where, "keepsight": own_text[:60], "server": text[:60]}
                counts["first_difference"] = told_
        told[server] = counts
    return told


def _answers(met: list[Round], own: Round) -> list[tuple[str, Heard, Heard]]:
    """Every answer of a server, where it was given, and Keepsight's to the same request."""
    pairs = []
    for round_ in met:
        alone = [(name, heard, own.alone[name]) for name, heard in round_.alone.items()]
        clients = [(n, c.heard, own.clients[n].heard) for n, c in round_.clients.items()]
        for name, heard, mine in alone + clients:
            for number, (one, other) in enumerate(zip(heard, mine, strict=True)):
                pairs.append((f"{name}, {number + 1}", one, other))
    return pairs


def _whole(text: str) -> str:
    """Without the half of a letter that an answer may end in; some servers keep that back."""
    return text.rstrip("\ufffd")


def _agree(given: list[int], expected: list[int]) -> int:
    """How many tokens are the same, up to the first that is not."""
    for number, (one, other) in enumerate(zip(given, expected, strict=False)):
        if one != other:
            return number
    return min(len(given), len(expected))


# -- what the server itself costs ----------------------------------------------------------------


def cost(workload: Workload, rounds: list[list[dict[str, Heard]]]) -> dict[str, Any]:
    """The server over the bare engine: turn 1 is cold, later turns are warm."""
    steps: list[dict[str, Any]] = []
    for number, step in enumerate(workload.steps):
        met = [round_[number] for round_ in rounds]
        steps.append(
            {
                "name": step.name,
                "server_ms": _rounded((one["server"].first for one in met), 1),
                "engine_ms": _rounded((one["engine"].first for one in met), 1),
                "added_ms": _rounded(one["server"].first - one["engine"].first for one in met),
                "first_token_ratio": _rounded(_over(met, lambda heard: heard.first)),
                "total_ratio": _rounded(_over(met, lambda heard: heard.total)),
            }
        )
    ratios = [float(step["first_token_ratio"]) for step in steps]
    return {
        "about": workload.about,
        "steps": steps,
        "cold": ratios[0],
        "warm": _rounded(ratios[1:] or ratios),
        "goal": GOAL,
        "equal": all(
            one["server"].text == one["engine"].text for round_ in rounds for one in round_
        ),
    }


def _over(met: list[dict[str, Heard]], what: Callable[[Heard], float]) -> list[float]:
    return [what(one["server"]) / what(one["engine"]) for one in met]
