"""What is refused before a checkpoint is loaded, in a sentence and within two seconds.

A device that is not there, a Hub that cannot be reached, a model that only reads text.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
)

from keepsight.errors import InputError, ModelError, UnsupportedModel
from keepsight.kinds import DeviceMap

PATIENCE = 2.0  # seconds for the Hub to say that it is there
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_DEVICE = re.compile(r"([a-z]+)(?::(\d+))?")


def check_loadable(path: str, device_map: DeviceMap, revision: str | None) -> None:
    """Refuse what cannot be loaded, as far as that can be said at once."""
    check_device(device_map)
    check_hub(path, revision)
    check_sees(path, revision)


def check_device(device_map: DeviceMap) -> None:
    """Refuse a device that this machine, or this PyTorch, has not got."""
    found = _DEVICE.fullmatch(device_map) if isinstance(device_map, str) else None
    if found is None or found[1] not in ("cuda", "mps", "xpu"):
        return  # a map of several, or what PyTorch knows better
    backend = getattr(torch, found[1])
    count = backend.device_count() if backend.is_available() else 0
    if int(found[2] or 0) < count:
        return
    there = f"there are {count} of them" if count else f"PyTorch {torch.__version__} sees none here"
    raise InputError(f"device {device_map!r}: {there}; leave the device out to run on the CPU")


def check_hub(path: str, revision: str | None) -> None:
    """Refuse a hub id that is not in the cache while the Hub cannot be reached, or lacks it."""
    if Path(path).exists() or not _HUB_ID.fullmatch(path):
        return
    cached = huggingface_hub.try_to_load_from_cache(path, "config.json", revision=revision)
    if isinstance(cached, str):
        return
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise ModelError(f"{path!r} is not in the cache of the Hub, and HF_HUB_OFFLINE is set")
    why: list[Exception | None] = []
    asking = threading.Thread(target=lambda: why.append(_asked(path, revision)), daemon=True)
    asking.start()
    asking.join(PATIENCE)
    error = why[0] if why else TimeoutError(f"no answer within {PATIENCE:g} s")
    if isinstance(error, RepositoryNotFoundError):
        raise ModelError(
            f"the Hub has no model {path!r}, or it is private: check the name, or log in with "
            "`hf auth login`"
        ) from error
    if error is not None and not isinstance(error, HfHubHTTPError):  # which upstream explains
        raise ModelError(
            f"{path!r} is not on this machine and the Hub cannot be reached "
            f"({type(error).__name__}); name a folder, or load it once where there is a network"
        ) from error


def _asked(path: str, revision: str | None) -> Exception | None:
    """What goes wrong when the Hub is asked for a model."""
    try:
        url = huggingface_hub.hf_hub_url(path, "config.json", revision=revision)
        huggingface_hub.get_hf_file_metadata(url, timeout=PATIENCE)
    except Exception as error:  # of whichever library it speaks to the network with
        return error
    return None


def check_sees(path: str, revision: str | None) -> None:
    """Refuse a language model without eyes."""
    try:
        config = AutoConfig.from_pretrained(path, revision=revision)
    except Exception:  # an adapter, or what loading itself refuses by name
        return
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or hasattr(config, "vision_config")
    if not sees and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"{path!r} has no vision tower: models of type {config.model_type!r} only read text; "
            "name a vision-language model"
        )
