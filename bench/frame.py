"""The frame of a benchmark beside the package: arguments, one result, tables, a line of JSON.

A benchmark says what it compares (`measure`, which gives a record) and how that is told (`tables`,
for the terminal and for docs/benchmarks.md). Everything else is here and in `keepsight.bench`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from keepsight.bench.options import DTYPES, SHAPES, SIZES

Record: TypeAlias = dict[str, Any]
Told: TypeAlias = tuple[str, list[str], list[list[str]]]  # heading, columns, rows
FORMAT = 1
FOLDER = Path("bench/checkpoints")
_UNTOLD = ("out", "folder")


def bench(
    name: str,
    about: str | None,
    add: Callable[[argparse.ArgumentParser], object],
    measure: Callable[[argparse.Namespace], Record],
    tables: Callable[[Record], Iterable[Told]],
    *,
    shapes: tuple[str, ...] = SHAPES,
    repetitions: int = 3,
) -> Callable[..., int]:
    """The `main` of a benchmark; its status is 1 when `equal` of the record is false. Without
    `shapes` no checkpoint is built."""

    def main(argv: list[str] | None = None) -> int:
        argv = sys.argv[1:] if argv is None else argv
        parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=about)
        if shapes:
            parser.add_argument("--shape", choices=shapes, default=shapes[0])
            parser.add_argument("--size", choices=SIZES, default="small", help="of the checkpoint")
            parser.add_argument("--dtype", choices=DTYPES, default="float32")
            parser.add_argument("--folder", type=Path, default=FOLDER, help="of checkpoints")
        if repetitions:
            parser.add_argument("--repetitions", type=int, default=repetitions)
        parser.add_argument("--out", type=Path, help="write the result here, as JSON")
        add(parser)
        options = parser.parse_args(argv)
        # PyTorch is loaded behind the options; a process that attacks a server needs none.
        from rich.console import Console

        from keepsight.bench import frame

        result: Record = {"benchmark": f"keepsight {name}", "format": FORMAT}
        result["command"] = frame.command(f"python -m bench.{name}", argv)
        result["machine"] = frame.describe()
        result |= {key: told for key, told in vars(options).items() if key not in _UNTOLD}
        result |= measure(options)
        console = Console()
        console.width = max(console.width, frame.WIDE)
        console.print(frame.machine(result["machine"]))
        frame.show(tables(result), console)
        frame.save(result, options.out)
        print(json.dumps(result, separators=(",", ":")))
        return 0 if result.get("equal", True) else 1

    return main


def sides(text: str) -> tuple[int, int]:
    """Width and height, from `640x480`."""
    width, height = text.split("x")
    return int(width), int(height)


def model_of(options: argparse.Namespace) -> str:
    """The checkpoint of a shape, built once; or a demo model by its name."""
    from keepsight.bench.checkpoints import checkpoint

    if options.shape not in SHAPES:
        return str(options.shape)
    return str(checkpoint(options.shape, options.size, options.folder.absolute()))


class Child:
    """A process of a benchmark's own, which is told something and then answers lines with JSON."""

    def __init__(self, name: str, **told: Any) -> None:
        command = [sys.executable, "-m", f"bench.{name}", "child", json.dumps(told)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def ask(self, line: object = "") -> Record:
        """One line to it, and its answer."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a process of the benchmark has no pipes")
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a process of the benchmark ended with {self._process.wait()}")
        found: Record = json.loads(answer)
        return found

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the process go."""
        self._process.kill()
        self._process.communicate()
