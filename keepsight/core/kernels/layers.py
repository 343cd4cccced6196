"""Decoder layers of the Llama kind without their modules: the same operations in the same order.

A small model spends a third of a token between its modules. Here a layer is one function: queries,
keys and values come from one product, and both are normed and turned together. It runs in the place
of the layer's own code in passes with our kernels, where a check at load has shown equal bits, and
where nobody listens at the layer's parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from keepsight.core.kernels import passes
from keepsight.core.kernels.elementwise import in_whole_vectors
from keepsight.core.kernels.linear import Linears, hooks_on_all
from keepsight.models.renamed import NEW, OLD

Layer = Any  # a module of Transformers and the arguments of its call
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
_MLP = ("gate_proj", "up_proj", "down_proj")
_begun: set[type] = set()


def begin(model: torch.nn.Module) -> None:
    """Wrap the code of such layers: once per class, before it is first inspected."""
    for kind in {type(module) for module in model.modules() if _is_llamas(module)} - _begun:
        _begun.add(kind)
        kind.forward = _put_before(kind.forward)  # type: ignore[attr-defined]


def are_in(model: torch.nn.Module) -> bool:
    """Whether a model has such layers."""
    return any(_is_llamas(module) for module in model.modules())


def _is_llamas(layer: torch.nn.Module) -> bool:
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
    )


def _put_before(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def forward(self: Layer, hidden_states: torch.Tensor, **named: Layer) -> torch.Tensor:
        linears = None if torch.compiler.is_compiling() else passes.for_whole_layers()
        turns = named.get("position_embeddings")
        if linears is None or turns is None or not _is_llamas(self) or _is_watched(self):
            return stock(self, hidden_states, **named)
        cache = next((named[name] for name in (NEW, OLD) if named.get(name) is not None), None)
        room = None if cache is None else cache.layers[self.self_attn.layer_idx]
        if not hasattr(room, "edges") or turns[0].dim() != 3:
            return stock(self, hidden_states, **named)
        if turns[0].shape[-1] != self.self_attn.head_dim:
            return stock(self, hidden_states, **named)
        with passes.inside():
            return _layer(self, hidden_states[0], turns, room, linears)[None]

    return forward


def _is_watched(layer: torch.nn.Module) -> bool:
    """Whether a part has a hook or a replaced method: its owner expects a call."""
    return hooks_on_all() or any(
        part is not layer
        and (part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
        for part in layer.modules()
    )


def _layer(
    layer: Layer, rows: torch.Tensor, turns: Sequence[torch.Tensor], room: Layer, linears: Linears
) -> torch.Tensor:
    attention, mlp = layer.self_attn, layer.mlp
    width, count = attention.head_dim, len(rows)
    normed = _norm(rows, layer.input_layernorm)
    joined = _product(linears, [attention.q_proj, attention.k_proj, attention.v_proj], normed)
    heads = joined.view(count, -1, width)
    queries, keys = (len(one.weight) // width for one in (attention.q_proj, attention.k_proj))
    turned = heads[:, : queries + keys]
    if "q_norm" in attention._modules:
        parts = turned.split([queries, keys], dim=1)
        norms = attention.q_norm, attention.k_norm
        turned = torch.cat([_norm(*pair) for pair in zip(parts, norms, strict=True)], dim=1)
    cos, sin = (one[0][:, None] for one in turns)
    half = width // 2
    other = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
    turned = ((turned * cos) + (other * sin)).transpose(0, 1)[None]
    values = heads[:, queries + keys :].transpose(0, 1)[None]
    key, value = room.update(turned[:, queries:], values)
    found = passes.attend(turned[:, :queries], key, value, attention.scaling)
    seen = found[0].transpose(0, 1).reshape(count, -1)
    rows = rows + _product(linears, [attention.o_proj], seen)
    normed = _norm(rows, layer.post_attention_layernorm)
    both = _product(linears, [mlp.gate_proj, mlp.up_proj], normed)
    gate, up = both.split(len(mlp.gate_proj.weight), dim=-1)
    gate = in_whole_vectors(functional.silu, gate.reshape(-1, 1)).view(gate.shape)
    return rows + _product(linears, [mlp.down_proj], gate * up)


def _norm(rows: torch.Tensor, norm: Layer) -> torch.Tensor:
    """As the root mean square norm of these models."""
    wide = rows.to(torch.float32)
    mean = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(mean + norm.variance_epsilon)
    normed: torch.Tensor = norm.weight * wide.to(rows.dtype)
    return normed


def _product(
    linears: Linears, layers: Sequence[torch.nn.Linear], rows: torch.Tensor
) -> torch.Tensor:
    """Linear layers that read the same rows, one after another."""
    together = linears.joined(layers, rows)
    if together is not None:
        return together
    found = [linears(rows, layer.weight, layer.bias) for layer in layers]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)
