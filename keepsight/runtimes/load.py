"""Models made by `keepsight export`: Transformers' own classes without weights, whose parts are
graphs in another runtime.

Everything except arithmetic on weights stays Transformers' code: where features go, which layers
get which, positions, masks, generation settings. The modules are built without memory and emptied,
and four of them run a graph as their forward (modules.py). manifest.py is the record of an export,
states.py names the states of a decoder, onnx.py and openvino.py run one graph, imports.py imports
them without telemetry. MLX has parts of mlx-vlm in place of graphs (mlx.py): mlx_library.py loads
it, mlx_types.py says how its models differ.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import transformers
from transformers import AutoModelForImageTextToText, GenerationConfig, PreTrainedModel

from keepsight.core.decoding.state import Shape
from keepsight.core.settings import chosen_store
from keepsight.errors import ModelError, UnsupportedInput
from keepsight.kinds import DeviceMap, Dtype, Grid
from keepsight.models.families.tower_tensors import TowerTensors
from keepsight.models.loading import files_digest
from keepsight.runtimes.manifest import GRAPHS, PARTS, Manifest, is_export, read
from keepsight.runtimes.modules import (
    DecoderStandIn,
    EmbeddingStandIn,
    GraphSession,
    HeadStandIn,
    PackedTowerStandIn,
    WholeTowerStandIn,
    check_sizes,
)
from keepsight.runtimes.onnx import OnnxSession
from keepsight.runtimes.openvino import OpenVinoSession

__all__ = ["is_export", "load_exported", "other_versions", "read"]


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
        raise UnsupportedInput(
            "vision=False: an exported model has its vision encoder; leave it in"
        )


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
    try:
        return load_model(Path(path), manifest), files
    except ModelError as error:
        others = other_versions(manifest)
        if not others:
            raise
        versions = ", ".join(f"{n} {was} (here {now})" for n, (was, now) in others.items())
        raise ModelError(f"{error}; it was made with {versions}") from error


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


# -- the model around the graphs ----------------------------------------------------------------


class Exported:
    """Describes the graphs that run in a model."""

    rounding_because = ""  # any cut is tried

    def __init__(self, folder: Path, manifest: Manifest, version: str, threads: int) -> None:
        self.folder = folder
        self.weights = dict(manifest.weights)  # the names of those that were exported
        self._most = manifest.most_patches
        files = manifest.files.items()
        decoder = f"{GRAPHS}/decoder."
        self.decoder_bytes = sum(file.bytes for name, file in files if name.startswith(decoder))
        # Everything that changes bits: the runtime, its version, and the graphs themselves.
        self.environment = {
            "runtime": f"{manifest.runtime} {version}",
            "quantised": manifest.quantised,
            "graphs": manifest.digest,
            # Fixed when the graphs were loaded: later settings of PyTorch do not reach them.
            "runtime_threads": threads,
        }

    def require(self, grid: Grid) -> None:
        """Refuse what the graph of the tower cannot take. `grid` holds rows of (time, h, w)."""
        if self._most is not None:
            for name in ("image_grid_thw", "video_grid_thw"):
                rows = np.reshape(grid.get(name, []), (-1, 3))
                check_sizes(rows[:, 1:].prod(-1).tolist(), self._most)


def load_model(folder: Path, manifest: Manifest) -> PreTrainedModel:
    """The model, ready to run."""
    model = empty_model(folder, "no configuration of an exported model")
    threads = torch.get_num_threads()
    graphs: dict[str, GraphSession] = {}
    for name in PARTS:
        path = folder / GRAPHS / name
        if manifest.runtime == "openvino":
            graphs[name] = OpenVinoSession(path.with_name(f"{name}.xml"), threads)
        else:
            graphs[name] = OnnxSession(path.with_name(f"{name}.onnx"), threads)
    shape, core, decoder = Shape.of(model), model.base_model, model.get_decoder()
    embedding, mrope = model.get_input_embeddings(), hasattr(core, "get_rope_index")
    embedding.forward = EmbeddingStandIn(graphs["embedding"], embedding.embedding_dim)
    model.get_output_embeddings().forward = HeadStandIn(graphs["head"])
    decoder.forward = DecoderStandIn(graphs["decoder"], decoder, shape, manifest.appends, mrope)
    most = manifest.most_patches
    if most is None:
        replace_encoder(core, WholeTowerStandIn(graphs["tower"], model.config))
    else:
        tensors = TowerTensors(core)
        core.visual.forward = PackedTowerStandIn(graphs["tower"], core.visual, tensors, most)
    model.exported = Exported(folder, manifest, graphs["decoder"].version, threads)
    model.eval()
    refuse_what_takes_weights(model, folder, "an exported model")
    return model


def refuse_what_takes_weights(model: PreTrainedModel, folder: Path, what: str) -> None:
    """Refuse training and saving with clear errors. Otherwise training would fail on gradients, and
    saving would write an empty checkpoint that loads with random weights."""
    before = model.train

    def train(mode: bool = True) -> PreTrainedModel:
        if mode:
            raise UnsupportedInput(
                f"{folder} is {what}, which cannot be trained: its weights are not PyTorch's; "
                "train the checkpoint that it was made of"
            )
        return before(mode)

    def save_pretrained(*args: object, **options: object) -> NoReturn:
        raise UnsupportedInput(f"{what} has no PyTorch weights to save; copy {folder} instead")

    model.train, model.save_pretrained = train, save_pretrained


def empty_model(folder: Path, lacking: str) -> PreTrainedModel:
    """Transformers' own model of a folder's configuration, without weights."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            make = AutoModelForImageTextToText.from_config
            model: PreTrainedModel = make(config, dtype=torch.float32)
        model.generation_config = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder} holds {lacking}: {error}") from error
    for module in model.modules():
        for home in (module._parameters, module._buffers):
            home.update(dict.fromkeys(home))
        if isinstance(module, PreTrainedModel):
            # Transformers asks the first weight for device and dtype.
            anchor = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
            module.register_parameter("anchor", anchor)
    return model


def replace_encoder(core: PreTrainedModel, stand_in: WholeTowerStandIn) -> None:
    """Replace the whole path from pixels to features; its signature tells which inputs it takes."""
    stand_in.__signature__ = inspect.signature(core.get_image_features)  # type: ignore[attr-defined]
    core.get_image_features = stand_in
