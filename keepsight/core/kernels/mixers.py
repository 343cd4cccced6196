"""Layers with a state of fixed size, computed so that no row depends on where a prompt is cut.

Gated delta rules are computed on a grid (`keepsight.core.kernels.delta`); convolutions are added
term by term. Two layer types of Transformers are known. In our passes, on layers of lanes, this
module computes them; everywhere else their own code does.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional

from keepsight.core.kernels import passes
from keepsight.core.kernels.delta import DeltaHeads, GridState, OpenSequence
from keepsight.core.kernels.elementwise import in_whole_vectors
from keepsight.models.renamed import NEW, OLD
from keepsight.models.silence import without_notes
from keepsight.models.upstream import activation

Layer = Any  # a layer of Transformers and the arguments of its call
_ROWS = 64  # tokens of a convolution at a time
_TRIED = 80  # tokens, more than a chunk of the grid
_OFF = 1e-4  # of the scale: float32 rounding
_MILD = -4.0  # decay in a trial: little of a state is lost from one chunk to the next


class MixerState(Protocol):
    """The state of one layer in one lane."""

    ends: Sequence[int]  # tokens of the pass after which its state is captured too
    found: dict[int, tuple[torch.Tensor, GridState | None]]

    def opened(self, heads: DeltaHeads) -> OpenSequence:
        """The sequence at its current end."""

    def inputs(self) -> torch.Tensor | None:
        """The last inputs of the convolution, channels x inputs."""

    def take(self, inputs: torch.Tensor) -> None:
        """Replace these inputs."""


StateRows = tuple[MixerState, int, int]  # a lane's state, and the rows of its tokens in a pass


def convolve(
    state: MixerState, rows: torch.Tensor, layer: torch.nn.Conv1d
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """A causal convolution of each channel over new rows, and its last inputs after each end."""
    weight, bias = layer.weight[:, 0], layer.bias
    size, count = weight.shape[-1], len(rows)
    held = state.inputs()
    before = rows.new_zeros(size, rows.shape[1]) if held is None else held.T
    everything = torch.cat([before, rows])
    factors = weight.float().T.contiguous()  # one row per place
    pieces = []
    for start in range(0, count, _ROWS):
        stop = min(start + _ROWS, count)
        inputs = everything[start + 1 : stop + size].float()
        total = inputs[: stop - start] * factors[0]
        for place in range(1, size):
            total += inputs[place : place + stop - start] * factors[place]
        if bias is not None:
            total += bias.float()
        pieces.append(total.to(rows.dtype))
    state.take(everything[count:].T.contiguous())
    inputs_at = {end: everything[end : end + size].T.contiguous() for end in state.ends}
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces), inputs_at


# -- layers of Transformers -----------------------------------------------------------------------


def _gated_delta(module: Layer, hidden: torch.Tensor, parts: Sequence[StateRows]) -> torch.Tensor:
    """A gated delta rule, with queries, keys and values from a convolution."""
    heads = DeltaHeads(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)
    hidden = hidden[0]
    each = (len(hidden), heads.values)
    mixed, gates = module.in_proj_qkv(hidden), module.in_proj_z(hidden)
    rates = (
        in_whole_vectors(torch.sigmoid, module.in_proj_b(hidden).reshape(-1, 1)).view(each).float()
    )
    steps = module.in_proj_a(hidden).float() + module.dt_bias
    steps = in_whole_vectors(functional.softplus, steps.reshape(-1, 1)).view(each)
    decays = -module.A_log.float().exp() * steps
    found = []
    for state, start, stop in parts:
        inputs, last = convolve(state, mixed[start:stop], module.conv1d)
        inputs = in_whole_vectors(activation(module.activation), inputs).float()
        queries, rest = inputs.split([heads.parts[0], sum(heads.parts[:2])], dim=-1)
        rows = torch.cat([rest, decays[start:stop], rates[start:stop]], dim=-1)
        read, at_ends = state.opened(heads).advance(queries, rows, state.ends)
        state.found = {end: (inputs_at, at_ends[end]) for end, inputs_at in last.items()}
        found.append(read.to(hidden.dtype))
    passes.note_mixer(heads)
    width = heads.value_width
    flat = in_whole_vectors(
        module.norm, torch.cat(found).reshape(-1, width), gates.reshape(-1, width)
    )
    result: torch.Tensor = module.out_proj(flat.reshape(1, len(hidden), -1))
    return result


def _short_convolution(
    module: Layer, hidden: torch.Tensor, parts: Sequence[StateRows]
) -> torch.Tensor:
    """A convolution between two gates."""
    before, behind, values = module.in_proj(hidden).chunk(3, dim=-1)
    inputs, found = (before * values)[0], []
    for state, start, stop in parts:
        out, last = convolve(state, inputs[start:stop], module.conv)
        state.found = {end: (inputs_at, None) for end, inputs_at in last.items()}
        found.append(out)
    passes.note_mixer(None)
    result: torch.Tensor = module.out_proj(behind * torch.cat(found)[None])
    return result


_Ours = Callable[[Layer, torch.Tensor, Sequence[StateRows]], torch.Tensor]
_KNOWN: dict[str, _Ours] = {
    "transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet": _gated_delta,
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet": _gated_delta,
    "transformers.models.lfm2.modeling_lfm2.Lfm2ShortConv": _short_convolution,
}
# Elementwise functions for which the last numbers round differently.
_ACTIVATIONS = {
    ("torch.nn.modules.activation", "GELU"),
    ("transformers.activations", "GELUTanh"),
    ("transformers.activations", "GELUActivation"),
}
_begun: set[type] = set()


def begin(model: torch.nn.Module) -> None:
    """Wrap the code of these layers: once per class, before it is first inspected."""
    for kind in {type(module) for module in model.modules()} - _begun:
        ours = _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")
        if ours is not None:
            _begun.add(kind)
            kind.forward = _put_before(kind.forward, ours)  # type: ignore[attr-defined]
        elif (kind.__module__, kind.__qualname__) in _ACTIVATIONS:
            _begun.add(kind)
            kind.forward = _in_whole_vectors(kind.forward)  # type: ignore[attr-defined]


def are_upstreams(model: torch.nn.Module, begin_state: Callable[[], MixerState]) -> bool:
    """Whether our code for the known layers gives what their own code gives."""
    seen = []
    for layer in model.modules():
        ours = _KNOWN.get(f"{type(layer).__module__}.{type(layer).__qualname__}")
        if ours is None:
            continue
        settings = {name: v for name, v in vars(layer).items() if name[0] != "_"}
        shapes = [weight.shape for weight in layer.parameters()]
        alike = (type(layer), settings | {"layer_idx": None}, shapes)
        if alike not in seen:
            seen.append(alike)
            if not _is_upstreams(layer, ours, begin_state()):
                return False
    return True


class _Gates(torch.nn.Module):
    """Replaces a norm, which would hide any constant factor."""

    def forward(self, rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return rows * gates


def _is_upstreams(layer: Layer, ours: _Ours, state: MixerState) -> bool:
    """Compare in float32, whatever the dtype of the layer: with fewer digits a rule that is wrong
    by one percent looks like rounding. Half of the heads forget so little that two chunks
    matter."""
    wide = copy.deepcopy(layer).float()
    if hasattr(wide, "A_log"):
        wide.norm = _Gates()
        wide.A_log.data[::2] = _MILD
    width, generator = wide.out_proj.out_features, torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _TRIED, width, generator=generator)
    with without_notes():  # that its code is slow concerns nobody: ours runs in its place
        found = ours(wide, hidden, [(state, 0, _TRIED)])
        wanted = wide(hidden_states=hidden)
    return bool((found - wanted).abs().max() <= _OFF * wanted.abs().max())


def _in_whole_vectors(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def forward(self: Layer, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or not passes.is_running():
            return stock(self, input)
        with passes.inside():
            return in_whole_vectors(functools.partial(stock, self), input.reshape(-1, 1)).view(
                input.shape
            )

    return forward


def _put_before(stock: Callable[..., torch.Tensor], ours: _Ours) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def forward(self: Layer, *given: object, **named: Layer) -> torch.Tensor:
        if torch.compiler.is_compiling() or given or not passes.is_running():
            return stock(self, *given, **named)
        cache = next((named[name] for name in ("cache_params", NEW, OLD) if name in named), None)
        layer = cache.layers[self.layer_idx] if cache else None
        parts = getattr(layer, "parts", None)
        if parts is None:
            return stock(self, **named)
        hidden, mask = named["hidden_states"], named.get("attention_mask")
        if mask is not None:
            hidden = (hidden * mask[:, -hidden.shape[1] :, None]).to(hidden.dtype)
        with passes.inside():
            return ours(self, hidden, parts(hidden.shape[1]))

    return forward
