"""Names and sizes of an exported decoder's input and output states, shared by the code that makes a
graph and the code that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BIAS, SLIDING_BIAS = "bias", "sliding_bias"
# The places of new rows in the buffers of a layer's keys and values.
PLACES, SLIDING_PLACES = "places", "sliding_places"
PRESENT = "present"  # for linear layers: 1 for a token, 0 for padding

_STATES = {"full": ("k", "v"), "sliding": ("k", "v"), "linear": ("conv", "recurrent")}
KINDS = frozenset(_STATES)  # of layers that can be exported


def state_names(kind: str) -> tuple[str, ...]:
    """The input and output states of a layer of one kind."""
    return _STATES[kind]


def deepstack(level: int) -> str:
    """The input for one level of features added after early layers."""
    return f"deepstack_{level}"


def state(name: str, layer: int) -> str:
    """The input for one state of a layer."""
    return f"{name}_{layer}"


def new_state(name: str, layer: int) -> str:
    """The output for one state of a layer: whole, or only its new rows."""
    return f"new_{name}_{layer}"


def state_sizes(decoder: PreTrainedModel, layer: int, kind: str) -> dict[str, tuple[int, ...]]:
    """The sizes of one row's states of a layer; 0 where it grows with the tokens."""
    config = decoder.config
    if kind == "linear":
        part = decoder.layers[layer].linear_attn
        recurrent = (part.num_v_heads, part.head_k_dim, part.head_v_dim)
        return {"conv": (part.conv_dim, part.conv_kernel_size), "recurrent": recurrent}
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = (config.num_key_value_heads, 0, width)
    return {"k": heads, "v": heads}
