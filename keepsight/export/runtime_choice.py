"""`ks.load`: loads a checkpoint in the runtime that an option names.

An export is made once, in the folder of the store, and used by everyone who names the same
checkpoint, runtime and weights. A process of its own makes it: tracers exchange functions of
PyTorch and Transformers, by which nothing here may answer meanwhile.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Unpack

import torch
from filelock import FileLock
from transformers import AutoConfig

from keepsight import vlm
from keepsight.core.settings import WRAP_DEFAULTS, check_options
from keepsight.core.signatures import shows
from keepsight.errors import (
    FileError,
    InputError,
    MissingExtra,
    ModelError,
    UnsupportedInput,
    UnsupportedModel,
)
from keepsight.export.graphs import exporter
from keepsight.export.graphs.target import size_text
from keepsight.kinds import DeviceMap, Dtype, Options, Wrapping
from keepsight.models import loading
from keepsight.runtimes.load import refuse_options
from keepsight.runtimes.manifest import is_export, read
from keepsight.system import digests
from keepsight.system.places import expanded, path_text
from keepsight.system.words import TORCH_WEIGHTS, check_export_place, check_together
from keepsight.vlm import VLM

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]


@shows(Wrapping, **WRAP_DEFAULTS)
def load(
    name: str | os.PathLike[str],
    *,
    runtime: str | None = None,
    weights: str | None = None,
    device: DeviceMap = None,
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    revision: str | None = None,
    vision: bool = True,
    tell: Tell = logger.info,
    **options: Unpack[Wrapping],
) -> VLM:
    """A model by name: `"demo"`, `"demo-hybrid"`, `"demo-smol"`, a folder, or a hub id.

    With `vision=False` the vision encoder is left out: its weights take no memory, and all images
    must come from packages or from a store that has them. Further options are those of `wrap`. A
    folder written by `keepsight export` is loaded like any other, and runs in its own runtime.
    `device` and `device_map` are two names of one option.

    `runtime`: `"torch"`, or `"onnx"` or `"openvino"`, for which an export is made once, in the
    store's folder; `"mlx"`, on a Mac; `"auto"` is OpenVINO where it can be, else torch.
    `weights="int8"`: eight bits for decoder and head; `"int4"`: four bits, in an export. `tell` is
    called with a line of text before each long step.
    """
    name = path_text(name, "the model's name")
    if device is not None and device_map is not None:
        raise InputError("device= and device_map= are two names of one option; give one of them")
    check_together(runtime, weights)
    check_options(options, "load", tuple(load.__kwdefaults__ or ()))
    how: Options = {"device_map": device if device_map is None else device_map}
    how |= {"dtype": dtype, "vision": vision, **options}
    path = loading.model_path(name)
    if is_export(path):
        _check_export(path, runtime, weights)
        return vlm.load(name, revision=revision, **how)
    if runtime == "mlx":
        if weights is not None:
            raise UnsupportedInput(
                f"weights={weights!r}: MLX reads weights as they are; convert the checkpoint "
                "with `mlx_vlm.convert -q`, and load that folder"
            )
        return vlm.load(name, revision=revision, mlx=True, **how)
    if runtime in (None, "torch"):
        return vlm.load(name, revision=revision, weights=weights, **how)
    store = options.get("store")
    store = path_text(os.environ.get("KEEPSIGHT_STORE", "") if store is None else store, "store")
    check_export_place(runtime, weights, store)
    because = "it was asked for"
    if runtime == "auto":
        why_not = _why_not_openvino(path, weights, revision, store, how)
        if why_not and weights not in (None, *TORCH_WEIGHTS):
            raise UnsupportedInput(f"weights={weights!r} runs in an export, and {why_not}")
        runtime = "torch" if why_not else "openvino"
        because = why_not or "this model runs in it here"
    tell(f"running in {runtime}: {because}")
    if runtime == "torch":
        found = vlm.load(name, revision=revision, weights=weights, **how)
    else:
        found = _exported(name, runtime, weights, revision, expanded(store), tell, how)
    weights = weights or ("as loaded" if runtime == "torch" else "float32")
    found.chosen_runtime = {"name": runtime, "weights": weights, "because": because}
    return found


def _check_export(path: str, runtime: str | None, weights: str | None) -> None:
    """Refuse to run an export in another form than it was made."""
    if runtime is None and weights is None:
        return
    made = read(Path(path), contents=False)
    for given, had, words in (
        (runtime if runtime != "auto" else None, made.runtime, f"for {made.runtime}"),
        (weights, made.quantised, f"with weights in {made.quantised or 'float32'}"),
    ):
        if given not in (None, had):
            raise InputError(
                f"{path} is an export {words}, and {given!r} was asked for; load the checkpoint "
                "that it was made of"
            )


def _why_not_openvino(
    path: str, weights: str | None, revision: str | None, store: str, how: Options
) -> str:
    """Why `auto` is PyTorch; empty if it is OpenVINO."""
    if not store or "://" in store:
        return "an export needs a store to lie in, and none was named"
    if torch.get_default_device().type != "cpu":
        return "exported models run on the CPU"
    try:
        refuse_options(how["dtype"], how["device_map"], how["vision"])
        exporter.check(path, "openvino", weights, revision)
    except (MissingExtra, UnsupportedInput, UnsupportedModel) as error:
        return str(error)
    return ""


def _exported(
    name: str,
    runtime: str,
    weights: str | None,
    revision: str | None,
    store: Path,
    tell: Tell,
    how: Options,
) -> VLM:
    """Load the export in a store; make it first where there is none that loads."""
    refuse_options(how["dtype"], how["device_map"], how["vision"])
    path = loading.model_path(name)
    if not Path(path).is_dir():  # its commit is known once something of it is here
        AutoConfig.from_pretrained(path, revision=revision)
    files = loading.files_digest(path, "float32", revision, every=True)
    if files is None:
        raise InputError(f"{name!r} names no files; load it from a folder")
    source = str(Path(path).resolve()) if Path(path).is_dir() else path
    what = f"{runtime}-{weights or 'float32'}-{digests.digest('source', source, revision)[:16]}"
    folder = store / "exports" / f"{what}-{files}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        alone = FileLock(folder.parent / f".{folder.name}.lock").acquire()
    except OSError as error:
        raise InputError(
            f"{folder.parent} cannot be written: {error.strerror or error}; name another store"
        ) from error
    with alone:
        if is_export(folder):
            try:
                return vlm.load(folder, **how)
            except FileError as error:
                tell(f"making the export again: {error}")
                shutil.rmtree(folder)
        exporter.check(path, runtime, weights, revision)
        start = time.perf_counter()
        make_apart(name, folder, runtime, weights, revision, tell)
        seconds, size = time.perf_counter() - start, size_text(read(folder, contents=False).bytes)
        tell(f"exported for {runtime} in {seconds:.0f} s: {size} in {folder}")
        for before in set(folder.parent.glob(f"{what}-*")) - {folder}:
            shutil.rmtree(before, ignore_errors=True)  # of an earlier state of this checkpoint
        return vlm.load(folder, **how)


def make_apart(
    name: str, to: Path, runtime: str, weights: str | None, revision: str | None, tell: Tell
) -> None:
    """Run `keepsight export` in a process of its own; give its lines to `tell`."""
    options = {"model": name, "to": to, "format": runtime, "quant": weights, "revision": revision}
    words = [f"--{option}={value}" for option, value in options.items() if value is not None]
    command = [sys.executable, "-m", "keepsight", "export", *words, "--json"]
    pipe, line = subprocess.PIPE, ""
    with subprocess.Popen(command, stderr=pipe, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            for line in process.stderr or ():
                tell(line.strip())
        except BaseException:
            process.terminate()  # it removes what it has written
            raise
    if process.returncode:
        why = line.strip().removeprefix("error: ")
        if not line.startswith("error: "):  # as when the system kills it for its memory
            why = f"the process that does it ended with code {process.returncode} after {why!r}"
        raise ModelError(f"{name} could not be exported for {runtime}: {why}")
