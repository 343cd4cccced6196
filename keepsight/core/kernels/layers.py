"""Decoder layers of the Llama kind: their parts, and what lies between their products.

The operations are those of the modules of Transformers, in the same order, but queries, keys and
values come from one product, and queries and keys are normed and turned together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from keepsight.core.kernels.linear import hooks_on_all
from keepsight.models.upstream import SILENT_HOOKS

Layer = Any  # a module of Transformers
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
_MLP = ("gate_proj", "up_proj", "down_proj")


def is_llamas(layer: torch.nn.Module) -> bool:
    """Whether a layer has these parts and no others."""
    if layer._modules.keys() != _LAYER:
        return False
    attention, mlp = layer._modules["self_attn"], layer._modules["mlp"]
    if attention is None or mlp is None:
        return False
    inner = set(attention._modules) - set(_ATTENTION)
    linears = [attention._modules.get(name) for name in _ATTENTION]
    linears += [mlp._modules.get(name) for name in _MLP]
    norms = [layer._modules["input_layernorm"], layer._modules["post_attention_layernorm"]]
    norms += [attention._modules[name] for name in inner]
    return (
        all(type(one) is torch.nn.Linear for one in linears)
        and (not inner or inner == set(_NORMS))
        and set(mlp._modules) - set(_MLP) <= {"act_fn"}
        and type(getattr(mlp, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
        and all(hasattr(attention, name) for name in ("head_dim", "scaling", "layer_idx"))
        and all(hasattr(norm, "variance_epsilon") for norm in norms)
        and len({getattr(norm, "variance_epsilon", None) for norm in norms[2:]}) < 2
    )


class Parts:
    """The parts of one layer, looked at once; each pass makes sure that they are still there and
    that nobody listens at them."""

    def __init__(self, layer: Layer) -> None:
        self._inside = [
            (home._modules, name, part)
            for home in layer.modules()
            for name, part in home._modules.items()
            if part is not None
        ]
        self._modules = [layer, *(part for _, _, part in self._inside)]
        self.layer, self.attention, self.width = layer, layer.self_attn, layer.self_attn.head_dim
        self.qkv = [self.attention._modules[name] for name in _ATTENTION[:3]]
        self.both, self.down = [layer.mlp.gate_proj, layer.mlp.up_proj], [layer.mlp.down_proj]
        self.first, self.second = layer.input_layernorm, layer.post_attention_layernorm
        self.norms = [self.attention._modules[n] for n in _NORMS if n in self.attention._modules]
        self.queries, self.keys = (one.out_features // self.width for one in self.qkv[:2])
        self.dtype = self.qkv[0].weight.dtype
        self.products = self.qkv, [self.attention.o_proj], self.both, self.down
        self._with_weights = [*chain(*self.products), self.first, self.second, *self.norms]

    def weights(self) -> list[torch.Tensor | None]:
        """Those of its products and norms, with biases."""
        names = ("weight", "bias")
        return [one._parameters.get(name) for one in self._with_weights for name in names]

    @property
    def sizes(self) -> tuple[float, ...]:
        """Heads of queries and of keys, their width, the gated layer's, the scale of attention, and
        what norms add."""
        norms = [one.variance_epsilon for one in (self.first, self.second, *self.norms)]
        heads = self.queries, self.keys, self.width
        return *heads, self.both[0].out_features, self.attention.scaling, *norms

    def stand(self) -> bool:
        """Whether nothing was exchanged, and no part has a hook or a replaced method."""
        for home, name, part in self._inside:
            if home.get(name) is not part:
                return False
        return is_quiet(self._modules)


def is_quiet(modules: Sequence[torch.nn.Module]) -> bool:
    """Whether none of these modules has a hook or a replaced method."""
    if hooks_on_all():
        return False
    for one in modules:
        held = one.__dict__
        hooks = held["_forward_hooks"] or held["_forward_pre_hooks"]
        if "forward" in held or (hooks and not _are_silent(held)):
            return False
    return True


def _are_silent(held: dict[str, Any]) -> bool:
    hooks = [*held["_forward_hooks"].values(), *held["_forward_pre_hooks"].values()]
    return all(
        (getattr(one, "__module__", ""), getattr(one, "__name__", "")) in SILENT_HOOKS
        for one in hooks
    )


# -- what lies between the products: compiled as a script ------------------------------------------


@functools.cache
def size_of(width: int, epsilon: float) -> list[torch.Tensor]:
    """The two numbers of a norm, once made into tensors."""
    return [torch.tensor(float(width)), torch.tensor(epsilon)]


def norm(rows: torch.Tensor, weight: torch.Tensor, size: list[torch.Tensor]) -> torch.Tensor:
    """As the root mean square norm of these models; `size` is the width and what is added."""
    wide = rows.to(torch.float32)
    mean = wide.pow(2).sum(-1, keepdim=True) / size[0]
    wide = wide * torch.rsqrt(mean + size[1])
    return weight * wide.to(rows.dtype)


def add_and_norm(
    rows: torch.Tensor, more: torch.Tensor, weight: torch.Tensor, size: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = rows + more
    return rows, norm(rows, weight, size)


def turn_heads(
    joined: torch.Tensor,
    sizes: list[int],
    weights: list[torch.Tensor],
    size: list[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values: normed where the layer does so, and turned to their positions."""
    queries, keys, width = sizes[0], sizes[1], sizes[2]
    heads = joined.view(joined.shape[0], -1, width)
    turned = heads.narrow(1, 0, queries + keys)
    if len(weights) > 0:  # of both at once: each head has the weight of its norm
        each = torch.cat([weights[0].expand(queries, -1), weights[1].expand(keys, -1)])
        turned = norm(turned, each, size)
    half = width // 2
    other = torch.cat((-turned.narrow(2, half, half), turned.narrow(2, 0, half)), dim=-1)
    turned = (turned * cos[0].unsqueeze(1)) + (other * sin[0].unsqueeze(1))
    turned = turned.transpose(0, 1).unsqueeze(0)
    values = heads.narrow(1, queries + keys, keys).transpose(0, 1).unsqueeze(0)
    return turned.narrow(1, 0, queries), turned.narrow(1, queries, keys), values
