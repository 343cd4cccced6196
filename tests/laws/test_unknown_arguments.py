"""What stands in the place of something of Transformers' refuses an argument that it does not know.

As a newer Transformers would hand it over: passed over in silence it could be a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keepsight.core.decoding.state import LaneLayer
from keepsight.errors import UnsupportedInput, UpstreamChanged
from keepsight.export.graphs import towers, tracing
from keepsight.models import upstream
from keepsight.runtimes import modules

X = torch.zeros(1, 2, 4, 8)
LAYER: Any = SimpleNamespace(layer_idx=0)


def cache() -> tracing.TracedCache:
    """A traced cache of one layer."""
    states = [dict.fromkeys(("k", "v", "conv", "recurrent"), X)]
    found = tracing.TracedCache(states, [torch.tensor([[0]])], False)
    tracing.begin(found)
    return found


def graph(*inputs: str) -> Any:
    """A graph that must not be run."""
    return SimpleNamespace(inputs=frozenset(inputs))


def whole_tower() -> modules.WholeTowerStandIn:
    return modules.WholeTowerStandIn(graph(), SimpleNamespace(vision_feature_layer=-2))


def decoder() -> modules.DecoderStandIn:
    shape: Any = SimpleNamespace(kinds=())
    return modules.DecoderStandIn(graph(), SimpleNamespace(config=None), shape, True, True)


def deepstack(*arguments: Any, **options: Any) -> Any:
    owner: Any = SimpleNamespace(_deepstack_process=deepstack)
    ((_, _, process),) = upstream.deepstack_with(owner, lambda hidden, features: hidden)
    return process(*arguments, **options)


def packed_tower(*arguments: Any, **options: Any) -> Any:
    tower: Any = SimpleNamespace()
    return modules.PackedTowerStandIn(graph(), tower, tower, 8)(*arguments, **options)


RULE = {"initial_state": X, "use_qk_l2norm_in_kernel": True}
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "in rooms": (tracing._in_buffers, (LAYER, X, X, X, None), {"scaling": 1.0}),
    "delta rule": (tracing.delta_rule, (X, X, X, X, X), RULE),
    "deepstack": (deepstack, (X, X, X), {}),
    "tower in a graph": (towers._forward(0, True), (None, X, X, (X, X)), {}),
    "length of a lane": (LaneLayer().get_seq_length, (), {}),
    "masks of a lane": (LaneLayer().get_mask_sizes, (1,), {}),
    "embedding": (modules.EmbeddingStandIn(graph(), 8), (X,), {}),
    "head": (modules.HeadStandIn(graph()), (X,), {}),
    "packed tower": (packed_tower, (X, X), {}),
    "whole tower": (whole_tower(), (X,), {"vision_feature_layer": -2}),
    "decoder": (decoder(), (), {"inputs_embeds": X}),
}
POSITIONAL = [name for name in CALLS if name not in ("fused", "joined")]


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_is_not_known_is_refused_by_name(name: str) -> None:
    cache()
    call, arguments, options = CALLS[name]
    with pytest.raises(UpstreamChanged, match="transformers .* passes an argument 'new_in_6'"):
        call(*arguments, **options, new_in_6=0.5)


@pytest.mark.parametrize("name", POSITIONAL)
def test_one_argument_more_is_refused(name: str) -> None:
    cache()
    call, arguments, options = CALLS[name]
    with pytest.raises(UpstreamChanged, match="passes 1 arguments more to"):
        call(*arguments, 0.5, **options)


def test_settings_that_were_traced_otherwise_are_refused() -> None:
    with pytest.raises(UpstreamChanged, match="'vision_feature_layer'"):
        whole_tower()(X, vision_feature_layer=-1)
    with pytest.raises(UpstreamChanged, match="use_qk_l2norm_in_kernel=False"):
        tracing.delta_rule(X, X, X, X, X, initial_state=X)
    with pytest.raises(UnsupportedInput, match="output_hidden_states"):
        whole_tower()(X, output_hidden_states=True)
    with pytest.raises(UnsupportedInput, match="embeddings, not ids"):
        decoder()(input_ids=X, inputs_embeds=X)
