"""What it saves to keep the tensors that a tower works out from a grid.

Run `python -m bench.towers`. One random tower for each shape meets one image size after
another, in turn with and without the remembered tensors, in an order that changes. Ratios are taken
within a repetition; features must be equal bit for bit. A first image pays for making the tensors,
as stock does for every image: `made` and `found` are timed alone, because on a slow tower the
difference between two whole runs is smaller than what the machine does in between.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from keepsight.bench import machine
from keepsight.bench.contestants import now
from keepsight.models.families.tower_tensors import TowerTensors

FORMAT = 1
_WIDTH = 118  # a narrower table cannot be read
DEPTH, WIDTH = 8, 512
GRIDS = ("16x16", "32x48")
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
_VISION = {
    "depth": DEPTH,
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_heads": WIDTH // 64,
    "out_hidden_size": 64,
}
_WIDE = {**_VISION, "embed_dim": WIDTH, "hidden_size": 64}
_ROPE = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [6, 5, 5]}
# Model, what else its tower is told, and numbers of one patch.
SHAPES: dict[str, tuple[str, dict[str, Any], int]] = {
    "qwen2_vl": ("Qwen2VL", _WIDE, 3 * 2 * 14**2),
    "qwen2_5_vl": ("Qwen2_5_VL", {**_VISION, "fullatt_block_indexes": [3, 7]}, 3 * 2 * 14**2),
    "qwen3_vl": ("Qwen3VL", {**_VISION, "deepstack_visual_indexes": [1, 3, 5]}, 3 * 2 * 16**2),
}


def main(argv: list[str] | None = None) -> int:
    """Run it; 1 when features differed."""
    options = _parser().parse_args(argv)
    runs = []
    for shape in options.shape.split(","):
        core = model(shape).to(options.device, getattr(torch, options.dtype))
        for grid in options.grid.split(","):
            print(f"{shape}, {grid} patches", file=sys.stderr, flush=True)
            runs.append({"shape": shape, **measure(core, shape, grid, options.repetitions)})
    result = {
        "benchmark": "keepsight towers",
        "format": FORMAT,
        "tower": {"depth": DEPTH, "width": WIDTH, "dtype": options.dtype},
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
    return 0 if all(run["equal"] for run in runs) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.towers", description=__doc__)
    parser.add_argument("--shape", default="qwen3_vl,qwen2_5_vl", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--grid", default=",".join(GRIDS), help="patches down x across")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    return parser


def model(shape: str) -> Any:
    """A model with a tower of middle size and hardly any language model."""
    name, vision, _ = SHAPES[shape]
    config = getattr(transformers, f"{name}Config")(
        text_config={**_TEXT, "rope_parameters": _ROPE}, vision_config=vision
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}Model")(config).eval()


@torch.inference_mode()
def measure(core: Any, shape: str, grid: str, repetitions: int) -> dict[str, Any]:
    """Stock and remembered in turn, on one size of image."""
    down, across = (int(side) for side in grid.split("x"))
    pixels = torch.randn(down * across, SHAPES[shape][2]).to(core.device, core.dtype)
    sizes = {"image_grid_thw": torch.tensor([[1, down, across]])}
    towers = TowerTensors(core)

    def stock() -> Any:
        return core.get_image_features(pixels, sizes["image_grid_thw"].to(core.device))

    def remembered() -> Any:
        given = towers.of(sizes, core.device)
        return core.get_image_features(pixels, sizes["image_grid_thw"].to(core.device), **given)

    def made() -> Any:
        towers.prepared.clear()
        return towers.of(sizes, core.device)

    first, again = stock(), remembered()
    pair = [("stock", stock), ("remembered", remembered)]
    samples: dict[str, list[float]] = {"stock": [], "remembered": []}
    for repetition in range(repetitions):
        for name, way in pair if repetition % 2 else pair[::-1]:
            samples[name].append(_time(way, core))
    made_ms = median(_time(made, core) for _ in range(repetitions))
    found_ms = median(_time(lambda: towers.of(sizes, core.device), core) for _ in range(9))
    kept = towers.prepared.nbytes
    equal = all(map(torch.equal, first.pooler_output, again.pooler_output))
    return {"grid": [down, across], "equal": equal, "bytes": kept} | _sums(
        samples, made_ms, found_ms
    )


def _time(way: Callable[[], Any], core: Any) -> float:
    start = now()
    way()
    if core.device.type == "cuda":
        torch.cuda.synchronize(core.device)
    return now() - start


def _sums(samples: dict[str, list[float]], made: float, found: float) -> dict[str, Any]:
    """Milliseconds, and the ratio within each repetition."""
    pairs = list(zip(samples["stock"], samples["remembered"], strict=True))
    stock = median(samples["stock"])
    return {
        "stock_ms": round(stock, 3),
        "remembered_ms": round(median(samples["remembered"]), 3),
        "stock_samples": [round(sample, 3) for sample in samples["stock"]],
        "remembered_samples": [round(sample, 3) for sample in samples["remembered"]],
        "stock_over_remembered": round(median(a / b for a, b in pairs), 4),
        "difference_ms": round(median(a - b for a, b in pairs), 3),
        "made_ms": round(made, 3),
        "found_ms": round(found, 3),
        "saved_ms_per_image": round(made - found, 3),
        "saved_ms_per_tower_second": round(1e3 * (made - found) / stock, 2),
    }


def _table(runs: list[dict[str, Any]]) -> Table:
    table = Table(title="Tensors of towers, remembered", title_justify="left", box=box.SIMPLE_HEAD)
    columns = ("shape", "patches", "stock ms", "stock / remembered", "made ms", "found ms")
    for column in (*columns, "saved ms an image", "ms a tower second", "features"):
        table.add_column(column, justify="left" if column in ("shape", "features") else "right")
    for run in runs:
        table.add_row(
            run["shape"],
            "x".join(str(side) for side in run["grid"]),
            f"{run['stock_ms']:.1f}",
            f"{run['stock_over_remembered']:.3f}",
            f"{run['made_ms']:.2f}",
            f"{run['found_ms']:.2f}",
            f"{run['saved_ms_per_image']:.2f}",
            f"{run['saved_ms_per_tower_second']:.1f}",
            "equal" if run["equal"] else "DIFFERENT",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
