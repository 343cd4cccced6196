"""Page retrieval (W4): some pages of a shelf with each question, other ones in another order.

Run `python -m bench.pages`. All pages were looked at before, once, as an index of
documents is made: their packages lie in a store. Each turn is answered by four in turn, in an order
that changes: stock, which encodes every page again; Keepsight with nothing in memory, so that every
package is read from the disk; Keepsight that remembers its earlier turns; and the limit, the bare
forward of the whole prompt with features at hand. No prefix can be reused where the first page is
another one, so what is left to save is the tower; how much that is depends on the model, and the
result says what share of stock's time it was.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import keepsight
from keepsight.bench import machine
from keepsight.bench.checkpoints import SHAPES, SIZES, checkpoint
from keepsight.bench.contestants import Answer, Keepsight, Limit, StockContestant, agreement, now
from keepsight.bench.measure import TOKENS, quiet_heap
from keepsight.bench.workloads import Pictures, user, words
from keepsight.kinds import Message
from keepsight.vlm import VLM

FORMAT = 1
WHO = ("disk", "memory", "stock", "limit")
_WIDTH = 118


@dataclass
class Turn:
    """One question about some pages, met by all."""

    pages: list[int]
    answers: dict[str, Answer]


def main(argv: list[str] | None = None) -> int:
    """Run it; 1 when an answer was wrong."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    runs = [run(shape, options) for shape in options.shape.split(",")]
    result = {
        "benchmark": "keepsight pages",
        "format": FORMAT,
        "command": " ".join(["python -m bench.pages", *_told(argv)]),
        "machine": machine.describe(),
        "runs": runs,
    }
    console = Console()
    console.width = max(console.width, _WIDTH)
    for found in runs:
        console.print(table(found))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    return 1 if any(found["wrong"] for found in runs) else 0


def _told(argv: list[str]) -> list[str]:
    """The command line without folders and files of this machine."""
    pairs = zip(argv[::2], argv[1::2], strict=False)
    return [word for pair in pairs if pair[0] not in ("--out", "--folder") for word in pair]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.pages", description=__doc__)
    parser.add_argument("--shape", default="qwen3_vl", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", help="where the model goes, such as cuda")
    parser.add_argument("--shelf", type=int, default=50, help="pages that there are")
    parser.add_argument("--pages", type=int, default=5, help="pages with each question")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--page", type=_sides, default=(448, 448), help="width x height in pixels")
    parser.add_argument("--folder", type=Path, default=Path("bench/checkpoints"))
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    return parser


def _sides(text: str) -> tuple[int, int]:
    width, height = (int(side) for side in text.split("x"))
    return width, height


def run(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """One checkpoint: the shelf is encoded once, then asked about."""
    path = checkpoint(shape, options.size, options.folder)
    load = {"dtype": options.dtype, "device_map": options.device}
    with TemporaryDirectory() as folder, quiet_heap():
        store, pictures = Path(folder) / "store", Pictures(Path(folder))
        shelf = [pictures.path(400 + page, *options.page) for page in range(options.shelf)]
        with keepsight.load(path, store=store, **load) as vlm:
            indexing = _index(vlm, shelf)
        held = sum(file.stat().st_size for file in store.rglob("*.sight"))
        # Each has a store of its own, or one would find the prefixes that the other left there.
        twin = shutil.copytree(store, Path(folder) / "twin")
        with _again(vlm, store) as forgetful, _again(vlm, twin) as remembering:
            met = _meet(forgetful, remembering, shelf, options)
        return {
            "shape": shape,
            "size": options.size,
            "dtype": options.dtype,
            "parameters": vlm.model.num_parameters(),
            "about": f"{options.pages} of {options.shelf} pages of "
            f"{options.page[0]}x{options.page[1]}, order changes",
            "indexing": {**indexing, "megabytes": round(held / 1e6, 2)},
            **sum_up(met),
        }


def _again(vlm: VLM, store: Path) -> VLM:
    """Another engine on the same model, with nothing in memory."""
    return keepsight.wrap(vlm.model, vlm.runtime.needed_processor(), store=store)


def _index(vlm: VLM, shelf: list[str]) -> dict[str, Any]:
    """Every page once through the tower, and onto the disk."""
    start = now()
    for page in shelf:
        vlm.encode(page)
    vlm.flush()
    spent = now() - start
    return {"pages": len(shelf), "ms": round(spent, 1), "ms_per_page": round(spent / len(shelf), 2)}


def _meet(
    forgetful: VLM, remembering: VLM, shelf: list[str], options: argparse.Namespace
) -> list[Turn]:
    """Every turn, answered by each in turn; a first one is not counted."""
    ways: dict[str, Any] = {
        "disk": Keepsight(forgetful),
        "memory": Keepsight(remembering),
        "stock": StockContestant(forgetful.model, forgetful.runtime.needed_processor()),
        "limit": Limit(forgetful),
    }
    ready = _features(remembering, shelf)
    remembering.clear()
    rng = np.random.default_rng(4)
    met = []
    for number in range(options.turns + 1):
        pages = [int(page) for page in rng.permutation(len(shelf))[: options.pages]]
        question = words(number, 22)
        messages = [user(question, *(shelf[page] for page in pages))]
        print(f"turn {number} of {options.turns}", file=sys.stderr, flush=True)
        shift = number % len(WHO)
        answers = {}
        for who in [*WHO[shift:], *WHO[:shift]]:
            answers[who] = _answer(who, ways[who], messages, ready)
        met.append(Turn(pages, answers))
    return met[1:]


def _features(vlm: VLM, shelf: list[str]) -> dict[str, Any]:
    """The features of all pages, by the names that prompts know them by."""
    found = {}
    for page in shelf:
        vision = vlm.runtime.vision
        package, _ = vision.package(vision.name(page))
        found[package.feature_id] = package
    return found


def _answer(who: str, way: Any, messages: list[Message], ready: dict[str, Any]) -> Answer:
    if who == "disk":
        way.vlm.clear()
    elif who == "limit":
        way.reset()
        way.know(ready)
        way.prepare(json.dumps(messages), messages)
    gc.collect()
    answer: Answer = way.answer(messages, TOKENS)
    return answer


def sum_up(met: list[Turn]) -> dict[str, Any]:
    """All turns of one run: medians, and medians of the ratios within each turn."""
    result: dict[str, Any] = {"turns": len(met)}
    usages = {who: [t.answers[who].usage for t in met] for who in ("disk", "memory")}
    result["prompt_tokens"] = round(median(u.prompt_tokens for u in usages["disk"] if u))
    result["cached_tokens"] = [u.cached_tokens for u in usages["memory"] if u]
    result["encoded"] = sum(u.images_encoded for who in usages for u in usages[who] if u)
    for who in WHO:
        for what in ("first", "total"):
            samples = [getattr(turn.answers[who], what) for turn in met]
            result[f"{who}_{what}_ms"] = round(median(samples), 2)
            result[f"{who}_{what}_samples"] = [round(sample, 2) for sample in samples]
    for who in ("disk", "memory"):
        for what in ("first", "total"):
            result[f"stock_over_{who}_{what}"] = _ratio(met, "stock", who, what)
        result[f"{who}_over_limit_first"] = _ratio(met, who, "limit", "first")
        stages = {name for turn in met for name in turn.answers[who].stages}
        result[f"{who}_stages"] = {
            name: round(median(t.answers[who].stages.get(name, 0.0) for t in met), 2)
            for name in sorted(stages)
        }
    # What re-encoding costs stock: all that the limit does not have to do.
    shares = [1 - t.answers["limit"].first / t.answers["stock"].first for t in met]
    result["stock_share_without_prefill"] = round(median(shares), 3)
    result["guards"] = sorted({guard for turn in met for guard in _guards(turn)})
    wrong = [guard for guard in result["guards"] if "DIFFERENT" in guard]
    result["wrong"] = wrong
    return result


def _ratio(met: list[Turn], above: str, below: str, what: str) -> float:
    pairs = [(getattr(t.answers[above], what), getattr(t.answers[below], what)) for t in met]
    return float(round(median(a / b for a, b in pairs), 3))


def _guards(turn: Turn) -> list[str]:
    stock = turn.answers["stock"]
    told = []
    for who in ("disk", "memory", "limit"):
        mine = turn.answers[who].tokens
        told.append(f"{who}: {agreement(mine, stock, len(mine) if who == 'limit' else None)}")
    if turn.answers["disk"].tokens != turn.answers["memory"].tokens:
        told.append("DIFFERENT: what is remembered changed an answer")
    return told


def table(found: dict[str, Any]) -> Table:
    """One run for people."""
    index = found["indexing"]
    heading = (
        f"W4, {found['shape']} {found['size']} {found['dtype']}: {found['about']}, "
        f"{found['turns']} turns of {found['prompt_tokens']} tokens; shelf encoded once in "
        f"{index['ms'] / 1e3:.1f} s, {index['megabytes']:.1f} MB"
    )
    shown = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD)
    columns = ("", "first token ms", "x stock", "all ms", "x stock", "x limit")
    for column in columns:
        shown.add_column(column, justify="left" if not column else "right")
    names = {"disk": "packages from the disk", "memory": "packages and prefixes in memory"}
    for who, name in names.items():
        row = [name, f"{found[f'{who}_first_ms']:.1f}", f"{found[f'stock_over_{who}_first']:.2f}"]
        row += [f"{found[f'{who}_total_ms']:.1f}", f"{found[f'stock_over_{who}_total']:.2f}"]
        shown.add_row(*row, f"{found[f'{who}_over_limit_first']:.2f}")
    for who, name in (("stock", "stock, encodes again"), ("limit", "limit, features at hand")):
        shown.add_row(
            name, f"{found[f'{who}_first_ms']:.1f}", "", f"{found[f'{who}_total_ms']:.1f}"
        )
    return shown


if __name__ == "__main__":
    raise SystemExit(main())
