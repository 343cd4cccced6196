"""Look once with Keepsight, answer with vLLM: features in the request, or read from a store.

    python examples/vllm_features.py encode CHECKPOINT STORE IMAGE...   # where Keepsight is
    python examples/vllm_features.py answer CHECKPOINT STORE            # where vLLM is

The first fills STORE and writes STORE-for-vllm: the packages, and what vLLM must be told. The
second needs no tower for these images: it asks about all of them in one request, once with their
features in it and once with their names alone. The prompt is that of the Qwen families, and
CHECKPOINT a folder (for vLLM also a hub id whose files are on the machine).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

QUESTION = "List the pictures."


def encode(checkpoint: str, store: str, images: list[str]) -> None:
    """Packages into a store, and what vLLM must know to read them from there."""
    import keepsight as ks
    from keepsight.export import engines

    config = engines.connector_config(checkpoint, store)
    with ks.load(checkpoint, store=store) as vlm:
        packages = [vlm.encode(image) for image in images]
        vlm.flush()
    folder = Path(f"{store}-for-vllm")
    folder.mkdir(parents=True, exist_ok=True)
    for number, package in enumerate(packages):
        package.save(folder / f"{number}.sight")
    (folder / "fleet.json").write_text(json.dumps(config))


def answer(checkpoint: str, store: str) -> None:
    """One request about all images, whose features vLLM takes from the store."""
    import vllm

    from keepsight.export import engines
    from keepsight.formats.package import Package

    folder = Path(f"{store}-for-vllm")
    config = json.loads((folder / "fleet.json").read_text())
    packages = [Package.load(path) for path in sorted(folder.glob("*.sight"))]
    pictures = "".join(
        f"Picture {number}: <|vision_start|><|image_pad|><|vision_end|>"
        for number in range(1, len(packages) + 1)
    )
    prompt = f"<|im_start|>user\n{pictures}{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    engine = vllm.LLM(
        checkpoint,
        enable_mm_embeds=True,
        ec_transfer_config=vllm.config.ECTransferConfig(**config),
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=64)
    for title, given in (
        ("features in the request", {"multi_modal_data": engines.to_vllm(packages)}),
        ("names in the request, features from the store", engines.named_for_vllm(packages)),
    ):
        (output,) = engine.generate({"prompt": prompt, **given}, sampling, use_tqdm=False)
        print(f"{title}: {output.outputs[0].text}")


if __name__ == "__main__":
    what, checkpoint, store, *images = sys.argv[1:]
    if what == "encode":
        encode(checkpoint, store, images)
    else:
        answer(checkpoint, store)
