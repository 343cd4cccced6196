"""Ways to change a live model that change what it computes, each with the way back.

Every change takes a Qwen3-VL model and returns a function that undoes it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize

Undo = Callable[[], object]
Change = Callable[[Any], Undo]
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    """Enter a change in the table."""
    CHANGES[function.__name__] = function
    return function


def attention(model: Any, layer: int = 1) -> Any:
    """The attention of one layer of the language model."""
    return model.get_decoder().layers[layer].self_attn


def put(thing: Any, name: str, value: Any) -> Undo:
    """Set an attribute; the way back leaves the object's own ones as they were."""
    own = name in vars(thing) or isinstance(thing, type)
    before = getattr(thing, name)
    setattr(thing, name, value)
    own |= isinstance(before, torch.Tensor | torch.nn.Module)
    return lambda: setattr(thing, name, before) if own else delattr(thing, name)


def kept(tensor: torch.Tensor, deed: Callable[[torch.Tensor], object]) -> Undo:
    """Do something to the values of a tensor; the way back copies them."""
    before = tensor.detach().clone()
    with torch.no_grad():
        deed(tensor)
    return lambda: tensor.data.copy_(before)


# -- settings ------------------------------------------------------------------------------------

CHANGES |= {
    "attention_scaling": lambda m: put(attention(m), "scaling", attention(m).scaling * 1.5),
    "epsilon_of_a_norm": lambda m: put(
        m.get_decoder().layers[0].input_layernorm, "variance_epsilon", 0.5
    ),
    "epsilon_in_the_tower": lambda m: put(m.base_model.visual.blocks[0].norm1, "eps", 0.5),
    "deepstack_levels": lambda m: put(m.base_model.visual, "deepstack_visual_indexes", [1, 2]),
    "inverse_frequencies": lambda m: put(
        m.get_decoder().rotary_emb, "inv_freq", m.get_decoder().rotary_emb.inv_freq * 0.5
    ),
    "frequencies_in_place": lambda m: kept(
        m.base_model.visual.rotary_pos_emb.inv_freq, lambda values: values.mul_(0.5)
    ),
}


@change
def scaling_through_the_dict(model: Any) -> Undo:
    home = vars(attention(model))
    before = home["scaling"]
    home["scaling"] = before * 1.5
    return lambda: home.__setitem__("scaling", before)


@change
def rope_sections(model: Any) -> Undo:
    sections = model.get_decoder().rotary_emb.mrope_section
    before = list(sections)
    sections[:] = [8, 0, 0]
    return lambda: sections.__setitem__(slice(None), before)


@change
def another_attention(model: Any) -> Undo:
    model.set_attn_implementation("eager")
    return lambda: model.set_attn_implementation("sdpa")


# -- modules -------------------------------------------------------------------------------------


class Doubled(torch.nn.Module):
    """An activation of a user's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2


CHANGES |= {
    "another_activation": lambda m: put(m.get_decoder().layers[0].mlp, "act_fn", torch.nn.ReLU()),
    "an_activation_of_ones_own": lambda m: put(
        m.base_model.visual.blocks[0].mlp, "act_fn", Doubled()
    ),
}


@change
def layers_in_another_order(model: Any) -> Undo:
    layers = model.get_decoder().layers
    first, second = layers[0].mlp, layers[1].mlp

    def placed(one: Any, other: Any) -> None:
        layers[0].mlp, layers[1].mlp = one, other

    placed(second, first)
    return lambda: placed(first, second)


@change
def decoder_layers_in_another_order(model: Any) -> Undo:
    layers = model.get_decoder().layers

    def exchange() -> None:
        layers[0], layers[1] = layers[1], layers[0]

    exchange()
    return exchange


@change
def halves_of_a_gated_layer(model: Any) -> Undo:
    mlp = model.get_decoder().layers[1].mlp

    def exchange() -> None:
        mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj

    exchange()
    return exchange


@change
def another_head(model: Any) -> Undo:
    usual = model.lm_head
    return put(model, "lm_head", torch.nn.Linear(usual.in_features, usual.out_features, bias=False))


@change
def a_parametrisation(model: Any) -> Undo:
    layer = attention(model).o_proj

    class Halved(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 0.5

    parametrize.register_parametrization(layer, "weight", Halved())
    return lambda: parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


# -- functions -----------------------------------------------------------------------------------


def _halved(forward: Any, *given: Any, **named: Any) -> torch.Tensor:
    found: torch.Tensor = forward(*given, **named) * 0.5
    return found


@change
def a_forward_of_its_own(model: Any) -> Undo:
    layer = attention(model).o_proj
    return put(layer, "forward", lambda x: linear(x, layer.weight) * 0.5)


@change
def a_bound_forward(model: Any) -> Undo:
    """With a tensor beside the weights."""
    layer = attention(model).o_proj
    layer.factor = torch.full((layer.out_features,), 0.5)
    forward = types.MethodType(lambda self, x: linear(x, self.weight) * self.factor, layer)
    back = put(layer, "forward", forward)

    def undo() -> None:
        back()
        del layer.factor

    return undo


@change
def a_forward_in_parts(model: Any) -> Undo:
    layer = attention(model).o_proj
    return put(layer, "forward", functools.partial(_halved, layer.forward))


@change
def the_forward_of_a_decoder_layer(model: Any) -> Undo:
    layer = model.get_decoder().layers[1]
    return put(layer, "forward", functools.partial(_halved, layer.forward))


@change
def the_forward_of_a_class(model: Any) -> Undo:
    kind: Any = type(model.get_decoder().layers[0].mlp)
    before = kind.forward
    return put(kind, "forward", lambda self, x: _halved(before, self, x))


@change
def the_table_of_attention(model: Any) -> Undo:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

    before = TABLE["sdpa"]

    def halved(*args: Any, **options: Any) -> Any:
        found, weights = before(*args, **options)
        return found * 0.5, weights

    TABLE["sdpa"] = halved
    return lambda: TABLE.__delitem__("sdpa")


# -- hooks ---------------------------------------------------------------------------------------


class Steering:
    """A hook with a state."""

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def __call__(self, module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out + self.amount


def _halves(module: Any, args: Any, out: Any) -> Any:
    return out * 0.5


def _less_for_norms(module: Any, args: Any, out: Any = None) -> Any:
    given = args if out is None else out
    if not isinstance(module, torch.nn.LayerNorm):
        return given
    return (args[0] * 0.9,) if out is None else out * 1.1


CHANGES |= {
    "a_hook": lambda m: attention(m).o_proj.register_forward_hook(_halves).remove,
    "a_hook_before": lambda m: (
        attention(m).o_proj.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,)).remove
    ),
    "a_hook_on_the_tower": lambda m: (
        m.base_model.visual.blocks[0].register_forward_hook(_halves).remove
    ),
    "a_hook_with_keywords": lambda m: (
        attention(m)
        .o_proj.register_forward_hook(lambda m, args, how, out: out * 0.5, with_kwargs=True)
        .remove
    ),
    "a_hook_on_a_decoder_layer": lambda m: (
        m.get_decoder().layers[1].register_forward_hook(_halves).remove
    ),
    "a_hook_on_the_positions": lambda m: (
        m.get_decoder()
        .rotary_emb.register_forward_hook(lambda m, args, out: (out[0] * 1.3, out[1]))
        .remove
    ),
    "a_hook_with_a_state": lambda m: (
        m.get_decoder().layers[1].mlp.register_forward_hook(Steering(0.25)).remove
    ),
    "a_hook_on_all_modules": lambda m: register_module_forward_hook(_less_for_norms).remove,
    "a_hook_before_all_modules": lambda m: register_module_forward_pre_hook(_less_for_norms).remove,
}


# -- weights -------------------------------------------------------------------------------------

CHANGES |= {
    "a_weight_in_place": lambda m: kept(attention(m).q_proj.weight, lambda w: w.mul_(1.05)),
    "a_norm_in_place": lambda m: kept(
        m.get_decoder().layers[1].post_attention_layernorm.weight, lambda w: w.mul_(2.0)
    ),
    "weights_through_data": lambda m: kept(attention(m).q_proj.weight, lambda w: w.data.mul_(1.05)),
    # The same bytes at the same place, read the other way.
    "a_weight_on_its_side": lambda m: put(
        attention(m).o_proj.weight, "data", attention(m).o_proj.weight.data.t()
    ),
    "new_data_of_a_weight": lambda m: put(
        attention(m).q_proj.weight, "data", attention(m).q_proj.weight.data * 1.05
    ),
    "a_new_parameter": lambda m: put(
        attention(m).q_proj, "weight", torch.nn.Parameter(attention(m).q_proj.weight * 1.05)
    ),
}


@change
def a_state_that_is_loaded(model: Any) -> Undo:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor * 1.01 for name, tensor in before.items()})
    return lambda: model.load_state_dict(before)


@change
def a_layer_in_half_precision(model: Any) -> Undo:
    """A cast of some weights: the sums of this layer are rounded to bfloat16."""
    layer = attention(model).o_proj
    back = put(layer, "weight", torch.nn.Parameter(layer.weight.detach().bfloat16()))
    forward = functools.partial(type(layer).forward, layer)
    own = put(layer, "forward", lambda x: forward(x.bfloat16()).to(x.dtype))

    def undo() -> None:
        own()
        back()

    return undo
