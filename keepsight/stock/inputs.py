"""The inputs of stock Transformers for a prompt, with features in place of pixels.

The tensors are new on each call, because stock `generate` changes those it gets.
"""

from __future__ import annotations

import torch

from keepsight.core.runtime import Runtime
from keepsight.kinds import Inputs, Record
from keepsight.prefix.prompt import Prompt
from keepsight.stock.features import repeatable


def stock_inputs(
    runtime: Runtime, prompt: Prompt, features: bool = True, tenant: str = ""
) -> Record:
    """Return the keyword arguments of a stock forward pass over the whole prompt."""
    family, vision = runtime.family, runtime.vision_of(tenant)
    device = runtime.model.device
    ids = torch.from_numpy(prompt.ids)[None].to(device)
    inputs: Inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    more = family.prompt_inputs(prompt.ids, prompt.types, prompt.grids)
    inputs |= {name: tensor.to(device) for name, tensor in more.items()}
    if prompt.media and features:
        parts = [(vision.package(m, beside=prompt.media)[0], 0, m.tokens) for m in prompt.media]
        inputs |= repeatable(family, parts, ids)
    return inputs
