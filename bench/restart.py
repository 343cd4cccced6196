"""Restart: the first turn of a new process over a store that an earlier process filled.

Run `python -m bench.restart`. One process has a chat and ends. Then new ones are started
to answer the next turn: one over the store, with its files in the page cache; one over the store
with its files dropped from it, as after a restart of the machine; and one that has no store and
computes everything. Each tells how long every step took, from the interpreter's start to the first
token. Beside it, in the same process, the same files are read into memory and nothing is done with
them: that is what reading costs. `keepsight bench --workload restart` measures the same turn within
one process, many times; here it is the whole way, once per process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from keepsight.bench import machine
from keepsight.bench.checkpoints import SHAPES, SIZES, checkpoint
from keepsight.bench.extremes import files_of, forget_files, read_files
from keepsight.bench.workloads import Pictures, assistant, user, words
from keepsight.models import loading
from keepsight.vlm import VLM

FORMAT = 1
WAYS = ("page cache", "disk", "nothing")
# What a process does before it can answer, in order, and the stages of its first turn.
START = ("imports", "model", "processor", "memory")
TURN = ("check", "render", "match", "load", "restore", "encode", "prefill")
_WIDTH = 118


def main(argv: list[str] | None = None) -> int:
    """Run it; 1 when two ways gave two answers."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    if options.child is not None:
        print(json.dumps(child(options)))
        return 0
    options.folder = options.folder.absolute()
    checkpoint(options.shape, options.size, options.folder)
    with TemporaryDirectory() as folder:
        rows = list(_measure(options, Path(folder)))
    told = [word for pair in pairs(argv) if pair[0] not in ("--out", "--folder") for word in pair]
    result = {
        "benchmark": "keepsight restart",
        "format": FORMAT,
        "command": " ".join(["python -m bench.restart", *told]),
        "machine": machine.describe(),
        "shape": options.shape,
        "size": options.size,
        "dtype": options.dtype,
        "runs": {way: sum_up([row for row in rows if row["way"] == way]) for way in WAYS},
    }
    result["nothing_over_page_cache"] = ratio(rows, "nothing", "page cache")
    result["nothing_over_disk"] = ratio(rows, "nothing", "disk")
    result["equal"] = equal(rows)
    console = Console()
    console.width = max(console.width, _WIDTH)
    console.print(table(result))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    return 0 if result["equal"] else 1


def pairs(argv: list[str]) -> Iterator[tuple[str, str]]:
    return zip(argv[::2], argv[1::2], strict=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.restart", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_vl")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--picture", default="1280x800", help="width x height in pixels")
    parser.add_argument("--turns", type=int, default=4, help="of the chat that is remembered")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("bench/checkpoints"))
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    parser.add_argument("--child", choices=("fill", *WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--question", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--born", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser


# -- the new process -----------------------------------------------------------------------------


def child(options: argparse.Namespace) -> dict[str, Any]:
    """What one process does; milliseconds of each step."""
    clock = _Clock()
    clock.spent["imports"] = 1e3 * (time.time() - options.born)
    path = str(checkpoint(options.shape, options.size, options.folder))
    model = loading.load_named(path, options.dtype, None, None)[0]
    clock.note("model")
    processor = loading.load_processor(path, None)
    clock.note("processor")
    width, height = (int(side) for side in options.picture.split("x"))
    picture = Pictures(options.store.parent).path(970, width, height)
    history = _history(options, picture)
    store = None if options.child == "nothing" else options.store
    if options.child == "disk":
        forget_files(_files(options.store))
    clock.skip()
    with VLM(model, processor, store=store, files=loading.files_digest(path, model.dtype)) as vlm:
        clock.note("memory")
        if options.child == "fill":
            for end in range(1, len(history), 2):
                vlm.chat(history[:end], max_new_tokens=1)
            vlm.flush()
            return {"stored": sum(file.stat().st_size for file in _files(options.store))}
        messages = [*history, user(words(90 + options.question, 22))]
        start = time.perf_counter()
        pieces = vlm.stream(messages, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        first = next(pieces)
        spent = 1e3 * (time.perf_counter() - start)
        rest = list(pieces)
        report = rest[-1].report
        files = files_of(vlm, store, report.cached_tokens) if store and report else []
    if options.child == "disk":
        forget_files(files)
    bare, size = read_files(files)
    return {
        "way": options.child,
        "tokens": [piece.token for piece in (first, *rest) if piece.token is not None],
        "prompt_tokens": report.prompt_tokens if report else 0,
        "cached_tokens": report.cached_tokens if report else 0,
        "start": clock.spent,
        "turn": {name: report.milliseconds.get(name, 0.0) for name in TURN} if report else {},
        "first_token_ms": spent,
        "bare_read_ms": bare,
        "megabytes": size / 1e6,
        "question": options.question,
    }


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


class _Clock:
    """Milliseconds since the last note, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.skip()

    def skip(self) -> None:
        """What happened since the last note belongs to nobody."""
        self._last = time.perf_counter()

    def note(self, name: str) -> None:
        """Everything since the last note was this."""
        now = time.perf_counter()
        self.spent[name] = 1e3 * (now - self._last)
        self._last = now


def _history(options: argparse.Namespace, picture: str) -> list[Any]:
    history: list[Any] = []
    for turn in range(options.turns):
        images = [] if turn else [picture]
        history += [user(words(turn, 22), *images), assistant(words(50 + turn, 45))]
    return history


# -- the process that starts them ----------------------------------------------------------------


def _measure(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Every way in turn, in an order that changes; each repetition asks something else."""
    store = folder / "store"
    _say(f"filling: {_start(options, 'fill', store, 0)['stored'] / 1e6:.1f} MB stored")
    ways = [way for way in WAYS if way != "disk" or hasattr(os, "posix_fadvise")]
    for repetition in range(options.repetitions):
        shift = repetition % len(ways)
        for way in [*ways[shift:], *ways[:shift]]:
            _say(f"{way}: repetition {repetition + 1} of {options.repetitions}")
            yield {"repetition": repetition, **_start(options, way, store, _asked(way, repetition))}


def _asked(way: str, repetition: int) -> int:
    """The number of a question. Over one store nothing is asked twice: the first process would
    leave its answer there. Without a store both questions are asked, by turns, to compare."""
    odd = {"page cache": False, "disk": True}.get(way, bool(repetition % 2))
    return 2 * repetition + odd


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _start(options: argparse.Namespace, way: str, store: Path, question: int) -> dict[str, Any]:
    names = ("shape", "size", "dtype", "picture", "turns", "folder")
    argv = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
    argv += ["--store", str(store), "--question", str(question), "--child", way]
    argv += ["--born", repr(time.time())]
    command = [sys.executable, "-m", "bench.restart", *argv]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a process of the benchmark failed: {done.stderr.decode()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def sum_up(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The processes of one way: medians of every step."""
    if not rows:
        return {}
    found: dict[str, Any] = {"repetitions": len(rows)}
    for name in ("prompt_tokens", "cached_tokens", "first_token_ms", "bare_read_ms", "megabytes"):
        found[name] = round(median(row[name] for row in rows), 3)
    for part in ("start", "turn"):
        found[part] = {k: round(median(r[part][k] for r in rows), 2) for k in rows[0][part]}
    pairs = [(row["turn"]["load"], row["bare_read_ms"]) for row in rows if row["megabytes"]]
    found["load_over_read"] = round(median(a / b for a, b in pairs), 3) if pairs else None
    found["samples"] = [round(row["first_token_ms"], 2) for row in rows]
    return found


def ratio(rows: list[dict[str, Any]], above: str, below: str) -> float | None:
    """First token over first token, within each repetition; questions are of one length."""
    times = {(row["way"], row["repetition"]): row["first_token_ms"] for row in rows}
    met = [r for way, r in times if way == below and (above, r) in times]
    return round(median(times[above, r] / times[below, r] for r in met), 3) if met else None


def equal(rows: list[dict[str, Any]]) -> bool:
    """Whether all processes that were asked the same answered the same."""
    answers: dict[int, set[tuple[int, ...]]] = {}
    for row in rows:
        answers.setdefault(row["question"], set()).add(tuple(row["tokens"]))
    return all(len(given) == 1 for given in answers.values())


def table(result: dict[str, Any]) -> Table:
    """All ways for people: what reading costs, and where the rest goes."""
    heading = (
        f"restart, {result['shape']} {result['size']} {result['dtype']}: the first turn of a new "
        f"process (without a store it takes {result['nothing_over_page_cache']} times as long)"
    )
    shown = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column("ms")
    ways = [way for way in WAYS if result["runs"][way]]
    for way in ways:
        told = {"nothing": "no store"}.get(way, f"files in the {way}")
        shown.add_column(told, justify="right")
    lines: list[tuple[str, Any]] = [
        ("tokens of the prompt", lambda run: f"{run['prompt_tokens']:.0f}"),
        ("of them reused", lambda run: f"{run['cached_tokens']:.0f}"),
        ("MB read", lambda run: f"{run['megabytes']:.1f}"),
        *((f"start: {name}", _step("start", name)) for name in START),
        *((f"turn: {name}", _step("turn", name)) for name in TURN),
        ("first token, from the question", lambda run: f"{run['first_token_ms']:.1f}"),
        ("bare reading of the same files", lambda run: f"{run['bare_read_ms']:.1f}"),
        ("load over bare reading", lambda run: str(run["load_over_read"] or "-")),
    ]
    for name, value in lines:
        shown.add_row(name, *(value(result["runs"][way]) for way in ways))
    return shown


def _step(part: str, name: str) -> Any:
    return lambda run: f"{run[part].get(name, 0.0):.1f}"


if __name__ == "__main__":
    raise SystemExit(main())
