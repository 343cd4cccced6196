"""Everything except weights and input that changes bits: device, libraries, threads, switches,
attention.

Snapshots are reused only in the environment they were made in; packages record theirs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from typing import TYPE_CHECKING

import PIL
import torch
import transformers

from keepsight.kinds import Record
from keepsight.models.switches import called, switches

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from keepsight.kinds import Processor

# Attributes of a configuration that choose Transformers' functions for its part of a model.
_CHOSEN = {
    "attention": "_attn_implementation_internal",
    "experts": "_experts_implementation_internal",
}


def about(model: PreTrainedModel, processor: Processor | None) -> Record:
    """What a package says of the model that made it, for people who read it."""
    config = model.config
    return {
        "model_type": config.model_type,
        # The last part only: a package may travel, and a local path is private.
        "name": str(getattr(config, "_name_or_path", "")).rstrip("/").split("/")[-1] or None,
        "commit": getattr(config, "_commit_hash", None),
        "image_processor": type(getattr(processor, "image_processor", None)).__name__,
    }


def environment_of(model: PreTrainedModel, dtype: str) -> Record:
    """The environment of a live model in this thread, given the dtype of its weights."""
    device: torch.device = model.device
    functions = _functions(model.config)
    chosen = {(word, name) for word, names in functions.items() for name in names.values()}
    return {
        "device": _device_class(device),
        "dtype": dtype,
        **functions,
        "torch": str(torch.__version__),  # torch's version class is slow to compare
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "switches": switches(device.type, sorted(chosen)),
        "autocast": _autocast(device.type),
        **getattr(getattr(model, "exported", None), "environment", {}),
    }


def compiled(model: PreTrainedModel) -> dict[str, str]:
    """What `torch.compile` made of modules, by path.

    Compiled code depends on options and on the shapes seen before, so no name for it is valid in
    another process, and compiling again gives another name.
    """
    found = {}
    for path, module in model.named_modules():
        in_place = vars(module).get("_compiled_call_impl")
        if in_place is not None or hasattr(module, "dynamo_ctx"):
            found[path] = called(module if in_place is None else in_place)
    return found


def beside_the_decoder(model: PreTrainedModel, found: dict[str, str]) -> dict[str, str]:
    """Compiled modules that are neither in the decoder nor around it: features come from a method,
    which bypasses what is compiled around a tower."""
    if not found:
        return found
    decoder = model.get_decoder()
    own = next((path for path, module in model.named_modules() if module is decoder), "")
    if not own:  # a tower alone
        return found
    inside = f"{own}."
    return {
        path: made
        for path, made in found.items()
        if path and not f"{path}.".startswith(inside) and not inside.startswith(f"{path}.")
    }


def backend_version(backend: str) -> str:
    """The version of the library that turns pixels into tower inputs."""
    if backend == "torchvision":
        return f"torchvision {importlib.metadata.version('torchvision')}"
    return f"pillow {PIL.__version__}"


@functools.cache
def _device_class(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return device.type


def _functions(config: PreTrainedConfig) -> dict[str, dict[str, str]]:
    """The chosen functions for attention and experts, per part of the model."""
    found: dict[str, dict[str, str]] = {"attention": {}, "experts": {}}
    waiting = [("model", config)]
    while waiting:
        name, part = waiting.pop()
        # Not by getattr: Transformers' properties walk over all parts again for each part.
        own = vars(part)
        for word, attribute in _CHOSEN.items():
            if own.get(attribute) is not None:
                found[word][name] = str(own[attribute])
        for below in getattr(type(part), "sub_configs", ()):
            if own.get(below) is not None:
                waiting.append((below if part is config else f"{name}.{below}", own[below]))
    return found


def _autocast(device: str) -> str | None:
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
