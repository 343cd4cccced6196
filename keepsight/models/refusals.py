"""Says in one sentence why a checkpoint cannot be loaded: before the work where that can be known.

Upstream's own words name classes and lists of classes, and an unreachable hub is tried six times.
"""

from __future__ import annotations

import os
import socket
import urllib.request
from urllib.parse import urlsplit

import torch
import transformers
from huggingface_hub import constants, try_to_load_from_cache
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
)

from keepsight.errors import InputError, ModelError, UnsupportedModel
from keepsight.kinds import DeviceMap

_CONNECT_SECONDS = 2


def refuse_missing_device(device_map: DeviceMap) -> None:
    """Refuse one accelerator by name where torch finds none of its kind."""
    if not isinstance(device_map, str) or device_map.partition(":")[0] not in ("cuda", "mps"):
        return
    kind = device_map.partition(":")[0]
    there = torch.cuda.is_available() if kind == "cuda" else torch.backends.mps.is_available()
    if not there:
        raise InputError(
            f"device_map={device_map!r}: torch {torch.__version__} finds no {kind} device here; "
            "leave it out to run on the CPU, or install a torch that is built for your device"
        )


def refuse_unreachable(path: str, revision: str | None) -> None:
    """Refuse a hub id that is not in the local cache where no connection can be made.

    A hub that is slow, or behind a proxy, is left to upstream.
    """
    if os.path.exists(path) or constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return
    cached = try_to_load_from_cache(path, "config.json", revision=revision)
    if isinstance(cached, str):
        return
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=_CONNECT_SECONDS).close()
    except TimeoutError:
        return
    except OSError as error:
        raise ModelError(
            f"{path!r} is not in the local cache, and the hub cannot be reached ({error}); name a "
            "folder, or load it once where there is a connection"
        ) from error


def refuse_no_vision(path: str, revision: str | None = None) -> None:
    """Refuse a model that Transformers knows for other tasks than image and text to text."""
    try:
        options = {} if revision is None else {"revision": revision}
        config = type(AutoConfig.from_pretrained(path, **options))
    except (OSError, ValueError, KeyError):
        return  # the error that is at hand already says more
    if config in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return
    kind = getattr(config, "model_type", config.__name__)
    if config in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"{path!r} has no vision tower: a {kind} model reads text alone; use a vision-language "
            "model (`keepsight families` lists the types)"
        )
    raise UnsupportedModel(
        f"{path!r} is a {kind} model, which Transformers {transformers.__version__} does not load "
        "as an image-text-to-text model (`keepsight families` lists the types)"
    )
