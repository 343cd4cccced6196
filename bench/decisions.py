"""What 64 decisions about one picture cost, against Transformers' `DecisionPipeline`, and 1,000
yes/no scores against stock forwards.

Run `python -m bench.decisions`. The picture has 1,024 tokens; the model is the same object, in
float32. Stock does the same work for each question, so a few of them are timed and the time is
scaled to all; the result says how many. Cold is a memory that has seen nothing; warm has seen the
picture. Stock always computes everything. Seconds are the process's own, on one thread, so other
work on the machine hardly changes them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from transformers import DecisionConfig, DecisionPipeline

import keepsight as ks
from keepsight.bench import machine
from keepsight.bench.checkpoints import SHAPES, SIZES, checkpoint
from keepsight.bench.workloads import Pictures
from keepsight.cli.terminal import table
from keepsight.kinds import Message, Record
from keepsight.models import loading

FORMAT = 1
SIDE = 1024  # pixels: 32 x 32 tokens of 32 pixels
WORDS = ("scratch", "logo", "crack", "person", "label", "screw", "dent", "shadow", "wheel", "cable")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    described = machine.describe()
    path = checkpoint(options.shape, options.size, options.folder)
    model = loading.load_named(str(path), "float32", None, None)[0]
    processor = loading.load_processor(str(path), None)
    pictures = Pictures(options.folder)
    rows = [
        _decisions(model, processor, pictures, options),
        _scores(model, processor, pictures, options),
    ]
    result = {
        "benchmark": "keepsight decisions",
        "format": FORMAT,
        "command": " ".join(["python -m bench.decisions", *_without_paths(argv)]),
        "machine": described,
        "shape": options.shape,
        "size": options.size,
        "dtype": "float32",
        "clock": "CPU seconds of the process",
        "rows": rows,
    }
    Console().print(_table(rows))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    return 0


def _without_paths(argv: list[str]) -> list[str]:
    pairs = zip(argv[::2], argv[1::2], strict=False)
    return [word for pair in pairs if pair[0] not in ("--out", "--folder") for word in pair]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.decisions", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_vl")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--decisions", type=int, default=64)
    parser.add_argument("--scores", type=int, default=1000)
    parser.add_argument("--sample", type=int, default=4, help="questions that stock is timed on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("bench/checkpoints"))
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    return parser


def _labels(processor: Any) -> list[str]:
    """Two labels of one token each: a tokenizer trained on code need not have Yes and No."""
    tokenizer = processor.tokenizer
    names = sorted(name for name in tokenizer.get_vocab() if name.isalpha())
    ids = ((name, tokenizer(name, add_special_tokens=False)["input_ids"]) for name in names)
    return [name for name, made in ids if len(made) == 1][:2]


def _question(number: int) -> str:
    return f"Is there a {WORDS[number % len(WORDS)]} at place {number}?"


def _asked(start: int, count: int) -> Record:
    return {
        f"q{i}": {"type": "noul", "instructions": _question(i)} for i in range(start, start + count)
    }


def _decisions(
    model: Any, processor: Any, pictures: Pictures, options: argparse.Namespace
) -> Record:
    picture = Image.open(pictures.path(1, SIDE, SIDE)).convert("RGB")
    config = DecisionConfig(labels={"noul": _labels(processor)})
    count, sample = options.decisions, min(options.sample, options.decisions)
    tower: list[int] = []
    handle = model.model.visual.register_forward_hook(lambda *_: tower.append(1))
    try:
        with ks.wrap(model, processor) as vlm:
            vlm.decide("x", _asked(0, 2), decision_config=config)  # what is made once for a model
            begun = time.process_time()
            cold = vlm.decide(
                "<p>", _asked(0, count), assets={"<p>": picture}, decision_config=config
            )
            cold_seconds, ran = time.process_time() - begun, len(tower)
            begun = time.process_time()
            warm = vlm.decide(
                "<p>", _asked(count, count), assets={"<p>": picture}, decision_config=config
            )
            warm_seconds = time.process_time() - begun
    finally:
        handle.remove()
    pipe = DecisionPipeline(
        model=model, tokenizer=processor.tokenizer, processor=processor, decision_config=config
    )
    seconds, worst = [], 0.0
    for number in range(sample):
        given = {"state": "<p>", "questions": _asked(number, 1), "assets": {"<p>": picture}}
        begun = time.process_time()
        theirs = pipe(given)
        seconds.append(time.process_time() - begun)
        name = f"q{number}"
        worst = max(worst, abs(theirs[name]["noul"] - cold[name]["noul"]))  # type: ignore[call-overload]
    report = cold.report  # type: ignore[union-attr]
    return {
        "name": f"{count} decisions",
        "stock_seconds": round(median(seconds) * count, 2),
        "stock_timed_on": sample,
        "cold_seconds": round(cold_seconds, 3),
        "warm_seconds": round(warm_seconds, 3),
        "times_cold": round(median(seconds) * count / cold_seconds, 1),
        "times_warm": round(median(seconds) * count / warm_seconds, 1),
        "towers": ran,
        "prompt_tokens": report.prompt_tokens,
        "computed_tokens": report.computed_tokens,
        "computed_tokens_warm": warm.report.computed_tokens,  # type: ignore[union-attr]
        "exactness": report.exactness,
        "worst_difference": worst,
    }


def _scores(model: Any, processor: Any, pictures: Pictures, options: argparse.Namespace) -> Record:
    picture = Image.open(pictures.path(2, SIDE, SIDE)).convert("RGB")
    labels = _labels(processor)
    count, sample = options.scores, min(options.sample, options.scores)
    chats = [_chat(picture, number) for number in range(count)]
    with ks.wrap(model, processor) as vlm:
        vlm.score([_chat(picture.resize((64, 64)), 0)], labels)
        begun = time.process_time()
        found = vlm.score(chats, labels)
        ours = time.process_time() - begun
    ids = processor.tokenizer(labels, add_special_tokens=False)["input_ids"]
    seconds, worst = [], 0.0
    for number in range(sample):
        begun = time.process_time()
        inputs = processor.apply_chat_template(
            chats[number],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            logits = model(**inputs, use_cache=False, logits_to_keep=1).logits[0, -1]
        chances = logits.log_softmax(-1)
        seconds.append(time.process_time() - begun)
        given = found[number].logprobs
        for one, (token,) in zip(given, ids, strict=True):  # type: ignore[arg-type]
            worst = max(worst, abs(float(chances[token]) - one))
    report = found[0].report  # type: ignore[union-attr]
    return {
        "name": f"{count} yes/no scores",
        "stock_seconds": round(median(seconds) * count, 2),
        "stock_timed_on": sample,
        "cold_seconds": round(ours, 3),
        "times_cold": round(median(seconds) * count / ours, 1),
        "prompt_tokens": report.prompt_tokens,
        "computed_tokens": report.computed_tokens,
        "exactness": report.exactness,
        "worst_difference": worst,
    }


def _chat(picture: Image.Image, number: int) -> list[Message]:
    content = [
        {"type": "image", "image": picture},
        {"type": "text", "text": f"{_question(number)} Yes or No?"},
    ]
    return [{"role": "user", "content": content}]


def _table(rows: list[Record]) -> Any:
    names = ("stock s", "cold s", "times", "warm s", "times warm", "tokens computed", "off by")
    made = table("what", *names, right=names, title="stock is timed on a few and scaled")
    for row in rows:
        warm = (row.get("warm_seconds"), row.get("times_warm"))
        made.add_row(
            row["name"],
            f"{row['stock_seconds']:.1f}",
            f"{row['cold_seconds']:.2f}",
            f"{row['times_cold']:.1f}",
            *("" if one is None else f"{one:.2f}" for one in warm),
            f"{row['computed_tokens']} of {row['prompt_tokens']}",
            f"{row['worst_difference']:.1e}",
        )
    return made


if __name__ == "__main__":
    raise SystemExit(main())
