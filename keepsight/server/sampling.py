"""The sampling fields of a request as options of the library.

OpenAI's options that Transformers lacks (presence and frequency penalties, biases, log
probabilities) are logits processors of Transformers' kind, created per answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import BaseModel
from transformers import LogitsProcessor

from keepsight.kinds import Options, Record
from keepsight.server.errors import invalid, refused

ScoredToken = list[tuple[int, float]]  # a token and its log probability, then the likeliest ones


class Penalties(LogitsProcessor):
    """OpenAI's penalties on tokens already in the answer, and biases on any token."""

    def __init__(self, presence: float, frequency: float, bias: dict[int, float]) -> None:
        self._presence, self._frequency = presence, frequency
        self._biased = torch.tensor(list(bias), dtype=torch.int64)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32)
        self._start: int | None = None  # start of the answer; known at the first call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._start is None:
            self._start = input_ids.shape[1]
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, self._start :]):
            tokens, counts = ids.unique(return_counts=True)
            scores[row, tokens] -= self._presence + self._frequency * counts.to(scores.dtype)
        if len(self._bias):  # all at once: there may be one per token of the vocabulary
            biased = self._biased.to(scores.device)
            scores[:, biased] += self._bias.to(scores.device, scores.dtype)
        return scores


class Recorder(LogitsProcessor):
    """Records the probability of each token, before temperature and truncation; changes nothing.

    One row per step. The chosen token is known one step later, so a row keeps the whole
    distribution until it is taken.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._rows: list[torch.Tensor] = []
        self._taken = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._rows.append(scores[0].detach().float().log_softmax(-1).cpu())
        return scores

    def take(self, token: int) -> ScoredToken:
        row, self._rows[self._taken] = self._rows[self._taken], torch.empty(0)
        self._taken += 1
        likeliest = row.topk(min(self._top, len(row))).indices.tolist()
        # JSON has no infinity; OpenAI writes -9999 for nearly impossible tokens.
        return [(one, max(float(row[one]), -9999.0)) for one in (token, *likeliest)]


@dataclass(frozen=True)
class Sampling:
    options: Options
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None  # beside the token's own; None: no log probabilities

    def of(self, choice: int) -> tuple[Record, Recorder | None]:
        options = dict(self.options)
        if "seed" in options:
            options["seed"] = (options["seed"] + choice) % (1 << 63)
        processors: list[LogitsProcessor] = []
        if self.presence or self.frequency or self.bias:
            processors.append(Penalties(self.presence, self.frequency, dict(self.bias)))
        recorder = None if self.top_logprobs is None else Recorder(self.top_logprobs)
        if recorder is not None:
            processors.append(recorder)
        if processors:
            options["logits_processor"] = processors
        return options, recorder


_OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
_COLD = 1e-5  # a temperature below is greedy: logits divided by it leave the range of numbers
_AS_MUCH_AS_FITS = 10_000_000  # the library limits it to the rest of the model's context


def sampling(
    body: BaseModel, longest: int | None, vocabulary: int, ends: tuple[int, ...]
) -> Sampling:
    """The sampling options in a body of any API; missing fields count as not given. `ends` are
    the model's end tokens."""
    given = {name: value for name, value in body if value is not None}

    def got(*names: str) -> Record:
        return {name: given[name] for name in names if name in given}

    options: Options = got("repetition_penalty", "seed", "stop", "skip_special_tokens")
    temperature, cuts = given.get("temperature"), got("top_p", "top_k", "min_p")
    if cuts.get("top_k") == -1:
        cuts["top_k"] = 0  # off, as in Transformers
    if temperature is not None and temperature < _COLD:
        options["do_sample"] = False  # the most likely token survives every truncation
    elif temperature is not None:
        options |= {**cuts, "do_sample": True, "temperature": temperature}
    else:
        options |= cuts
        if any(cut != _OFF[name] for name, cut in cuts.items()):
            options["do_sample"] = True  # a neutral value needs no processor
    asked = got("max_completion_tokens", "max_tokens", "max_output_tokens")
    if (limit := _limit(asked, longest)) is not None:
        options["max_new_tokens"] = limit
    options |= _ends(given, limit if asked else None, vocabulary, ends)
    top = given.get("top_logprobs", 0)
    if top and not given.get("logprobs"):
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    bias = given.get("logit_bias", {})
    for token in bias:
        digits = token.isascii() and token.isdigit() and len(token) < 10
        if not (digits and int(token) < vocabulary):
            raise _no_token("logit_bias", token[:40], vocabulary)
    return Sampling(
        options,
        given.get("presence_penalty", 0.0),
        given.get("frequency_penalty", 0.0),
        tuple((int(token), weight) for token, weight in bias.items()),
        top if given.get("logprobs") else None,
    )


def _no_token(place: str, token: object, vocabulary: int) -> Exception:
    return invalid(place, f"{token!r} is not a token id; expected 0 to {vocabulary - 1}")


def _limit(asked: dict[str, int], longest: int | None) -> int | None:
    """The longest answer; the first of several fields counts."""
    for name, count in asked.items():
        if count == 0:
            raise invalid(name, f"{name} is 0; expected at least 1, or -1 for as much as fits")
        if longest is not None and count > longest:
            raise refused(name, f"{count} tokens; this server gives at most {longest}")
        return count if count > 0 else longest or _AS_MUCH_AS_FITS
    return longest


def _ends(given: Record, limit: int | None, vocabulary: int, ends: tuple[int, ...]) -> Options:
    """End conditions besides length and stop texts, and minimum lengths."""
    options: Options = {}
    more = given.get("stop_token_ids", [])
    for number, token in enumerate(more):
        if token >= vocabulary:
            raise _no_token(f"stop_token_ids[{number}]", token, vocabulary)
    own = () if given.get("ignore_eos") else ends
    if more or own != ends:
        # No token has the id after the last: such an answer ends at its length.
        options["eos_token_id"] = [*own, *more] or [vocabulary]
    if least := given.get("min_tokens"):
        if limit is not None and least > limit:
            raise invalid("min_tokens", f"min_tokens is {least}, the longest answer is {limit}")
        if own or more:
            options["min_new_tokens"] = least
    return options
