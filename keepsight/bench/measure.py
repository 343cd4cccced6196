"""Measures all contestants on every prompt of a workload, and first requests on an empty memory.

Each repetition begins with an empty memory. Agreement of tokens is part of the result: with other
tokens a time is worthless.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from keepsight.bench.contestants import Answer, Keepsight, Limit, Stock, agreement
from keepsight.bench.frame import interleaved, middle, now, ratio, say
from keepsight.bench.options import Scale
from keepsight.bench.workloads import Pictures, Step, Workload, user, words
from keepsight.kinds import Record
from keepsight.media.sources import decode_bytes
from keepsight.system import digests
from keepsight.vlm import VLM

TOKENS = 8  # greedy tokens compared and timed behind each prompt
_COLD = 9  # differences of three per cent are small; they need more repetitions


@dataclass
class Round:
    """One prompt in one repetition, with all answers and what was new."""

    answers: dict[str, Answer]
    new_tokens: int = 0
    new_images: int = 0
    shared: int = 0

    def first(self, above: str, below: str) -> tuple[float, float]:
        """Milliseconds to the first token of two contestants."""
        return self.answers[above].first, self.answers[below].first


class Bench:
    """One model and its contestants."""

    def __init__(self, vlm: VLM) -> None:
        self.vlm = vlm
        self.keepsight, self.stock, self.limit = Keepsight(vlm), Stock(vlm), Limit(vlm)

    def run(self, workload: Workload) -> Record:
        """All repetitions of one workload, summarised."""
        rounds = []
        for number in range(workload.repetitions):
            say(f"{workload.name}: repetition {number + 1} of {workload.repetitions}")
            self.vlm.clear()
            self.limit.reset()
            rounds.append([self._meet(s, number + i) for i, s in enumerate(workload.steps)])
        stats = self.vlm.stats()
        held = {"prefix": stats["prefix"]["bytes"], "features": stats["features"]["bytes"]}
        held["lanes"] = stats["prefix"]["lane_bytes"]
        say(f"{workload.name}: warm against cold, bit for bit")
        met = zip(workload.steps, zip(*rounds, strict=True), strict=True)
        return {
            "name": workload.name,
            "about": workload.about,
            "repetitions": workload.repetitions,
            "steps": [_sums(step.name, list(answers)) for step, answers in met],
            "warm_equals_cold": self.vlm.verify(workload.steps[-1].messages).equal,
            "bytes": held,
        }

    def _meet(self, step: Step, turn: int) -> Round:
        self.limit.prepare(step.messages)
        new, images, shared = self.limit.new_tokens, self.limit.new_images, self.limit.shared

        def ask(contestant: Keepsight | Stock | Limit) -> Answer:
            gc.collect()
            return contestant.answer(step.messages, TOKENS)

        ways: dict[str, Callable[[int], Answer]] = {
            "keepsight": lambda _: ask(self.keepsight),
            "stock": lambda _: ask(self.stock),
            "limit": lambda _: ask(self.limit),
        }
        (answers,) = interleaved(turn + 1, ways, turn)
        return Round(answers, new, images, shared)

    # -- nothing is known yet ----------------------------------------------------------------------

    def cold(self, pictures: Pictures, scale: Scale) -> Record:
        """First requests on an empty memory, for some numbers and sizes of pictures."""
        small = scale.small
        sizes = {"one small image": [small], "one image": [scale.picture]}
        sizes["two images"] = [small, small]
        repetitions = min(_COLD, 2 * scale.repetitions - 1)
        cases = []
        for number, (name, images) in enumerate(sizes.items()):
            say(f"cold: {name}")
            paths = [pictures.path(900 + 10 * number + i, *size) for i, size in enumerate(images)]
            cases.append(
                self._cold_case(name, [user(words(9, scale.question), *paths)], repetitions)
            )
        found = anatomy(self.vlm, pictures.path(950, *scale.picture), scale.repetitions)
        return {"repetitions": repetitions, "cases": cases, "anatomy": found}

    def _cold_case(self, name: str, messages: list[Record], repetitions: int) -> Record:
        def ask(contestant: Keepsight | Stock) -> Answer:
            self.vlm.clear()
            gc.collect()
            return contestant.answer(messages, TOKENS)

        ways = {"keepsight": lambda _: ask(self.keepsight), "stock": lambda _: ask(self.stock)}
        met = [Round(answers) for answers in interleaved(repetitions, ways)]
        return {
            "name": name,
            "prompt_tokens": met[0].answers["keepsight"].counted.prompt_tokens,
            "guard": guard(met),
            "keepsight_over_stock": ratio(one.first("keepsight", "stock") for one in met),
            **_first_tokens(met, "keepsight", "stock"),
        }


def _sums(name: str, met: list[Round]) -> Record:
    """One step over all repetitions."""
    mine = [one.answers["keepsight"] for one in met]
    usage = mine[0].counted
    return {
        "name": name,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "new_tokens": met[0].new_tokens,
        "rerun_tokens": max(0, met[0].shared - usage.cached_tokens),
        "new_images": met[0].new_images,
        "encoded": usage.images_encoded,
        "guard": guard(met),
        **_first_tokens(met, "keepsight", "stock", "limit"),
        "stock_over_keepsight": ratio(one.first("stock", "keepsight") for one in met),
        "keepsight_over_limit": ratio(one.first("keepsight", "limit") for one in met),
        "decode_ms": middle(answer.per_token for answer in mine),
        "stages": {n: middle(a.stages.get(n, 0.0) for a in mine) for n in mine[0].stages},
    }


def _first_tokens(met: list[Round], *names: str) -> Record:
    """The median time to the first token of each contestant, and its samples."""
    result: Record = {}
    for who in names:
        samples = [one.answers[who].first for one in met]
        result[f"{who}_ms"] = middle(samples)
        result[f"{who}_samples"] = [round(sample, 2) for sample in samples]
    return result


def guard(met: list[Round]) -> str:
    """The worst agreement with stock over all repetitions. Keepsight must also repeat its answer,
    and the limit must agree as far as it goes."""
    mine = [one.answers["keepsight"].tokens for one in met]
    if any(tokens != mine[0] for tokens in mine):
        return "DIFFERENT from one repetition to the next"
    found = {agreement(one.answers["keepsight"].tokens, one.answers["stock"]) for one in met}
    for one in met:
        if limit := one.answers.get("limit"):
            # A limit that computed something else is no limit.
            said = agreement(limit.tokens, one.answers["stock"], len(limit.tokens))
            found.add(f"DIFFERENT limit: {said}" if said.startswith("DIFFERENT") else said)
    return max(found, key=lambda said: (said.startswith("DIFFERENT"), said != "equal"))


def anatomy(vlm: VLM, path: str, repetitions: int) -> dict[str, float]:
    """Cost of a new picture, stage by stage, and of `encode` relative to the tower alone."""
    data = Path(path).read_bytes()
    memory = vlm.runtime
    image, processor = decode_bytes(data, path), memory.needed_processor()
    pixels = memory.family.preprocess(processor, image, memory.image_options)
    stages: dict[str, Callable[[], object]] = {
        "decode_image": lambda: decode_bytes(data, path),
        "preprocess": lambda: memory.family.preprocess(processor, image, memory.image_options),
        "hash_file": lambda: digests.digest("file", data),
        "hash_pixels": lambda: pixels.key,
        "tower": lambda: memory.family.encode(pixels),
        "encode": lambda: vlm.encode(path),
    }
    samples: dict[str, list[float]] = {name: [] for name in stages}
    with torch.inference_mode():
        for _ in range(repetitions):
            vlm.clear()
            for name, stage in stages.items():
                samples[name].append(timed(stage))
    found = {f"{name}_ms": middle(times) for name, times in samples.items()}
    pairs = zip(samples["encode"], samples["tower"], strict=True)
    return {**found, "encode_over_tower": middle((a / b for a, b in pairs), 3)}


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    start = now()
    work()
    return now() - start
