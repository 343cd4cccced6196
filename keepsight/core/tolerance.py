"""How far logits may be from stock Transformers', as a share of their scale (law 2).

What is farther off was not rounded otherwise: something else was computed.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from keepsight.models.narrow import is_narrow

NEAR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def tolerance_of(model: PreTrainedModel) -> float:
    """The share for a model: rounding in its dtype, and more where weights have fewer bits."""
    return max(NEAR.values()) if _has_fewer_bits(model) else NEAR.get(model.dtype, 1e-4)


def _has_fewer_bits(model: PreTrainedModel) -> bool:
    """Whether some weights are quantised; of those in MLX nothing is known."""
    if hasattr(model, "exported"):
        return model.exported.environment.get("quantised", "perhaps") is not None
    weights = (weight.data for weight in model.parameters())
    return is_narrow(model) or any(
        type(weight) is not torch.Tensor or not weight.is_floating_point() for weight in weights
    )
