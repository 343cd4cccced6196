"""How busy `keepsight encode` keeps the tower: images a second of the whole against the bare tower.

Run `python -m bench.encoding`. The whole reads files, decodes, preprocesses, encodes and
writes a store; the bare tower gets pixels that are ready in memory and keeps nothing. A repetition
runs the bare tower, the whole, one image after another without anything ahead, and the bare tower
again; ratios are taken within a repetition, against the mean of its two bare runs. Packages must be
equal, bit for bit, to those of one image after another.

Beside the clock stands the processor time of the thread that runs the tower: how much of it goes to
the tower itself. On a machine that others use as well, only that can be trusted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import thread_time
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import keepsight
from keepsight.bench import machine
from keepsight.bench.checkpoints import SHAPES, SIZES, checkpoint
from keepsight.bench.contestants import now
from keepsight.bench.workloads import Pictures
from keepsight.encode import encode
from keepsight.system import digests

FORMAT = 1
AMBITION = 0.9  # of the bare tower's rate
_WIDTH = 118  # a narrower table cannot be read


def main(argv: list[str] | None = None) -> int:
    """Run it; 1 when packages differed."""
    options = _parser().parse_args(argv)
    if options.torch_threads is not None:
        torch.set_num_threads(options.torch_threads)
    with TemporaryDirectory() as folder:
        photos = _photos(Path(folder) / "photos", options.images, options.side)
        shapes = options.shape.split(",")
        runs = [_measure(shape, photos, Path(folder), options) for shape in shapes]
    result = {
        "benchmark": "keepsight encoding",
        "format": FORMAT,
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
    parser = argparse.ArgumentParser(prog="python -m bench.encoding", description=__doc__)
    parser.add_argument("--shape", default="qwen3_vl", help=f"of {', '.join(SHAPES)}, or demo")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the checkpoint")
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--side", type=int, default=448, help="pixels of an image, down and across")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default=None, help="where the model goes, such as cuda")
    parser.add_argument("--threads", type=int, help="that work ahead; default: as the command")
    parser.add_argument("--torch-threads", type=int, help="that a tower on a CPU computes with")
    parser.add_argument("--folder", type=Path, default=Path("bench") / "checkpoints")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    return parser


def _photos(folder: Path, count: int, side: int) -> Path:
    folder.mkdir()
    pictures = Pictures(folder)
    for number in range(count):
        pictures.path(number, side, side)
    return folder


def _measure(shape: str, photos: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All repetitions on one checkpoint."""
    built = shape == "demo"
    path = shape if built else str(checkpoint(shape, options.size, options.folder))
    files = sorted(photos.iterdir())
    rates: dict[str, list[float]] = {"bare": [], "whole": [], "plain": [], "known": []}
    busy: list[float] = []
    with keepsight.load(path, dtype=options.dtype, device_map=options.device) as vlm:
        vision = vlm.runtime.vision
        tokens = vision.encode(files[0]).tokens
        pixels = [vision.namer.look(file).pixels for file in files[1:]]
    equal = True
    for repetition in range(options.repetitions):
        print(f"{shape}, repetition {repetition + 1}", file=sys.stderr, flush=True)
        root = folder / f"{shape}-{repetition}"
        with _loaded(path, options, root / "whole") as vlm:
            spent = thread_time()
            before = _rate(lambda: _bare(vlm, pixels), len(pixels), vlm)
            bare, spent = (thread_time() - spent) / len(pixels), thread_time()
            rates["whole"].append(_rate(lambda: _whole(vlm, photos, options), len(files), vlm))
            busy.append(bare * len(files) / (thread_time() - spent))
        with _loaded(path, options, root / "plain") as plain:
            rates["plain"].append(_rate(lambda: _plain(plain, files), len(files), plain))
            after = _rate(lambda: _bare(plain, pixels), len(pixels), plain)
            rates["bare"].append((before + after) / 2)
        with _loaded(path, options, root / "whole") as again:
            rates["known"].append(_rate(lambda: _whole(again, photos, options), len(files), again))
            with _loaded(path, options, root / "plain") as plain:
                equal = equal and _packages(again) == _packages(plain)
    return {
        "shape": shape,
        "side": options.side,
        "images": len(files),
        "tokens": tokens,
        "torch_threads": torch.get_num_threads(),
        "bare_over_whole_of_the_tower_thread": round(median(busy), 4),
        **_sums(rates, equal),
    }


def _loaded(path: str, options: argparse.Namespace, store: Path) -> Any:
    return keepsight.load(path, dtype=options.dtype, device_map=options.device, store=str(store))


def _rate(way: Callable[[], Any], count: int, vlm: Any) -> float:
    start = now()
    way()
    if vlm.model.device.type == "cuda":
        torch.cuda.synchronize(vlm.model.device)
    return 1e3 * count / (now() - start)


@torch.inference_mode()
def _bare(vlm: Any, pixels: list[Any]) -> None:
    for one in pixels:
        vlm.runtime.family.encode(one)


def _whole(vlm: Any, photos: Path, options: argparse.Namespace) -> None:
    for _ in encode([photos], vlm, threads=options.threads):
        pass


def _plain(vlm: Any, files: list[Path]) -> None:
    for file in files:
        vlm.encode(file)
    vlm.flush()


def _packages(vlm: Any) -> dict[str, str]:
    """A digest of the tensors of every package in a store."""
    store = vlm.runtime.store
    names = [entry.key for entry in store.entries() if entry.kind == "package"]
    found = {name: store.get("package", name)[0] for name in names}
    return {
        name: digests.digest("bench", [[n, t[n]] for n in sorted(t)]) for name, t in found.items()
    }


def _sums(rates: dict[str, list[float]], equal: bool) -> dict[str, Any]:
    """Images a second, and ratios within each repetition."""

    def over(name: str) -> list[float]:
        pairs = zip(rates[name], rates["bare"], strict=True)
        return [round(one / bare, 4) for one, bare in pairs]

    whole = over("whole")
    return {
        "equal": equal,
        "images_per_second": {name: round(median(found), 3) for name, found in rates.items()},
        "whole_over_bare": round(median(whole), 4),
        "whole_over_bare_samples": whole,
        "plain_over_bare": round(median(over("plain")), 4),
        "ambition": AMBITION,
        "met": median(whole) >= AMBITION,
    }


def _table(runs: list[dict[str, Any]]) -> Table:
    title = "Encoding files into a store, against the bare tower (images a second)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    columns = ("shape", "image", "tokens", "bare tower", "keepsight encode", "of bare")
    more = ("tower's share", "nothing ahead", "of bare", "known images", "packages")
    for column in (*columns, *more):
        table.add_column(column, justify="left" if column in ("shape", "packages") else "right")
    for run in runs:
        rates = run["images_per_second"]
        table.add_row(
            run["shape"],
            f"{run['side']}²",
            str(run["tokens"]),
            f"{rates['bare']:.2f}",
            f"{rates['whole']:.2f}",
            f"{run['whole_over_bare']:.2f}",
            f"{run['bare_over_whole_of_the_tower_thread']:.2f}",
            f"{rates['plain']:.2f}",
            f"{run['plain_over_bare']:.2f}",
            f"{rates['known']:.0f}",
            "equal" if run["equal"] else "DIFFERENT",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
