"""`ks.load`: loads a checkpoint in the runtime that an option names.

An export is made once, in the folder of the store, and used by everyone who names the same
checkpoint, runtime and weights. Processes that want the same one wait for each other; an
interrupted export leaves nothing that loads. A changed checkpoint gets another export, which
replaces the earlier one. `auto` measures the installed runtimes, once, and takes the fastest.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

import numpy as np
import PIL.Image
import torch
from filelock import FileLock, Timeout
from transformers import AutoConfig

from keepsight import digests, vlm
from keepsight.core.settings import WRAP_DEFAULTS, check_options
from keepsight.core.signatures import shows
from keepsight.errors import (
    DamagedFile,
    InputError,
    MissingExtra,
    UnsupportedInput,
    WrongFormatVersion,
)
from keepsight.export.graphs import exporter
from keepsight.export.graphs.target import size_text
from keepsight.formats import tensorfile
from keepsight.kinds import DeviceMap, Dtype, Options, Record, Wrapping
from keepsight.models import loading
from keepsight.runtimes.manifest import Manifest, is_export, read
from keepsight.system.places import expanded
from keepsight.system.words import TORCH_WEIGHTS, check_export_place, check_together
from keepsight.vlm import VLM

logger = logging.getLogger(__name__)

TORCH, AUTO, MLX = "torch", "auto", "mlx"
_LIBRARY = {"onnx": "onnxruntime", "openvino": "openvino"}
_FOLDER = "exports"  # folder in a store
_SIDE, _TOKENS, _TIMES = 448, 24, 3  # size of the measured picture and answer
Tell = Callable[[str], None]
_AS_GIVEN: Options = {}


@dataclass(frozen=True)
class ExportSource:
    """The source of an export, and its options."""

    name: str
    weights: str | None = None
    device_map: DeviceMap = None
    dtype: Dtype = "auto"
    revision: str | None = None
    vision: bool = True
    options: Record = field(default_factory=dict)
    tell: Tell = logger.info

    @property
    def store(self) -> Path | None:
        """The folder of the store, if one was named."""
        return expanded(self._named) if self._named else None

    @property
    def _named(self) -> str | None:
        named = self.options.get("store")
        given = named if named is not None else os.environ.get("KEEPSIGHT_STORE")
        return os.fspath(given) if given else None

    def in_torch(self, other: Options = _AS_GIVEN) -> VLM:
        """Load the checkpoint itself in PyTorch."""
        return vlm.load(
            self.name,
            device_map=self.device_map,
            dtype=self.dtype,
            revision=self.revision,
            vision=self.vision,
            weights=self.weights,
            **{**self.options, **other},
        )

    def in_mlx(self) -> VLM:
        """Load the checkpoint itself in MLX."""
        if self.weights is not None:
            raise UnsupportedInput(
                f"weights={self.weights!r}: MLX reads weights as they are; convert the checkpoint "
                "with `mlx_vlm.convert -q`, and load that folder"
            )
        return self.in_torch({"mlx": True})

    def exported(self, folder: Path, other: Options = _AS_GIVEN) -> VLM:
        """Load an export of it; options that exports lack are refused by name."""
        return vlm.load(
            folder,
            device_map=self.device_map,
            dtype=self.dtype,
            vision=self.vision,
            **{**self.options, **other},
        )

    @property
    def place(self) -> Path:
        """The folder of all exports."""
        check_export_place("onnx", None, self._named)
        return expanded(self._named or "") / _FOLDER

    @functools.cached_property
    def checkpoint(self) -> str:
        """The name of all files of the checkpoint in their present state."""
        path = loading.model_path(self.name)
        if not Path(path).is_dir():  # its commit is known once something of it is here
            AutoConfig.from_pretrained(path, revision=self.revision)
        files = loading.files_digest(path, "float32", self.revision, every=True)
        if files is None:
            raise InputError(f"{self.name!r} names no files; load it from a folder")
        return files


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

    With `vision=False` the vision tower is left out: its weights take no memory, and all images
    must come from packages or from a store that has them. Further options are those of `wrap`. A
    folder written by `keepsight export` is loaded like any other, and runs in its own runtime.
    `device` and `device_map` are two names of one option.

    `runtime`: `"torch"`, or `"onnx"` or `"openvino"`, for which an export is made once, in the
    store's folder; `"mlx"`, on a Mac; `"auto"` takes the fastest of torch and exports here.
    `weights="int8"`: eight bits for decoder and head; `"int4"`: four bits, in an export. `tell` is
    called with a line of text before each long step.
    """
    name = os.fspath(name)
    if device is not None and device_map is not None:
        raise InputError("device= and device_map= are two names of one option; give one of them")
    device_map = device if device_map is None else device_map
    check_together(runtime, weights)
    check_options(options, "load", tuple(load.__kwdefaults__ or ()))
    wanted = ExportSource(name, weights, device_map, dtype, revision, vision, dict(options), tell)
    path = loading.model_path(name)
    if is_export(path):
        _check_export(path, runtime, weights)
        return wanted.in_torch()
    if runtime in (None, TORCH):
        return wanted.in_torch()
    if runtime == MLX:
        return wanted.in_mlx()
    chosen, why = choose(wanted, runtime)
    tell(f"running in {chosen}: {why}")
    found = _load(wanted, chosen)
    weights = weights or ("as loaded" if chosen == TORCH else "float32")
    found.chosen_runtime = {"name": chosen, "weights": weights, "because": why}
    return found


def _check_export(path: str, runtime: str | None, weights: str | None) -> None:
    """Refuse to run an export in another form than it was made."""
    if runtime is None and weights is None:
        return
    manifest = read(Path(path), contents=False)
    if runtime not in (None, AUTO, manifest.runtime):
        raise InputError(
            f"{path} is an export for {manifest.runtime}, and runtime={runtime!r} was asked for; "
            "load the checkpoint that it was made of"
        )
    if weights not in (None, manifest.quantised):
        raise InputError(
            f"{path} is an export with weights in {manifest.quantised or 'float32'}, and "
            f"weights={weights!r} was asked for; load the checkpoint that it was made of"
        )


# -- choice of runtime ---------------------------------------------------------------------------


def choose(wanted: ExportSource, runtime: str | None) -> tuple[str, str]:
    """The runtime, and the reason."""
    installed = [one for one, library in _LIBRARY.items() if importlib.util.find_spec(library)]
    if runtime not in (None, AUTO):
        return str(runtime), "it was asked for"
    known = [TORCH, *installed] if wanted.weights in (None, *TORCH_WEIGHTS) else installed
    if not known:
        raise MissingExtra.named("onnxruntime or openvino", "onnx")
    if TORCH in known:
        why = _only_torch(wanted)
        if why or len(known) == 1:
            return TORCH, why or "no other runtime is installed"
    if len(known) == 1:
        return known[0], "no other runtime with such weights is installed"
    seconds = _measured(wanted, known)
    best = min(seconds, key=lambda one: seconds[one])
    times = ", ".join(f"{one} {s:.2f} s" for one, s in sorted(seconds.items(), key=lambda p: p[1]))
    return best, f"measured here, a picture and {_TOKENS} tokens: {times}"


def _only_torch(wanted: ExportSource) -> str:
    """Why only torch is possible; empty if others are."""
    if wanted.store is None:
        return "an export needs a store to lie in, and none was named"
    if wanted.device_map not in (None, "cpu") or torch.get_default_device().type != "cpu":
        return "exports run on the CPU"
    if not wanted.vision:
        return "an export has its tower"
    config = AutoConfig.from_pretrained(loading.model_path(wanted.name), revision=wanted.revision)
    if config.model_type not in exporter.FAMILIES:
        return f"models of type {config.model_type} cannot be exported"
    if getattr(config, "quantization_config", None):
        return "the checkpoint is quantised already"
    return ""


def _measured(wanted: ExportSource, known: list[str]) -> dict[str, float]:
    """Seconds of one answer in each runtime: measured once, then read."""
    environment: Record = {
        "checkpoint": wanted.checkpoint,
        "weights": wanted.weights,
        "dtype": str(wanted.dtype),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {one: _version(one) for one in known},
    }
    note = wanted.place / f"{digests.digest('measured runtimes', environment)}.json"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found = json.loads(note.read_text(encoding="utf-8"))["seconds"]
        if set(found) == set(known) and all(isinstance(s, float) for s in found.values()):
            return dict(found)
    seconds = {}
    for one in known:
        wanted.tell(f"measuring {one}")
        with _load(wanted, one, {"store": "", "remote": ""}) as model:
            seconds[one] = _seconds_of(model)
    text = json.dumps({"seconds": seconds, "of": environment}, indent=1)
    _write(note, text)
    return seconds


def _seconds_of(model: VLM) -> float:
    """Seconds of an answer about a new picture, after one to warm up."""
    noise = np.random.default_rng(0)
    samples = []
    for _ in range(_TIMES):
        pixels = noise.integers(0, 255, (_SIDE, _SIDE, 3), dtype=np.uint8)
        start = time.perf_counter()
        model.ask(
            PIL.Image.fromarray(pixels),
            "What is to be seen in this picture?",
            max_new_tokens=_TOKENS,
            min_new_tokens=_TOKENS,
            do_sample=False,
        )
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[1:])


def _version(runtime: str) -> str:
    library = _LIBRARY.get(runtime, "torch")
    return importlib.metadata.version(library)


# -- the export ----------------------------------------------------------------------------------


def _load(wanted: ExportSource, runtime: str, other: Options = _AS_GIVEN) -> VLM:
    if runtime == TORCH:
        return wanted.in_torch(other)
    folder, made = _made_once(wanted, runtime)
    try:
        return wanted.exported(folder, other)
    except (DamagedFile, WrongFormatVersion) as error:
        if made:
            raise
        wanted.tell(f"making the export again: {error}")
        folder, _ = _made_once(wanted, runtime, broken=folder)
        return wanted.exported(folder, other)


def _made_once(wanted: ExportSource, runtime: str, broken: Path | None = None) -> tuple[Path, bool]:
    """The folder of the export, and whether it was made just now."""
    what = f"{runtime}-{wanted.weights or 'float32'}"
    folder = wanted.place / f"{what}-{wanted.checkpoint}"
    if broken is None and is_export(folder):
        return folder, False
    with _alone(folder, wanted.tell):
        if is_export(folder):
            if broken is None:
                return folder, False
            shutil.rmtree(folder)
        start = time.perf_counter()
        manifest = exporter.export(
            wanted.name,
            folder,
            runtime=runtime,
            quantised=wanted.weights,
            revision=wanted.revision,
            tell=wanted.tell,
        )
        _note_source(wanted, what, folder)
        _say_made(wanted, manifest, folder, time.perf_counter() - start)
    return folder, True


def _say_made(wanted: ExportSource, manifest: Manifest, folder: Path, seconds: float) -> None:
    size = size_text(manifest.bytes)
    wanted.tell(f"exported for {manifest.runtime} in {seconds:.0f} s: {size} in {folder}")


@contextlib.contextmanager
def _alone(folder: Path, tell: Tell) -> Iterator[None]:
    """Let one process make an export while others wait."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(folder.parent / f".{folder.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            tell("another process makes the same export; waiting for it")
            lock.acquire()
    except OSError as error:
        raise InputError(
            f"{folder.parent} cannot be written: {error.strerror or error}; name another store"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _note_source(wanted: ExportSource, what: str, folder: Path) -> None:
    """Record the checkpoint of an export, and remove the export of its earlier state."""
    path = loading.model_path(wanted.name)
    source = str(Path(path).resolve()) if Path(path).is_dir() else path
    for other in wanted.place.glob(f"{what}-*.source"):
        with contextlib.suppress(OSError):
            before = wanted.place / other.stem
            if before != folder and other.read_text(encoding="utf-8") == source:
                shutil.rmtree(before, ignore_errors=True)
                other.unlink()
    _write(folder.with_name(f"{folder.name}.source"), source)


def _write(path: Path, text: str) -> None:
    """Write a small file that may be missing without harm."""
    with contextlib.suppress(OSError):
        tensorfile.write_whole(path, [text.encode()])
