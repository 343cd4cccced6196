"""All that is remembered for one live model, and the name under which it may be reused.

`refresh` runs before each call: it looks at the weights and the settings that change results, and
gives the namespace. Two calls share a namespace only if a snapshot of one is bit for bit what the
other would compute.
"""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Any

import PIL
import torch
import transformers
from transformers import PreTrainedModel

from keepsight import keys
from keepsight.engine import Engine
from keepsight.errors import InputError, ModelError, UnknownOption, UnsupportedModel
from keepsight.families import Family
from keepsight.prefix import Tree
from keepsight.prompt import Rule
from keepsight.state import Shape
from keepsight.store import DiskStore, parse_bytes
from keepsight.vision import Vision
from keepsight.weights import Weights

ACCELERATOR_GRAIN, CPU_GRAIN = 256, 64


@dataclass(frozen=True)
class Settings:
    """What the caller chose. Sizes are bytes, as a number or as in "2GiB"."""

    grain: int | None = None
    cache_budget: int | str = "2GiB"  # prefixes in memory
    vision_budget: int | str = "2GiB"  # features and waiting pixels in memory
    store: str | None = None
    store_budget: int | str | None = None
    accept_features: str = "same"
    image_options: tuple[tuple[str, Any], ...] = ()

    def check(self) -> None:
        """Refuse what makes no sense, by name."""
        if self.grain is not None and (not isinstance(self.grain, int) or self.grain < 1):
            raise InputError(f"grain={self.grain!r}; expected a number of tokens, at least 1")
        if self.accept_features not in ("same", "any"):
            raise InputError(
                f"accept_features={self.accept_features!r}; expected 'same' (only features made "
                "as this model would make them) or 'any'"
            )


class Memory:
    """Tree, engine, vision and store of one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        processor: Any,
        weights: Weights,
        settings: Settings,
        store: DiskStore | None,
    ) -> None:
        settings.check()
        self.model, self.family, self.processor = model, family, processor
        self.weights, self.store, self.settings = weights, store, settings
        _refuse_stretching_rope(model)
        shape = Shape.of(model)
        budget = parse_bytes(settings.cache_budget)
        self.tree = Tree(budget, shape.has_fixed, store)
        self.engine = Engine(model, family, self.tree, shape, budget)
        self.image_options = _image_options(processor, dict(settings.image_options))
        self.vision = Vision(
            family,
            processor,
            self.image_options,
            parse_bytes(settings.vision_budget),
            store,
            settings.accept_features,
        )
        default = CPU_GRAIN if model.device.type == "cpu" else ACCELERATOR_GRAIN
        tokenizer = getattr(processor, "tokenizer", None)
        self.rule = Rule(
            settings.grain or default,
            family.turn_ends(tokenizer),
            family.sees_whole_media,
            family.reuse,
            family.media_ends,
        )
        self.made_under: dict[str, str] = {}  # namespace -> weights, to say why a path is not here
        self._about(model)

    def _about(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        self.vision.about = {
            "model_type": config.model_type,
            # The last part only: a package may travel, and a local path is nobody's business.
            "name": str(getattr(config, "_name_or_path", "")).rstrip("/").split("/")[-1] or None,
            "commit": getattr(config, "_commit_hash", None),
            "image_processor": type(getattr(self.processor, "image_processor", None)).__name__,
        }

    def refresh(self, exact: bool = True, remembered: dict[str, str] | None = None) -> str:
        """Look at everything that results depend on; the namespace they give."""
        if self.model.training:
            raise ModelError("the model is in training mode (dropout is random); call model.eval()")
        self.weights.refresh(remembered)
        self.vision.bind(self.weights.vision, self._provenance())
        namespace = keys.digest(
            "namespace",
            self.weights.all,
            self.weights.config,
            self._circumstances(),
            self.rule.record(),
            "exact" if exact else "with decoded state",
        )
        self.made_under[namespace] = self.weights.all
        return namespace

    def _circumstances(self) -> dict[str, Any]:
        """What changes bits beside weights and input."""
        model = self.model
        on_cpu = model.device.type == "cpu"
        return {
            "device": _device_class(model.device),
            "dtype": str(model.dtype),
            "attention": _attention(model.config),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads() if on_cpu else None,
            "precision": _precision(),
            "autocast": _autocast(model.device.type),
        }

    def _provenance(self) -> dict[str, Any]:
        """How features made now are made."""
        processor = getattr(self.processor, "image_processor", None)
        backend = str(getattr(processor, "backend", None) or "tensors")
        return dict(
            self._circumstances(),
            maker="torch",
            codec="exact",
            image_backend=f"{backend} ({_backend_version(backend)})",
        )

    def why_elsewhere(self, namespace: str) -> str:
        """Why what another namespace knows is of no use here."""
        other = self.made_under.get(namespace)
        return "other settings" if other == self.weights.all else "other weights"

    def clear(self) -> None:
        """Forget everything in memory that nobody holds."""
        self.engine.lanes.clear()
        self.tree.clear()
        self.vision.clear()

    def stats(self) -> dict[str, Any]:
        """Bytes and counts per tier."""
        nodes = list(self.tree.nodes())
        return {
            "prefix": {
                "bytes": self.tree.nbytes,
                "budget": self.tree.budget,
                "held_bytes": self.tree.held_bytes(),
                "evictable_bytes": self.tree.evictable_bytes(),
                "snapshots": sum(node.kv is not None for node in nodes),
                "evictions": self.tree.evictions,
                "lane_bytes": self.engine.lanes.nbytes,
            },
            "features": {
                "bytes": self.vision.packages.nbytes,
                "budget": self.vision.packages.budget,
                "packages": len(self.vision.packages),
                **self.vision.counts,
            },
            "engine": {
                "prefill_tokens": self.engine.prefill_tokens,
                "decode_steps": self.engine.decode_steps,
            },
            "store": None if self.store is None else self.store.stats(),
        }


def _refuse_stretching_rope(model: PreTrainedModel) -> None:
    """Rope whose frequencies depend on total length rewrites the past when a prompt grows."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    layers = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in [rope, *layers]:
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind in ("dynamic", "longrope"):
            raise UnsupportedModel(
                f"rope type {kind!r} changes its frequencies with the length of the prompt, so a "
                "remembered prefix would be wrong for a longer one; load the model with "
                "rope_parameters={'rope_type': 'default', ...} or use it without Keepsight"
            )


def _image_options(processor: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The image processor's options as the composite processor passes them, and the caller's."""
    if processor is None:
        return given
    image_processor = processor.image_processor
    known = set(getattr(getattr(image_processor, "valid_kwargs", None), "__annotations__", given))
    known |= set(vars(image_processor))
    if set(given) - known:
        raise UnknownOption.among(given, known, "image_options")
    if not hasattr(processor, "_merge_kwargs"):  # an image processor alone
        return given
    merged = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs, **given)
    options = dict(merged["images_kwargs"])
    options.pop("return_tensors", None)
    return options


def _backend_version(backend: str) -> str:
    """The library that turns pixels into what the tower takes."""
    if backend == "torchvision":
        return f"torchvision {importlib.metadata.version('torchvision')}"
    return f"pillow {PIL.__version__}"


def _device_class(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return device.type


def _attention(config: Any) -> dict[str, Any]:
    parts = {"model": config, "text": config.get_text_config()}
    parts["vision"] = getattr(config, "vision_config", None)
    return {name: getattr(c, "_attn_implementation", None) for name, c in parts.items()}


def _precision() -> list[str]:
    backends: Any = torch.backends
    places = (backends, backends.mkldnn.matmul, backends.cuda.matmul)
    found = [str(getattr(place, "fp32_precision", "")) for place in places]
    return [torch.get_float32_matmul_precision(), *found]


def _autocast(device: str) -> str | None:
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
