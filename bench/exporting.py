"""Exported models against PyTorch on the same weights, side by side.

Run `python -m bench.exporting`. Each way of computing runs in a process of its own, so that memory
can be told apart and no thread pool disturbs another; the processes take turns. In each round a new
picture is looked at, a new conversation about it is answered, and one more question is asked.
Reported are ratios to PyTorch in float32 within one repetition; bare times only to understand them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import keepsight
from bench.frame import Child, Record, Told, bench, model_of, sides
from keepsight.bench.contestants import Keepsight
from keepsight.bench.frame import interleaved, middle, ratio, say
from keepsight.bench.workloads import Pictures, assistant, user, words
from keepsight.vlm import VLM

FIRST = "pytorch float32"
WAYS = (FIRST, "pytorch bfloat16", "onnx float32", "onnx int8", "openvino float32", "openvino int8")
# What a round tells, and its heading; of times and memory less is better.
TOLD = {
    "tower_patches_per_second": "tower, patches/s",
    "prefill_tokens_per_second": "prefill, tokens/s",
    "decode_tokens_per_second": "decode, tokens/s",
    "first_token_cold_ms": "first token, cold, ms",
    "first_token_warm_ms": "first token, warm, ms",
    "memory_mib": "memory, MiB",
}


def add(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told."""
    parser.add_argument("--picture", default="1024x768", help="width x height in pixels")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--threads", type=int, default=2)


def exported(model: str, way: str) -> str:
    """The checkpoint itself, or its export such as "onnx int8" beside it, made once."""
    from keepsight.export.graphs.exporter import export

    runtime, kind = way.split()
    if runtime == "pytorch":
        return model
    folder = Path(f"{model}-{runtime}-{kind}")
    if not folder.exists():
        say(f"exporting {folder.name}")
        export(model, folder, runtime=runtime, quantised=None if kind == "float32" else kind)
    return str(folder)


def measure(options: argparse.Namespace) -> Record:
    """Every way in turn, each in its own process."""
    model = model_of(options)
    folders = {way: exported(model, way) for way in WAYS if way in options.ways}
    told = {name: getattr(options, name) for name in ("threads", "tokens", "picture")}
    with ExitStack() as stack:
        asked: dict[str, Any] = {}
        for way, folder in folders.items():
            dtype = way.split()[1] if folder == model else "auto"
            asked[way] = stack.enter_context(
                Child("exporting", folder=folder, dtype=dtype, **told)
            ).ask
        interleaved(1, asked)  # not counted: first calls, pages not yet there
        rounds = interleaved(options.repetitions + 1, asked, 1)
    notes = {way: Path(folder) / "keepsight.json" for way, folder in folders.items()}
    off = {
        w: json.loads(n.read_text())["deviation"] if n.exists() else None for w, n in notes.items()
    }
    return {"deviation": off, "ways": {way: sums(way, rounds) for way in folders}}


def child(folder: str, dtype: str, threads: int, tokens: int, picture: str) -> None:
    """One way of computing, in a process of its own that waits for its turns."""
    torch.set_num_threads(threads)
    with TemporaryDirectory() as place, keepsight.load(folder, dtype=dtype) as vlm:
        for line in sys.stdin:
            path = Pictures(Path(place)).path(900 + int(line), *sides(picture))
            print(json.dumps(_round(vlm, path, tokens, int(line))), flush=True)


def _round(vlm: VLM, picture: str, count: int, number: int) -> Record:
    """A new picture looked at, asked about, and asked about once more."""
    vlm.clear()
    messages = [user(words(number, 22), picture)]
    cold = Keepsight(vlm).answer(messages, count)
    messages += [assistant(cold.text), user(words(50 + number, 16))]
    warm = Keepsight(vlm).answer(messages, 2)
    patches = int(np.prod(vlm.render(messages).grids[0]["image_grid_thw"]))
    # `getrusage` counts the memory of the parent, too.
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return {
        "tower_patches_per_second": 1e3 * patches / cold.stages["encode"],
        "prefill_tokens_per_second": 1e3
        * cold.counted.prompt_tokens
        / (cold.stages["prefill"] or 1),
        "decode_tokens_per_second": 1e3 * (count - 1) / cold.stages["decode"],
        "first_token_cold_ms": cold.first,
        "first_token_warm_ms": warm.first,
        "memory_mib": peak / 1024,
        "answer": cold.tokens,
    }


def sums(way: str, rounds: list[Record]) -> Record:
    """Medians, ratios to the first way within one repetition, and how many tokens of the answers
    are those of the first way, up to where they part."""
    told: Record = {}
    for name in TOLD:
        told[name] = middle(one[way][name] for one in rounds)
        if FIRST in rounds[0]:
            pairs = [(one[way][name], one[FIRST][name]) for one in rounds]
            better = pairs if name.endswith("_per_second") else [(b, a) for a, b in pairs]
            told[f"{name}_times_as_good"] = ratio(better)
    told["tokens_as_first"] = None
    if FIRST in rounds[0]:
        same = whole = 0
        for one in rounds:
            mine, theirs = one[way]["answer"], one[FIRST]["answer"]
            parted = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
            same, whole = same + (parted[0] if parted else len(mine)), whole + len(mine)
        told["tokens_as_first"] = f"{same}/{whole}"
    return told


def tables(result: Record) -> Iterator[Told]:
    """Times as good as PyTorch in float32, and how far off the model."""
    rows = []
    for name, told in result["ways"].items():
        row = [name]
        for field in TOLD:
            better = told.get(f"{field}_times_as_good")
            row.append(f"{told[field]:.0f}" + ("" if better is None else f" ({better:.2f})"))
        rows.append([*row, str(told["tokens_as_first"])])
    heading = (
        f"a picture of {result['picture']}, answers of {result['tokens']} tokens (in brackets: "
        f"times as good as {FIRST} in the same repetition)"
    )
    yield heading, ["", *TOLD.values(), "same tokens"], rows
    rows = []
    for name, told in result["deviation"].items():
        if told:
            same = f"{told['same_tokens']} of {told['tokens']}"
            rows.append([name, f"{told['features']:.1e}", f"{told['logits']:.1e}", same])
    yield "off the model, as parts of the scale", ["", "features", "logits", "same tokens"], rows


main = bench("exporting", __doc__, add, measure, tables)

if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(**json.loads(sys.argv[2]))
    else:
        raise SystemExit(main())
