"""Refuses, by its name alone and without importing PyTorch, what cannot be loaded.

A hub id that the Hub lacks, any hub id while the Hub is unreachable, and a folder of a text-only
model.
"""

from __future__ import annotations

import json
import os
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

from keepsight.errors import ModelError, UnsupportedModel
from keepsight.system.places import expanded

PATIENCE = 2.0  # seconds to wait for the Hub
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "adapter_config.json")
_READERS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
_SENSES = re.compile("vision|visual|image|img|audio|video|pixel|mm_|encoder|thinker", re.IGNORECASE)


def check_hub(path: str, revision: str | None) -> None:
    """Refuse a hub id that is not cached if the Hub cannot be reached or lacks it."""
    if Path(path).exists() or not _HUB_ID.fullmatch(path):
        return
    cached = huggingface_hub.try_to_load_from_cache(path, "config.json", revision=revision)
    if isinstance(cached, str):
        check_folder_sees(os.path.dirname(cached), path)
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


def check_folder_sees(path: str, name: str | None = None) -> None:
    """Refuse a folder whose files name a language model without vision.

    Unclear cases are left to the loader.
    """
    folder = expanded(path)
    if any((folder / name).is_file() for name in _PROCESSORS):
        return
    try:
        text = (folder / "config.json").read_text(encoding="utf-8")
        config = json.loads(text)
        kind, made = config["model_type"], config["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    reads = isinstance(made, list) and all(str(one).endswith(_READERS) for one in made)
    if (
        made
        and reads
        and "auto_map" not in config
        and not _SENSES.search(text.replace("is_encoder_decoder", ""))
    ):
        raise UnsupportedModel(
            f"{name or path!r} has no vision encoder: models of type {kind!r} only read text; name "
            "a vision-language model"
        )
