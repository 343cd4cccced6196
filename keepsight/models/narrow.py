"""Linear layers with eight-bit weights, in PyTorch and for any family.

Only weights of the decoder and the output head are narrow. The tower is unchanged, so features are
shared with the model as loaded. A few tokens use torch's kernel, which reads eight bits and
computes in bfloat16; more tokens use a product with the weight widened again. So a token's bits
depend on the number of tokens in a pass, and answers are equal to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from keepsight.errors import UnsupportedInput

_Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_kernel: _Kernel | None = getattr(torch, "_weight_int8pack_mm", None)
_FEW = 16  # up to this many tokens the kernel is faster than widening a weight
_SMALLEST = 64  # inputs x outputs; below this nothing is gained
_STEP = 32  # sizes must be multiples: otherwise the kernel reads beyond the weights
_LARGEST = 127  # largest eight-bit value


class NarrowLinear(torch.nn.Module):
    """A linear layer with an eight-bit weight and a scale per output."""

    weight: torch.Tensor
    scales: torch.Tensor
    _ones: torch.Tensor

    def __init__(self, wide: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = wide.in_features, wide.out_features
        values = wide.weight.detach().float()
        scales = values.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / _LARGEST
        self.register_buffer("weight", (values / scales[:, None]).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.register_buffer("_ones", torch.ones(len(scales), dtype=torch.bfloat16), False)
        self.bias = wide.bias
        self.train(wide.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As of `torch.nn.Linear`."""
        rows = input.reshape(-1, self.in_features)
        if len(rows) <= _FEW and _kernel is not None:
            few = rows.to(torch.bfloat16).contiguous()
            found = _kernel(few, self.weight, self._ones).to(input.dtype)
        else:
            found = functional.linear(rows, self.weight.to(input.dtype))
        found = found * self.scales.to(input.dtype)
        if self.bias is not None:
            found = found + self.bias
        return found.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """As of `torch.nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, weights=int8"


def narrow(model: PreTrainedModel, parts: Iterable[torch.nn.Module]) -> None:
    """Replace the linear layers of these parts by ones with narrow weights."""
    if model.device.type != "cpu":
        raise UnsupportedInput(
            f"weights='int8' computes on the CPU, and the model is on {model.device}; leave out "
            "device_map, or load a checkpoint that is quantised already"
        )
    inside = {id(module) for part in parts for module in part.modules()}
    paths = [
        path
        for path, module in model.named_modules()
        if id(module) in inside and type(module) is torch.nn.Linear and _pays(module)
    ]
    for path in paths:  # nothing holds the wide layers, so each goes as soon as it is replaced
        model.set_submodule(path, NarrowLinear(model.get_submodule(path)))
    if not paths:
        raise UnsupportedInput(
            "weights='int8': this model has no linear layers in its decoder that could use "
            "eight bits; leave weights= out"
        )


def is_narrow(model: torch.nn.Module) -> bool:
    """Whether some weights of a model were narrowed here."""
    return any(type(module) is NarrowLinear for module in model.modules())


def _pays(layer: torch.nn.Linear) -> bool:
    usual = type(layer.weight) is torch.nn.Parameter and layer.weight.is_floating_point()
    sizes = layer.weight.shape
    return usual and min(sizes) >= _SMALLEST and not any(size % _STEP for size in sizes)
