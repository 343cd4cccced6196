"""Exported models against PyTorch on the same weights, side by side.

Run `python -m bench.exporting`. Each way of computing runs in a process of its own, so
that memory can be told apart and no thread pool disturbs another; the processes take turns, in
another order in each repetition. In each round a new picture is looked at, a new conversation about
it is answered, and one more question is asked. Reported are ratios to PyTorch in float32 within one
repetition; bare times only to understand them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from keepsight.bench import machine
from keepsight.bench.checkpoints import SHAPES, SIZES, checkpoint
from keepsight.export.graphs.exporter import export

FORMAT = 1
FIRST = "pytorch float32"
_WIDTH = 110

# Name: (what is loaded, what is said when it is loaded).
WAYS: dict[str, dict[str, Any]] = {
    FIRST: {"dtype": "float32"},
    "pytorch bfloat16": {"dtype": "bfloat16"},
    "onnx float32": {"runtime": "onnx"},
    "onnx int8": {"runtime": "onnx", "quantised": "int8"},
    "openvino float32": {"runtime": "openvino"},
    "openvino int8": {"runtime": "openvino", "quantised": "int8"},
}
# What a round tells: (unit, whether more is better).
TOLD = {
    "tower_patches_per_second": True,
    "prefill_tokens_per_second": True,
    "decode_tokens_per_second": True,
    "first_token_cold_ms": False,
    "first_token_warm_ms": False,
    "memory_mib": False,
}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    source = checkpoint(options.shape, options.size, options.folder)
    names = [name for name in WAYS if name in options.ways]
    folders = {name: _folder(source, name, options.folder) for name in names}
    described = machine.describe()
    rounds = _rounds(folders, options)
    result = {
        "benchmark": "keepsight exporting",
        "format": FORMAT,
        "command": " ".join(["python -m bench.exporting", *_told(argv)]),
        "machine": described,
        "shape": options.shape,
        "size": options.size,
        "picture": options.picture,
        "tokens": options.tokens,
        "deviation": {name: _deviation(folder) for name, folder in folders.items()},
        "ways": {name: _sum_up(name, rounds) for name in names},
    }
    console = Console()
    console.width = max(console.width, _WIDTH)
    console.print(table(result))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    return 0


def _told(argv: list[str]) -> list[str]:
    pairs = zip(argv[::2], argv[1::2], strict=False)
    return [word for pair in pairs if pair[0] not in ("--out", "--folder") for word in pair]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.exporting", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_vl")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the checkpoint")
    parser.add_argument("--picture", default="1024x768", help="width x height in pixels")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("bench/checkpoints"))
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    return parser


def _folder(source: Path, name: str, home: Path) -> Path:
    """The checkpoint itself, or its export, made once."""
    way = WAYS[name]
    if "runtime" not in way:
        return source
    target = home / f"{source.name}-{name.replace(' ', '-')}"
    if not target.exists():
        print(f"exporting {target.name}", file=sys.stderr, flush=True)
        export(str(source), target, runtime=way["runtime"], quantised=way.get("quantised"))
    return target


def _deviation(folder: Path) -> dict[str, Any] | None:
    record = folder / "keepsight.json"
    return json.loads(record.read_text())["deviation"] if record.exists() else None


# -- measuring -----------------------------------------------------------------------------------


class Worker:
    """One way of computing, in a process of its own that waits for its turns."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace) -> None:
        told = {
            "folder": str(folder),
            "dtype": WAYS[name].get("dtype", "auto"),
            "threads": options.threads,
            "tokens": options.tokens,
            "picture": options.picture,
        }
        command = [sys.executable, "-m", "bench.exporting_worker", json.dumps(told)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def round(self, number: int) -> dict[str, float]:
        """One round; what it told."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the worker has no pipes")
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with code {self._process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found

    def end(self) -> None:
        """Let the process go."""
        self._process.kill()
        self._process.communicate()


def _rounds(folders: dict[str, Path], options: argparse.Namespace) -> list[dict[str, Any]]:
    workers = {name: Worker(name, folder, options) for name, folder in folders.items()}
    try:
        for worker in workers.values():
            worker.round(0)  # not counted: first calls, pages not yet there
        found = []
        for number in range(1, options.repetitions + 1):
            print(f"repetition {number} of {options.repetitions}", file=sys.stderr, flush=True)
            order = list(workers)[:: -1 if number % 2 else 1]
            found.append({name: workers[name].round(number) for name in order})
        return found
    finally:
        for worker in workers.values():
            worker.end()


def _sum_up(name: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and medians of ratios to the first way within one repetition."""
    told: dict[str, Any] = {}
    for what, more in TOLD.items():
        told[what] = round(median(one[name][what] for one in rounds), 2)
        if FIRST in rounds[0]:
            ratios = [one[name][what] / one[FIRST][what] for one in rounds]
            told[f"{what}_times_as_good"] = round(median(x if more else 1 / x for x in ratios), 3)
    told["tokens_as_first"] = _agreement(name, rounds)
    return told


def _agreement(name: str, rounds: list[dict[str, Any]]) -> str | None:
    """How many tokens of the answers are those of the first way, up to where they part."""
    if FIRST not in rounds[0]:
        return None
    same = whole = 0
    for one in rounds:
        mine, theirs = one[name]["answer"], one[FIRST]["answer"]
        parted = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
        same, whole = same + (parted[0] if parted else len(mine)), whole + len(mine)
    return f"{same}/{whole}"


# -- telling -------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> Table:
    """For people: times better than PyTorch in float32."""
    heading = (
        f"{result['shape']} {result['size']}, a picture of {result['picture']}, answers of "
        f"{result['tokens']} tokens; in brackets, times as good as {FIRST}"
    )
    shown = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column("")
    for what in TOLD:
        shown.add_column(what.replace("_", " "), justify="right")
    shown.add_column("same tokens", justify="right")
    for name, told in result["ways"].items():
        cells = []
        for what in TOLD:
            ratio = told.get(f"{what}_times_as_good")
            better = "" if ratio is None else f" ({ratio:.2f})"
            cells.append(f"{told[what]:.0f}{better}")
        shown.add_row(name, *cells, str(told["tokens_as_first"]))
    return shown


if __name__ == "__main__":
    raise SystemExit(main())
