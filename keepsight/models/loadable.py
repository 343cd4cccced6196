"""Refuses, within two seconds and with a reason, what cannot be loaded.

A missing device, an unreachable Hub, a text-only model.
"""

from __future__ import annotations

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
)

from keepsight.errors import InputError, UnsupportedModel
from keepsight.kinds import DeviceMap
from keepsight.models.reachable import check_hub
from keepsight.system import places

_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def check_loadable(path: str, device_map: DeviceMap, revision: str | None) -> None:
    """Refuse what is known at once not to load."""
    check_device(device_map)
    check_hub(path, revision)
    check_sees(path, revision)


def check_device(device_map: DeviceMap) -> None:
    """Refuse a device that this machine or this PyTorch does not have."""
    if not isinstance(device_map, str) or device_map in _MAPS:
        return
    places.check_device_name(device_map)
    try:
        device = torch.device(device_map)
    except RuntimeError:
        known = "cpu, cuda, cuda:1, mps, xpu or auto"
        raise InputError(f"there is no device {device_map!r}; name {known}") from None
    if device.type not in ("cuda", "mps", "xpu"):
        return  # something only PyTorch knows
    backend = getattr(torch, device.type)
    count = backend.device_count() if backend.is_available() else 0
    if (device.index or 0) < count:
        return
    there = f"there are {count} of them" if count else f"PyTorch {torch.__version__} sees none here"
    raise InputError(f"device {device_map!r}: {there}; leave the device out to run on the CPU")


def check_sees(path: str, revision: str | None) -> None:
    """Refuse a language model without a vision tower."""
    try:
        config = AutoConfig.from_pretrained(path, revision=revision)
    except Exception:  # an adapter, or something that loading itself refuses by name
        return
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or hasattr(config, "vision_config")
    if not sees and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"{path!r} has no vision tower: models of type {config.model_type!r} only read text; "
            "name a vision-language model"
        )
