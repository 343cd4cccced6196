"""What only a family knows. `family_of(model)` finds the right one.

A family's file is named for the behaviour it adds; most model types need none and are served by
`base.py`. A type is listed in `SUPPORTED` once tests have shown it exact; others are refused by
name, never guessed.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from keepsight.errors import UnsupportedModel
from keepsight.families.base import Family, Pixels
from keepsight.families.tiled import Tiled

__all__ = ["SUPPORTED", "Family", "Pixels", "family_of"]

SUPPORTED: dict[str, type[Family]] = {
    "qwen2_vl": Family,
    "qwen2_5_vl": Family,
    "qwen3_vl": Family,
    "qwen3_vl_moe": Family,
    "qwen3_5": Family,
    "qwen3_5_moe": Family,
    "llava": Family,
    "internvl": Tiled,
}


def family_of(model: PreTrainedModel) -> Family:
    """The family of a model, or a refusal that names what is supported."""
    model_type = getattr(model.config, "model_type", "?")
    if model_type not in SUPPORTED:
        raise UnsupportedModel(
            f"model type {model_type!r} has not been shown to be exact with Keepsight; "
            f"supported: {', '.join(sorted(SUPPORTED))}"
        )
    return SUPPORTED[model_type](model)
