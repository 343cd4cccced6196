"""Exports a checkpoint to a folder of graphs: each part is traced, written, and compared with the
model before the folder is published."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from keepsight.errors import (
    InputError,
    KeepsightError,
    MissingExtra,
    ModelError,
    UnsupportedInput,
    UnsupportedModel,
)
from keepsight.export.graphs import tracing
from keepsight.export.graphs.check import deviation
from keepsight.export.graphs.parts import Decoder, Embedding, GraphPart, OutputHead
from keepsight.export.graphs.target import (
    check_room,
    check_space,
    check_target,
    new_folder,
    size_text,
)
from keepsight.export.graphs.towers import tower_of
from keepsight.export.graphs.writing import QUANTISED, quantise, write_graph
from keepsight.models import loading, silence
from keepsight.runtimes import imports
from keepsight.runtimes.manifest import GRAPHS, Manifest, files_in, is_export
from keepsight.runtimes.states import KINDS
from keepsight.system.memory import free_memory
from keepsight.system.words import check_export_words
from keepsight.vlm import VLM, load

FAMILIES = (
    *("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen2_vl", "qwen2_5_vl"),
    *("gemma3", "llava", "internvl"),
)
_REASONS = {  # of the tested ones
    "ernie4_5_vl_moe": "its resampler counts in a loop over a tensor, which no exporter traces",
    "video_llama_3": "its vision encoder takes pictures of any size without a grid to vary by",
}
MAX_PATCHES = 16_384
_NEAR = 1e-3  # of the logits' scale; a float32 export further off is wrong
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
_LIBRARIES = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("onnx", "onnxscript", "openvino"),
}
_COPIES = 3  # peak memory as a multiple of the weights, measured

_ALONE = threading.Lock()

Tell = Callable[[str], None]


def export(
    name: str,
    to: str | Path,
    *,
    runtime: str = "onnx",
    quantised: str | None = None,
    max_patches: int | None = None,
    revision: str | None = None,
    verbose: bool = False,
    tell: Tell = lambda line: None,
) -> Manifest:
    """Export a checkpoint by name into a new folder; return the facts about the export.

    Tracers exchange functions of the whole process: nothing else may compute in it meanwhile, and
    a second export waits. `ks.load` runs this in a process of its own.

    `max_patches` limits one picture, if pictures may have any size (default: 16,384). `verbose`
    lets the exporters say more than errors.
    """
    if max_patches is not None and max_patches < 1:
        raise InputError(f"--max-patches {max_patches}; a picture has at least one")
    target, path = check_target(to), loading.model_path(name)
    if revision is not None and Path(path).is_dir():
        raise UnsupportedInput(
            f"revision={revision!r}: {name} is a folder, which has no revisions; leave it out"
        )
    needed = _weight_bytes(check(path, runtime, quantised, revision))
    takes = (
        f"this takes about {size_text(_COPIES * needed + 2**29)} of memory and "
        f"{size_text(needed)} of disk"
    )
    check_space(target, needed + needed // 10)
    tell(takes)
    free = free_memory()
    if free is not None and free < 2 * needed:
        raise ModelError(
            f"{takes}, and {size_text(free)} of memory are free; close other programs, or export "
            "on a larger machine: the folder works anywhere"
        )
    with _ALONE, new_folder(target) as folder:
        tell("loading the model")
        # No store: pictures of noise are not worth remembering.
        with load(name, dtype="float32", revision=revision, store="", remote="") as vlm:
            _check(vlm, max_patches)
            _copy_settings(vlm, path, revision, folder)
            try:
                with torch.inference_mode(False):  # no tracer works in inference mode
                    _write_parts(vlm, folder, runtime, quantised, verbose, tell)
                    most = (max_patches or MAX_PATCHES) if vlm.runtime.family.mrope else None
                    manifest = _compared(vlm, folder, runtime, quantised, most, tell)
            except MemoryError as error:
                raise ModelError(f"the memory is full; {takes}") from error
        manifest.save(folder)  # last: without it the folder is no export
        tell("giving it its name")
    return manifest


# -- refusals before the long work ---------------------------------------------------------------


def check(path: str, runtime: str, quantised: str | None, revision: str | None) -> PreTrainedConfig:
    """Refuse what cannot be exported; return the configuration of what can."""
    check_export_words(runtime, quantised)
    missing = [one for one in _LIBRARIES[runtime] if importlib.util.find_spec(one) is None]
    if missing:
        raise MissingExtra.named(" and ".join(missing), runtime)
    # Before an exporter imports it in another way.
    imports.openvino() if runtime == "openvino" else imports.onnxruntime()
    if is_export(path):
        raise InputError(f"{path} is an export; name the checkpoint that it was made of")
    with loading.named_refusal(path):
        options = {} if revision is None else {"revision": revision}
        config = AutoConfig.from_pretrained(path, **options)
    if config.model_type not in FAMILIES:
        why = _REASONS.get(config.model_type, "no test has shown its graphs right")
        raise UnsupportedModel(
            f"model type {config.model_type!r} cannot be exported: {why}; those that can be: "
            f"{', '.join(FAMILIES)}"
        )
    if getattr(config, "quantization_config", None):
        raise UnsupportedModel(
            f"{path!r} is quantised already; export the checkpoint that it was made of"
        )
    return config


def _weight_bytes(config: PreTrainedConfig) -> int:
    """The bytes of the graphs in float32: a head with tied weights counts twice."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    head = model.get_output_embeddings().weight
    shared = head is model.get_input_embeddings().weight
    count = sum(weight.numel() for weight in model.parameters())
    return int(4 * (count + (head.numel() if shared else 0)))


def _check(vlm: VLM, max_patches: int | None) -> None:
    unknown = sorted(set(vlm.runtime.engine.shape.kinds) - KINDS)
    if unknown:
        raise UnsupportedModel(f"layers of kind {', '.join(unknown)} cannot be exported yet")
    if max_patches is not None and not vlm.runtime.family.mrope:
        raise UnsupportedInput(
            f"--max-patches {max_patches}: all pictures of {vlm.model.config.model_type} have one "
            "size; leave it out"
        )


# -- the work ------------------------------------------------------------------------------------


def _write_parts(
    vlm: VLM, folder: Path, runtime: str, quantised: str | None, verbose: bool, tell: Tell
) -> None:
    family, onnx = vlm.runtime.family, runtime == "onnx"
    parts: dict[str, GraphPart] = {
        "tower": tower_of(family, vlm.runtime.needed_processor(), blocks=onnx),
        "embedding": Embedding(family),
        "decoder": Decoder(family, vlm.runtime.engine.shape, appends=onnx),
        "head": OutputHead(family),
    }
    quiet = nullcontext if verbose else silence.without_exporters_notes
    for name, part in parts.items():
        tell(f"tracing the {name}")
        path = folder / GRAPHS / name
        with _named(path, vlm.model.config.model_type):
            sample = part.eval().requires_grad_(False).sample()
            with quiet(), tracing.traced(vlm.model.get_decoder()), torch.no_grad():
                write_graph(runtime, path, part, sample)
            if quantised is not None and name in QUANTISED:
                tell(f"quantising the {name}")
                with quiet():
                    quantise(runtime, path, quantised)


@contextmanager
def _named(path: Path, model_type: str) -> Iterator[None]:
    """Map any error of exporters and quantisers to one error."""
    try:
        yield
    except (KeepsightError, OSError, MemoryError):
        raise
    except Exception as error:
        check_room(path.parents[1])  # if the disk is full, OpenVINO says "iostream error"
        why = str(error).strip().split("\n")[0][:300]
        raise ModelError(
            f"the {path.name} of {model_type} could not be made a graph "
            f"({type(error).__name__}: {why}). Please report this, with the model and `pip freeze`"
        ) from error


def _compared(
    vlm: VLM, folder: Path, runtime: str, quantised: str | None, most: int | None, tell: Tell
) -> Manifest:
    """The record of an export, with how far it is from its model; refused if that is too far."""
    manifest = Manifest(
        runtime=runtime,
        model_type=vlm.model.config.model_type,
        quantised=quantised,
        appends=runtime == "onnx",
        weights=vlm.runtime.weights.record(),
        # The pictures of the comparison are small, and a limit may be smaller.
        most_patches=None if most is None else max(most, MAX_PATCHES),
        versions={
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", *_LIBRARIES[runtime])
        },
        files=files_in(folder),
    )
    tell("comparing with the model")
    measured = deviation(vlm, folder, manifest)
    for what in ("features", "logits"):
        exact = quantised is None or what == "features"
        near = measured[what] <= _NEAR if exact else measured[what] < float("inf")
        if not near:  # so that NaN fails too
            raise ModelError(
                f"the exported graphs are off by {measured[what]:.1e} of the scale of the {what}; "
                "nothing was written. Please report this, with the model and `pip freeze`."
            )
    return replace(manifest, deviation=measured, most_patches=most)


def _copy_settings(vlm: VLM, path: str, revision: str | None, folder: Path) -> None:
    """Copy everything except weights: configuration, generation settings, tokenizer, processor."""
    source = Path(path)
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        found = snapshot_download(path, revision=revision, allow_patterns=list(_COPIED))
        source = Path(found)
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
    vlm.model.config.save_pretrained(folder)
    generation = folder / "generation_config.json"
    if vlm.model.generation_config is not None and not generation.exists():
        # Transformers' own saving refuses settings that it loads without complaint.
        vlm.model.generation_config.to_json_file(generation)
