"""Tiny models of each family that can be exported, beside their exports.

Fewer layers than the models of other tests have: tracing is what takes the time here.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock

import keepsight as ks
from keepsight.export.graphs.exporter import export
from support.model_parts import wake
from support.models import ALL, saved

# One for all processes of a test run (see conftest.py): to make an export takes half a minute.
_SHARED = Path(os.environ["KEEPSIGHT_TEST_EXPORTS"])
_FOLDER = TemporaryDirectory(prefix="keepsight-checkpoints-")
_LAYERS = {"qwen3_5": ["linear_attention", "full_attention"]}
_HALVED = {"gemma3_sliding", "sliding"}  # half of their layers see 24 tokens back


@functools.cache
def small(kind: str) -> tuple[Any, Any]:
    """Model and processor, of two layers in decoder and tower; the same weights each time."""
    torch.manual_seed(0)
    model_class, config, processor = ALL[kind]()
    text: dict[str, Any] = config.text_config.to_dict()
    text |= {"num_hidden_layers": 2, "vocab_size": 576}
    text["layer_types"] = _LAYERS.get(kind) or ["full_attention"] * 2
    if kind in _HALVED:
        text["layer_types"] = ["sliding_attention", "full_attention"]
        text["max_window_layers"] = 1
    if kind in ("llava", "internvl", "qwen3_vl"):
        text.pop("layer_types")
    config.text_config = type(config.text_config)(**text)
    if getattr(config.vision_config, "deepstack_visual_indexes", None):
        config.vision_config.deepstack_visual_indexes = [0, 1]
    if getattr(config.vision_config, "depth", 0) == 3:
        config.vision_config.depth = 2
    model = model_class(config)
    model.config.architectures = [model_class.__name__]  # as one that was saved, in every process
    wake(model)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    return model.float().eval(), processor


@functools.cache
def folder(kind: str) -> Path:
    """A checkpoint of it on disk, with a processor that stock Transformers would load."""
    return saved(*small(kind), Path(_FOLDER.name) / kind)


@functools.cache
def exported_folder(kind: str, runtime: str = "onnx") -> Path:
    """What `keepsight export` made of it."""
    return _once(kind, str(folder(kind)), runtime)


def exported_demo(name: str, runtime: str = "onnx") -> Path:
    """An export of a demo model, which nobody may change."""
    if (name, runtime) == ("demo", "onnx"):
        return exported_by_command()[0]
    return _once(name, name, runtime)


def exported_by_command() -> tuple[Path, str, str]:
    """What `keepsight export demo --to made` made, printed, and said meanwhile."""
    made = _SHARED / "made"
    with FileLock(_SHARED / "made.lock"):
        if not made.exists():
            words = ("export", "demo", "--to", "made", "--max-patches", "256", "--json")
            command = [sys.executable, "-m", "keepsight", *words]
            done = subprocess.run(command, cwd=_SHARED, capture_output=True, text=True, timeout=400)
            assert done.returncode == 0, done.stderr
            (_SHARED / "printed").write_text(done.stdout)
            (_SHARED / "said").write_text(done.stderr)
    return made, *((_SHARED / name).read_text() for name in ("printed", "said"))


def copied(made: Path) -> Callable[..., None]:
    """What stands in the place of `write_graph` where no test asks for tracing: the graphs of an
    export of the same model. Those that are quantised are traced as all others."""

    def write_graph(runtime: str, path: Path, *more: Any) -> None:
        path.parent.mkdir(exist_ok=True)
        for file in (made / "graphs").glob(f"{path.name}.*"):
            shutil.copy(file, path.parent)

    return write_graph


def _once(name: str, source: str, runtime: str) -> Path:
    target = _SHARED / f"{runtime}-{name}"
    with FileLock(f"{target}.lock"):
        if not target.exists():
            export(source, target, runtime=runtime)
    return target


@functools.cache
def exported(kind: str, runtime: str = "onnx") -> Any:
    """The exported model, ready to be wrapped as any other."""
    with ks.load(exported_folder(kind, runtime)) as vlm:
        return vlm.model


def wrapped(kind: str, **options: Any) -> tuple[ks.VLM, ks.VLM]:
    """The export and its model, each with an empty memory."""
    processor = small(kind)[1]
    options = {**options}
    return ks.wrap(exported(kind), processor, **options), ks.wrap(*small(kind), **options)
