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
from typing import Any

import torch
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, PreTrainedConfig

from keepsight.errors import (
    InputError,
    KeepsightError,
    MissingExtra,
    ModelError,
    UnsupportedInput,
    UnsupportedModel,
)
from keepsight.export.graphs import quantise, tracing
from keepsight.export.graphs.check import deviation
from keepsight.export.graphs.openvino import write_openvino
from keepsight.export.graphs.parts import Decoder, Embedding, GraphPart, OutputHead, Sample
from keepsight.export.graphs.target import ExportFolder, check_room, size_text
from keepsight.export.graphs.towers import tower_of
from keepsight.kinds import Record
from keepsight.models import loading, silence
from keepsight.runtimes import imports
from keepsight.runtimes.manifest import GRAPHS, Manifest, files_in, is_export, unfinished
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
    "video_llama_3": "its tower takes pictures of any size without a grid for a graph to vary by",
}
MAX_PATCHES = 16_384
_NEAR = 1e-3  # of the logits' scale; a float32 export further off is wrong
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
_LIBRARIES = {"onnx": ("onnx", "onnxscript", "onnxruntime")}
_LIBRARIES["openvino"] = ("onnx", "onnxscript", "openvino")
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
    target = ExportFolder(to)
    path = loading.model_path(name)
    if revision is not None and Path(path).is_dir():
        raise UnsupportedInput(
            f"revision={revision!r}: {name} is a folder, which has no revisions; leave it out"
        )
    config = check(path, runtime, quantised, revision)
    needed = _weight_bytes(config)
    target.check_space(needed + needed // 10)
    _check_memory(needed, tell)
    with _ALONE, target.scratch() as folder:
        tell("loading the model")
        # No store: pictures of noise are not worth remembering.
        with load(name, dtype="float32", revision=revision, store="", remote="") as vlm:
            _check(vlm, max_patches)
            _copy_settings(vlm, path, revision, folder)
            try:
                with torch.inference_mode(False):  # no tracer works in inference mode
                    manifest = _write(vlm, folder, runtime, quantised, max_patches, verbose, tell)
            except MemoryError as error:
                raise ModelError(f"the memory is full; {_takes(needed)}") from error
        tell("giving it its name")
        target.take(folder)
    return manifest


# -- refusals before the long work ---------------------------------------------------------------


def check(path: str, runtime: str, quantised: str | None, revision: str | None) -> PreTrainedConfig:
    """Refuse what cannot be exported; return the configuration of what can."""
    _check_words(runtime, quantised)
    return _checked_config(path, revision)


def _check_words(runtime: str, quantised: str | None) -> None:
    check_export_words(runtime, quantised)
    missing = [one for one in _LIBRARIES[runtime] if importlib.util.find_spec(one) is None]
    if missing:
        raise MissingExtra.named(" and ".join(missing), runtime)
    # Before an exporter imports it in another way.
    imports.openvino() if runtime == "openvino" else imports.onnxruntime()


def _checked_config(path: str, revision: str | None) -> PreTrainedConfig:
    if is_export(path):
        raise InputError(f"{path} is an export; name the checkpoint that it was made of")
    with loading.named_refusal(path):
        options = {} if revision is None else {"revision": revision}
        config = AutoConfig.from_pretrained(path, **options)
    if config.model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model type {config.model_type!r} cannot be exported: "
            f"{_REASONS.get(config.model_type, 'no test has shown its graphs right')}; those that "
            f"can be: {', '.join(FAMILIES)}"
        )
    if getattr(config, "quantization_config", None):
        raise UnsupportedModel(
            f"{path!r} is quantised already; export the checkpoint that it was made of"
        )
    return config


def _weight_bytes(config: PreTrainedConfig) -> int:
    """The bytes of the graphs in float32: a head with tied weights counts twice."""
    kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    kind = kind[0] if isinstance(kind, tuple | list) else kind
    with torch.device("meta"):
        model = kind(config)
    known = {id(each): each.numel() for each in model.parameters()}
    head = model.get_output_embeddings().weight
    shared = head is model.get_input_embeddings().weight
    count: int = sum(known.values()) + (head.numel() if shared else 0)
    return 4 * count


def _check_memory(needed: int, tell: Tell) -> None:
    """Refuse what cannot work; only warn about what may be too much."""
    tell(_takes(needed))
    free = free_memory()
    if free is not None and free < 2 * needed:
        raise ModelError(
            f"{_takes(needed)}, and {size_text(free)} of memory are free; close other "
            "programs, or export on a larger machine: the folder works anywhere"
        )


def _takes(needed: int) -> str:
    memory = size_text(_COPIES * needed + 2**29)
    return f"this takes about {memory} of memory and {size_text(needed)} of disk"


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


def _write(
    vlm: VLM,
    folder: Path,
    runtime: str,
    quantised: str | None,
    max_patches: int | None,
    verbose: bool,
    tell: Tell,
) -> Manifest:
    quiet = nullcontext if verbose else silence.without_exporters_notes
    family = vlm.runtime.family
    appends = runtime == "onnx"
    parts = {
        "tower": tower_of(family, vlm.runtime.needed_processor(), blocks=runtime == "onnx"),
        "embedding": Embedding(family),
        "decoder": Decoder(family, vlm.runtime.engine.shape, appends),
        "head": OutputHead(family),
    }
    for name, part in parts.items():
        tell(f"tracing the {name}")
        path = folder / GRAPHS / name
        with _named(path, vlm.model.config.model_type):
            with quiet():
                _write_part(vlm, runtime, path, part)
            if quantised is not None and name in quantise.PARTS:
                tell(f"quantising the {name}")
                with quiet():
                    quantise.quantise(runtime, path, quantised)
    most = max_patches or MAX_PATCHES
    manifest = Manifest(
        runtime=runtime,
        model_type=vlm.model.config.model_type,
        quantised=quantised,
        appends=appends,
        weights=vlm.runtime.weights.record(),
        # The pictures of the comparison are small, and a limit may be smaller.
        most_patches=max(most, MAX_PATCHES) if family.mrope else None,
        versions=_versions(runtime),
        files=files_in(folder),
    )
    manifest.save(folder)
    tell("comparing with the model")
    with unfinished(folder):
        measured = deviation(vlm, folder)
    _check_deviation(measured, quantised)
    manifest = replace(manifest, deviation=measured, most_patches=most if family.mrope else None)
    manifest.save(folder)
    return manifest


def _write_part(vlm: VLM, runtime: str, path: Path, part: GraphPart) -> None:
    sample = part.eval().requires_grad_(False).sample()
    with tracing.traced(vlm.model.get_decoder()), torch.no_grad():
        write_graph(runtime, path, part, sample)


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


def _check_deviation(measured: Record, quantised: str | None) -> None:
    for what in ("features", "logits"):
        off, exact = measured[what], quantised is None or what == "features"
        near = off <= _NEAR if exact else off < float("inf")
        if not near:  # so that NaN fails too
            raise ModelError(
                f"the exported graphs are off by {off:.1e} of the scale of the {what}; nothing was "
                "written. Please report this, with the model and `pip freeze`."
            )


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


def _versions(runtime: str) -> dict[str, str]:
    names = ("torch", "transformers", *_LIBRARIES[runtime])
    return {name: importlib.metadata.version(name) for name in names}


def write_graph(runtime: str, path: Path, part: GraphPart, sample: Sample) -> None:
    """Trace a part and write its graph beside its weights; `path` has no extension."""
    path.parent.mkdir(exist_ok=True)
    if runtime == "openvino":
        write_openvino(path.with_name(f"{path.name}.xml"), part, sample, _write_onnx)
    else:
        _write_onnx(path.with_name(f"{path.name}.onnx"), part, sample, ort_fusions="cpu")


def _write_onnx(path: Path, part: GraphPart, sample: Sample, **options: Any) -> None:
    from transformers.exporters import OnnxConfig, OnnxExporter  # needs an optional library

    exporter = OnnxExporter()
    config = OnnxConfig(dynamic=True, dynamic_shapes=sample.varies, **options)
    program, _ = exporter.export_program(part, sample.inputs, config)
    exporter.save_program(program, path)
