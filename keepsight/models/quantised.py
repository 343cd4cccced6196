"""Refuses quantised layers whose result for a token depends on other tokens.

Weights in eight or four bits are weights like others. Activations in few bits need a scale. If that
is the largest value of a whole pass, a token's result depends on the tokens computed beside it, so
neither cuts nor batches are exact. Many libraries make such layers under many names, so layers are
tried, not looked up: the same tokens run beside quiet and beside loud neighbours. Scales per token,
and fixed scales, pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from keepsight.errors import KeepsightError, UnreadableWeights, UnsupportedModel
from keepsight.models.no_gradients import run_plainly

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Modules whose layers compute in the dtype of their weights.
_USUAL = ("torch.nn.modules.", "transformers.models.", "peft.", "keepsight.")
_TOKENS = 8
_LOUD = 1000.0  # of the loud neighbours: a scale shared with them leaves nothing of others
_NEAR = 1e-3  # of the largest value; a shared scale changes nearly all of it
_ROW = 16  # bytes
# What a layer may raise whose weights lie packed, or in a dtype that it cannot multiply.
_FAILURES = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def named_weights(model: torch.nn.Module) -> Iterator[None]:
    """Name the weight classes when a model's weights cannot be read."""
    try:
        yield
    except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
        odd = {type(t).__name__ for m in model.modules() for t in _held(m) if _is_odd(t)}
        if isinstance(error, KeepsightError) or not odd:
            raise
        raise UnreadableWeights(
            f"weights of kind {', '.join(sorted(odd))} cannot be read, so they cannot be "
            f"fingerprinted and nothing could be remembered safely ({error}); load the model in "
            "another precision or quantise it with another library"
        ) from error


def refuse_experts_without_kernel(model: PreTrainedModel) -> None:
    """Refuse grouped experts for which torch has no such product: in float64, or with rows that are
    no multiple of sixteen bytes."""
    for name, layer in model.named_modules():
        weights = [w for w in layer._parameters.values() if w is not None and w.dim() == 3]
        chosen = getattr(getattr(layer, "config", None), "_experts_implementation", None)
        if chosen != "grouped_mm" or not weights:
            continue
        weight = weights[0]
        odd = any(one.shape[2] * one.element_size() % _ROW for one in weights)
        if weight.dtype in _DTYPES and not odd:
            continue
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


class Quantised:
    """The layers of one model that were already tried."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._asked: set[str] = set()

    def check(self) -> None:
        """Refuse a model with a layer that mixes tokens; try each kind of layer once."""
        for name, layer in self._model.named_modules():
            if not _is_unusual(layer) or (kind := _kind(layer)) in self._asked:
                continue
            off = self._coupling(name, layer)
            if off > _NEAR:
                raise UnsupportedModel(
                    f"{name} ({type(layer).__module__}.{type(layer).__name__}) scales its input "
                    "by the largest value of a whole pass, so a token's result depends on the "
                    f"tokens computed beside it (loud neighbours change it by {off:.0%}): no "
                    "remembered prefix could be continued exactly. Quantise the weights only, "
                    "or the activations with a scale for each token"
                )
            self._asked.add(kind)

    def _coupling(self, name: str, layer: torch.nn.Module) -> float:
        """How much the results for some tokens depend on other tokens, relative to their size."""
        try:
            with torch.inference_mode():
                return _ask(self._model, layer)
        except UnsupportedModel:
            raise
        except _FAILURES as error:
            first = error
        try:
            with torch.no_grad():
                off = _ask(self._model, layer)
        except UnsupportedModel:
            raise
        except _FAILURES:
            packed = not _is_usual(layer) and not any(True for _ in _held(layer))
            marked = hasattr(layer, "quantization_scheme")
            if not packed and not marked and not _has_odd_weights(layer):
                return 0.0  # some other layer that needs more than tokens
            raise UnsupportedModel(
                f"{name} ({type(layer).__module__}.{type(layer).__name__}) is quantised, and a "
                f"trial could not show that it treats each token alone: {first}"
            ) from first
        run_plainly(self._model)
        return off


def _is_unusual(layer: torch.nn.Module) -> bool:
    """Whether a layer maps features to features in a way that needs a trial."""
    if _width(layer) is None:
        return False
    replaced = "forward" in vars(layer) or hasattr(layer, "quantization_scheme")
    return not _is_usual(layer) or replaced or _has_odd_weights(layer)


def _width(layer: torch.nn.Module) -> int | None:
    """The number of input features, if it takes features."""
    width = getattr(layer, "in_features", None)
    return width if isinstance(width, int) else None


def _is_usual(layer: torch.nn.Module) -> bool:
    return f"{type(layer).__module__}.".startswith(_USUAL)


def _has_odd_weights(layer: torch.nn.Module) -> bool:
    """Whether some weights are not plain floating tensors of torch."""
    return any(_is_odd(t) or not t.is_floating_point() for t in _held(layer))


def _is_odd(tensor: torch.Tensor) -> bool:
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def _held(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from (t for t in layer._parameters.values() if t is not None)
    yield from (t for t in layer._buffers.values() if t is not None)


def _kind(layer: torch.nn.Module) -> str:
    """The kind of a layer: its class, weight classes and plain settings."""
    parts = [(type(t).__qualname__, _settings(t)) for t in _held(layer)]
    return repr((type(layer).__module__, type(layer).__qualname__, _settings(layer), parts))


def _settings(thing: object) -> list[tuple[str, str]]:
    plain = {n: v for n, v in getattr(thing, "__dict__", {}).items() if not n.startswith("_")}
    sizes = ("in_features", "out_features")
    parts = torch.Tensor | torch.nn.Module
    named = ((n, v) for n, v in plain.items() if n not in sizes and not isinstance(v, parts))
    return sorted((name, repr(value)) for name, value in named)


def _ask(model: PreTrainedModel, layer: torch.nn.Module) -> float:
    """Results for a few tokens beside quiet and beside loud neighbours."""
    device = next((tensor.device for tensor in _held(layer)), model.device)
    draw = torch.Generator().manual_seed(0)
    quiet = torch.randn(1, _TOKENS, _width(layer) or 0, generator=draw)
    loud = quiet.clone()
    loud[:, _TOKENS // 2 :] *= _LOUD
    error: Exception | None = None
    for dtype in dict.fromkeys((model.dtype, *_DTYPES)):
        try:
            one, other = (_first(layer(x.to(device, dtype))) for x in (quiet, loud))
        except _FAILURES as refusal:
            error = error or refusal
            continue
        if _is_odd(one) and type(one) not in map(type, _held(layer)):
            raise UnsupportedModel(
                f"a layer of kind {type(layer).__module__}.{type(layer).__name__} returns "
                f"values of kind {type(one).__name__}, which cannot be remembered; quantise the "
                "weights only"
            )
        mine, theirs = (x[:, : _TOKENS // 2].float() for x in (one, other))
        return float((mine - theirs).abs().max() / mine.abs().max().clamp(min=1e-30))
    raise error or RuntimeError("no dtype")


def _first(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
