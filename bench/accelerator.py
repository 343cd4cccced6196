"""An 8 B shape on an accelerator, random weights made on the spot, ten pictures of 1,200 tokens.

    python -m bench.accelerator qwen3_vl --out bench/results/gpu/qwen3_vl.json

Stock Transformers, Keepsight, and what a step cannot be faster than: bytes over bandwidth. Needs
about 40 GB of memory on the device, and nothing that `make test` does.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import transformers
from PIL import Image
from transformers.initialization import no_init_weights

import keepsight as ks
from keepsight.bench import checkpoints
from keepsight.bench.checkpoints import SHAPES, SPECIAL, Size
from keepsight.bench.workloads import Pictures, user, words
from keepsight.kinds import Message

SIZE = Size(4096, 36, 32, 128, 1152, 27, 8000, "bfloat16")
BANDWIDTH = 4.3e12  # bytes a second that a copy on an H200 moves
Milliseconds = dict[str, float]


def make(shape: str) -> tuple[Any, Any]:
    """A model on the device, and its processor."""
    architecture, tokenizer = SHAPES[shape], checkpoints._tokenizer(8000)
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    text = {
        **architecture.text(SIZE),
        "vocab_size": 151936,
        "num_key_value_heads": 8,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision = {**architecture.vision(SIZE), "num_heads": 16, "intermediate_size": 4304}
    if "deepstack_visual_indexes" in vision:
        vision["deepstack_visual_indexes"] = [8, 16, 24]
    config = getattr(transformers, f"{architecture.name}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"), no_init_weights():
        model = getattr(transformers, f"{architecture.name}ForConditionalGeneration")(config).eval()
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
    tokenizer.save_pretrained(folder)
    checkpoints._write_processor(architecture, folder)
    config.save_pretrained(folder)
    return model, transformers.AutoProcessor.from_pretrained(folder)


def median(run: Callable[[], object], times: int = 3, warm: int = 1) -> float:
    """Milliseconds of a call."""
    found = []
    for number in range(warm + times):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if number >= warm:
            found.append(1e3 * (time.perf_counter() - begun))
    return round(sorted(found)[len(found) // 2], 2)


def stock(model: Any, processor: Any, messages: list[Message], images: list[str]) -> Milliseconds:
    """Stock Transformers: a first token from pixels, and a decoded token behind it."""
    loaded = [Image.open(path).convert("RGB") for path in images]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def given() -> Any:
        return processor(text=[text], images=loaded, return_tensors="pt").to("cuda")

    inputs = given()
    pixels, grid = inputs["pixel_values"].to(torch.bfloat16), inputs["image_grid_thw"]
    first = median(lambda: model.generate(**inputs, max_new_tokens=1, do_sample=False))
    many = median(lambda: model.generate(**inputs, max_new_tokens=33, do_sample=False), 1)
    with torch.no_grad():
        tower = median(lambda: model.model.visual(pixels, grid_thw=grid))
    return {
        "stock preprocessing": median(given, 1, 0),
        "stock first token behind it": first,
        "tower": tower,
        "stock decoded token": round((many - first) / 32, 2),
    }


def ours(vlm: ks.VLM, ask: Callable[[int], list[Message]]) -> Milliseconds:
    """Keepsight: cold, warm, a decoded token, eight answers at once."""
    vlm.chat(ask(99)[:1], max_new_tokens=4)
    vlm.clear()
    found = {"first token, cold": median(lambda: vlm.chat(ask(1), max_new_tokens=1), 1, 0)}
    questions = iter(range(2, 20))
    warm = median(lambda: vlm.chat(ask(next(questions)), max_new_tokens=1), 5, 2)
    few, many = (
        median(lambda n=n: vlm.chat(ask(50), max_new_tokens=n), 1)  # type: ignore[misc]
        for n in (2, 34)
    )
    found |= {"first token, warm": warm, "decoded token": round((many - few) / 32, 2)}
    for count in (1, 8):

        def together(count: int = count) -> None:
            threads = [
                threading.Thread(
                    target=vlm.chat, args=(ask(60 + i),), kwargs={"max_new_tokens": 64}
                )
                for i in range(count)
            ]
            for one in threads:
                one.start()
            for one in threads:
                one.join()

        found[f"{count} at once, 64 tokens each"] = median(together, 1)
    return found


def main() -> None:
    """Measure one shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model, processor = make(options.shape)
    pictures = Pictures(Path(mkdtemp()))
    ten = [pictures.path(number, 1280, 960) for number in range(10)]

    def ask(number: int) -> list[Message]:
        return [user(words(number, 22), *ten)]

    read = [model.get_input_embeddings().weight, *model.model.visual.parameters()]
    decoder = model.num_parameters() - sum(weight.numel() for weight in read)
    found = stock(model, processor, ask(1), ten)
    with ks.wrap(model, processor) as vlm:
        found |= ours(vlm, ask)
        recorder = vlm.runtime.engine.decoder.recorder
    result = {
        "command": f"python -m bench.accelerator {options.shape}",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": model.num_parameters(),
        "milliseconds": {**found, "bytes over bandwidth": round(2e3 * decoder / BANDWIDTH, 2)},
        "short passes": "recorded" if recorder is not None else "as they are",
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
