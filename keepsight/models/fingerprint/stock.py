"""What Transformers makes of a configuration: the model that a live one is compared with.

Most of a model is as its configuration says. Only where a live model differs (another scale, a
module of another kind, an adapter) does the difference belong to its identity; so the identity of
an unchanged model does not depend on how a version of Transformers spells its settings.
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

BASE = frozenset(vars(torch.nn.Module()))  # what every module has, and is looked at by itself
# What Transformers and PEFT note on modules and no forward pass depends on.
NOTES = frozenset(
    {
        "_hf_peft_config_loaded",
        "_is_hf_initialized",
        "_output_capturing_hooks_installed",
        "_use_kernels",  # what kernels then replace is seen where it is replaced
        "_weight_conversions",
        "generation_config",  # read on every call by who samples
        "hf_device_map",
        "hf_quantizer",
        "is_loaded_in_4bit",
        "is_loaded_in_8bit",
        "is_quantized",
        "model_tags",
        "name_or_path",
        "peft_config",  # what a forward pass needs of it, PEFT puts on its layers
        "quantization_method",
        "rope_deltas",  # whoever called last left it; positions are given explicitly
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
# What `generate` notes for its own next call.
NOTES |= {
    "_cached_continuous_batching_manager",
    "_compiled_call",
    "_last_compile_config",
    "_previous_max_cache_length",
}
# What GLM-Image notes of the picture that stock `generate` draws; we draw none.
NOTES |= {"_cached_decode_position_ids", "_prefill_len"}
# Who calls `generate` of a live model is no part of any forward pass.
NOTES |= {"generate"}
OUR_HOOK = "keepsight.blindfold"  # a forward pre-hook of ours that only watches
_KEPT = 4  # configurations whose models are remembered


@dataclass(frozen=True)
class StockModule:
    """A module as Transformers builds it: its kind, its settings and the buffers it derives."""

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
    """Every module that Transformers makes of the model's configuration, by its path.

    `config` describes that configuration. Empty where no model can be made of it.
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
    except Exception as error:  # whatever a model's code raises: then all of it is described
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
    """The values of buffers that no checkpoint holds, as upstream's own code fills them."""
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
    """What upstream says of a configuration it said when the model was made."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def reads_training(kind: type) -> bool:
    """Whether code of a module's class asks for training mode."""
    for base in kind.__mro__:
        if base is torch.nn.Module:
            return False
        for value in vars(base).values():
            for layer in functions.layers(value):
                if "training" in functions.names_in(layer.__code__):
                    return True
    return False
