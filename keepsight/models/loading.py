"""Loads checkpoints as live models and processors, without parts that images do not need.

What cannot be loaded is refused first: a missing device, an unreachable Hub, a text-only model. If
Transformers cannot build a processor here, it comes without its video part (partial_processor.py).
"""

from __future__ import annotations

import difflib
import importlib.metadata
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import HFValidationError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForDecision,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from keepsight.errors import InputError, KeepsightError, ModelError, UnsupportedModel
from keepsight.kinds import DeviceMap, Dtype, Processor, Record
from keepsight.models import demo_smol
from keepsight.models.deciding import has_head
from keepsight.models.families import family_of
from keepsight.models.families.tower_absent import AbsentTower, tower_parts
from keepsight.models.identity import digest_of, dtype_of
from keepsight.models.partial_processor import partial_processor
from keepsight.models.reachable import check_hub
from keepsight.models.silence import without_short_bars
from keepsight.system import digests, places
from keepsight.system.words import check_dtype

DEMO = {"demo": "qwen3_vl", "demo-hybrid": "qwen3_5"}
DEMO_SMOL = "demo-smol"
DEMOS = (*DEMO, DEMO_SMOL)
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_UNKNOWN_TYPE = re.compile(r"Unrecognized configuration class <class '[\w.]*?(\w+)Config'>")
Rows = list[list[str | int | None]]  # per file: name, size, times and inode


def model_path(name: str) -> str:
    """The folder of a demo model, or the name unchanged (a folder or a hub id)."""
    if name in DEMO:
        return str(Path(__file__).parents[1] / "demo" / "models" / DEMO[name])
    if name == DEMO_SMOL:
        return str(demo_smol.folder())
    near = difflib.get_close_matches(name, [*DEMO, DEMO_SMOL], n=1, cutoff=0.7)
    if near and not os.path.exists(name):
        raise InputError(f"no model {name!r}: there is no such folder; did you mean {near[0]}?")
    return os.path.expanduser(name) if name.startswith("~") else name


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
    """Refuse a language model without a vision encoder."""
    try:
        config = AutoConfig.from_pretrained(path, revision=revision)
    except Exception:  # an adapter, or something that loading itself refuses by name
        return
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or hasattr(config, "vision_config")
    if not sees and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"{path!r} has no vision encoder: models of type {config.model_type!r} only read text; "
            "name a vision-language model"
        )


def load_named(
    path: str, dtype: Dtype, device_map: DeviceMap, revision: str | None
) -> tuple[PreTrainedModel, str | None]:
    """The model in eval mode, and the name of the files from which its digests follow, if any."""
    given = {"dtype": parse_dtype(dtype), "device_map": device_map, "revision": revision}
    options = {name: value for name, value in given.items() if value is not None}
    if has_head(path, revision):  # which Transformers loads without saying what was missing
        with named_refusal(path), without_short_bars(path):
            return AutoModelForDecision.from_pretrained(path, **options).eval(), None
    before = files_of(path, revision)
    with named_refusal(path), without_short_bars(path):
        model, found = AutoModelForImageTextToText.from_pretrained(
            path, output_loading_info=True, **options
        )
    # Missing weights are random, and files may change meanwhile: then they do not name the model.
    missing = found["missing_keys"] or found["mismatched_keys"]
    named = not missing and files_of(path, revision) == before
    return thinking(model).eval(), files_digest(path, model.dtype, revision) if named else None


def load_without_tower(
    path: str, dtype: Dtype, device_map: DeviceMap, revision: str | None
) -> tuple[PreTrainedModel, str | None]:
    """The same with placeholders for its tower.

    The whole model is loaded. The tower's weights are hashed, because packages are bound to them,
    and let go.
    """
    model, files = load_named(path, dtype, device_map, revision)
    family = family_of(model)
    if not family.proven or family.packages_only:
        raise UnsupportedModel(
            f"model type {model.config.model_type!r} cannot be loaded without its vision encoder: "
            "no test has shown that its answers are exact from packages alone; load it whole"
        )
    for name in tower_parts(family):
        part = model.get_submodule(name)
        weights = [(f"{name}.{own}", tensor) for own, tensor in part.state_dict().items()]
        named = [(path, digest_of(tensor), dtype_of(tensor)) for path, tensor in weights]
        model.set_submodule(name, AbsentTower(part, named))
    return model, files


@contextmanager
def named_refusal(path: str) -> Iterator[None]:
    """Map any error of Transformers for a checkpoint that it cannot load to one error."""
    try:
        yield
    except (OSError, ValueError, KeyError, AssertionError, RuntimeError) as error:
        if isinstance(error, KeepsightError):
            raise
        why = str(error)
        if unknown := _UNKNOWN_TYPE.match(why):  # the message goes on with all known types
            why = (
                f"Transformers has no {unknown[1]} among them; load it with a class of its own, "
                "and hand it to ks.wrap(model, processor)"
            )
        raise ModelError(f"{path!r} cannot be loaded as an image-text-to-text model: {why}") from (
            error
        )


def thinking(model: PreTrainedModel) -> PreTrainedModel:
    """The thinker of an Omni model, which sees, hears and answers; the rest talks."""
    return getattr(model, "thinker", model)


def parse_dtype(dtype: Dtype) -> str | torch.dtype:
    """`"auto"`, a torch dtype, or its name."""
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return "auto" if dtype is None else dtype
    check_dtype(str(dtype))
    found: torch.dtype = getattr(torch, str(dtype))
    return found


def _from_pretrained() -> Callable[..., Processor]:
    """What makes Transformers' processors, also where mlx-vlm put its own before them."""
    found = vars(transformers.AutoProcessor)["from_pretrained"].__func__
    while found.__module__.startswith("mlx_vlm."):
        before = inspect.getclosurevars(found).nonlocals.get("previous_from_pretrained")
        if before is None:
            break
        found = before.__func__
    return cast("Callable[..., Processor]", found)


def load_processor(path: str, revision: str | None) -> Processor:
    """The checkpoint's own tokenizer, image processor and chat template."""
    options = {} if revision is None else {"revision": revision}
    try:
        processor: Processor = _from_pretrained()(transformers.AutoProcessor, path, **options)
        if hasattr(processor, "image_processor"):
            return processor
    except Exception as error:  # the error type depends on what is missing; try without video
        problem: Exception | None = error
    else:
        problem = None  # Transformers fell back to a bare tokenizer
    try:
        return partial_processor(path, options)
    except (OSError, ValueError, ImportError, AttributeError, TypeError) as error:
        raise ModelError(f"{path!r} has no usable processor: {error}") from (problem or error)


def files_digest(
    path: str, dtype: torch.dtype | str, revision: str | None = None, every: bool = False
) -> str | None:
    """The name of all files from which a model is loaded: those of a folder by size, time and
    inode, those of the Hub by repository and commit too.

    For an adapter it includes those of its base. None if they are not known, as for a hub id that
    is not cached. With `every`, all files of a folder count, including those in subfolders; of the
    Hub then the commit alone.
    """
    folder = folder_of(path, revision)
    if folder is None:
        return None
    own = every and Path(path).is_dir()
    rows = _rows(folder, folder.rglob("*")) if own else files_of(path, revision, by_commit=every)
    if rows is None:
        return None
    versions = [torch.__version__, transformers.__version__]
    if (folder / _ADAPTER).is_file():
        versions.append(importlib.metadata.version("peft"))
    where = str(folder.resolve()) if Path(path).is_dir() else path
    return digests.digest("weight files", where, rows, str(dtype), versions)


_ADAPTER = "adapter_config.json"
_READ = ("*.safetensors", "*.bin", "*.json")
_MOST_BASES = 8


def folder_of(path: str, revision: str | None) -> Path | None:
    """The folder itself, or that of a hub id in the cache; the name of the latter is its commit.

    Transformers' configurations do not tell the commit any more.
    """
    if Path(path).is_dir():
        return Path(path)
    for name in ("config.json", _ADAPTER):
        try:
            cached = huggingface_hub.try_to_load_from_cache(path, name, revision=revision)
        except HFValidationError:  # neither a folder nor a hub id
            return None
        if isinstance(cached, str):
            return Path(cached).parent
    return None


def commit_of(path: str, revision: str | None) -> str | None:
    """The commit of a hub id that is in the cache."""
    folder = None if Path(path).is_dir() else folder_of(path, revision)
    return None if folder is None else folder.name


def files_of(
    path: str, revision: str | None = None, below: int = 0, by_commit: bool = False
) -> Rows | None:
    """The files of a model with their state; None if not all are known.

    By commit, those of the Hub are what the commit says, whether they are here yet or not.
    Otherwise what was edited in the cache counts too.
    """
    folder = folder_of(path, revision)
    if folder is None:
        return None
    files = {file for pattern in _READ for file in folder.glob(pattern)}
    for index in folder.glob("*.index.json"):
        parts = _read_json(index).get("weight_map", {})
        files |= {folder / str(part) for part in parts.values()}
    rows = _rows(folder, files)
    if (commit := commit_of(path, revision)) is not None:
        rows = [[path, commit], *([] if by_commit else rows)]
    base = _read_json(folder / _ADAPTER).get("base_model_name_or_path")
    if base is None:
        return rows
    under = files_of(str(base), revision, below + 1, by_commit) if below < _MOST_BASES else None
    return None if under is None else [*rows, ["base", str(base)], *under]


def _rows(folder: Path, files: Iterable[Path]) -> Rows:
    rows: Rows = []
    for file in sorted(files):
        if file.is_file():
            status = file.stat()
            # The change time too: a new file may reuse an inode, and anybody can reset the
            # modification time.
            times = [status.st_mtime_ns, status.st_ctime_ns]
            name = os.path.relpath(file, folder)
            rows.append([name, status.st_size, *times, status.st_ino])
    return rows


def _read_json(file: Path) -> Record:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
