"""What all benchmarks share: the machine, turns, medians, and tables for people.

Times of two runs cannot be compared on a machine that others use too. So everything that is
compared takes turns, in an order that changes; ratios are taken within one turn, and the median of
the ratios is told.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

import keepsight
from keepsight.kinds import Record

T = TypeVar("T")
Told = tuple[str, list[str], list[list[str]]]  # heading, columns, rows
WIDE = 118  # width of all columns
_WIDE_ONLY = {"new", "again", "limit ms", "x limit", "ms/tok", "bare read ms", "x read"}
_WIDE_ONLY |= {"restore ms"}  # left out on a narrow terminal; a file given to --out has all


def now() -> float:
    """Milliseconds on a monotonic clock."""
    return 1e3 * time.perf_counter()


def say(text: str) -> None:
    """Progress, beside the result."""
    print(text, file=sys.stderr, flush=True)


# -- turns and medians ---------------------------------------------------------------------------


def interleaved(
    repetitions: int, ways: Mapping[str, Callable[[int], T]], first: int = 0
) -> list[dict[str, T]]:
    """What each way gives in each repetition; the order changes."""
    names, rounds = list(ways), []
    for number in range(first, repetitions):
        turn = number % len(names)
        met = {name: ways[name](number) for name in names[turn:] + names[:turn]}
        rounds.append({name: met[name] for name in names})
    return rounds


def middle(values: Iterable[float], digits: int = 2) -> float:
    """The median, rounded."""
    return round(float(median(values)), digits)


def ratio(pairs: Iterable[tuple[float, float]], digits: int = 3) -> float | None:
    """The median of the ratios within each repetition; None if there is nothing to divide by."""
    met = list(pairs)
    return middle((a / b for a, b in met), digits) if all(b >= 0.05 for _, b in met) else None


def spread(values: Iterable[float], digits: int = 2) -> list[float]:
    """The least and the most."""
    met = sorted(values)
    return [round(met[0], digits), round(met[-1], digits)]


# -- the machine ---------------------------------------------------------------------------------


def describe() -> Record:
    """The machine of a run. No path, host or user is named, because results are committed. A load
    above zero at the start says that the machine was not quiet."""
    names, flags = (_cpu_lines(start) for start in ("model name", "flags"))
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "amx": bool(flags) and "amx_tile" in flags[0].split(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "keepsight": keepsight.__version__,
    }


def _cpu_lines(start: str) -> list[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(start)]


def _commit() -> str | None:
    """The commit of a clone, and whether it was changed; None where keepsight is installed."""
    home = Path(__file__).parents[2]
    if not (home / ".git").exists():
        return None
    words = ["git", "-C", str(home), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def machine(m: Record) -> str:
    """A machine in one line."""
    amx = ", AMX" if m["amx"] else ""
    on = m["accelerator"] or f"{m['processor']} ({m['instructions']}{amx})"
    commit = f", commit {m['commit']}" if m.get("commit") else ""
    return (
        f"{m['date']}; {on}, {m['cores']} cores, {m['threads']} threads, load {m['load']} at the "
        f"start; Python {m['python']}, torch {m['torch']}, transformers {m['transformers']}, "
        f"keepsight {m['keepsight']}{commit}"
    )


# -- telling -------------------------------------------------------------------------------------


def command(program: str, argv: list[str]) -> str:
    """The command line without folders and files of this machine."""
    told, words = [program], iter(argv)
    for word in words:
        if word in ("--out", "--folder"):
            next(words, None)
        elif not word.startswith(("--out=", "--folder=")):
            told.append(json.dumps(word) if " " in word else word)
    return " ".join(told)


def cells(found: Record, *fields: str) -> list[str]:
    """Fields of a record as text, such as `stock_ms:.1f`; a dash where there is nothing."""
    parts = (field.partition(":") for field in fields)
    return [
        "-" if found.get(name) is None else format(found[name], digits) for name, _, digits in parts
    ]


def wide(console: Console) -> Console:
    """A console that shows all columns, unless it is a narrow terminal."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        console.width = WIDE
    return console


def show(tables: Iterable[Told], console: Console) -> None:
    """Tables on the terminal; what is wrong is red."""
    narrow = console.width < WIDE
    for heading, columns, rows in tables:
        kept = [i for i, column in enumerate(columns) if not narrow or column not in _WIDE_ONLY]
        table = Table(title=heading, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for i in kept:
            justify: Any = "left" if i == 0 or columns[i] == "tokens" else "right"
            once = i == 0 and not narrow
            table.add_column(columns[i], justify=justify, overflow="fold", no_wrap=once)
        for row in rows:
            wrong = any(cell == "NO" or cell.startswith("DIFFERENT") for cell in row)
            table.add_row(*(row[i] for i in kept), style="red" if wrong else None)
        console.print(table)


def save(result: Record, out: Path | None) -> None:
    """Write a result where the user wants it."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
