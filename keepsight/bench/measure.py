"""Measures all contestants on every prompt of a workload, repeatedly and in changing order.

Ratios are taken within one repetition, in which all contestants ran on the machine in the same
state; their median is reported. So they also hold on a shared machine. Each repetition begins with
an empty memory. Agreement of tokens is part of the result: with other tokens a time is worthless.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from keepsight.bench.contestants import Answer, Keepsight, Limit, StockContestant, agreement
from keepsight.bench.workloads import Step, Workload
from keepsight.kinds import Record
from keepsight.vlm import VLM

TOKENS = 8  # greedy tokens compared and timed behind each prompt
Say = Callable[[str], None]


@dataclass
class Round:
    """One prompt in one repetition, with all answers."""

    answers: dict[str, Answer]
    new_tokens: int
    new_images: int
    shared: int


@dataclass
class Bench:
    """One model and its contestants."""

    vlm: VLM
    keepsight: Keepsight = field(init=False)
    stock: StockContestant = field(init=False)
    limit: Limit = field(init=False)

    def __post_init__(self) -> None:
        self.keepsight = Keepsight(self.vlm)
        self.stock = StockContestant(self.vlm.model, self.vlm.runtime.needed_processor())
        self.limit = Limit(self.vlm)


def run_workload(bench: Bench, workload: Workload, say: Say) -> Record:
    """All repetitions of one workload, summarised."""
    repetitions = workload.repetitions
    rounds: list[list[Round]] = [[] for _ in workload.steps]
    for repetition in range(repetitions):
        say(f"{workload.name}: repetition {repetition + 1} of {repetitions}")
        bench.vlm.clear()
        bench.limit.reset()
        for i, step in enumerate(workload.steps):
            key = f"{workload.name}/{step.name}"
            rounds[i].append(_meet(bench, step, key, repetition + i))
    stats = bench.vlm.stats()
    steps = [_sum_up(s.name, met) for s, met in zip(workload.steps, rounds, strict=True)]
    say(f"{workload.name}: warm against cold, bit for bit")
    verified = bench.vlm.verify(workload.steps[-1].messages)
    return {
        "name": workload.name,
        "about": workload.about,
        "repetitions": repetitions,
        "steps": steps,
        "warm_equals_cold": verified.equal,
        "bytes": {
            "prefix": stats["prefix"]["bytes"],
            "features": stats["features"]["bytes"],
            "lanes": stats["prefix"]["lane_bytes"],
        },
    }


@contextmanager
def quiet_heap() -> Iterator[None]:
    """Exclude all existing objects from garbage collection, so that collecting before each answer
    is cheap and no collection interrupts one because of earlier objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _meet(bench: Bench, step: Step, key: str, shift: int) -> Round:
    bench.limit.prepare(key, step.messages)
    order: list[Keepsight | StockContestant | Limit] = [bench.keepsight, bench.stock, bench.limit]
    order = order[shift % 3 :] + order[: shift % 3]
    answers = {}
    for contestant in order:
        gc.collect()
        answers[contestant.name] = contestant.answer(step.messages, TOKENS)
    return Round(answers, bench.limit.new_tokens, bench.limit.new_images, bench.limit.shared)


def _sum_up(name: str, met: list[Round]) -> Record:
    """One step over all repetitions."""
    mine = [r.answers["keepsight"] for r in met]
    usage = mine[0].usage
    if usage is None:
        raise RuntimeError("an answer came without its usage")
    result: Record = {
        "name": name,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "new_tokens": met[0].new_tokens,
        "rerun_tokens": max(0, met[0].shared - usage.cached_tokens),
        "images": usage.images,
        "new_images": met[0].new_images,
        "encoded": usage.images_encoded,
        "guard": guard(met),
    }
    stock = [r.answers["stock"] for r in met]
    return {
        **result,
        **first_tokens(met, "keepsight", "stock", "limit"),
        "stock_over_keepsight": ratio(met, "stock", "keepsight"),
        "keepsight_over_limit": ratio(met, "keepsight", "limit"),
        "decode_ms": _per_token(mine),
        "stock_decode_ms": _per_token(stock),
        "stages": _stages(mine),
        "stock_processor_ms": _stages(stock)["processor"],
    }


def first_tokens(met: list[Round], *names: str) -> Record:
    """The median time to the first token of each contestant, and its samples."""
    result: Record = {}
    for who in names:
        samples = [r.answers[who].first for r in met]
        result[f"{who}_ms"] = round(median(samples), 2)
        result[f"{who}_samples"] = [round(sample, 2) for sample in samples]
    return result


def guard(met: list[Round]) -> str:
    """The worst agreement with stock over all repetitions. Keepsight must also repeat its answer,
    and the limit must agree as far as it goes."""
    mine = [r.answers["keepsight"].tokens for r in met]
    if any(tokens != mine[0] for tokens in mine):
        return "DIFFERENT from one repetition to the next"
    found = {agreement(r.answers["keepsight"].tokens, r.answers["stock"]) for r in met}
    for r in met:
        if limit := r.answers.get("limit"):
            # A limit that computed something else is no limit.
            words = agreement(limit.tokens, r.answers["stock"], len(limit.tokens))
            found.add(f"DIFFERENT limit: {words}" if words.startswith("DIFFERENT") else words)
    return max(found, key=lambda words: (words.startswith("DIFFERENT"), words != "equal"))


def ratio(met: list[Round], above: str, below: str) -> float | None:
    """The median of the ratios within each repetition; None if there is nothing to divide by."""
    pairs = [(r.answers[above].first, r.answers[below].first) for r in met]
    if any(b < 0.05 for _, b in pairs):
        return None
    return round(median(a / b for a, b in pairs), 3)


def _per_token(answers: list[Answer]) -> float:
    return round(median((a.total - a.first) / max(1, len(a.tokens) - 1) for a in answers), 2)


def _stages(answers: list[Answer]) -> dict[str, float]:
    """The median of each stage; `decode` is per answer, `first_token` the whole time to it."""
    names = dict.fromkeys(name for answer in answers for name in answer.stages)
    return {name: round(median(a.stages.get(name, 0.0) for a in answers), 2) for name in names}
