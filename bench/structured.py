"""What a form of the answer costs, and what certain tokens save.

Run `python -m bench.structured`. One model answers about a remembered picture: freely; with JSON
whose texts are as free as that; and with JSON of which much is certain. They take turns, in an
order that changes, with the same prompt. A rate is tokens of the answer over the time of the whole
call, in which nothing but the answer is computed; a ratio is that of a form over the free answer
of the same repetition, and shown is the median of all repetitions.

- **text**: a JSON schema of long texts, so that nearly every token is masked and none is certain.
- **record**: names of properties and choices, most of whose tokens are certain and read in passes
  of several.
- **one by one**: the same record, its certain tokens computed one by one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from keepsight.core.engine import Engine

FORMAT = 1
FREE, TEXT, RECORD, SINGLY = "free", "text", "record", "one by one"
COLUMNS = ["answer", "tokens", "certain", "tokens/s", "over free"]
_LONG = {"type": "string", "minLength": 4000}
_CHOICE = {"enum": ["certainly not visible", "partially visible", "visible everywhere"]}
_NAMES = ("foreground objects", "background objects", "written characters", "human persons")
FORMS: dict[str, Any] = {
    FREE: None,
    TEXT: {"type": "object", "properties": {"text": _LONG}, "required": ["text"]},
    RECORD: {
        "type": "object",
        "properties": dict.fromkeys(_NAMES, _CHOICE),
        "required": list(_NAMES),
    },
}
FORMS[SINGLY] = FORMS[RECORD]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 when certain tokens differed."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    described = machine.describe()
    name = checkpoint(options.shape, options.size, options.folder)
    with (
        ks.load(name, dtype=options.dtype, pack=True, drafts=False) as vlm,
        TemporaryDirectory() as folder,
    ):
        picture = Pictures(Path(folder)).path(0, 320, 256)
        rounds = []
        for number in range(options.repetitions + 1):  # the first one warms up
            print(f"repetition {number} of {options.repetitions}", file=sys.stderr, flush=True)
            order = list(FORMS)[:: -1 if number % 2 else 1]
            answers = {name: _timed(vlm, picture, name, number, options) for name in order}
            rounds.append(answers)
    result = {
        "benchmark": "keepsight structured",
        "format": FORMAT,
        "command": " ".join(["python -m bench.structured", *_kept(argv)]),
        "machine": described,
        **{n: getattr(options, n) for n in ("shape", "size", "dtype", "tokens", "repetitions")},
        "answers": sums(rounds[1:]),
        "equal": all(one[RECORD][0].tokens == one[SINGLY][0].tokens for one in rounds),
    }
    shown = table(*COLUMNS)
    for row in rows(result):
        shown.add_row(*row)
    Console().print(shown)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    return 0 if result["equal"] else 1


def _kept(argv: list[str]) -> list[str]:
    pairs = zip(argv[::2], argv[1::2], strict=False)
    return [word for pair in pairs if pair[0] not in ("--out", "--folder") for word in pair]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_vl")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer, at most")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("bench/checkpoints"))
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    return parser


def _timed(
    vlm: ks.VLM, picture: str, name: str, number: int, options: argparse.Namespace
) -> tuple[ks.Reply, float]:
    """One answer, and its seconds."""
    chat = {"role": "user", "content": [{"type": "image", "image": picture}]}
    chat["content"] = [*chat["content"], {"type": "text", "text": words(7, 22)}]
    how: dict[str, Any] = {"max_new_tokens": options.tokens, "do_sample": True, "seed": number}
    if name == FREE:
        how["min_new_tokens"] = options.tokens
    vlm.chat([chat], max_new_tokens=1, response_format=FORMS[name])  # read, and compiled
    with _singly() if name == SINGLY else _as_it_is():
        begun = time.perf_counter()
        reply = vlm.chat([chat], response_format=FORMS[name], **how)
        return reply, time.perf_counter() - begun


@contextmanager
def _singly() -> Iterator[None]:
    """Compute certain tokens one by one."""
    before = vars(Engine)["_forced"]
    setattr(Engine, "_forced", lambda *_: [])  # noqa: B010
    try:
        yield
    finally:
        setattr(Engine, "_forced", before)  # noqa: B010


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The kinds of answers as cells."""
    return [[str(value) for value in row.values()] for row in result["answers"]]


def sums(rounds: list[dict[str, tuple[ks.Reply, float]]]) -> list[dict[str, Any]]:
    """One row for each kind of answer: medians, and the median of the ratios."""
    found = []
    for name in FORMS:
        rates = [len(one[name][0].tokens) / one[name][1] for one in rounds]
        free = [len(one[FREE][0].tokens) / one[FREE][1] for one in rounds]
        first = rounds[0][name][0]
        found.append(
            {
                "name": name,
                "tokens": len(first.tokens),
                "certain": first.usage.forced_tokens,
                "rate": round(median(rates), 1),
                "over_free": round(median(a / b for a, b in zip(rates, free, strict=True)), 3),
            }
        )
    return found


if __name__ == "__main__":
    raise SystemExit(main())
