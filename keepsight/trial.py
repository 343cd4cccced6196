"""A model type that nobody has written down: what it can reuse is found out, or it is refused.

The model answers a few small prompts about noise, once as stock Transformers does it from pixels
and once in pieces, cut at every few tokens and behind every picture. The boldest kind of reuse that
gives the same logits is taken; controls make sure that the pictures matter. Nothing is guessed: a
model that fails all of them, or cannot be asked, is refused with what went wrong.

This is evidence from some short prompts. `keepsight verify` and `keepsight.testing.FamilyTests` are
how anyone gets more.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from PIL import Image

from keepsight.errors import KeepsightError, UnsupportedModel
from keepsight.families import Family
from keepsight.lock import FairLock
from keepsight.medium import Medium, entry_of
from keepsight.memory import Memory
from keepsight.render import Renderer
from keepsight.settings import Settings
from keepsight.tensors import Generated, generate
from keepsight.weights import Weights

# (cuts inside a medium are wrong, what of a prompt serves another), the boldest first.
_CHANCES = (
    (False, "prefix"),
    (True, "prefix"),
    (True, "same media"),
    (True, "whole prompt"),
)
_RUN = 7  # tokens between cuts: some fall into every picture
_TOKENS = 3
_NEAR = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the logits' scale


def settle(model: Any, family: Family, processor: Any, weights: Weights) -> None:
    """Find out what this family may reuse, and write it into the instance; or refuse the model."""
    kind = model.config.model_type
    if processor is None:
        raise UnsupportedModel(
            f"model type {kind!r} is not one that tests have shown exact, and without a processor "
            "it cannot be tried; wrap it with its processor"
        )
    try:
        prompts = _prompts(processor)
        stock = [_stock(model, inputs) for inputs in prompts]
    except Exception as error:  # whatever a strange model or processor runs into
        raise UnsupportedModel(
            f"model type {kind!r} is not one that tests have shown exact, and it could not be "
            f"tried: {error}"
        ) from error
    _refuse_blind(kind, stock)
    near = _NEAR.get(model.dtype, 1e-4)
    seen = []
    for whole, reuse in _CHANCES:
        family.sees_whole_media, family.reuse = whole, reuse
        off = _worst(model, family, processor, weights, prompts, stock)
        if isinstance(off, float) and off < near:
            _check_rendering(kind, family, processor)
            return
        seen.append(f"{reuse}{', whole pictures' if whole else ''}: {off}")
    raise UnsupportedModel(
        f"model type {kind!r} could not be shown exact: logits off by more than {near:g} of their "
        f"scale against stock Transformers ({'; '.join(seen)})"
    )


def _check_rendering(kind: str, family: Family, processor: Any) -> None:
    """Messages must become the ids that the processor makes of them; tensors need no template."""
    if not getattr(processor, "chat_template", None):
        return
    images = [_noise(1, (96, 96)), _noise(2, (160, 96))]
    parts = [{"type": "image", "image": image} for image in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "Which is red?"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    wanted = processor(text=[text], images=images, return_tensors="pt")["input_ids"][0].tolist()

    def name(image: Any, modality: str) -> Medium:
        pixels = family.preprocess(processor, image, {})
        what = entry_of(pixels)
        return Medium("", "", "", what["grid"], pixels.layout, None, lambda: pixels)

    try:
        found = Renderer(family, processor).render(messages, name).ids.tolist()
    except (KeepsightError, LookupError, TypeError, ValueError, AttributeError):
        found = []
    if found != wanted:
        raise UnsupportedModel(
            f"model type {kind!r} could not be shown exact: its prompts are not rendered as its "
            "processor does it"
        )


def _prompts(processor: Any) -> list[dict[str, Any]]:
    """One picture; a text behind it; a second picture; the first replaced."""
    token = processor.image_token
    a, b, c = (_noise(seed, size) for seed, size in ((1, (96, 96)), (2, (160, 96)), (3, (96, 96))))
    first = f"Look at this: {token} What do you see in it, and where?"
    texts = [
        (first, [a]),
        (f"{first} It is a pattern. And what colour is it?", [a]),
        (f"{first} It is a pattern. {token} Compare it with this one.", [a, b]),
        (first, [c]),
    ]
    return [
        dict(processor(text=[text], images=images, return_tensors="pt")) for text, images in texts
    ]


def _noise(seed: int, size: tuple[int, int]) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.NEAREST)


def _stock(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    out = model.generate(
        **{name: tensor.to(model.device) for name, tensor in inputs.items()},
        max_new_tokens=_TOKENS,
        min_new_tokens=_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits: tuple[torch.Tensor, ...] = out.logits
    return logits


def _refuse_blind(kind: str, stock: list[tuple[torch.Tensor, ...]]) -> None:
    """The control: if another picture changes nothing, equal logits would prove nothing."""
    one, other = stock[0][0].float(), stock[3][0].float()
    if float((one - other).abs().max()) < 1e-2 * float(one.abs().max()):
        raise UnsupportedModel(
            f"model type {kind!r} cannot be tried: its answers hardly depend on its pictures"
        )


def _worst(
    model: Any,
    family: Family,
    processor: Any,
    weights: Weights,
    prompts: list[dict[str, Any]],
    stock: list[tuple[torch.Tensor, ...]],
) -> float | str:
    """The largest difference over all prompts, each on top of the ones before, or what failed."""
    memory = Memory(model, family, processor, weights, Settings(grain=1), None)
    memory.rule = dataclasses.replace(memory.rule, run=_RUN)
    worst = 0.0
    for inputs, wanted in zip(prompts, stock, strict=True):
        try:
            found = _ours(memory, inputs)
        except KeepsightError as error:
            return str(error)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        if len(found) != len(wanted):
            return f"{len(found)} of {len(wanted)} tokens came out"
        for theirs, mine in zip(wanted, found, strict=True):
            scale = float(theirs.abs().max())
            worst = max(worst, float((theirs.float() - mine.float()).abs().max()) / scale)
            if int(theirs.argmax()) != int(mine.argmax()):
                break
    return worst


def _ours(memory: Memory, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    options = {
        **inputs,
        "max_new_tokens": _TOKENS,
        "min_new_tokens": _TOKENS,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    out = generate(memory, FairLock(), None, options)
    return out.logits or () if isinstance(out, Generated) else ()
