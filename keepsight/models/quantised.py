"""Refuses quantised layers whose result for a token depends on other tokens.

Weights in eight or four bits are weights like others. Activations in few bits need a scale. If that
is the largest value of a whole pass, a token's result depends on the tokens computed beside it, so
neither cuts nor batches are exact. Such schemes are known by the checkpoint's `quantization_config`
and by the classes of their layers; no layer runs for it. Scales per token, and fixed scales, pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from keepsight.errors import UnsupportedModel
from keepsight.kinds import Record
from keepsight.models.no_gradients import run_plainly

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DYNAMIC = ("torch.ao.nn.quantized.dynamic.", "torch.ao.nn.intrinsic.quantized.dynamic.")
_ROW = 16  # bytes
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ADVICE = "Quantise the weights only, or the activations with a scale for each token"


def refuse_experts_without_kernel(model: PreTrainedModel) -> None:
    """Refuse grouped experts for which torch has no such product: in float64, or with rows that are
    no multiple of sixteen bytes."""
    for name, layer in model.named_modules():
        weights = [w for w in layer._parameters.values() if w is not None and w.dim() == 3]
        chosen = getattr(getattr(layer, "config", None), "_experts_implementation", None)
        odd = any(w.dtype not in _DTYPES or w.shape[2] * w.element_size() % _ROW for w in weights)
        if chosen != "grouped_mm" or not odd:
            continue
        weight = weights[0]
        width = weight.shape[1 if getattr(layer, "is_transposed", False) else 2]
        one = weight.new_ones(1, width)
        try:
            with torch.no_grad():
                layer(one, torch.zeros(1, 1, dtype=torch.long, device=one.device), one[:, :1])
        except RuntimeError as error:
            usual = ", ".join(map(str, _DTYPES))
            sizes = " and ".join(str(tuple(one.shape)) for one in weights)
            raise UnsupportedModel(
                f"{name} runs its experts by {chosen!r}, which torch {torch.__version__} supports "
                f"for {usual} with rows of a multiple of {_ROW} bytes, and not for {weight.dtype} "
                f"of {sizes} ({error}): the model cannot run at all. Call "
                "model.set_experts_implementation('eager')"
            ) from error


def refuse_shared_scales(model: PreTrainedModel) -> None:
    """Refuse a model that scales activations by the largest value of a whole pass, or whose packed
    weights nothing here unpacks."""
    config = getattr(model.config, "quantization_config", None)
    given = config if isinstance(config, dict) else config.to_dict() if config is not None else {}
    if scheme := _shared_scale(given):
        raise UnsupportedModel(f"quantization_config: {scheme}, {_WHY}. {_ADVICE}")
    for name, layer in model.named_modules():
        kind = f"{type(layer).__module__}.{type(layer).__name__}"
        if _scales_by_pass(kind, layer):
            raise UnsupportedModel(f"{name} ({kind}) scales its input, {_WHY}. {_ADVICE}")
        if getattr(layer, "activation_qtype", None) is not None:
            raise UnsupportedModel(
                f"{name} ({kind}) is one of quanto's with activations in few bits: what comes out "
                f"is of a class of its own, which cannot be remembered. {_ADVICE}"
            )
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "quantization_scheme") and (
            not isinstance(weight, torch.Tensor) or weight.dtype not in _DTYPES
        ):
            raise UnsupportedModel(
                f"{name} ({kind}) is quantised, and nothing here unpacks its weights; load the "
                "model in another precision, or on a device for which its library has kernels"
            )
        if any(map(_is_odd, _held(layer))):
            run_plainly(model)  # weights that unpack themselves may not work in inference mode


_WHY = (
    "by the largest value of a whole pass, so a token's result depends on the tokens computed "
    "beside it: no remembered prefix could be continued exactly"
)


def _shared_scale(config: Record) -> str:
    """Which setting of a checkpoint asks for a scale over a whole pass; empty if none does."""
    method = str(getattr(config.get("quant_method"), "value", config.get("quant_method")))
    in_eight = method == "bitsandbytes" and config.get("load_in_8bit")
    if in_eight and config.get("llm_int8_threshold", 6.0) > 0:
        return "bitsandbytes in eight bits chooses columns (llm_int8_threshold above 0)"
    for group in _records(config.get("config_groups")):  # compressed-tensors
        taken: Record = group.get("input_activations") or {}
        if taken.get("dynamic") and taken.get("strategy") in (None, "tensor"):
            return "compressed-tensors scales activations"
    parts = {"all": config.get("global_quant_config"), **(config.get("layer_quant_config") or {})}
    for group in _records(parts):  # quark
        taken = group.get("input_tensors") or {}
        if taken.get("is_dynamic") and taken.get("qscheme") == "per_tensor":
            return "quark scales activations"
    return ""


def _records(groups: Any) -> list[Record]:
    return [one for one in (groups or {}).values() if isinstance(one, dict)]


def _scales_by_pass(kind: str, layer: torch.nn.Module) -> bool:
    packed: Any = getattr(layer, "_packed_params", None)
    is_half = getattr(packed, "dtype", None) == torch.float16  # which scales nothing
    torchao = (getattr(tensor, "act_quant_kwargs", None) for tensor in _held(layer))
    grains = {type(getattr(one, "granularity", None)).__name__ for one in torchao}
    return "PerTensor" in grains or (kind.startswith(_DYNAMIC) and not is_half)


def _is_odd(tensor: torch.Tensor) -> bool:
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def _held(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from (t for t in layer._parameters.values() if t is not None)
    yield from (t for t in layer._buffers.values() if t is not None)
