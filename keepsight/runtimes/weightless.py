"""A model of Transformers' own class without weights, whose parts are graphs in another runtime.

Everything except arithmetic on weights stays Transformers' code: where features go, which layers
get which, positions, masks, generation settings. The modules are built without memory and emptied,
and four of them run a graph as their forward.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import transformers
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    GenerationConfig,
    PreTrainedModel,
)

from keepsight.core.decoding.state import Shape
from keepsight.errors import ModelError, UnsupportedInput
from keepsight.kinds import Grid
from keepsight.models.families.tower_tensors import TowerTensors
from keepsight.runtimes.manifest import GRAPHS, Manifest
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

PARTS = ("tower", "embedding", "decoder", "head")


class Exported:
    """Describes the graphs that run in a model."""

    def __init__(self, folder: Path, manifest: Manifest, version: str, threads: int) -> None:
        self.folder, self.manifest = folder, manifest
        self.rounding_because = ""  # any cut is tried
        # Everything that changes bits: the runtime, its version, and the graphs themselves.
        self.environment = {
            "runtime": f"{manifest.runtime} {version}",
            "quantised": manifest.quantised,
            "graphs": manifest.digest,
            # Fixed when the graphs were loaded: later settings of PyTorch do not reach them.
            "runtime_threads": threads,
        }

    @property
    def weights(self) -> dict[str, str]:
        """The fingerprints of the model that was exported."""
        return dict(self.manifest.weights)

    def require(self, grid: Grid) -> None:
        """Refuse what the graph of the tower cannot take. `grid` holds rows of (time, h, w)."""
        if self.manifest.most_patches is not None:
            grids = (grid[name] for name in ("image_grid_thw", "video_grid_thw") if name in grid)
            sizes = [
                n for rows in grids for n in np.reshape(rows, (-1, 3))[:, 1:].prod(-1).tolist()
            ]
            check_sizes(sizes, self.manifest.most_patches)

    @property
    def decoder_bytes(self) -> int:
        """The bytes of the decoder's graph and weights, which each pass reads."""
        files = self.manifest.files.items()
        return sum(f.bytes for name, f in files if name.startswith(f"{GRAPHS}/decoder."))


def load_model(folder: Path, manifest: Manifest) -> PreTrainedModel:
    """The model, ready to run."""
    model = empty_model(folder, "no configuration of an exported model")
    threads = torch.get_num_threads()
    sessions = {name: _session(folder, manifest, name, threads) for name in PARTS}
    _fill(model, manifest, sessions)
    version = sessions["decoder"].version
    model.exported = Exported(folder, manifest, version, threads)
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
        kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        kind = kind[0] if isinstance(kind, tuple | list) else kind
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = kind(config)
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
    model.config.dtype = torch.float32
    return model


def _session(folder: Path, manifest: Manifest, name: str, threads: int) -> GraphSession:
    path = folder / GRAPHS
    if manifest.runtime == "openvino":
        return OpenVinoSession(path / f"{name}.xml", threads)
    return OnnxSession(path / f"{name}.onnx", threads)


def _fill(model: PreTrainedModel, manifest: Manifest, sessions: dict[str, GraphSession]) -> None:
    shape = Shape.of(model)
    core, decoder, embedding = model.base_model, model.get_decoder(), model.get_input_embeddings()
    embedding.forward = EmbeddingStandIn(sessions["embedding"], embedding.embedding_dim)
    model.get_output_embeddings().forward = HeadStandIn(sessions["head"])
    decoder.forward = DecoderStandIn(
        sessions["decoder"], decoder, shape, manifest.appends, hasattr(core, "get_rope_index")
    )
    if manifest.most_patches is None:
        replace_encoder(core, WholeTowerStandIn(sessions["tower"], model.config))
        return
    tensors = TowerTensors(core)
    core.visual.forward = PackedTowerStandIn(
        sessions["tower"], core.visual, tensors, manifest.most_patches
    )


def replace_encoder(core: PreTrainedModel, stand_in: WholeTowerStandIn) -> None:
    """Replaces the whole path from pixels to features; its signature tells which inputs it
    takes."""
    import inspect

    stand_in.__signature__ = inspect.signature(core.get_image_features)  # type: ignore[attr-defined]
    core.get_image_features = stand_in
