"""mlx-vlm and MLX, as far as they are called: loaded without taking Transformers' place.

mlx-vlm reads a configuration by the names it had before Transformers 5, and puts processors of its
own in Transformers' place when a model is loaded. Both are stepped around here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoProcessor

from keepsight.errors import MissingExtra, ModelError
from keepsight.runtimes.imports import Foreign

Array = Foreign


class Mlx:
    """The libraries. Whatever they compute is computed by one thread at a time."""

    def __init__(self) -> None:
        self.core = _imported("mlx.core")
        self.utils = _imported("mlx_vlm.utils")
        self.arrays_cache = _imported("mlx_vlm.models.cache").ArraysCache
        self.alone = threading.Lock()
        versions = {name: importlib.metadata.version(name) for name in ("mlx", "mlx-vlm")}
        device = str(self.core.default_device())
        self.version = f"{versions['mlx']}, mlx-vlm {versions['mlx-vlm']}, {device}"

    def load(self, folder: Path) -> Foreign:
        """The model of mlx-vlm."""
        try:
            with as_mlx_reads_it(folder) as readable, _own_processors():
                return cast(Foreign, self.utils.load_model(readable))
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise ModelError(f"mlx-vlm cannot load {folder}: {error}") from error

    def given(self, tensor: Tensor, dtype: object = None) -> Array:
        """A tensor as an array."""
        array: Array = self.core.array(tensor.detach().contiguous().numpy())
        return array if dtype is None else cast(Foreign, array.astype(dtype))

    def taken(self, array: Array) -> Tensor:
        """A copy of an array, as a tensor."""
        if array.dtype in (self.core.bfloat16, self.core.float16):
            array = array.astype(self.core.float32)
        return torch.from_numpy(np.array(array))


@contextmanager
def as_mlx_reads_it(folder: Path) -> Iterator[Path]:
    """The folder, with rope and tower where mlx-vlm looks for them: Transformers names these in
    another way since version 5."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text, vision = config.get("text_config", config), config.get("vision_config", {})
    rope = text.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" in text:
        yield folder
        return
    vision["model_type"] = config["model_type"]
    text["rope_theta"] = rope.get("rope_theta", 10000.0)
    text["rope_scaling"] = {"type": rope.get("rope_type", "default"), **rope}
    config = {**text, **config}  # where the language model's settings once were
    with TemporaryDirectory(prefix="keepsight-mlx-") as made:
        for file in folder.iterdir():
            if file.name != "config.json":
                (Path(made) / file.name).symlink_to(file.resolve())
        (Path(made) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(made)


@contextmanager
def _own_processors() -> Iterator[None]:
    """Loading a model, mlx-vlm puts processors of its own in the place of Transformers', for the
    whole process. What Keepsight knows of pictures it knows of Transformers'."""
    before = vars(AutoProcessor)["from_pretrained"]
    try:
        yield
    finally:
        AutoProcessor.from_pretrained = before


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra.named("mlx-vlm", "mlx") from error
