"""Loads checkpoints without their vision tower: for training, and for answering from packages.

The whole model is loaded. The tower's weights are hashed, because packages are bound to them, and
let go: placeholders take the places of its modules.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from keepsight.errors import UnsupportedModel
from keepsight.kinds import DeviceMap, Dtype
from keepsight.models import loading
from keepsight.models.families import family_of
from keepsight.models.families.tower_absent import AbsentTower, tower_parts
from keepsight.models.identity import digest_of, dtype_of


def load_named(
    path: str, dtype: Dtype, device_map: DeviceMap, revision: str | None
) -> tuple[PreTrainedModel, str | None]:
    """The model in eval mode with placeholders for its tower, and the name of its files."""
    model, files = loading.load_named(path, dtype, device_map, revision)
    family = family_of(model)
    if not family.proven or family.packages_only:
        raise UnsupportedModel(
            f"model type {model.config.model_type!r} cannot be loaded without its tower: no test "
            "has shown that its answers are exact from packages alone; load it whole"
        )
    for name in tower_parts(family):
        part = model.get_submodule(name)
        weights = [(f"{name}.{own}", tensor) for own, tensor in part.state_dict().items()]
        named = [(path, digest_of(tensor), dtype_of(tensor)) for path, tensor in weights]
        model.set_submodule(name, AbsentTower(part, named))
    return model, files
