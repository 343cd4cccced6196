"""Runs what the options ask for: workloads on checkpoints, tables and one line of JSON."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

import keepsight
from keepsight.bench import frame, hardware, tables
from keepsight.bench.checkpoints import checkpoint
from keepsight.bench.measure import Bench
from keepsight.bench.options import Asked
from keepsight.bench.workloads import Pictures, Step, Workload, user, workloads
from keepsight.kinds import Record

FORMAT = 1


def run(typed: list[str], asked: Asked, out: Path | None = None, as_json: bool = False) -> int:
    """Run the benchmark; 1 if an answer was wrong."""
    told = [word for word in typed if word != "--json"]
    if asked.model is not None:
        told = [word.replace(asked.model, Path(asked.model).name) for word in told]
    result: Record = {
        "benchmark": "keepsight",
        "format": FORMAT,
        "command": frame.command("keepsight bench", told),
        "machine": frame.describe(),
        "runs": [],
    }
    if asked.scale == "quick":
        frame.say("a short look: under a minute on two free cores, twice that at the first time")
    for shape, names in asked.plan().items():
        for dtype in asked.dtypes:
            frame.say(f"{shape}, {dtype}: {', '.join(names)}")
            result["runs"].append(_run(shape, dtype, names, asked))
    if not as_json:
        tables.show_all(result, frame.wide(Console()))
    frame.save(result, out)
    if as_json or not sys.stdout.isatty():
        print(json.dumps(result, separators=(",", ":")))
    return 1 if any(tables.warnings(run) for run in result["runs"]) else 0


def _run(shape: str, dtype: str, names: list[str], asked: Asked) -> Record:
    """Run everything requested on one checkpoint."""
    path = asked.model or checkpoint(shape, asked.size, asked.folder)
    scale = asked.amount()
    loaded = keepsight.load(path, dtype=dtype, device_map=asked.device_map)
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
            "size": asked.size,
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
