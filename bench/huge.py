"""How much memory one huge picture takes in the tower, in one stock pass and by rows.

Run `python -m bench.huge`. Each measurement is a process of its own: a random tower, one picture of
noise, one pass. The peak is the most memory that the process had while the tower ran, less what it
had before (the weights and the pixels). Features of both ways must be equal to rounding. Linux
only: the peak is the kernel's (`VmHWM`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

from keepsight.bench import machine
from keepsight.bench.contestants import now
from keepsight.models import huge
from keepsight.models.families import Family, Pixels

FORMAT = 2
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
# The layers of Qwen3-VL 8B's tower; their number changes the time, and hardly the peak.
_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [],
}
_ROPE = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [6, 5, 5]}
_WAYS = ("stock", "rows")
_PATCH = 16
_ROUNDING = {"float32": 1e-4, "bfloat16": 0.05}  # of the largest feature


def main(argv: list[str] | None = None) -> int:
    """Run it; 1 when features differed by more than rounding."""
    options = _parser().parse_args(argv)
    if options.way:
        print(json.dumps(_measure(options)))
        return 0
    runs = []
    for side in options.side.split(","):
        with tempfile.TemporaryDirectory() as folder:
            ways = {way: _alone(options, way, side, Path(folder) / way) for way in _WAYS}
            stock, rows = (torch.load(Path(folder) / way, weights_only=True) for way in _WAYS)
        off = float((stock - rows).abs().max() / stock.abs().max())
        part = ways["rows"]["peak_mb"] / ways["stock"]["peak_mb"]
        took = ways["rows"]["seconds"] / ways["stock"]["seconds"]
        run = {"side": int(side), "patches": (int(side) // _PATCH) ** 2, "off": off, **ways}
        runs.append({**run, "peak_ratio": round(part, 3), "time_ratio": round(took, 3)})
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    tower = {**_VISION, "depth": options.depth, "dtype": options.dtype, "threads": options.threads}
    result = {
        "benchmark": "keepsight huge",
        "format": FORMAT,
        "tower": tower,
        "machine": machine.describe(),
        "runs": runs,
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    return 0 if all(run["off"] < _ROUNDING[options.dtype] for run in runs) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.huge", description=__doc__)
    parser.add_argument("--side", default="2048", help="pixels down and across, a list")
    parser.add_argument("--depth", type=int, default=2, help="layers")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--way", choices=_WAYS, help="measure this way alone, here")
    parser.add_argument("--features", type=Path, help="with --way: where the features go")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    return parser


def _alone(options: argparse.Namespace, way: str, side: str, features: Path) -> dict[str, Any]:
    """One measurement in a process of its own."""
    same = [f"--{name}={getattr(options, name)}" for name in ("depth", "dtype", "threads")]
    same += [f"--way={way}", f"--side={side}", f"--features={features}"]
    command = [sys.executable, "-m", "bench.huge", *same]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    family, dtype = _family(options), getattr(torch, options.dtype)
    across = int(options.side) // _PATCH
    noise = torch.randn(across * across, 3 * 2 * _PATCH**2).to(dtype)
    pixels = Pixels(
        {"pixel_values": noise, "image_grid_thw": torch.tensor([[1, across, across]])}, {}, ()
    )
    around = huge.by_rows(family) if options.way == "rows" else nullcontext()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start = now()
    with torch.no_grad(), around:
        made = family.encode(pixels)[0]
    seconds = (now() - start) / 1e3
    peak = _memory("VmHWM") - before
    if options.features:
        torch.save(made["features"].float(), options.features)
    return {"peak_mb": round(peak), "seconds": round(seconds, 2)}


def _family(options: argparse.Namespace) -> Family:
    config = transformers.Qwen3VLConfig(
        text_config={**_TEXT, "rope_parameters": _ROPE},
        vision_config={**_VISION, "depth": options.depth},
    )
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(config)
    return Family(model.to(getattr(torch, options.dtype)).eval())


def _memory(name: str) -> float:
    """Megabytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e6


if __name__ == "__main__":
    raise SystemExit(main())
