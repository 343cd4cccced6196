"""The parts of mlx-vlm and MLX in use, loaded without replacing Transformers' classes.

mlx-vlm reads configurations with the names before Transformers 5, and installs its own processors
in Transformers when a model is loaded. Both are avoided here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoProcessor

from keepsight.errors import MissingExtra, ModelError
from keepsight.runtimes.imports import Untyped
from keepsight.system.exchanged import exchanged

Array = Untyped


class Mlx:
    """The libraries. All their computations run in one thread at a time."""

    def __init__(self) -> None:
        self.core = _imported("mlx.core")
        self.utils = _imported("mlx_vlm.utils")
        self.nn = _imported("mlx.nn")
        self.pixel_shuffle = _imported("mlx_vlm.models.base").pixel_shuffle
        self.arrays_cache = _imported("mlx_vlm.models.cache").ArraysCache
        self.alone = threading.Lock()
        versions = {name: importlib.metadata.version(name) for name in ("mlx", "mlx-vlm")}
        device = str(self.core.default_device())
        self.version = f"{versions['mlx']}, mlx-vlm {versions['mlx-vlm']}, {device}"

    def load(self, folder: Path) -> Untyped:
        """The model of mlx-vlm."""
        try:
            # mlx-vlm replaces Transformers' processors for the process while a model loads.
            own = vars(AutoProcessor)["from_pretrained"]
            kept = exchanged((AutoProcessor, "from_pretrained", own))
            with as_mlx_reads_it(folder) as readable, kept, own_names():
                return cast(Untyped, self.utils.load_model(readable))
        except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
            raise ModelError(f"mlx-vlm cannot load {folder}: {error}") from error

    def given(self, tensor: Tensor, dtype: object = None) -> Array:
        """A tensor as an array."""
        array: Array = self.core.array(tensor.detach().contiguous().numpy())
        return array if dtype is None else cast(Untyped, array.astype(dtype))

    def taken(self, array: Array) -> Tensor:
        """An array as a tensor, in the same memory. MLX never writes into an array again."""
        if array.dtype in (self.core.bfloat16, self.core.float16):
            array = array.astype(self.core.float32)
        return torch.from_numpy(np.array(array, copy=False))


@contextmanager
def as_mlx_reads_it(folder: Path) -> Iterator[Path]:
    """The folder with rope and tower settings renamed to what mlx-vlm expects."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text, vision = config.get("text_config", config), config.get("vision_config", {})
    rope = text.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" in text:
        yield folder
        return
    if config["model_type"].startswith("qwen"):
        vision["model_type"] = config["model_type"]
    for name, once in (("num_local_experts", "num_experts"), ("mm_tokens_per_image",) * 2):
        if name in config or name in text:
            text.setdefault(once, text.get(name, config.get(name)))
    if "tie_word_embeddings" in config:  # its place since version 5
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    kinds = text.get("layer_types") or []
    if "full_attention" in rope:  # each kind of layer has its own
        text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        text["rope_global_base_freq"] = rope["full_attention"]["rope_theta"]
        text["sliding_window_pattern"] = (*kinds, "full_attention").index("full_attention") + 1
        rope = rope["full_attention"]
    text["rope_theta"] = rope.get("rope_theta", 10000.0)
    if set(rope) - {"rope_theta", "rope_type"}:
        text["rope_scaling"] = {"type": rope.get("rope_type", "default"), **rope}
    config = {**text, **config}  # the old place of the language model's settings
    with TemporaryDirectory(prefix="keepsight-mlx-") as made:
        for file in folder.iterdir():
            if file.name != "config.json":
                (Path(made) / file.name).symlink_to(file.resolve())
        (Path(made) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(made)


def own_names() -> AbstractContextManager[None]:
    """Rename weights from Transformers 5 to the names and order that mlx-vlm expects."""
    utils = _imported("mlx_vlm.utils")
    before = utils.sanitize_weights

    def renamed(model: Untyped, weights: dict[str, Array], config: object = None) -> object:
        if config is None:  # the whole model's method; those of its parts run after it
            weights = _as_mlx_names_them(weights, model)
        return before(model, weights, config)

    return exchanged((utils, "sanitize_weights", renamed))


def _as_mlx_names_them(weights: dict[str, Array], model: Untyped) -> dict[str, Array]:
    inner = hasattr(getattr(model, "vision_tower", None), "vision_model")
    found = {}
    for name, array in weights.items():
        part, _, rest = name.partition("vision_tower.")
        if inner and not part and rest and not rest.startswith("vision_model."):
            name = f"vision_tower.vision_model.{rest}"
        found[name] = array
    if model.config.model_type == "qwen3_vl_moe":
        _put_inputs_first(found)
    return found


def _put_inputs_first(weights: dict[str, Array]) -> None:
    """Convert expert weights to the hub's layout: Transformers computes, and may save them, with
    outputs first."""
    for name in [name for name in weights if name.endswith(".experts.down_proj")]:
        other = name.replace("down_proj", "gate_up_proj")
        down, both = weights[name], weights[other]
        if both.shape[1:] == (2 * down.shape[2], down.shape[1]):
            weights[name], weights[other] = down.swapaxes(1, 2), both.swapaxes(1, 2)


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra.named("mlx-vlm", "mlx") from error
