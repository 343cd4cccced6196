"""What tokens guessed from memory are worth, and what they cost where no guess comes true.

Run `python -m bench.drafting`. One model, wrapped twice: with drafts and without. The two take
turns, in an order that changes, with the same conversations, seeds and memory. A ratio is the time
of decoding without drafts over that with them; shown is the median of those of all repetitions.
Answers must be equal, token by token.

- **first**: an answer about a picture that nobody has asked about before.
- **regenerated**: the same question about the same picture once more.
- **described**: the demo model describes pictures, one after the other, in its own words, which are
  alike: what was said of other pictures is where guesses are from. Only with `--model demo`.
- **free**: sampled at a temperature at which nothing repeats, so that guesses only cost.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

import keepsight as ks
from keepsight.bench import machine
from keepsight.bench.checkpoints import SHAPES, SIZES, checkpoint
from keepsight.bench.workloads import Pictures, words
from keepsight.cli.terminal import table
from keepsight.demo.scene import Scene

FORMAT = 1
WITH, WITHOUT = "drafts", "no drafts"
COLUMNS = [
    *("answer", "tokens", "ms a token, without", "ms a token, with"),
    *("times faster", "guessed", "came true"),
]
_SHAPES = ("circle", "square", "triangle")
_COLORS = ("red", "blue", "green", "yellow")
Answers = dict[str, list[ks.Reply]]  # by what is measured


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 when an answer differed."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    described = machine.describe()
    name = options.model or checkpoint(options.shape, options.size, options.folder)
    with ExitStack() as stack, ks.load(name, dtype=options.dtype) as loaded:
        own = {WITH: True, WITHOUT: False}
        sides = {
            side: stack.enter_context(
                ks.wrap(loaded.model, loaded.processor, pack=True, drafts=drafts)
            )
            for side, drafts in own.items()
        }
        folder = stack.enter_context(TemporaryDirectory())
        pictures = Pictures(Path(folder))
        rounds = []
        for number in range(options.repetitions + 1):  # the first one warms up
            print(f"repetition {number} of {options.repetitions}", file=sys.stderr, flush=True)
            order = list(sides)[:: -1 if number % 2 else 1]
            rounds.append({s: _round(sides[s], pictures, number, options) for s in order})
    result = {
        "benchmark": "keepsight drafting",
        "format": FORMAT,
        "command": " ".join(["python -m bench.drafting", *_kept(argv)]),
        "machine": described,
        "shape": options.model or options.shape,
        "size": "" if options.model else options.size,
        **{name: getattr(options, name) for name in ("dtype", "tokens", "repetitions")},
        "answers": sums(rounds[1:]),
        "equal": all(map(equal, rounds)),
    }
    Console().print(_table(result))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    return 0 if result["equal"] else 1


def _kept(argv: list[str]) -> list[str]:
    pairs = zip(argv[::2], argv[1::2], strict=False)
    return [word for pair in pairs if pair[0] not in ("--out", "--folder") for word in pair]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.drafting", description=__doc__)
    parser.add_argument("--model", choices=("demo",), help="in place of a built checkpoint")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_vl")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("bench/checkpoints"))
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    return parser


# -- measuring -----------------------------------------------------------------------------------


def _round(vlm: ks.VLM, pictures: Pictures, number: int, options: argparse.Namespace) -> Answers:
    """All answers of one repetition; questions of their own for each, so that nothing is known."""
    picture, question = pictures.path(number, 320, 256), words(100 + number, 22)
    long = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens}
    # Not greedy: weights of chance repeat a few tokens for ever then.
    once = {**long, "do_sample": True, "temperature": 1.0, "seed": number}
    free = {**long, "do_sample": True, "temperature": 4.0, "seed": 1000 + number}
    found = {
        "first": [vlm.ask(picture, question, **once)],
        "regenerated": [vlm.ask(picture, question, **once)],
        "free": [vlm.ask(picture, words(300 + number, 22), **free)],
    }
    if options.model == "demo":
        found["described"] = [
            vlm.ask(scene.draw(), "Describe the picture.", do_sample=False)
            for scene in _scenes(number)
        ]
    return found


def _scenes(number: int) -> Iterator[Scene]:
    for color in _COLORS:
        yield Scene.of(color=color, shape=_SHAPES[number % len(_SHAPES)], background="white")


# -- telling -------------------------------------------------------------------------------------


def equal(one: dict[str, Answers]) -> bool:
    """Whether both sides gave the same tokens."""
    return all(
        [reply.tokens for reply in answers] == [reply.tokens for reply in one[WITHOUT][name]]
        for name, answers in one[WITH].items()
    )


def _decoding(replies: list[ks.Reply]) -> float:
    """Milliseconds of decoding a token."""
    spent = sum(reply.report.milliseconds["decode"] for reply in replies)
    return spent / max(1, sum(len(reply.tokens) - 1 for reply in replies))


def sums(rounds: list[dict[str, Answers]]) -> list[dict[str, Any]]:
    """One row for each kind of answer: medians, and the median of the ratios."""
    rows = []
    for name in rounds[0][WITH]:
        pairs = [(_decoding(one[WITHOUT][name]), _decoding(one[WITH][name])) for one in rounds]
        usages = [reply.usage for one in rounds for reply in one[WITH][name]]
        rows.append(
            {
                "name": name,
                "tokens": sum(len(reply.tokens) for reply in rounds[0][WITH][name]),
                "without_ms": round(median(pair[0] for pair in pairs), 2),
                "with_ms": round(median(pair[1] for pair in pairs), 2),
                "times": round(median(a / b for a, b in pairs), 3),
                "drafted": sum(usage.drafted_tokens for usage in usages),
                "accepted": sum(usage.accepted_tokens for usage in usages),
            }
        )
    return rows


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The kinds of answers as cells."""
    return [
        [
            row["name"],
            str(row["tokens"]),
            f"{row['without_ms']:.1f}",
            f"{row['with_ms']:.1f}",
            f"{row['times']:.2f}",
            str(row["drafted"]),
            str(row["accepted"]),
        ]
        for row in result["answers"]
    ]


def _table(result: dict[str, Any]) -> Any:
    shown = table(*COLUMNS)
    for row in rows(result):
        shown.add_row(*row)
    return shown


if __name__ == "__main__":
    raise SystemExit(main())
