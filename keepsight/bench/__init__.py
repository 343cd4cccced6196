"""`keepsight bench`: against stock Transformers and the limit. May import keepsight and below.

It builds a random-weight checkpoint, or takes a model that is named (an exported one too), runs the
workloads in one process, prints tables for people and one line of JSON for machines.
`bench/README.md` says what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from rich.console import Console

import keepsight
from keepsight.bench import ambitions, extremes, machine, rivals, tables
from keepsight.bench.checkpoints import SHAPES, SIZES, checkpoint
from keepsight.bench.measure import Bench, Say, quiet_heap, run_workload
from keepsight.bench.workloads import SCALES, Pictures, Scale, Step, Workload, user, workloads
from keepsight.kinds import Record

WORKLOADS = ("W1", "W4", "W5", "W7", "peers", "cold", "restart")
FORMAT = 1
_WIDTH = 118  # tables of fewer columns cannot be read; a terminal may be wider


def main(argv: list[str]) -> int:
    """Run the benchmark; 1 when an answer was wrong."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.model is not None and options.model_shape is not None:
        parser.error("a model is named, so none is built: leave --model-shape out")
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    console = Console()
    console.width = max(console.width, _WIDTH)
    say: Say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    result: Record = {
        "benchmark": "keepsight",
        "format": FORMAT,
        "command": " ".join(["keepsight", "bench", *_command(argv, options.model)]),
        "machine": machine.describe(),
        "runs": [],
    }
    for shape, names in _plan(options).items():
        for dtype in options.dtype:
            say(f"{shape}, {dtype}: {', '.join(names)}")
            result["runs"].append(_run(shape, dtype, names, options, say))
    tables.show(result, console)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    return 1 if any(tables.warnings(run) for run in result["runs"]) else 0


def _command(argv: list[str], model: str | None) -> list[str]:
    """The command line without folders and files of this machine."""
    words = [Path(word).name if word == model else word for word in argv]
    for name in ("--out", "--folder"):
        if name in words:
            spot = words.index(name)
            del words[spot : spot + 2]
    return [word for word in words if not word.startswith(("--out=", "--folder="))]


def _plan(options: argparse.Namespace) -> dict[str, list[str]]:
    """Which workloads to run on which shape; without a choice, each shape shows what it is for."""
    if options.model is not None:
        return {Path(options.model).name: options.workload or list(WORKLOADS)}
    if options.model_shape is None and options.workload is None:
        return {"qwen3_vl": list(WORKLOADS), "qwen3_5": list(WORKLOADS), "qwen2_5_vl": ["peers"]}
    shapes = options.model_shape or ["qwen3_vl", "qwen3_5"]
    return dict.fromkeys(shapes, options.workload or list(WORKLOADS))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="keepsight bench", description=__doc__)
    parser.add_argument("model", nargs="?", help="a checkpoint or an export; else one is built")
    parser.add_argument("--model-shape", type=_several(tuple(SHAPES)))
    parser.add_argument("--workload", type=_several(WORKLOADS))
    parser.add_argument("--dtype", type=_several(("float32", "bfloat16")), default=["float32"])
    parser.add_argument("--size", choices=SIZES, default="small", help="of the checkpoint")
    parser.add_argument("--turns", type=_positive, help="turns, steps or requests of each workload")
    parser.add_argument("--repetitions", type=_positive, help="of each workload")
    parser.add_argument("--grain", type=_positive, help="tokens between two snapshots, at least")
    parser.add_argument("--device", default=None, help="where the model goes, such as cuda")
    parser.add_argument("--scale", choices=SCALES, default="full", help="of the workloads")
    parser.add_argument(
        "--quick", dest="scale", action="store_const", const="quick", help="--scale quick"
    )
    parser.add_argument("--folder", type=Path, default=_folder(), help="where checkpoints are kept")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}; expected at least 1")
    return number


def _several(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A parser of `a,b`, where each must be known."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}; choose from {', '.join(known)}")
        return names

    return parse


def _folder() -> Path:
    """`bench/checkpoints` in a clone of the project (git ignores it), else a temporary folder."""
    clone = Path("bench")
    return clone / "checkpoints" if clone.is_dir() else Path(gettempdir()) / "keepsight-bench"


def _scale(options: argparse.Namespace) -> Scale:
    chosen: Scale = SCALES[options.scale]
    if options.turns is not None:
        chosen = replace(chosen, turns=options.turns, requests=options.turns)
    if options.repetitions is not None:
        chosen = replace(chosen, repetitions=options.repetitions)
    return chosen


def _run(shape: str, dtype: str, names: list[str], options: argparse.Namespace, say: Say) -> Record:
    """Everything that was asked for on one checkpoint."""
    path = options.model or checkpoint(shape, options.size, options.folder)
    scale = _scale(options)
    load = {"dtype": dtype, "device_map": options.device, "grain": options.grain}
    with keepsight.load(path, **load) as vlm, TemporaryDirectory() as folder, quiet_heap():
        pictures = Pictures(Path(folder))
        bench = Bench(vlm)
        _warm_up(bench, pictures, scale, say)
        chosen = workloads(names, pictures, scale)
        found = [run_workload(bench, workload, say) for workload in chosen]
        run: Record = {
            "shape": shape,
            "size": options.size,
            "dtype": dtype,
            "parameters": vlm.model.num_parameters(),
            "grain": 0 if vlm.runtime.rule.any_cut else vlm.runtime.rule.grain,
            "workloads": found,
        }
        if "cold" in names:
            run["cold"] = extremes.cold(bench, pictures, scale, say)
        if "restart" in names:
            run["restart"] = extremes.restart(vlm, pictures, scale, say)
    peers = [workload["steps"] for workload in found if workload["name"] == "peers"]
    if peers:
        # The recorded figures belong to the small checkpoints and to pictures of 672x672.
        same = options.model is None and options.size == "small" and scale.peers == 672
        run["peers"] = rivals.compare(shape if same else "", dtype, peers[0])
    run["ambitions"] = ambitions.judge(run)
    return run


def _warm_up(bench: Bench, pictures: Pictures, scale: Scale, say: Say) -> None:
    """One uncounted request for each, so that nobody pays for the library's first call."""
    steps = [Step("warm up", [user("warm up", pictures.path(999, *scale.picture))])]
    run_workload(bench, Workload("warm up", "not counted", steps, 1), say)
