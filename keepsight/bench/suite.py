"""Runs what the options ask for: workloads on checkpoints, tables and one line of JSON.

It gets parsed options, however they were written.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

import keepsight
from keepsight.bench import extremes, machine, tables
from keepsight.bench.checkpoints import checkpoint
from keepsight.bench.measure import Bench, Say, quiet_heap, run_workload
from keepsight.bench.options import QUICK, SCALES, WORKLOADS, Scale
from keepsight.bench.roofline import roofline
from keepsight.bench.workloads import Pictures, Step, Workload, user, workloads
from keepsight.kinds import Record

FORMAT = 1


def run(argv: list[str], options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if an answer was wrong."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    console = Console()
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        console.width = tables.WIDE
    say: Say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    result: Record = {
        "benchmark": "keepsight",
        "format": FORMAT,
        "command": " ".join(["keepsight", "bench", *_command(argv, options.model)]),
        "machine": machine.describe(),
        "runs": [],
    }
    if options.scale == "quick":
        say("a short look: under a minute on two cores that are free, twice that at the first time")
    for shape, names in _plan(options).items():
        for dtype in options.dtype:
            say(f"{shape}, {dtype}: {', '.join(names)}")
            result["runs"].append(_run(shape, dtype, names, options, say))
    if not options.json:
        tables.show(result, console)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.json or not sys.stdout.isatty():
        print(json.dumps(result, separators=(",", ":")))
    return 1 if any(tables.warnings(run) for run in result["runs"]) else 0


def _command(argv: list[str], model: str | None) -> list[str]:
    """The command line without folders and files of this machine."""
    argv = [word for word in argv if word != "--json"]
    words = [Path(word).name if word == model else word for word in argv]
    for name in ("--out", "--folder"):
        if name in words:
            spot = words.index(name)
            del words[spot : spot + 2]
    return [word for word in words if not word.startswith(("--out=", "--folder="))]


def _plan(options: argparse.Namespace) -> dict[str, list[str]]:
    """The workloads to run on each shape; by default each shape runs those that suit it."""
    usual = list(QUICK if options.scale == "quick" else WORKLOADS)
    if options.model is not None:
        return {Path(options.model).name: options.workload or usual}
    if options.scale == "quick" and options.model_shape is None:
        return {"qwen3_vl": options.workload or usual}
    if options.model_shape is None and options.workload is None:
        return {"qwen3_vl": list(WORKLOADS), "qwen3_5": list(WORKLOADS), "qwen2_5_vl": ["peers"]}
    shapes = options.model_shape or ["qwen3_vl", "qwen3_5"]
    return dict.fromkeys(shapes, options.workload or usual)


def _scale(options: argparse.Namespace) -> Scale:
    chosen: Scale = SCALES[options.scale]
    if options.turns is not None:
        chosen = replace(chosen, turns=options.turns, requests=options.turns)
    if options.repetitions is not None:
        chosen = replace(chosen, repetitions=options.repetitions)
    return chosen


def _run(shape: str, dtype: str, names: list[str], options: argparse.Namespace, say: Say) -> Record:
    """Run everything requested on one checkpoint."""
    path = options.model or checkpoint(shape, options.size, options.folder)
    scale = _scale(options)
    load = {"dtype": dtype, "device_map": options.device}
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
            "exactness": "bits" if vlm.runtime.rule.kernels else "rounding",
            "workloads": found,
        }
        if "cold" in names:
            run["cold"] = extremes.cold(bench, pictures, scale, say)
        if "restart" in names:
            run["restart"] = extremes.restart(vlm, pictures, scale, say)
        if "roofline" in names and getattr(vlm.model, "exported", None) is None:
            run["roofline"] = roofline(bench, pictures, scale, say)
    return run


def _warm_up(bench: Bench, pictures: Pictures, scale: Scale, say: Say) -> None:
    """One uncounted request for each, so that no measurement contains the library's first call."""
    steps = [Step("warm up", [user("warm up", pictures.path(999, *scale.picture))])]
    run_workload(bench, Workload("warm up", "not counted", steps, 1), say)
