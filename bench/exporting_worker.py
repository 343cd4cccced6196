"""One way of computing in a process of its own: loads a model, then waits for rounds.

Started by `bench.exporting`, which says on the command line what to load, and writes the
number of a round to the standard input for each that it wants; the answer is a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import keepsight
from keepsight.bench.workloads import Pictures, user, words
from keepsight.kinds import Generating, Message
from keepsight.report import Piece
from keepsight.vlm import VLM


def main() -> None:
    """Answer rounds until the input ends."""
    told = json.loads(sys.argv[1])
    torch.set_num_threads(told["threads"])
    with TemporaryDirectory() as folder, keepsight.load(told["folder"], dtype=told["dtype"]) as vlm:
        pictures = Pictures(Path(folder))
        for line in sys.stdin:
            found = _round(vlm, pictures, told, int(line))
            print(json.dumps(found), flush=True)


def _round(vlm: VLM, pictures: Pictures, told: dict[str, Any], number: int) -> dict[str, Any]:
    """A new picture looked at, asked about, and asked about once more."""
    vlm.clear()
    width, height = (int(side) for side in told["picture"].split("x"))
    messages = [user(words(number, 22), pictures.path(900 + number, width, height))]
    first, pieces = _asked(vlm, messages, told["tokens"])
    report = pieces[-1].report
    times = {} if report is None else report.milliseconds
    prompt = pieces[-1].usage
    messages += [
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "".join(p.text for p in pieces)}],
        },
        user(words(50 + number, 16)),
    ]
    warm, _ = _asked(vlm, messages, 2)
    patches = int(np.prod(vlm.render(messages).grids[0]["image_grid_thw"]))
    tokens = [piece.token for piece in pieces if piece.token is not None]
    return {
        "tower_patches_per_second": 1e3 * patches / times["encode"],
        "prefill_tokens_per_second": 1e3
        * (prompt.prompt_tokens if prompt else 0)
        / (times["prefill"] or 1),
        "decode_tokens_per_second": 1e3 * (len(tokens) - 1) / times["decode"],
        "first_token_cold_ms": first,
        "first_token_warm_ms": warm,
        "memory_mib": _peak() / 1024,
        "answer": tokens,
    }


def _peak() -> float:
    """The most memory that this process has had, in KiB; `getrusage` counts its parent's too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def _asked(vlm: VLM, messages: list[Message], count: int) -> tuple[float, list[Piece]]:
    """Milliseconds to the first token, and all pieces."""
    decoding: Generating = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    begun, first, pieces = time.perf_counter(), 0.0, []
    for piece in vlm.stream(messages, **decoding):
        first = first or 1e3 * (time.perf_counter() - begun)
        pieces.append(piece)
    return first, pieces


if __name__ == "__main__":
    main()
