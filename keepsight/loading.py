"""Checkpoints to live models and processors, with nothing that a checkpoint of images needs not.

Upstream's composite processors cannot be built where torchvision is missing, even for images only:
their video processor is a required argument. `load_processor` builds them with a stand-in there
(tests/test_upstream_traps.py tells when that is no longer needed).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from keepsight import keys
from keepsight.errors import InputError, KeepsightError, ModelError

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
        return _without_video(path, options)
    except (OSError, ValueError, ImportError, AttributeError, TypeError) as error:
        raise ModelError(f"{path!r} has no usable processor: {error}") from (problem or error)


class _NoVideo:
    """Stands where a video processor would; images never touch it."""

    model_input_names: tuple[str, ...] = ()
    num_frames = fps = None  # what some processors read of it when they are built
    slice_mode, downsample_mode = False, "16x"


def _without_video(path: str, options: dict[str, Any]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    image_processor = AutoImageProcessor.from_pretrained(path, backend="pil", **options)
    config = _processor_config(path, options)
    name = config.get("processor_class") or _usual_processor(path, options)
    base: Any = getattr(transformers, str(name), None)
    if base is None:
        raise ValueError(f"no processor class {name!r} in Transformers {transformers.__version__}")

    def check(self: Any, attribute: str, argument: Any) -> Any:
        if not isinstance(argument, _NoVideo):
            return base.check_argument_for_proper_class(self, attribute, argument)
        return type(argument)

    images_only: Any = type(base.__name__, (base,), {"check_argument_for_proper_class": check})
    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    if "video_processor" in base.get_attributes():
        parts["video_processor"] = _NoVideo()
    if "feature_extractor" in base.get_attributes():
        parts["feature_extractor"] = _ears(path, options)
    own = {k: v for k, v in config.items() if k not in ("processor_class", "auto_map", *parts)}
    template = getattr(tokenizer, "chat_template", None) or own.pop("chat_template", None)
    own.pop("chat_template", None)
    return images_only(**parts, chat_template=template, **own)


def _ears(path: str, options: dict[str, Any]) -> Any:
    """The feature extractor, or a stand-in where the checkpoint has none that loads."""
    try:
        return transformers.AutoFeatureExtractor.from_pretrained(path, **options)
    except (OSError, ValueError, ImportError, KeyError):
        return _NoVideo()


def _usual_processor(path: str, options: dict[str, Any]) -> str | None:
    """The processor class that Transformers goes by where a checkpoint names none."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    model_type = transformers.AutoConfig.from_pretrained(path, **options).model_type
    name: str | None = PROCESSOR_MAPPING_NAMES.get(model_type)
    return name


def _processor_config(path: str, options: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for file in ("preprocessor_config.json", "processor_config.json"):
        found = transformers.utils.cached_file(
            path, file, _raise_exceptions_for_missing_entries=False, **options
        )
        if found is not None:
            with open(found, encoding="utf-8") as handle:
                config = json.load(handle)
            if file == "processor_config.json":
                merged.update(config)
            else:
                merged["processor_class"] = config.get("processor_class")
    return merged


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
