"""Ways to change a live model that change what it computes, each with the way back.

Every change takes a Qwen3-VL model and returns a function that undoes it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize

Undo = Callable[[], None]
Change = Callable[[Any], Undo]
CHANGES: dict[str, Change] = {}
SCALE = 1.25


def change(function: Change) -> Change:
    """Enter a change in the table."""
    CHANGES[function.__name__] = function
    return function


def attention(model: Any, layer: int = 1) -> Any:
    """The attention of one layer of the language model."""
    return model.get_decoder().layers[layer].self_attn


def _put(thing: Any, name: str, value: Any) -> Undo:
    """Set an attribute of an object's own; the way back leaves it as it was."""
    before = vars(thing).get(name, thing)
    setattr(thing, name, value)

    def undo() -> None:
        if before is thing:
            delattr(thing, name)
        else:
            setattr(thing, name, before)

    return undo


# -- settings ------------------------------------------------------------------------------------


@change
def attention_scaling(model: Any) -> Undo:
    return _put(attention(model), "scaling", attention(model).scaling * 1.5)


@change
def epsilon_of_a_norm(model: Any) -> Undo:
    return _put(model.get_decoder().layers[0].input_layernorm, "variance_epsilon", 0.5)


@change
def epsilon_in_the_tower(model: Any) -> Undo:
    return _put(model.base_model.visual.blocks[0].norm1, "eps", 0.5)


@change
def scaling_through_the_dict(model: Any) -> Undo:
    home = vars(attention(model))
    before = home["scaling"]
    home["scaling"] = before * 1.5
    return lambda: home.__setitem__("scaling", before)


@change
def inverse_frequencies(model: Any) -> Undo:
    rotary = model.get_decoder().rotary_emb
    before = rotary.inv_freq
    rotary.inv_freq = before * 0.5
    return lambda: setattr(rotary, "inv_freq", before)


@change
def frequencies_in_place(model: Any) -> Undo:
    buffer = model.base_model.visual.rotary_pos_emb.inv_freq
    before = buffer.clone()
    buffer.mul_(0.5)

    def undo() -> None:
        buffer.copy_(before)

    return undo


@change
def rope_sections(model: Any) -> Undo:
    rotary = model.get_decoder().rotary_emb
    before = list(rotary.mrope_section)
    rotary.mrope_section[:] = [8, 0, 0]
    return lambda: rotary.mrope_section.__setitem__(slice(None), before)


@change
def deepstack_levels(model: Any) -> Undo:
    visual = model.base_model.visual
    return _put(visual, "deepstack_visual_indexes", [1, 2])


# -- modules -------------------------------------------------------------------------------------


class Doubled(torch.nn.Module):
    """An activation of a user's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2


@change
def another_activation(model: Any) -> Undo:
    mlp = model.get_decoder().layers[0].mlp
    before = mlp.act_fn
    mlp.act_fn = torch.nn.ReLU()
    return lambda: setattr(mlp, "act_fn", before)


@change
def an_activation_of_ones_own(model: Any) -> Undo:
    mlp = model.base_model.visual.blocks[0].mlp
    before = mlp.act_fn
    mlp.act_fn = Doubled()
    return lambda: setattr(mlp, "act_fn", before)


@change
def layers_in_another_order(model: Any) -> Undo:
    layers = model.get_decoder().layers
    first, second = layers[0].mlp, layers[1].mlp
    layers[0].mlp, layers[1].mlp = second, first

    def undo() -> None:
        layers[0].mlp, layers[1].mlp = first, second

    return undo


@change
def a_parametrisation(model: Any) -> Undo:
    layer = attention(model).o_proj
    before = layer.weight.detach().clone()

    class Halved(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 0.5

    parametrize.register_parametrization(layer, "weight", Halved())

    def undo() -> None:
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        assert torch.equal(layer.weight, before)

    return undo


# -- functions -----------------------------------------------------------------------------------


@change
def a_forward_of_its_own(model: Any) -> Undo:
    layer = attention(model).o_proj
    return _put(layer, "forward", lambda x: torch.nn.functional.linear(x, layer.weight) * 0.5)


@change
def a_bound_forward(model: Any) -> Undo:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight) * SCALE

    layer = attention(model).o_proj
    return _put(layer, "forward", types.MethodType(forward, layer))


@change
def a_forward_in_parts(model: Any) -> Undo:
    layer = attention(model).o_proj
    halved = functools.partial(_scaled, layer.forward, scale=0.5)
    return _put(layer, "forward", halved)


def _scaled(forward: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
    scaled: torch.Tensor = forward(x) * scale
    return scaled


@change
def the_forward_of_a_class(model: Any) -> Undo:
    kind: Any = type(model.get_decoder().layers[0].mlp)
    before = kind.forward
    kind.forward = lambda self, x: before(self, x) * 0.5
    return lambda: setattr(kind, "forward", before)


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


@change
def a_hook(model: Any) -> Undo:
    return attention(model).o_proj.register_forward_hook(lambda m, args, out: out * 0.5).remove


@change
def a_hook_before(model: Any) -> Undo:
    layer = attention(model).o_proj
    return layer.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,)).remove


@change
def a_hook_on_the_tower(model: Any) -> Undo:
    visual = model.base_model.visual.blocks[0]
    return visual.register_forward_hook(lambda m, args, out: out * 0.5).remove


@change
def a_hook_with_keywords(model: Any) -> Undo:
    def hook(module: Any, args: Any, options: Any, out: Any) -> Any:
        return out * 0.5

    return attention(model).o_proj.register_forward_hook(hook, with_kwargs=True).remove


class Steering:
    """A hook with a state."""

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def __call__(self, module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out + self.amount


@change
def a_hook_with_a_state(model: Any) -> Undo:
    return model.get_decoder().layers[1].mlp.register_forward_hook(Steering(0.25)).remove


@change
def a_hook_on_all_modules(model: Any) -> Undo:
    def hook(module: Any, args: Any, out: Any) -> Any:
        return out * 1.1 if isinstance(module, torch.nn.LayerNorm) else out

    return register_module_forward_hook(hook).remove


@change
def a_hook_before_all_modules(model: Any) -> Undo:
    def hook(module: Any, args: Any) -> Any:
        return (args[0] * 0.9,) if isinstance(module, torch.nn.LayerNorm) else args

    return register_module_forward_pre_hook(hook).remove


# -- weights -------------------------------------------------------------------------------------


@change
def a_weight_in_place(model: Any) -> Undo:
    weight = attention(model).q_proj.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1.05)

    def undo() -> None:
        weight.data.copy_(before)

    return undo


@change
def a_weight_on_its_side(model: Any) -> Undo:
    """The same bytes at the same place, read the other way."""
    weight = attention(model).o_proj.weight
    before = weight.data
    weight.data = weight.data.t()
    return lambda: setattr(weight, "data", before)


@change
def weights_through_data(model: Any) -> Undo:
    weight = attention(model).q_proj.weight
    before = weight.data.clone()
    weight.data.mul_(1.05)
    return lambda: weight.data.copy_(before)


@change
def new_data_of_a_weight(model: Any) -> Undo:
    weight = attention(model).q_proj.weight
    before = weight.data
    weight.data = before * 1.05
    return lambda: setattr(weight, "data", before)


@change
def a_new_parameter(model: Any) -> Undo:
    layer = attention(model).q_proj
    before = layer.weight
    layer.weight = torch.nn.Parameter(before.detach() * 1.05)
    return lambda: setattr(layer, "weight", before)


@change
def a_state_that_is_loaded(model: Any) -> Undo:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor * 1.01 for name, tensor in before.items()})
    return lambda: model.load_state_dict(before)


@change
def a_layer_in_half_precision(model: Any) -> Undo:
    """A cast of some weights: the sums of this layer are rounded to bfloat16."""
    layer = attention(model).o_proj
    before, forward = layer.weight, type(layer).forward
    layer.weight = torch.nn.Parameter(before.detach().bfloat16())
    back = _put(layer, "forward", lambda x: forward(layer, x.bfloat16()).to(x.dtype))

    def undo() -> None:
        back()
        layer.weight = before

    return undo


@change
def a_tensor_beside_the_weights(model: Any) -> Undo:
    layer = attention(model).o_proj
    factor = torch.full((layer.out_features,), 0.5)
    undo = _put(layer, "factor", factor)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight) * self.factor

    back = _put(layer, "forward", types.MethodType(forward, layer))

    def both() -> None:
        back()
        undo()

    return both


# -- configuration -------------------------------------------------------------------------------


@change
def another_attention(model: Any) -> Undo:
    model.set_attn_implementation("eager")
    return lambda: model.set_attn_implementation("sdpa")
