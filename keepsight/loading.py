"""Checkpoints to live models and processors, with nothing that a checkpoint of images needs not.

A processor that upstream cannot build here comes without its video part (partial_processor.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForImageTextToText

from keepsight import keys
from keepsight.errors import InputError, KeepsightError, ModelError
from keepsight.partial_processor import partial_processor

DEMO = {"demo": "qwen3_vl", "demo-hybrid": "qwen3_5"}
DEMO_GRAIN = 16


def model_path(name: str) -> str:
    """The folder of a demo model, or the name as it is (a folder or a hub id)."""
    if name in DEMO:
        return str(Path(__file__).parent / "demo" / "models" / DEMO[name])
    return os.path.expanduser(name) if name.startswith("~") else name


def load_model(path: str, dtype: Any, device_map: Any, revision: str | None) -> Any:
    """The model, in eval mode."""
    options = load_options(dtype, device_map, revision)
    with named_refusal(path):
        model = AutoModelForImageTextToText.from_pretrained(path, **options)
    return thinking(model).eval()


def load_options(dtype: Any, device_map: Any, revision: str | None) -> dict[str, Any]:
    """What `from_pretrained` is told."""
    given = {"device_map": device_map, "revision": revision}
    told = {name: value for name, value in given.items() if value is not None}
    return {"dtype": parse_dtype(dtype), **told}


@contextmanager
def named_refusal(path: str) -> Iterator[None]:
    """Whatever upstream raises for a checkpoint that it cannot load, as one error."""
    try:
        yield
    except (OSError, ValueError, KeyError, AssertionError, RuntimeError) as error:
        if isinstance(error, KeepsightError):
            raise
        raise ModelError(
            f"{path!r} cannot be loaded as an image-text-to-text model: {error}"
        ) from error


def thinking(model: Any) -> Any:
    """An Omni model also talks; what sees, hears and answers is its thinker."""
    return getattr(model, "thinker", model)


def parse_dtype(dtype: Any) -> Any:
    """`"auto"`, a torch dtype, or its name."""
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return "auto" if dtype is None else dtype
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise InputError(
            f"{dtype!r} is not a dtype; use 'auto', 'float32', 'bfloat16' or 'float16'"
        )
    return found


def load_processor(path: str, revision: str | None) -> Any:
    """The checkpoint's own tokenizer, image processor and chat template."""
    options = {} if revision is None else {"revision": revision}
    try:
        processor = transformers.AutoProcessor.from_pretrained(path, **options)
        if hasattr(processor, "image_processor"):
            return processor
    except Exception as error:  # what is raised differs by what is missing; try it without video
        problem: Exception | None = error
    else:
        problem = None  # upstream fell back to a bare tokenizer
    try:
        return partial_processor(path, options)
    except (OSError, ValueError, ImportError, AttributeError, TypeError) as error:
        raise ModelError(f"{path!r} has no usable processor: {error}") from (problem or error)


def files_digest(path: str, dtype: Any, every: bool = False) -> str | None:
    """The name of a folder's weight files by size, time and inode, or None for a hub id.

    With `every`, of all its files, those in folders below too.
    """
    folder = Path(path)
    if not folder.is_dir():
        return None
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin"), folder / "config.json"]
    files = sorted(folder.rglob("*") if every else weights)
    rows = []
    for file in files:
        if file.is_file():
            status = file.stat()
            # The change time too: a new file may get the inode of the one it replaces, and anybody
            # can set the time of modification back.
            times = [status.st_mtime_ns, status.st_ctime_ns]
            name = file.relative_to(folder).as_posix()
            rows.append([name, status.st_size, *times, status.st_ino])
    versions = [torch.__version__, transformers.__version__]
    return keys.digest("weight files", str(folder.resolve()), rows, str(dtype), versions)
