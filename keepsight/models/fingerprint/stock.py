"""The model that Transformers makes of a configuration, for comparison with a live one.

Most of a model follows from its configuration. Only differences (another scale, a replaced module,
an adapter) belong to its identity. So the identity of an unchanged model does not depend on how a
version of Transformers spells its settings.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from keepsight import digests
from keepsight.models.fingerprint import functions
from keepsight.models.fingerprint.describe import Describer, Plain
from keepsight.models.fingerprint.undescribed import ObjectNumbers
from keepsight.models.fingerprint.watch import Owner

BASE = frozenset(vars(torch.nn.Module()))  # attributes of every module, checked separately
# Notes of Transformers and PEFT on modules that change no forward pass.
NOTES = frozenset(
    {
        "_hf_peft_config_loaded",
        "_is_hf_initialized",
        "_output_capturing_hooks_installed",
        "_use_kernels",  # replacement by kernels is detected where it happens
        "_weight_conversions",
        "generation_config",  # read on every call by the sampling code
        "hf_device_map",
        "hf_quantizer",
        "is_loaded_in_4bit",
        "is_loaded_in_8bit",
        "is_quantized",
        "model_tags",
        "name_or_path",
        "peft_config",  # PEFT puts what a forward pass needs on its layers
        "quantization_method",
        "rope_deltas",  # left by the last caller; positions are passed explicitly
        "warnings_issued",
    }
)
# How a checkpoint is loaded, saved and spread over devices.
NOTES |= {
    "_ep_plan", "_fsdp_plan", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict",
    "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected",
    "_keys_to_ignore_on_save", "_no_split_modules", "_pp_plan", "_skip_keys_device_placement",
    "_tp_plan", "all_tied_weights_keys",
}  # fmt: skip
# Notes of `generate` for its own next call.
NOTES |= {
    "_cached_continuous_batching_manager",
    "_compiled_call",
    "_last_compile_config",
    "_previous_max_cache_length",
}
# GLM-Image's notes about a picture that stock `generate` draws; we draw none.
NOTES |= {"_cached_decode_position_ids", "_prefill_len"}
# The caller of a live model's `generate` changes no forward pass.
NOTES |= {"generate"}
OUR_HOOK = "keepsight.blindfold"  # our forward pre-hook that only watches
_KEPT = 4  # configurations whose models are kept


@dataclass(frozen=True)
class StockModule:
    """A module as Transformers builds it: its class, its settings and its derived buffers."""

    kind: type
    settings: dict[str, Plain]
    derived: dict[str, torch.Tensor]


_known: OrderedDict[tuple[type, str], dict[str, StockModule]] = OrderedDict()


def settings_of(
    module: torch.nn.Module, describer: Describer, owner: Owner, ignored: frozenset[str]
) -> dict[str, Plain]:
    """The settings of a module, by name."""
    own = {name: value for name, value in vars(module).items() if name not in ignored}
    found = {name: describer.value(value, owner) for name, value in own.items()}
    return {**found, "children": ("children", *module._modules)}


def stock_parts(model: PreTrainedModel, config: Plain) -> dict[str, StockModule]:
    """Every module that Transformers makes of the model's configuration, by path.

    `config` is the description of that configuration. Empty if no model can be made of it.
    """
    key = (type(model), digests.digest("stock", repr(config)))
    found = _known.get(key)
    if found is None:
        found = _known[key] = _build(model)
        while len(_known) > _KEPT:
            _known.popitem(last=False)
    return found


def _build(model: PreTrainedModel) -> dict[str, StockModule]:
    try:
        with torch.random.fork_rng(devices=[]), _quiet():
            with torch.device("meta"):
                twin: Any = type(model)(copy.deepcopy(model.config))
            derived = dict(_derived(twin))
    except Exception as error:  # a model's code may raise anything: then everything is described
        logging.getLogger(__name__).info("no model to compare with: %s", error)
        return {}
    places = {id(part): path for path, part in twin.named_modules()}
    describer = Describer(
        None, places, lambda tensor: f"unread {tuple(tensor.shape)}", ObjectNumbers()
    )
    ignored = BASE | NOTES
    return {
        path: StockModule(
            type(part), settings_of(part, describer, None, ignored), derived.get(path, {})
        )
        for path, part in twin.named_modules(remove_duplicate=False)
    }


def _derived(twin: Any) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """The values of buffers missing in checkpoints, filled by Transformers' own code."""
    homes = {path: part for path, part in twin.named_modules() if isinstance(part, PreTrainedModel)}
    for path, part in twin.named_modules():
        names = [n for n in part._non_persistent_buffers_set if part._buffers.get(n) is not None]
        if not names:
            continue
        for name in names:
            part._buffers[name] = torch.zeros_like(part._buffers[name], device="cpu")
        above = [home for home in homes if path == home or path.startswith(home and f"{home}.")]
        homes[max(above, key=len)]._init_weights(part)
        yield path, {name: part._buffers[name] for name in names}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings that were already shown when the model was made."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def reads_training(kind: type) -> bool:
    """Whether code of a module's class reads the training mode."""
    for base in kind.__mro__:
        if base is torch.nn.Module:
            return False
        for value in vars(base).values():
            for layer in functions.layers(value):
                if "training" in functions.names_in(layer.__code__):
                    return True
    return False
