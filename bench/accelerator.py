"""An 8 B shape on an accelerator, random weights made on the spot, ten pictures of 1,200 tokens.

    python -m bench.accelerator qwen3_vl --out bench/results/gpu/qwen3_vl.json

Stock Transformers, Keepsight, and what a step cannot be faster than: bytes over bandwidth. Needs
about 40 GB of memory on the device, and nothing that `make test` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

import torch
import transformers
from PIL import Image
from transformers.initialization import no_init_weights

import keepsight as ks
from bench.frame import Record, Told, bench
from keepsight.bench.checkpoints import (
    SHAPES,
    Size,
    configuration,
    parts,
    save_processor,
    tokenizer_of,
)
from keepsight.bench.frame import now
from keepsight.bench.workloads import Pictures, user, words
from keepsight.kinds import Message
from keepsight.models import loading

SIZES = {
    "large": Size(4096, 36, 32, 128, 1152, 27, 8000, "bfloat16"),
    "tiny": Size(64, 4, 4, 16, 64, 3, 1024, "bfloat16"),  # for a look at the program itself
}


def add(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told."""
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--picture", type=int, default=1280, help="width in pixels")
    parser.add_argument("--pictures", type=int, default=10)
    bandwidth = "bytes a second that a copy on the device moves; an H200: 4.3e12"
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help=bandwidth)


def make(shape: str, size: Size, device: str) -> tuple[Any, Any]:
    """A model on the device, and its processor."""
    tokenizer, (text, vision) = tokenizer_of(size.vocabulary), parts(shape, size)
    if size.layers > 27:  # as the published model of this size
        text |= {"vocab_size": 151936, "num_key_value_heads": 8}
        vision |= {"num_heads": 16, "intermediate_size": 4304}
        if "deepstack_visual_indexes" in vision:
            vision["deepstack_visual_indexes"] = [8, 16, 24]
    config = configuration(shape, text, vision, tokenizer)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device), no_init_weights():
        made = getattr(transformers, f"{SHAPES[shape]}ForConditionalGeneration")
        model = made(config).eval()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_tokens" in name:
                weight.normal_()
            elif weight.dim() >= 2:
                weight.normal_(0, weight[0].numel() ** -0.5)
            elif name.endswith("bias"):
                weight.zero_()
            elif "norm" in name:
                weight.fill_(1.0) if shape == "qwen3_vl" or "visual" in name else weight.zero_()
            else:
                weight.normal_(0, 0.5)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    folder = Path(mkdtemp())
    save_processor(shape, tokenizer, folder)
    config.save_pretrained(folder)
    return model, loading.load_processor(str(folder), None)


def timed(run: Callable[[], object], times: int = 3, warm: int = 1) -> float:
    """Milliseconds of a call."""
    found = []
    for _ in range(warm + times):
        _synchronise()
        start = now()
        run()
        _synchronise()
        found.append(now() - start)
    return round(median(found[warm:]), 2)


def _synchronise() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def stock(model: Any, processor: Any, messages: list[Message], images: list[str]) -> Record:
    """Stock Transformers: a first token from pixels, and a decoded token behind it."""
    loaded = [Image.open(path).convert("RGB") for path in images]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def given() -> Any:
        return processor(text=[text], images=loaded, return_tensors="pt").to(model.device)

    inputs = given()
    pixels, grid = inputs["pixel_values"].to(model.dtype), inputs["image_grid_thw"]
    first = timed(lambda: model.generate(**inputs, max_new_tokens=1, do_sample=False))
    many = timed(lambda: model.generate(**inputs, max_new_tokens=33, do_sample=False), 1)
    with torch.no_grad():
        tower = timed(lambda: model.model.visual(pixels, grid_thw=grid))
    return {
        "stock preprocessing": timed(given, 1, 0),
        "stock first token behind it": first,
        "tower": tower,
        "stock decoded token": round((many - first) / 32, 2),
    }


def ours(vlm: ks.VLM, ask: Callable[[int], list[Message]]) -> Record:
    """Keepsight: cold, warm, a decoded token, eight answers at once."""
    vlm.chat(ask(99), max_new_tokens=4)
    vlm.clear()
    found = {"first token, cold": timed(lambda: vlm.chat(ask(1), max_new_tokens=1), 1, 0)}
    numbers = iter(range(2, 20))
    found["first token, warm"] = timed(lambda: vlm.chat(ask(next(numbers)), max_new_tokens=1), 5, 2)
    few, many = (timed(partial(vlm.chat, ask(50), max_new_tokens=n), 1) for n in (2, 34))
    found["decoded token"] = round((many - few) / 32, 2)
    for count in (1, 8):

        def together(count: int = count) -> None:
            with ThreadPoolExecutor(count) as pool:
                asked = map(ask, range(60, 60 + count))
                list(pool.map(lambda one: vlm.chat(one, max_new_tokens=64), asked))

        found[f"{count} at once, 64 tokens each"] = timed(together, 1)
    return found


def measure(options: argparse.Namespace) -> Record:
    """One shape."""
    model, processor = make(options.shape, SIZES[options.size], options.device)
    pictures, width = Pictures(Path(mkdtemp())), options.picture
    shown = [pictures.path(n, width, 3 * width // 4) for n in range(options.pictures)]

    def ask(number: int) -> list[Message]:
        return [user(words(number, 22), *shown)]

    read = [model.get_input_embeddings().weight, *model.model.visual.parameters()]
    decoder = model.num_parameters() - sum(weight.numel() for weight in read)
    found = stock(model, processor, ask(1), shown)
    with ks.wrap(model, processor) as vlm:
        found |= ours(vlm, ask)
        recorded = vlm.runtime.engine.decoder.recorder is not None
    found["bytes over bandwidth"] = round(2e3 * decoder / options.bandwidth, 2)
    return {
        "parameters": model.num_parameters(),
        "milliseconds": found,
        "short passes": "recorded" if recorded else "as they are",
    }


def tables(result: Record) -> Iterator[Told]:
    """What was timed."""
    rows = [[name, f"{value:.2f}"] for name, value in result["milliseconds"].items()]
    yield f"{result['shape']}, {result['parameters'] / 1e9:.1f} B parameters", ["", "ms"], rows


main = bench("accelerator", __doc__, add, measure, tables, shapes=(), repetitions=0)

if __name__ == "__main__":
    raise SystemExit(main())
