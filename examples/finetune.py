"""Teach the demo model a new way to answer, twice: from packages, without its tower; from pixels.

Every picture is looked at once, before training. The first run then loads the language model alone
and reads packages; the second is what one does without Keepsight: the whole model, and every
picture through the processor and the frozen tower at every step. Both see the same records in the
same order, so their losses should be the same; time and memory are what differs.

    python examples/finetune.py                 # about two minutes on one core
    python examples/finetune.py --steps 10      # a quick look
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import keepsight as ks
from keepsight.demo.scene import COLORS, Scene
from keepsight.training import IGNORED, PackageDataset

QUESTION = "Which colour? Answer in French."
_WORDS = ("rouge", "vert", "bleu", "jaune", "orange", "violet", "turquoise", "rose")
FRENCH = dict(zip(COLORS, _WORDS, strict=True))
Record = tuple[list[dict[str, Any]], str]


def draw(folder: Path, count: int, seed: int, side: int) -> list[tuple[str, str]]:
    """(file, answer) of some new pictures."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        color = rng.choice(list(COLORS))
        path = folder / f"{seed}-{number}.png"
        Scene.of(color=color, seed=1000 * seed + number, size=(side, side)).draw().save(path)
        made.append((str(path), FRENCH[color]))
    return made


def record(image: str, answer: str) -> Record:
    """A conversation and the answer to learn."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": content}], answer


def from_packages(model: str, folder: Path, pictures: list[tuple[str, str]]) -> tuple[Any, Any]:
    """The model without its tower, and a dataset of packages."""
    vlm = ks.load(model, dtype="float32", vision=False)
    return vlm, PackageDataset(vlm, [record(*one) for one in pictures], packages=folder)


def batches_from_packages(data: PackageDataset, order: list[list[int]]) -> Iterator[dict[str, Any]]:
    """What any training loop does: a DataLoader with the dataset's own collator."""
    yield from DataLoader(data, batch_sampler=order, collate_fn=data.collator())


def batches_from_pixels(
    vlm: Any, pictures: list[tuple[str, str]], order: list[list[int]]
) -> Iterator[dict[str, Any]]:
    """The same batches through the processor, as for stock Transformers."""
    from PIL import Image

    processor = vlm.processor
    processor.tokenizer.padding_side = "right"
    for batch in order:
        records = [record(*pictures[i]) for i in batch]
        prompts = [
            processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for messages, _ in records
        ]
        texts = [f"{p}{answer}<|im_end|>" for p, (_, answer) in zip(prompts, records, strict=True)]
        images = [[Image.open(pictures[i][0]).convert("RGB")] for i in batch]
        inputs = processor(text=texts, images=images, return_tensors="pt", padding=True)
        labels = inputs["input_ids"].clone()
        lengths = inputs["attention_mask"].sum(1)
        for row, (_, answer) in enumerate(records):
            learnt = len(processor.tokenizer(f"{answer}<|im_end|>")["input_ids"])
            labels[row, : lengths[row] - learnt] = IGNORED
            labels[row, lengths[row] :] = IGNORED
        yield {**inputs, "labels": labels}


def train(model: Any, batches: Iterator[dict[str, Any]], rate: float) -> list[float]:
    """A plain loop; the losses."""
    learning = [p for name, p in model.named_parameters() if ".visual." not in name]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in learning:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(learning, lr=rate)
    model.train()
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def right(vlm: Any, folder: Path, pictures: list[tuple[str, str]]) -> float:
    """The share of pictures answered in French; their packages were made beforehand."""
    hits = 0
    for path, answer in pictures:
        package = ks.Package.load(folder / f"{Path(path).stem}.sight")
        hits += vlm.ask(package, QUESTION, max_new_tokens=12, do_sample=False).text == answer
    return hits / len(pictures)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One of the two runs, in a process of its own, so that its memory can be told."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    pictures = json.loads((options.folder / "pictures.json").read_text())
    rng = random.Random(1)
    order = [rng.sample(range(len(pictures["train"])), options.batch) for _ in range(options.steps)]
    before = _peak()
    if options.run == "packages":
        vlm, data = from_packages(options.model, options.folder, pictures["train"])
        batches = batches_from_packages(data, order)
    else:
        vlm = ks.load(options.model, dtype="float32")
        batches = batches_from_pixels(vlm, pictures["train"], order)
    start = time.process_time()  # of the processor: whoever shares the machine does not count
    losses = train(vlm.model, batches, options.rate)
    seconds = time.process_time() - start
    peak = _peak() - before
    share = right(vlm, options.folder, pictures["test"]) if options.run == "packages" else None
    weights = sum(p.nbytes for p in vlm.model.parameters())
    return {"losses": losses, "seconds": seconds, "peak": peak, "weights": weights, "right": share}


def _peak() -> float:
    """The most memory that this process has held, in bytes."""
    status = Path("/proc/self/status")  # `getrusage` counts what the parent had before it forked
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return 1024 * float(lines["VmHWM"].split()[0])
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def prepare(options: argparse.Namespace, folder: Path) -> float:
    """Draw all pictures and look at each of them once; how many are answered in French so far."""
    counts = {"train": options.pictures, "test": 16}
    pictures = {
        kind: draw(folder, count, seed, options.side)
        for seed, (kind, count) in enumerate(counts.items())
    }
    (folder / "pictures.json").write_text(json.dumps(pictures))
    with ks.load(options.model, dtype="float32") as vlm:
        for path, _ in pictures["train"] + pictures["test"]:
            vlm.encode(path).save(folder / f"{Path(path).stem}.sight")
        return right(vlm, folder, pictures["test"])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Look at all pictures once, run both, compare."""
    options = _options(argv)
    if options.run:
        found = run(options)
        print(json.dumps(found))
        return found
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        untaught = prepare(options, folder)
        both = {kind: _in_a_process(kind, folder, options) for kind in ("packages", "pixels")}
    both["untaught"] = untaught
    show(both)
    return both


def _in_a_process(kind: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    told = {k: v for k, v in vars(options).items() if k not in ("run", "folder")}
    argv = [word for k, v in told.items() for word in (f"--{k}", str(v))]
    argv += ["--run", kind, "--folder", str(folder)]
    done = subprocess.run([sys.executable, __file__, *argv], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(both: dict[str, Any]) -> None:
    """Both loss curves and what they cost, side by side."""
    mine, stock = both["packages"], both["pixels"]
    steps = len(mine["losses"])
    print(f"{'step':>5} {'packages':>12} {'pixels':>12}")
    for step in sorted({*range(0, steps, max(1, steps // 10)), steps - 1}):
        print(f"{step + 1:>5} {mine['losses'][step]:>12.7f} {stock['losses'][step]:>12.7f}")
    pairs = list(zip(mine["losses"], stock["losses"], strict=True))
    apart = max(abs(a - b) / abs(b) for a, b in pairs)
    same = "bit for bit" if all(a == b for a, b in pairs) else f"to {apart:.1e} of their size"
    print(f"the losses are the same {same}")
    for what, unit in (("seconds", 1.0), ("weights", 1e-6), ("peak", 1e-6)):
        a, b = unit * mine[what], unit * stock[what]
        name = {
            "seconds": "processor seconds",
            "weights": "MB of weights",
            "peak": "MB of memory, peak",
        }
        times = f"{b / a:.2f} times" if a else "no measure"
        print(f"{name[what]:>20}: {a:8.1f} from packages, {b:8.1f} from pixels ({times})")
    print(
        f"new pictures answered in French: {both['untaught']:.0%} before, {mine['right']:.0%} now"
    )


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pictures", type=int, default=96)
    parser.add_argument("--side", type=int, default=128, help="of a picture, in pixels")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--run", choices=("packages", "pixels"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
