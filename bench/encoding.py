"""How busy `keepsight encode` keeps the tower: images a second of the whole against the bare tower.

Run `python -m bench.encoding`. The whole reads files, decodes, preprocesses, encodes and writes a
store; the bare tower gets pixels that are ready in memory and keeps nothing. A repetition runs the
bare tower, the whole, one image after another without anything ahead, and the bare tower again;
ratios are taken within a repetition, against the mean of its two bare runs. Packages must be equal,
bit for bit, to those of one image after another.

Beside the clock stands the processor time of the thread that runs the tower: how much of it goes to
the tower itself. On a machine that others use as well, only that can be trusted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import thread_time
from typing import Any

import torch

import keepsight
from bench.frame import Record, Told, bench, model_of
from keepsight.bench.frame import middle, now, ratio, say, spread
from keepsight.bench.options import SHAPES
from keepsight.bench.workloads import Pictures
from keepsight.encode import encode
from keepsight.system import digests

RATES = ("bare", "whole", "plain", "known")


def add(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told."""
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--side", type=int, default=448, help="pixels of an image, down and across")
    parser.add_argument("--device", help="where the model goes, such as cuda")
    parser.add_argument("--threads", type=int, help="that work ahead; default: as the command")


def measure(options: argparse.Namespace) -> Record:
    """All repetitions on one checkpoint."""
    model = model_of(options)
    with TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        photos.mkdir()
        for number in range(options.images):
            Pictures(photos).path(number, options.side, options.side)
        rounds = []
        for number in range(options.repetitions):
            say(f"repetition {number + 1} of {options.repetitions}")
            rounds.append(_once(model, photos, Path(folder) / str(number), options))
    run: Record = {"shape": options.shape, "side": options.side, "images": options.images}
    run |= {"tokens": rounds[0]["tokens"], "torch_threads": torch.get_num_threads()}
    run["equal"] = all(one["equal"] for one in rounds)
    run["images_per_second"] = {name: middle((o[name] for o in rounds), 3) for name in RATES}
    run["bare_over_whole_of_the_tower_thread"] = middle((one["busy"] for one in rounds), 4)
    for name in ("whole", "plain"):
        pairs = [(one[name], one["bare"]) for one in rounds]
        run[f"{name}_over_bare"] = ratio(pairs, 4)
        run[f"{name}_over_bare_spread"] = spread((a / b for a, b in pairs), 4)
    return {"runs": [run], "equal": run["equal"]}


def _once(model: str, photos: Path, stores: Path, options: argparse.Namespace) -> Record:
    """One repetition: images a second of each way."""
    files = sorted(photos.iterdir())

    def loaded(store: str) -> Any:
        home = str(stores / store)
        return keepsight.load(model, dtype=options.dtype, device_map=options.device, store=home)

    def whole(vlm: Any) -> None:
        for _ in encode([photos], vlm, threads=options.threads):
            pass

    def plain(vlm: Any) -> None:
        for file in files:
            vlm.encode(file)
        vlm.flush()

    with loaded("whole") as vlm:
        pixels = [vlm.runtime.vision.namer.look(file).pixels for file in files]
        spent = thread_time()
        before = _rate(vlm, len(files), lambda: _bare(vlm, pixels))
        bare, spent = thread_time() - spent, thread_time()
        found: Record = {"whole": _rate(vlm, len(files), lambda: whole(vlm))}
        found["busy"] = bare / (thread_time() - spent)
    with loaded("plain") as vlm:
        found["plain"] = _rate(vlm, len(files), lambda: plain(vlm))
        found["bare"] = (before + _rate(vlm, len(files), lambda: _bare(vlm, pixels))) / 2
        kept = _packages(vlm)
    with loaded("whole") as vlm:
        found["known"] = _rate(vlm, len(files), lambda: whole(vlm))
        found["equal"], found["tokens"] = _packages(vlm) == kept, vlm.encode(files[0]).tokens
    return found


def _rate(vlm: Any, count: int, way: Callable[[], object]) -> float:
    start = now()
    way()
    if vlm.model.device.type == "cuda":
        torch.cuda.synchronize(vlm.model.device)
    return 1e3 * count / (now() - start)


@torch.inference_mode()
def _bare(vlm: Any, pixels: list[Any]) -> None:
    for one in pixels:
        vlm.runtime.family.encode(one)


def _packages(vlm: Any) -> dict[str, str]:
    """A digest of the tensors of every package in a store."""
    store = vlm.runtime.store
    names = [entry.key for entry in store.entries() if entry.kind == "package"]
    found = {name: store.get("package", name)[0] for name in names}
    return {
        name: digests.digest("bench", [[n, t[n]] for n in sorted(t)]) for name, t in found.items()
    }


def tables(result: Record) -> Iterator[Told]:
    """Images a second of every way."""
    columns = ["shape", "image", "tokens an image", "bare tower", "keepsight encode", "of bare"]
    columns += ["tower's share", "nothing ahead", "of bare", "known images", "equal packages"]
    rows = []
    for run in result["runs"]:
        rates = run["images_per_second"]
        shares = [run["whole_over_bare"], run["bare_over_whole_of_the_tower_thread"]]
        ahead = [f"{rates['bare']:.2f}", f"{rates['whole']:.2f}", *(f"{s:.2f}" for s in shares)]
        plain = [f"{rates['plain']:.2f}", f"{run['plain_over_bare']:.2f}", f"{rates['known']:.0f}"]
        about = [run["shape"], f"{run['side']}²", str(run["tokens"])]
        rows.append([*about, *ahead, *plain, "yes" if run["equal"] else "NO"])
    yield "encoding files into a store, against the bare tower (images a second)", columns, rows


main = bench("encoding", __doc__, add, measure, tables, shapes=(*SHAPES, "demo"), repetitions=5)

if __name__ == "__main__":
    raise SystemExit(main())
