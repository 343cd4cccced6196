"""What changes bits beside weights and input: device, libraries, threads, precision, attention.

Snapshots are reused only under the circumstances they were made under; packages say theirs.
"""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import PIL
import torch
import transformers


def circumstances(model: Any, dtype: str) -> dict[str, Any]:
    """Those that hold for a live model whose weights are of a dtype."""
    on_cpu = model.device.type == "cpu"
    return {
        "device": _device_class(model.device),
        "dtype": dtype,
        "attention": _attention(model.config),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads() if on_cpu else None,
        "precision": _precision(),
        "autocast": _autocast(model.device.type),
        **getattr(getattr(model, "exported", None), "circumstances", {}),
    }


def backend_version(backend: str) -> str:
    """The library that turns pixels into what the tower takes."""
    if backend == "torchvision":
        return f"torchvision {importlib.metadata.version('torchvision')}"
    return f"pillow {PIL.__version__}"


def _device_class(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return device.type


def _attention(config: Any) -> dict[str, Any]:
    parts = {"model": config, "text": config.get_text_config()}
    parts["vision"] = getattr(config, "vision_config", None)
    return {name: getattr(c, "_attn_implementation", None) for name, c in parts.items()}


def _precision() -> list[str]:
    backends: Any = torch.backends
    places = (backends, backends.mkldnn.matmul, backends.cuda.matmul)
    found = [str(getattr(place, "fp32_precision", "")) for place in places]
    return [torch.get_float32_matmul_precision(), *found]


def _autocast(device: str) -> str | None:
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
