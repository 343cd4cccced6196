"""Inputs of other engines in place of an image: the features of packages, in each engine's form.

An engine that gets features in an unexpected shape crashes at best, so nothing is guessed: for each
model type the table says what the engine takes, in the version that was read (docs/fleets.md);
everything else is refused by name. Most of it was run as well: `bench/results/fleet/` compares
answers from features with answers from pixels.

This module knows shapes, not engines: it imports none of them, and returns plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from keepsight.errors import InputError, UnsupportedInput
from keepsight.kinds import Record

if TYPE_CHECKING:
    from keepsight.formats.package import Package

VLLM, SGLANG = "vLLM 0.32.0", "SGLang 0.5.23"  # in the versions that were read
PREFIX = "keepsight-"  # of names by which requests ask a connector for features

# "grid": all features in one tensor, with the grids beside them, from which the engine counts the
# tokens of each image. "rows": one tensor per image, whose rows are its tokens.
_GRID, _ROWS = "grid", "rows"
_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
TAKES: dict[str, dict[str, str]] = {
    VLLM: {
        **dict.fromkeys((*_QWEN, "qwen2_5_omni_thinker"), _GRID),
        **dict.fromkeys(("llava", "llava_next", "llava_onevision", "internvl"), _ROWS),
        "paligemma": _ROWS,
    },
    SGLANG: dict.fromkeys(_QWEN, _GRID),
}
_NO_GRID = "its parser takes no grid beside features, and the prompt cannot be built without one"
_NO_FEATURES = "its model code takes pixels only"
_NO_POSITIONS = "it would compute their positions without the grid handed over, silently"
REFUSES: dict[str, dict[str, str]] = {
    VLLM: {
        **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "ernie4_5_vl_moe"), _NO_GRID),
        **dict.fromkeys(("idefics3", "smolvlm"), "its prompt is built from the image's own size"),
        **dict.fromkeys(("gemma3", "cohere2_vision", "mistral3", "paddleocr_vl"), _NO_FEATURES),
        "qwen3_omni_moe_thinker": "its parser takes features of sound, and none of images",
    },
    SGLANG: dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), _NO_POSITIONS),
}


def to_vllm(packages: Sequence[Package]) -> Record:
    """The `multi_modal_data` of a vLLM request whose images, in prompt order, are these packages.

    The prompt holds one placeholder per image, as with pixels. The engine must run with
    `enable_mm_embeds`; it keys its caches by the bytes of its inputs.
    """
    form = _form(packages, VLLM)
    if form == _ROWS:
        return {"image": [rows(package) for package in packages]}
    return {"image": {"image_embeds": torch.cat(list(map(rows, packages))), **_grids(packages)}}


def named_for_vllm(packages: Sequence[Package]) -> Record:
    """The same by name only, for a vLLM that reads a store with these packages.

    The request carries the grids, from which vLLM counts tokens, and the names.
    """
    form = _form(packages, VLLM)
    if form == _ROWS:
        raise UnsupportedInput(
            f"{VLLM} counts the tokens of {packages[0].about['model_type']} by rows or "
            "pixels; give it the image beside its name (`multi_modal_uuids`), or the features"
        )
    names = [identifier(package) for package in packages]
    return {
        "multi_modal_data": {"image": _grids(packages)},
        "multi_modal_uuids": {"image": names},
    }


def identifier(package: Package) -> str:
    """The name by which a request asks a connector for these features."""
    return PREFIX + package.feature_id


def to_sglang(packages: Sequence[Package]) -> Record:
    """The `image_data` of an SGLang request whose images, in prompt order, are these packages.

    All images are one item, the only form that SGLang takes. The request also needs `input_ids`
    with every placeholder written out: `vlm.render(messages).ids.tolist()`.
    """
    _form(packages, SGLANG)
    # Not its format "precomputed_embedding": there features replace pixels, and Qwen3-VL would send
    # them through the tower.
    item = {"format": "processor_output", "modality": "image"}
    features = {"precomputed_embeddings": torch.cat(list(map(rows, packages)))}
    return {"image_data": [{**item, **features, **_grids(packages)}]}


def rows(package: Package) -> torch.Tensor:
    """The features, one row per token, followed by the deepstack levels side by side."""
    if "indicator" in package.tensors:
        raise UnsupportedInput("features with indicator tokens are taken by Keepsight only")
    levels = sum(name.startswith("deepstack.") for name in package.tensors)
    names = ["features", *(f"deepstack.{level}" for level in range(levels))]
    return torch.cat([package.tensors[name].flatten(0, -2) for name in names], dim=-1)


def _grids(packages: Sequence[Package]) -> dict[str, torch.Tensor]:
    grid = [row for package in packages for row in package.grid.get("image_grid_thw", [])]
    if len(grid) != len(packages):
        raise InputError(
            f"{len(packages)} packages have {len(grid)} grids (image_grid_thw); expected one each"
        )
    return {"image_grid_thw": torch.tensor(grid, dtype=torch.int64)}


def _form(packages: Sequence[Package], engine: str) -> str:
    """How an engine takes the features of this model type, after checking that all packages
    match."""
    if not packages:
        raise InputError("there are no packages to hand over")
    for field in ("weights", "settings", "modality"):
        if len({getattr(package, field) for package in packages}) > 1:
            raise InputError(f"the packages differ in their {field}: they cannot share a request")
    name, modality = engine.split()[0], packages[0].modality
    if modality != "image":
        raise UnsupportedInput(
            f"{name} takes features of images only; this is a package of {modality!r}"
        )
    model_type = packages[0].about.get("model_type")
    if model_type is None:
        raise InputError(f"the package lacks its model type, so the form for {name} is unknown")
    if model_type not in TAKES[engine]:
        why = REFUSES[engine].get(model_type, "it was not tested yet")
        raise UnsupportedInput(
            f"{engine} takes no features of {model_type}: {why}; give it the image"
        )
    return TAKES[engine][model_type]
