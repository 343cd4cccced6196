"""Refuses, without importing PyTorch, a hub id that the Hub lacks, and any that is not here while
the Hub is unreachable."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from keepsight.errors import ModelError

PATIENCE = 2.0  # seconds to wait for the Hub
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def check_hub(path: str, revision: str | None) -> None:
    """Refuse a hub id that is not cached if the Hub cannot be reached or lacks it."""
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
    if isinstance(error, RevisionNotFoundError):
        raise ModelError(f"the Hub has {path!r}, but no revision {revision!r} of it") from error
    if error is not None and not isinstance(error, EntryNotFoundError):  # may be an adapter
        what = type(error).__name__
        if isinstance(error, HfHubHTTPError):  # a failing server, or a proxy in its place
            answered = error.response.status_code
            what = f"{huggingface_hub.constants.ENDPOINT} answers with status {answered}"
        raise ModelError(
            f"{path!r} is not on this machine and the Hub cannot be reached "
            f"({what}); name a folder, or load it once where there is a network"
        ) from error


def _asked(path: str, revision: str | None) -> Exception | None:
    """What goes wrong when the Hub is asked for a model; empty if nothing."""
    try:
        url = huggingface_hub.hf_hub_url(path, "config.json", revision=revision)
        huggingface_hub.get_hf_file_metadata(url, timeout=PATIENCE)
    except Exception as error:  # errors of its HTTP library, whichever that is
        return error
    return None
