"""Runs what the options ask for: workloads on checkpoints, tables and one line of JSON."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

import keepsight
from keepsight.bench import frame, hardware, tables
from keepsight.bench.checkpoints import checkpoint
from keepsight.bench.measure import Bench
from keepsight.bench.options import QUICK, SCALES, WORKLOADS, Scale
from keepsight.bench.workloads import Pictures, Step, Workload, user, workloads
from keepsight.kinds import Record

FORMAT = 1


def run(argv: list[str], options: argparse.Namespace) -> int:
    """Run the benchmark; 1 if an answer was wrong."""
    told = [Path(word).name if word == options.model else word for word in argv if word != "--json"]
    result: Record = {
        "benchmark": "keepsight",
        "format": FORMAT,
        "command": frame.command("keepsight bench", told),
        "machine": frame.describe(),
        "runs": [],
    }
    if options.scale == "quick":
        frame.say("a short look: under a minute on two free cores, twice that at the first time")
    for shape, names in plan(options).items():
        for dtype in options.dtype:
            frame.say(f"{shape}, {dtype}: {', '.join(names)}")
            result["runs"].append(_run(shape, dtype, names, options))
    if not options.json:
        tables.show_all(result, frame.wide(Console()))
    frame.save(result, options.out)
    if options.json or not sys.stdout.isatty():
        print(json.dumps(result, separators=(",", ":")))
    return 1 if any(tables.warnings(run) for run in result["runs"]) else 0


def plan(options: argparse.Namespace) -> dict[str, list[str]]:
    """The workloads to run on each shape; by default each shape runs those that suit it."""
    usual = list(QUICK if options.scale == "quick" else WORKLOADS)
    if options.model is not None:
        return {Path(options.model).name: options.workload or usual}
    if options.scale == "quick" and options.model_shape is None:
        return {"qwen3_vl": options.workload or usual}
    if options.model_shape is None and options.workload is None:
        return {"qwen3_vl": usual, "qwen3_5": usual, "qwen2_5_vl": ["peers"]}
    return dict.fromkeys(options.model_shape or ["qwen3_vl", "qwen3_5"], options.workload or usual)


def _scale(options: argparse.Namespace) -> Scale:
    scale: Scale = SCALES[options.scale]
    turns = options.turns
    return replace(
        scale,
        turns=turns or scale.turns,
        requests=turns or scale.requests,
        repetitions=options.repetitions or scale.repetitions,
    )


def _run(shape: str, dtype: str, names: list[str], options: argparse.Namespace) -> Record:
    """Run everything requested on one checkpoint."""
    path = options.model or checkpoint(shape, options.size, options.folder)
    scale = _scale(options)
    loaded = keepsight.load(path, dtype=dtype, device_map=options.device)
    with loaded as vlm, TemporaryDirectory() as folder:
        # Collecting before each answer is cheap without all that exists already.
        gc.collect()
        gc.freeze()
        bench, pictures = Bench(vlm), Pictures(Path(folder))
        # Not counted, so that no measurement holds the library's first call.
        warm_up = [Step("warm up", [user("warm up", pictures.path(999, *scale.picture))])]
        bench.run(Workload("warm up", "not counted", warm_up, 1))
        run: Record = {
            "shape": shape,
            "size": options.size,
            "dtype": dtype,
            "parameters": vlm.model.num_parameters(),
            "exactness": "bits" if vlm.runtime.rule.kernels else "rounding",
            "workloads": [bench.run(workload) for workload in workloads(names, pictures, scale)],
        }
        if "cold" in names:
            run["cold"] = bench.cold(pictures, scale)
        if "restart" in names:
            run["restart"] = hardware.restart(vlm, pictures, scale)
        if "roofline" in names and getattr(vlm.model, "exported", None) is None:
            run["roofline"] = hardware.roofline(bench, pictures, scale)
        gc.unfreeze()
    return run
