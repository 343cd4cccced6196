"""Eight chats at once against the same eight one after another, side by side.

Run `python -m bench.together`. Each chat asks about a picture of its own. In every
repetition the same questions are answered once in turn, by direct calls, and once together, by
clients that all ask at the same moment; the order changes, and each way begins with an empty
memory. A second pair asks other questions about pictures that are known by then. Reported are
ratios within one repetition: tokens per second of all answers, and the time until a client has its
first token, counted from the moment when all of them ask. Answers are compared token by token.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from threading import Barrier
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import keepsight
from keepsight import Together
from keepsight.bench import machine
from keepsight.bench.checkpoints import SHAPES, SIZES, checkpoint
from keepsight.bench.workloads import Pictures, user, words
from keepsight.kinds import Message
from keepsight.report import Piece, Report
from keepsight.vlm import VLM

FORMAT = 1
_WIDTH = 118


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 when an answer was another one together than alone."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    name = options.shape
    if options.shape in SHAPES:
        name = str(checkpoint(options.shape, options.size, options.folder))
    with TemporaryDirectory() as folder:
        vlm = keepsight.load(name, dtype=options.dtype, device_map=options.device)
        with vlm:
            found = _measure(vlm, Pictures(Path(folder)), options)
    told = [word for pair in _pairs(argv) if pair[0] not in ("--out", "--folder") for word in pair]
    result = {
        "benchmark": "keepsight together",
        "format": FORMAT,
        "command": " ".join(["python -m bench.together", *told]),
        "machine": machine.describe(),
        "shape": options.shape,
        "size": options.size if options.shape in SHAPES else "",
        "dtype": options.dtype,
        "chats": options.chats,
        "tokens": options.tokens,
        "picture": options.picture,
        "runs": found,
    }
    console = Console()
    console.width = max(console.width, _WIDTH)
    console.print(table(result))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    return 0 if all(run["equal"] for run in found.values()) else 1


def _pairs(argv: list[str]) -> list[tuple[str, str]]:
    return list(zip(argv[::2], argv[1::2], strict=False))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.together", description=__doc__)
    parser.add_argument("--shape", choices=(*SHAPES, "demo", "demo-hybrid"), default="qwen3_vl")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default=None, help="where the model goes, such as cuda")
    parser.add_argument("--chats", type=int, default=8, help="how many clients ask")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--picture", default="448x448", help="width x height in pixels")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("bench/checkpoints"))
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    return parser


# -- measuring -----------------------------------------------------------------------------------


class _Client:
    """One client's answer: its tokens, when the first came (in milliseconds after all asked), and
    the longest time between two."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.first = self.pause = self._last = 0.0
        self.report: Report | None = None

    def hears(self, piece: Piece, since: float) -> None:
        if piece.token is not None:
            now = 1e3 * (time.perf_counter() - since)
            self.pause = max(self.pause, now - self._last if self.tokens else 0.0)
            self.first, self._last = self.first or now, now
            self.tokens.append(piece.token)
        self.report = piece.report or self.report


class _Way:
    """All answers of one way, and how long they took together."""

    def __init__(self, clients: list[_Client], seconds: float, stats: dict[str, Any]) -> None:
        self.clients, self.seconds, self.stats = clients, seconds, stats

    @property
    def rate(self) -> float:
        """Tokens per second, of all answers."""
        return sum(len(client.tokens) for client in self.clients) / self.seconds

    def stage(self, name: str) -> float:
        """Milliseconds of one stage, of all reports."""
        reports = [client.report for client in self.clients if client.report is not None]
        return sum(report.milliseconds.get(name, 0.0) for report in reports)


def _measure(vlm: VLM, pictures: Pictures, options: argparse.Namespace) -> dict[str, Any]:
    width, height = (int(side) for side in options.picture.split("x"))
    decoding = {
        "max_new_tokens": options.tokens,
        "min_new_tokens": options.tokens,
        "do_sample": False,
    }

    def asked(round_: int) -> list[list[Message]]:
        paths = [pictures.path(700 + chat, width, height) for chat in range(options.chats)]
        return [[user(words(100 * round_ + i, 22), path)] for i, path in enumerate(paths)]

    ways: dict[str, Callable[..., _Way]] = {"in turn": _in_turn, "together": _together}
    _together(vlm, asked(9), decoding)  # not counted: the library's first call
    met: dict[str, list[dict[str, _Way]]] = {"new pictures": [], "known pictures": []}
    for repetition in range(options.repetitions):
        print(f"repetition {repetition + 1} of {options.repetitions}", file=sys.stderr, flush=True)
        both: dict[str, dict[str, _Way]] = {name: {} for name in met}
        for way in list(ways)[:: -1 if repetition % 2 else 1]:
            vlm.clear()
            gc.collect()
            both["new pictures"][way] = ways[way](vlm, asked(1), decoding)
            both["known pictures"][way] = ways[way](vlm, asked(2), decoding)
        for name in met:
            met[name].append(both[name])
    return {name: _sum_up(rounds) for name, rounds in met.items()}


def _in_turn(vlm: VLM, chats: list[list[Message]], decoding: dict[str, Any]) -> _Way:
    clients = [_Client() for _ in chats]
    before, start = vlm.runtime.engine.decode_steps, time.perf_counter()
    for client, messages in zip(clients, chats, strict=True):
        for piece in vlm.stream(messages, **decoding):
            client.hears(piece, start)
    seconds = time.perf_counter() - start
    return _Way(clients, seconds, {"passes": vlm.runtime.engine.decode_steps - before})


def _together(vlm: VLM, chats: list[list[Message]], decoding: dict[str, Any]) -> _Way:
    clients = [_Client() for _ in chats]
    all_here = Barrier(len(chats) + 1)

    def ask(client: _Client, messages: list[Message]) -> None:
        all_here.wait()
        begun = time.perf_counter()
        for piece in served.submit(messages, **decoding):
            client.hears(piece, begun)

    with Together(vlm, max_running=len(chats)) as served, ThreadPoolExecutor(len(chats)) as pool:
        waiting = [pool.submit(ask, *pair) for pair in zip(clients, chats, strict=True)]
        all_here.wait()
        start = time.perf_counter()
        for one in waiting:
            one.result()
        seconds = time.perf_counter() - start
        stats = served.stats()
    return _Way(clients, seconds, stats)


def _sum_up(rounds: list[dict[str, _Way]]) -> dict[str, Any]:
    """Medians over the repetitions, and medians of ratios within one."""
    told: dict[str, Any] = {}
    for way in ("in turn", "together"):
        met = [one[way] for one in rounds]
        firsts = [[client.first for client in one.clients] for one in met]
        told[way] = {
            "tokens_per_second": round(median(one.rate for one in met), 2),
            "first_token_mean_ms": round(median(map(mean, firsts)), 1),
            "first_token_last_ms": round(median(map(max, firsts)), 1),
            "longest_pause_ms": round(
                median(max(client.pause for client in one.clients) for one in met), 1
            ),
            "passes": median(one.stats["passes"] for one in met),
            **{f"{s}_ms": round(median(one.stage(s) for one in met), 1) for s in _STAGES},
        }
        seconds = [one.seconds for one in met]
        told[way]["seconds"] = round(median(seconds), 3)
    # A step's time is in the report of each who took part in it.
    spent = [max(_decode(client) for client in one["together"].clients) for one in rounds]
    told["together"]["decode_ms"] = round(median(spent), 1)
    told["speedup"] = _ratio(rounds, lambda one: one["together"].rate / one["in turn"].rate)
    told["step_over_step_alone"] = _ratio(rounds, _step_ratio)
    told["equal"] = all(
        a.tokens == b.tokens
        for one in rounds
        for a, b in zip(one["in turn"].clients, one["together"].clients, strict=True)
    )
    return told


_STAGES = ("render", "encode", "prefill", "decode")


def _ratio(rounds: list[dict[str, _Way]], of: Callable[[dict[str, _Way]], float]) -> float:
    value: float = median(map(of, rounds))
    return round(value, 3)


def _decode(client: _Client) -> float:
    milliseconds = {} if client.report is None else client.report.milliseconds
    spent: float = milliseconds.get("decode", 0.0)
    return spent


def _step_ratio(one: dict[str, _Way]) -> float:
    """What a step of all costs, in steps of one."""
    alone: float = one["in turn"].stage("decode") / max(1, one["in turn"].stats["passes"])
    spent = max(_decode(client) for client in one["together"].clients)
    tokens = max(len(client.tokens) for client in one["together"].clients)
    return spent / max(1, tokens - 1) / alone


# -- telling -------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> Table:
    """For people: the two ways beside each other."""
    heading = (
        f"{result['chats']} chats of {result['tokens']} tokens, {result['shape']} {result['size']} "
        f"{result['dtype']}, a picture of {result['picture']} each"
    )
    shown = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column("")
    for name in result["runs"]:
        for way in ("in turn", "together"):
            shown.add_column(f"{name}, {way}", justify="right")
    lines = {
        "tokens per second": "tokens_per_second",
        "first token, mean of the clients, ms": "first_token_mean_ms",
        "first token of the last client, ms": "first_token_last_ms",
        "longest pause between two tokens, ms": "longest_pause_ms",
        "decode passes": "passes",
        "the tower, ms": "encode_ms",
        "prefill, ms": "prefill_ms",
        "decode, ms": "decode_ms",
    }
    for line, field in lines.items():
        ways = [run[way] for run in result["runs"].values() for way in ("in turn", "together")]
        shown.add_row(line, *(str(way[field]) for way in ways))
    for line, field in {"speedup": "speedup", "equal tokens": "equal"}.items():
        runs = result["runs"].values()
        shown.add_row(line, *(cell for run in runs for cell in ("", str(run[field]))))
    return shown


if __name__ == "__main__":
    raise SystemExit(main())
