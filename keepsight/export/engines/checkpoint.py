"""Identifies a checkpoint by its bytes, so that two engines know that they serve the same one.

Every byte of weights and configuration is read. Names, sizes and times would be quicker to compare,
but say nothing on another machine.
"""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from keepsight.errors import InputError
from keepsight.system import digests

_FILES = ("config.json", "*.safetensors", "*.bin", "adapter_config.json")


def checkpoint_digest(name: str, revision: str | None = None) -> str:
    """The digest of the weight files and the configuration of a folder, or of a hub id on disk."""
    folder = Path(name)
    if not folder.is_dir():
        folder = _snapshot(name, revision)
    files = sorted({file for pattern in _FILES for file in folder.glob(pattern)})
    if not any(file.suffix in (".safetensors", ".bin") for file in files):
        raise InputError(
            f"{folder} has no weight files, which features are bound to; name a checkpoint"
        )
    parts: list[str] = []
    for file in files:
        hasher = blake3(max_threads=blake3.AUTO)
        hasher.update_mmap(file)
        parts += [file.name, hasher.hexdigest()]
    return digests.digest("checkpoint", *parts)


def _snapshot(name: str, revision: str | None) -> Path:
    """The folder of a hub checkpoint's files on this machine; nothing is downloaded."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{name!r} is neither a folder nor a checkpoint whose files are on this machine"
        ) from error
