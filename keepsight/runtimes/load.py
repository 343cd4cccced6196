"""Models made by `keepsight export`: their graphs run in another runtime, the rest is the same.

manifest.py         the record of an export: source weights, and every file's digest
states.py           the input and output states of a decoder
modules.py          graphs in place of tower, embedding, decoder and head
weightless.py       Transformers' own model around them, without weights
onnx.py, openvino.py  one graph in either runtime
mlx.py              the parts of a model of mlx-vlm in place of graphs; mlx_library.py loads
                    it, mlx_types.py says how its models differ, mlx_states.py what layers remember
imports.py          imports both libraries without telemetry
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from keepsight.core.settings import chosen_store
from keepsight.errors import ModelError, UnsupportedInput
from keepsight.kinds import DeviceMap, Dtype
from keepsight.models.loading import files_digest
from keepsight.models.tested import TESTED, is_newer_than_tested
from keepsight.runtimes.manifest import Manifest, is_export, read

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

__all__ = ["is_export", "load_exported", "load_in_mlx", "other_versions", "read"]


def refuse_options(dtype: Dtype, device_map: DeviceMap, vision: bool) -> None:
    """Refuse what no export can honour."""
    if dtype not in ("auto", None, "float32") and str(dtype) != "torch.float32":
        raise UnsupportedInput(
            f"dtype={dtype!r}: an exported model computes as it was exported; export it in another "
            "precision (--quant), or load the checkpoint"
        )
    if device_map not in (None, "cpu", "auto"):
        raise UnsupportedInput(f"device_map={device_map!r}: exported models run on the CPU")
    if not vision:
        raise UnsupportedInput("vision=False: an exported model has its tower; leave it in")


def load_exported(
    path: str,
    dtype: Dtype,
    device_map: DeviceMap,
    vision: bool,
    revision: str | None,
    store: str | os.PathLike[str] | None,
) -> tuple[PreTrainedModel, str | None]:
    """The model of an export, after checking its files; and the name of the files."""
    refuse_options(dtype, device_map, vision)
    if revision is not None:
        raise UnsupportedInput(
            f"revision={revision!r}: a folder has no revisions; give it to keepsight export"
        )
    files = files_digest(path, "float32", every=True)
    manifest = read(Path(path), contents=not _was_read(files, store))
    _warn_of_untested(path, manifest.versions.get("transformers", "an unknown version"))
    from keepsight.runtimes.weightless import load_model

    try:
        return load_model(Path(path), manifest), files
    except ModelError as error:
        others = other_versions(manifest)
        if not others:
            raise
        versions = ", ".join(f"{n} {was} (here {now})" for n, (was, now) in others.items())
        raise ModelError(f"{error}; it was made with {versions}") from error


def load_in_mlx(
    path: str, dtype: Dtype, device_map: DeviceMap, vision: bool, revision: str | None
) -> tuple[PreTrainedModel, str | None]:
    """A checkpoint's model in MLX; and the name of its files."""
    from keepsight.runtimes.mlx import load_mlx  # requires an optional library

    return load_mlx(path, dtype, device_map, vision, revision)


@functools.lru_cache(64)  # once per folder
def _warn_of_untested(path: str, version: str) -> None:
    if is_newer_than_tested(version):
        logger.warning(
            "%s was made with Transformers %s, and exports were tested with up to %s: compare its "
            "answers with those of the checkpoint, or export it again with that version",
            path,
            version,
            TESTED["transformers"],
        )


def _was_read(files: str | None, named: str | os.PathLike[str] | None) -> bool:
    """Whether a store says that these files were read before with right digests.

    The note that spares hashing a checkpoint again serves here; it is written once a model is
    loaded. The model opens the store itself later; opening it here takes less than a millisecond.
    """
    store = chosen_store(named, None, "", None)
    if store is None or files is None:
        return False
    try:
        return store.note("weights", files) is not None
    finally:
        store.close()


def other_versions(manifest: Manifest) -> dict[str, tuple[str, str]]:
    """The libraries that run an export and have another version here: (version at export, version
    here).

    torch, onnx and onnxscript are left out: they only made it, and their work is in the graphs.
    """
    found = {}
    runtime = {"onnx": "onnxruntime"}.get(manifest.runtime, manifest.runtime)
    for name in ("transformers", runtime):
        was = manifest.versions.get(name, "an unknown version")
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            here = "not installed"
        if was != here:
            found[name] = (was, here)
    return found
