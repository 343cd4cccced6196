"""What a compiled decode step, or a compiled chunk of prefill, is worth on this machine.

Run `python -m bench.compiling`. One model with random weights decodes from a prompt of
some tokens: eager on the engine's lane as the engine does it, eager and compiled on `StaticCache`,
and compiled on a lane. All take turns, in an order that changes, and ratios are taken within a
repetition. Logits must agree within float32 rounding. The engine itself compiles nothing: a graph
takes seconds to make, and other sums in another order would break "warm equals cold".
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import StaticCache

from keepsight.bench import machine
from keepsight.bench.checkpoints import SHAPES, SIZES, checkpoint
from keepsight.bench.contestants import now
from keepsight.core.decoding.state import Lane, Shape
from keepsight.models import loading

FORMAT = 1
_WIDTH = 118  # a narrower table cannot be read
_CLOSE = 1e-4  # of the logits' scale
_FIRST = "engine"  # what the others are compared with


@dataclass
class Way:
    """One way to run the model: its memory, its forward, and what it took so far."""

    name: str
    cache: Any
    forward: Callable[..., Any]
    length: int = 0
    first_ms: float = 0.0  # the first call, which compiles


def main(argv: list[str] | None = None) -> int:
    """Run it; 1 when logits differed."""
    options = _parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    # As the engine reads keys and values, said so that a tracer hears it too.
    os.environ["TRANSFORMERS_SDPA_FORCE_GQA"] = "1"
    runs = []
    with tempfile.TemporaryDirectory() as draft:
        folder = options.folder or Path(draft)
        for shape in options.shape.split(","):
            path = checkpoint(shape, options.size, folder)
            model = loading.load_named(str(path), options.dtype, None, None)[0]
            for tokens in options.tokens.split(","):
                print(f"{shape}, {tokens} tokens a pass", file=sys.stderr, flush=True)
                run = measure(model, int(tokens), options.behind, options.repetitions)
                runs.append({"shape": shape, **run})
    result = {
        "benchmark": "keepsight compiling",
        "format": FORMAT,
        "size": options.size,
        "dtype": options.dtype,
        "machine": machine.describe(),
        "runs": runs,
    }
    console = Console()
    console.width = max(console.width, _WIDTH)
    console.print(_table(runs))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    return 0 if all(run["agree"] for run in runs) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.compiling", description=__doc__)
    parser.add_argument("--shape", default="qwen3_vl", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--tokens", default="1,64", help="of one pass; 1 is a decode step")
    parser.add_argument("--behind", type=int, default=512, help="tokens that stand before")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, help="keep the checkpoints here")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    return parser


@torch.inference_mode()
def measure(model: Any, tokens: int, behind: int, repetitions: int) -> dict[str, Any]:
    """Every way in turn, each from the same prompt on."""
    room = behind + tokens * (repetitions + 1)
    ways = _ways(model, room)
    for way in ways:
        _pass(model, way, torch.arange(behind)[None] % 997)
    again = _ids(tokens, 0)
    logits = [_first(model, way, again) for way in ways]
    samples: dict[str, list[float]] = {way.name: [] for way in ways}
    for repetition in range(repetitions):
        turn = repetition % len(ways)
        ids = _ids(tokens, repetition + 1)
        for way in ways[turn:] + ways[:turn]:
            start = now()
            _pass(model, way, ids, way.forward)
            samples[way.name].append(now() - start)
    scale = float(logits[0].abs().max())
    worst = max(float((other - logits[0]).abs().max()) for other in logits[1:])
    agree = worst <= _CLOSE * scale
    return {"tokens": tokens, "behind": behind, "agree": agree, "ways": _sums(ways, samples)}


def _ways(model: Any, room: int) -> list[Way]:
    torch.compiler.reset()

    def lane() -> Any:
        made = Lane(model, Shape.of(model))
        made.reserve(room)
        return made.cache

    def static() -> Any:
        return StaticCache(config=model.config, max_cache_len=room)

    compiled = torch.compile(model.forward, fullgraph=True, dynamic=False)
    growing = torch.compile(model.forward, fullgraph=True, dynamic=True)
    return [
        Way(_FIRST, lane(), model.forward),
        Way("static", static(), model.forward),
        Way("compiled static", static(), compiled),
        Way("compiled lane", lane(), growing),
    ]


def _ids(tokens: int, step: int) -> torch.Tensor:
    return (torch.arange(tokens)[None] + 31 * step) % 997


def _first(model: Any, way: Way, ids: torch.Tensor) -> torch.Tensor:
    """The first pass, which compiles, and its last logits."""
    start = now()
    logits = _pass(model, way, ids, way.forward)
    way.first_ms = now() - start
    return logits


def _pass(
    model: Any, way: Way, ids: torch.Tensor, forward: Callable[..., Any] | None = None
) -> torch.Tensor:
    """Some tokens behind what the way's cache holds."""
    end = way.length + ids.shape[1]
    positions = torch.arange(way.length, end)[None, None].expand(4, 1, -1)
    output = (forward or model.forward)(
        input_ids=ids,
        position_ids=positions,
        past_key_values=way.cache,
        use_cache=True,
        logits_to_keep=1,
    )
    way.length = end
    logits: torch.Tensor = output.logits[:, -1].clone()
    return logits


def _sums(ways: list[Way], samples: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Milliseconds of each way, and its ratio to the engine's within each repetition."""
    first = samples[_FIRST]
    return [
        {
            "name": way.name,
            "ms": round(median(samples[way.name]), 3),
            "of_engine": round(
                median(b / a for a, b in zip(first, samples[way.name], strict=True)), 3
            ),
            "first_ms": round(way.first_ms, 1),
            "samples": [round(sample, 3) for sample in samples[way.name]],
        }
        for way in ways
    ]


def _table(runs: list[dict[str, Any]]) -> Table:
    table = Table(title="Compiled or not", title_justify="left", box=box.SIMPLE_HEAD)
    for column in (
        "shape",
        "tokens",
        "behind",
        "way",
        "ms",
        "of the engine's",
        "first ms",
        "logits",
    ):
        left = column in ("shape", "way", "logits")
        table.add_column(column, justify="left" if left else "right")
    for run in runs:
        for way in run["ways"]:
            table.add_row(
                run["shape"],
                str(run["tokens"]),
                str(run["behind"]),
                way["name"],
                f"{way['ms']:.2f}",
                f"{way['of_engine']:.3f}",
                f"{way['first_ms']:.0f}",
                "agree" if run["agree"] else "DIFFERENT",
            )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
