"""What it costs to look whether a model is still the one that it was, which each call does first.

Run `python -m bench.watching` on a machine that does nothing else. A Qwen3-VL model with random
weights is looked at many times. Printed are the best and the median in microseconds: of the look at
the model alone, and of all that a call looks at (`refresh`: torch's switches as well). The look has
to find nothing, and a changed weight behind the last one; else the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from transformers import PreTrainedModel, Qwen3VLConfig, Qwen3VLForConditionalGeneration

import keepsight as ks
from keepsight.bench import machine
from keepsight.kinds import Record
from keepsight.models.families import family_of
from keepsight.models.identity import Identity

FORMAT = 1
_IN_A_LAYER, _BESIDE = 14, 63  # modules of a decoder's layer, and of all else


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 when a look was wrong."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    torch.set_num_threads(1)
    model = _model(max(1, (options.modules - _BESIDE) // _IN_A_LAYER + 1))
    weights = Identity(model, family_of(model))
    weights.refresh()
    changes: list[bool] = []
    alone = _times(lambda: changes.append(weights.refresh()), options.repetitions)
    with ks.wrap(model, None) as vlm:
        names = {vlm.runtime.refresh()}
        whole = _times(lambda: names.add(vlm.runtime.refresh()), options.repetitions)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    noticed = not any(changes) and len(names) == 1 and weights.refresh()
    result = {
        "benchmark": "keepsight watching",
        "format": FORMAT,
        "command": " ".join(["python -m bench.watching", *argv]),
        "machine": machine.describe(),
        "modules": sum(1 for _ in model.modules()),
        "tensors": sum(1 for _ in model.parameters()),
        "repetitions": options.repetitions,
        "weights": _sums(alone),
        "refresh": _sums(whole),
        "noticed": noticed,
    }
    for name, times in (("weights", alone), ("refresh", whole)):
        sums = _sums(times)
        print(f"{name:8} best {sums['best_us']:6.1f} us, median {sums['median_us']:6.1f} us")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    return 0 if noticed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.watching")
    parser.add_argument("--modules", type=int, default=1000, help="at least so many")
    parser.add_argument("--repetitions", type=int, default=5000)
    parser.add_argument("--out", type=Path, help="a file for the result as JSON")
    return parser


def _model(layers: int) -> PreTrainedModel:
    rope: Record = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
    text: Record = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 576}
    text["rope_parameters"] = rope
    vision: Record = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
    vision |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0, 2]}
    config = Qwen3VLConfig(text_config=text, vision_config=vision)
    return Qwen3VLForConditionalGeneration(config).eval()


def _times(look: Callable[[], object], repetitions: int) -> list[int]:
    found = []
    for _ in range(repetitions):
        begun = time.perf_counter_ns()
        look()
        found.append(time.perf_counter_ns() - begun)
    return found


def _sums(times: list[int]) -> dict[str, float]:
    best, middle = min(times), median(times)
    return {"best_us": round(best / 1000, 1), "median_us": round(middle / 1000, 1)}


if __name__ == "__main__":
    sys.exit(main())
