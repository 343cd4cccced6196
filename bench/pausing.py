"""What prefilling ahead is worth to somebody who reads an answer before going on.

Run `python -m bench.pausing`. A chat on one picture, with the answers that the server
really gave in its history, and a pause before each next question. Two servers of this working tree
take turns, in an order that changes: one that prefills its answers while nobody asks, one that
never does. Told is the time to the first token of the later turns, without the pause, as one
quotient within each repetition: above 1, prefilling ahead was the faster. Answers must be equal.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from bench import servers
from bench.servers import Contestant, Running
from bench.serving import sent
from bench.serving_sums import Heard
from keepsight.bench import machine
from keepsight.bench.checkpoints import SHAPES, SIZES, checkpoint
from keepsight.bench.workloads import Pictures, assistant, user, words
from keepsight.cli.terminal import table
from keepsight.kinds import Message

FORMAT = 1
AHEAD, NEVER = "ahead", "never"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 when an answer differed."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    model = Path(checkpoint(options.shape, options.size, options.folder)).absolute()
    described = machine.describe()
    rounds = [_round(model, number, options) for number in range(options.repetitions)]
    result = {
        "benchmark": "keepsight pausing",
        "format": FORMAT,
        "command": " ".join(["python -m bench.pausing", *_told(argv)]),
        "machine": described,
        **{name: getattr(options, name) for name in ("shape", "size", "dtype", "picture")},
        **{name: getattr(options, name) for name in ("pause", "tokens", "repetitions", "threads")},
        **sums(rounds),
    }
    Console().print(_table(result))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    return 0 if result["equal"] else 1


def _told(argv: list[str]) -> list[str]:
    pairs = zip(argv[::2], argv[1::2], strict=False)
    return [word for pair in pairs if pair[0] not in ("--out", "--folder") for word in pair]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.pausing", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_vl")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--picture", default="1280x800", help="width x height in pixels")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=120, help="of each answer")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds of reading")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, default=Path("bench/checkpoints"))
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    return parser


# -- measuring -----------------------------------------------------------------------------------


def _round(model: Path, number: int, options: argparse.Namespace) -> dict[str, list[Heard]]:
    print(f"repetition {number + 1} of {options.repetitions}", file=sys.stderr, flush=True)
    made = {
        AHEAD: servers.keepsight_server(options.dtype, options.threads, "0.25s"),
        NEVER: servers.keepsight_server(options.dtype, options.threads, "never"),
    }
    order = list(made)[:: -1 if number % 2 else 1]
    return {name: _chat(made[name], model, options) for name in order}


def _chat(contestant: Contestant, model: Path, options: argparse.Namespace) -> list[Heard]:
    """One conversation with a server from its start to its end."""
    width, height = (int(side) for side in options.picture.split("x"))
    heard: list[Heard] = []
    with TemporaryDirectory() as folder, Running(contestant, model) as server:
        pictures = Pictures(Path(folder))
        server.ask(server.body(sent([user("warm up", pictures.path(999, 320, 256))]), 4))
        history: list[Message] = [user(words(1, 22), pictures.path(1, width, height))]
        for turn in range(options.turns):
            if turn:
                history += [assistant(heard[-1].text), user(words(50 + turn, 22))]
                time.sleep(options.pause)
            heard.append(server.ask(server.body(sent(history), options.tokens)))
    return heard


# -- telling -------------------------------------------------------------------------------------


def sums(rounds: list[dict[str, list[Heard]]]) -> dict[str, Any]:
    """Each turn's medians and quotients, the median of the later ones, and whether all is equal."""
    turns: list[dict[str, Any]] = []
    for turn in range(len(rounds[0][AHEAD])):
        pairs = [(one[NEVER][turn], one[AHEAD][turn]) for one in rounds]
        never, ahead = pairs[0]
        turns.append(
            {
                "prompt_tokens": ahead.prompt,
                "cached_tokens": {NEVER: never.cached, AHEAD: ahead.cached},
                "first_token_ms": {
                    NEVER: round(median(pair[0].first for pair in pairs), 1),
                    AHEAD: round(median(pair[1].first for pair in pairs), 1),
                },
                "times": round(median(a.first / b.first for a, b in pairs), 3),
            }
        )
    later = [turn["times"] for turn in turns[1:]]
    texts = {name: [heard.text for heard in rounds[0][name]] for name in (AHEAD, NEVER)}
    equal = all(
        [heard.text for heard in one[name]] == texts[NEVER] for one in rounds for name in one
    )
    return {"turns": turns, "later_turns": round(median(later), 3), "equal": equal}


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The turns as cells."""
    made = []
    for number, turn in enumerate(result["turns"], 1):
        cached, first = turn["cached_tokens"], turn["first_token_ms"]
        made.append(
            [
                f"turn {number}",
                str(turn["prompt_tokens"]),
                *(str(cached[name]) for name in (NEVER, AHEAD)),
                *(f"{first[name]:.0f}" for name in (NEVER, AHEAD)),
                f"{turn['times']:.2f}",
            ]
        )
    return made


COLUMNS = [
    "request",
    "prompt",
    "reused, never ahead",
    "reused, ahead",
    "first token, never ahead, ms",
    "first token, ahead, ms",
    "times sooner",
]


def _table(result: dict[str, Any]) -> Any:
    shown = table(*COLUMNS)
    for row in rows(result):
        shown.add_row(*row)
    return shown


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers end with it
    raise SystemExit(main())
