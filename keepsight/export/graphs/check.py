"""Compares an export with its model: the same conversation about the same pictures.

No store is used: pictures of noise are not worth remembering.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from keepsight.kinds import Message, Record
from keepsight.models.loading import load_processor
from keepsight.runtimes.load import load_model
from keepsight.runtimes.manifest import Manifest
from keepsight.stock.inputs import stock_inputs
from keepsight.vlm import VLM, wrap

_SIZES = ((96, 96), (160, 96), (96, 224))
_TOKENS = 4


def deviation(vlm: VLM, folder: Path, manifest: Manifest) -> Record:
    """The deviation of features and logits, relative to their scale, and how many tokens agree."""
    processor = load_processor(str(folder), None)
    exported = wrap(load_model(folder, manifest), processor, store="", remote="")
    features: list[float] = []
    logits: list[float] = []
    same: list[bool] = []
    with exported:
        for images in _pictures():
            features += [_off(_features(exported, one), _features(vlm, one)) for one in images]
            for a, b in zip(_logits(exported, images), _logits(vlm, images), strict=True):
                logits.append(_off(a, b))
                same.append(bool(a.argmax() == b.argmax()))
                if not same[-1]:
                    break  # from here on the answers differ
    # NaN is larger than all.
    worst = {"features": float(np.max(features)), "logits": float(np.max(logits))}
    return {**worst, "same_tokens": sum(same), "tokens": len(same)}


def _off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


def _features(vlm: VLM, image: Image.Image) -> torch.Tensor:
    return vlm.encode(image).tensors["features"]


def _pictures() -> list[list[Image.Image]]:
    """One picture, then two of other sizes, then another one of the first size."""
    rng = np.random.default_rng(0)
    made = []
    for size in (*_SIZES, _SIZES[0]):
        small = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        made.append(Image.fromarray(small).resize(size, Image.Resampling.NEAREST))
    return [made[:1], made[1:3], made[3:], made[:2]]


def _logits(vlm: VLM, images: list[Image.Image]) -> list[torch.Tensor]:
    """The logits after a prompt, and after each token of `vlm`'s own answer."""
    prompt = vlm.render([_message(images)])
    pixels = [medium.recall() for medium in prompt.media if callable(medium.recall)]
    inputs = {**stock_inputs(vlm.runtime, prompt, False), **vlm.runtime.family.join_pixels(pixels)}
    out = vlm.generate(
        **inputs,
        max_new_tokens=_TOKENS,
        min_new_tokens=_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return list(out.logits or ())


def _message(images: list[Image.Image]) -> Message:
    parts: list[Record] = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "What do you see?"}]}
