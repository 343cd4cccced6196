"""What a warm turn of a long conversation costs beside the model.

Run `python -m bench.longturn`. A conversation of many turns is remembered whole. Then the same
prompt is asked for again, and then one turn more, again and again; each time one token is taken.
From the time of the whole call, passes of the model are subtracted: what is left is naming,
rendering, tokenising, matching, checking weights, making the report. The model is a tiny one, so
that the rest can be measured well. Medians in milliseconds, by stage as the report names them, and
the least of what is left, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

import keepsight as ks
from keepsight.bench import machine
from keepsight.bench.checkpoints import SHAPES, checkpoint
from keepsight.bench.workloads import Pictures, assistant, user, words
from keepsight.cli.terminal import table
from keepsight.core.decoding.forward import LanguageModel
from keepsight.kinds import Message, Record

FORMAT = 1
SETTINGS = ((4, 250), (120, 8000), (500, 32000))  # turns, tokens
STAGES = ("check", "render", "match", "restore")


@dataclass
class Clock:
    """Seconds that passes of the model took."""

    seconds: float = 0.0
    _began: list[float] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the passes of every decoder meanwhile."""
        before = LanguageModel.forward
        setattr(LanguageModel, "forward", self._timed(before))  # noqa: B010
        try:
            yield
        finally:
            setattr(LanguageModel, "forward", before)  # noqa: B010

    def _timed(self, call: Callable[..., object]) -> Callable[..., object]:
        def timed(*given: object, **named: object) -> object:
            begun = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self.seconds += time.perf_counter() - begun

        return timed


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    model = checkpoint(options.shape, "tiny", options.folder)
    described = machine.describe()
    rows = []
    with TemporaryDirectory() as folder:
        pictures = Pictures(Path(folder))
        for turns, tokens in options.settings:
            rows += _measured(model, turns, tokens, pictures, options)
    result = {
        "benchmark": "keepsight longturn",
        "format": FORMAT,
        "command": " ".join(["python -m bench.longturn", *_without_paths(argv)]),
        "machine": described,
        "shape": options.shape,
        "repetitions": options.repetitions,
        "rows": rows,
    }
    Console().print(_table(rows))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    return 0


def _without_paths(argv: list[str]) -> list[str]:
    pairs = zip(argv[::2], argv[1::2], strict=False)
    return [word for pair in pairs if pair[0] not in ("--out", "--folder") for word in pair]


def _settings(text: str) -> list[tuple[int, int]]:
    pairs = (setting.partition("x") for setting in text.split(","))
    return [(int(turns), int(tokens)) for turns, _, tokens in pairs]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.longturn", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_vl")
    parser.add_argument(
        "--settings", type=_settings, default=SETTINGS, help="turns x tokens, as 4x250,120x8000"
    )
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--profile", type=int, default=0, help="print so many lines of a profile")
    parser.add_argument("--folder", type=Path, default=Path("bench/checkpoints"))
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    return parser


def _conversation(turns: int, tokens: int, pictures: Pictures) -> list[Message]:
    """So many turns, each of a question and an answer, of about so many tokens in all."""
    chance = random.Random(0)
    each = max(4, int((tokens / turns - 12) / 2.6))  # words: the tokenizer knows Python, not prose
    talk: list[Message] = []
    for turn in range(turns):
        shown = [pictures.path(turn, 64, 64)] if turn % 50 == 0 else []
        talk.append(user(_said(chance, each // 2), *shown))
        talk.append(assistant(_said(chance, each - each // 2)))
    return talk[:-1]


def _said(chance: random.Random, count: int) -> str:
    return words(chance.randrange(1000), count) + f" {chance.randrange(10_000)}"


def _measured(
    model: Path, turns: int, tokens: int, pictures: Pictures, options: argparse.Namespace
) -> list[Record]:
    talk = _conversation(turns, tokens, pictures)
    clock, chance = Clock(), random.Random(1)
    with ks.load(str(model)) as vlm, clock.watching():
        vlm.chat(talk, max_new_tokens=1)

        def ask() -> ks.Report:
            return vlm.chat(talk, max_new_tokens=1).report

        def go_on() -> None:
            talk.append(assistant(_said(chance, 12)))
            talk.append(user(_said(chance, 8)))

        return [
            {"what": what, "turns": turns, **_timed(ask, before, clock, options)}
            for what, before in (("the same prompt", list), ("one turn more", go_on))
        ]


def _timed(
    call: Callable[[], ks.Report],
    before: Callable[[], object],
    clock: Clock,
    options: argparse.Namespace,
) -> Record:
    wholes, models, stages = [], [], []
    tokens = 0
    for _ in range(options.repetitions + 2):
        before()
        clock.seconds, begun = 0.0, time.perf_counter()
        report = call()
        wholes.append(1e3 * (time.perf_counter() - begun))
        models.append(1e3 * clock.seconds)
        stages.append(report.milliseconds)
        tokens = report.prompt_tokens
    if options.profile:
        _profile(call, before, options.profile)
    beside = [whole - model for whole, model in zip(wholes[2:], models[2:], strict=True)]
    parts = {name: median(s.get(name, 0.0) for s in stages[2:]) for name in STAGES}
    found = {"whole": median(wholes[2:]), "model": median(models[2:]), "beside": median(beside)}
    found |= {"least": min(beside), **parts}
    return {"tokens": tokens, **{name: round(value, 3) for name, value in found.items()}}


def _profile(call: Callable[[], ks.Report], before: Callable[[], object], lines: int) -> None:
    profile = cProfile.Profile()
    for _ in range(10):
        before()
        profile.runcall(call)
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(lines)


def _table(rows: list[Record]) -> object:
    names = [name for name in rows[0] if name not in ("what", "whole")]
    made = table("", *names, right=tuple(names), title="milliseconds of a warm turn")
    for row in rows:
        cells = [str(row[n]) if isinstance(row[n], int) else f"{row[n]:.2f}" for n in names]
        made.add_row(row["what"], *cells)
    return made


if __name__ == "__main__":
    sys.exit(main())
