"""Decoder layers of the Llama kind without their modules: the same operations in the same order.

A small model spends a third of a token between its modules. Here a layer is one function: queries,
keys and values come from one product, and both are normed and turned together. It runs in the place
of the layer's own code in passes with our kernels, where a check at load has shown equal bits, and
where nobody listens at the layer's parts.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.jit import optimized_execution  # type: ignore[attr-defined]
from torch.nn import functional

from keepsight.core.kernels import passes
from keepsight.core.kernels.elementwise import fills_vectors, in_whole_vectors
from keepsight.core.kernels.linear import Linears, hooks_on_all
from keepsight.models.renamed import NEW, OLD
from keepsight.models.upstream import SILENT_HOOKS

Layer = Any  # a module of Transformers and the arguments of its call
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
_MLP = ("gate_proj", "up_proj", "down_proj")
_begun: set[type] = set()


def begin(model: torch.nn.Module) -> None:
    """Wrap the code of such layers: once per class, before it is first inspected."""
    for kind in {type(module) for module in model.modules() if is_llamas(module)} - _begun:
        _begun.add(kind)
        kind.forward = _put_before(kind.forward)  # type: ignore[attr-defined]


def are_in(model: torch.nn.Module) -> bool:
    """Whether a model has such layers."""
    return any(is_llamas(module) for module in model.modules())


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


def _put_before(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    known: weakref.WeakKeyDictionary[torch.nn.Module, Parts] = weakref.WeakKeyDictionary()

    @functools.wraps(stock)
    def forward(
        self: Layer, hidden_states: torch.Tensor, *given: Layer, **named: Layer
    ) -> torch.Tensor:
        linears = None if torch.compiler.is_compiling() else passes.for_whole_layers()
        turns = named.get("position_embeddings")
        if linears is None or given or turns is None or turns[0].dim() != 3:
            return stock(self, hidden_states, *given, **named)
        parts = known.get(self)
        if parts is None or not parts.stand():
            if not is_llamas(self):
                return stock(self, hidden_states, **named)
            parts = known[self] = Parts(self)
        cache = next((named[name] for name in (NEW, OLD) if named.get(name) is not None), None)
        room = None if cache is None else cache.layers[parts.attention.layer_idx]
        fits = hasattr(room, "edges") and turns[0].shape[-1] == parts.width
        if not fits or not parts.stand():
            return stock(self, hidden_states, **named)
        with passes.inside(), optimized_execution(False):  # fuse nothing
            return _layer(parts, hidden_states[0], turns, room, linears)[None]

    return forward


def _layer(
    parts: Parts, rows: torch.Tensor, turns: Sequence[torch.Tensor], room: Layer, linears: Linears
) -> torch.Tensor:
    work, count = _scripts(), len(rows)
    size = size_of(rows.shape[1], parts.first.variance_epsilon)
    normed = work.norm(rows, parts.first.weight, size)
    joined = _product(linears, parts.qkv, normed)
    weights = [norm.weight for norm in parts.norms]
    of_heads = size_of(parts.width, parts.norms[0].variance_epsilon) if weights else []
    sizes = [parts.queries, parts.keys, parts.width]
    query, key, value = work.heads(joined, sizes, weights, of_heads, turns[0], turns[1])
    key, value = room.update(key, value)
    found = passes.attend(query, key, value, parts.attention.scaling)
    seen = _product(linears, [parts.attention.o_proj], found[0].transpose(0, 1).reshape(count, -1))
    size = size_of(rows.shape[1], parts.second.variance_epsilon)
    rows, normed = work.add_and_norm(rows, seen, parts.second.weight, size)
    both = _product(linears, parts.both, normed)
    gate, up = both.split(parts.both[0].out_features, dim=-1)
    if fills_vectors(gate.numel()):
        gated = work.gate(gate, up)
    else:
        gate = in_whole_vectors(functional.silu, gate.reshape(-1, 1)).view(gate.shape)
        gated = gate * up
    return rows + _product(linears, parts.down, gated)


# -- what lies between the products, without Python between its operations -------------------------


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


def _gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate.contiguous()) * up


class Scripts(NamedTuple):
    norm: Callable[..., torch.Tensor]
    add_and_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    heads: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    gate: Callable[..., torch.Tensor]


@functools.cache
def _scripts() -> Scripts:
    """These functions as scripts. Torch would rather have them compiled, which fuses, and changes
    bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = [torch.jit.script(one) for one in (norm, add_and_norm, turn_heads, _gate)]
    return Scripts(*made)


def _product(
    linears: Linears, layers: Sequence[torch.nn.Linear], rows: torch.Tensor
) -> torch.Tensor:
    """Linear layers that read the same rows, one after another."""
    together = linears.joined(layers, rows)
    if together is not None:
        return together
    found = [linears(rows, layer.weight, layer.bias) for layer in layers]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)
