"""Binds a store of features to the checkpoint that another engine serves.

That engine keeps the weights in other shapes, so our fingerprint cannot be computed from it. But
both sides can read the checkpoint's files: `connector_config` loads them once with Keepsight and
records which features fit, with a digest of every byte of weights and configuration. The connector
compares that digest with the files its engine serves. Names, sizes and times would be quicker to
compare, but say nothing on another machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from blake3 import blake3

from keepsight.errors import InputError
from keepsight.kinds import Record
from keepsight.system import digests
from keepsight.system.places import expanded

CONNECTOR = "KeepsightConnector"
MODULE = "keepsight.export.engines.vllm_connector"
_FILES = ("config.json", "*.safetensors", "*.bin", "adapter_config.json")


def connector_config(
    name: str | os.PathLike[str],
    store: str | os.PathLike[str],
    *,
    tenant: str | None = None,
    lossy: bool = False,
) -> Record:
    """The `--ec-transfer-config` with which vLLM takes features of this checkpoint from a store.

    Loads the model once. `lossy` also admits packages of a lossy codec.
    """
    from keepsight import vlm  # not inside vLLM, where another Transformers is installed
    from keepsight.models import loading

    address = os.fspath(store)
    if "://" not in address:
        address = str(expanded(address).resolve())
    with vlm.load(name) as live:
        weights = live.runtime.weights
        extra = {
            "store": address,
            "tenant": tenant,
            "weights": weights.vision,
            "settings": weights.settings,
            "checkpoint": checkpoint_digest(loading.model_path(os.fspath(name))),
            "lossy": bool(lossy),
        }
    return {
        "ec_connector": CONNECTOR,
        "ec_connector_module_path": MODULE,
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": extra,
    }


def checkpoint_digest(name: str, revision: str | None = None) -> str:
    """The digest of the weight files and the configuration of a folder, or of a hub id on disk."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        except (OSError, ValueError) as error:
            raise InputError(
                f"{name!r} is neither a folder nor a checkpoint whose files are on this machine"
            ) from error
    files = sorted({file for pattern in _FILES for file in folder.glob(pattern)})
    if not any(file.suffix in (".safetensors", ".bin") for file in files):
        raise InputError(
            f"{folder} has no weight files, which features are bound to; name a checkpoint"
        )
    parts: list[str] = []
    for file in files:
        hasher = blake3(max_threads=blake3.AUTO)
        parts += [file.name, hasher.update_mmap(file).hexdigest()]
    return digests.digest("checkpoint", *parts)
