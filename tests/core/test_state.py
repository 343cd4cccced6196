"""Capture and restore equal recompute, for every kind of layer that is supported.

The suite itself is in `support`; here it meets tiny models with random weights.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from support import StateTests
from transformers import DynamicCache, PreTrainedModel

from keepsight.core.decoding.state import Shape
from keepsight.errors import UnsupportedModel

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@functools.cache
def build(name: str, dtype: torch.dtype, *kinds: str, **options: Any) -> PreTrainedModel:
    """A tiny model with weights so large that each token it saw shows in its logits."""
    torch.manual_seed(0)
    if kinds:
        options["layer_types"] = [f"{kind}_attention" if kind != "conv" else kind for kind in kinds]
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **options})
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, 1.5 / weight.shape[1] ** 0.5)
    return model.to(dtype).eval()


def suite(*made: Any, **options: Any) -> type[StateTests]:
    """The suite for a model of such layers."""
    return type("Suite", (StateTests,), {"make_model": lambda self: build(*made, **options)})


TestFull = suite("Llama", torch.float32)
TestFullInBfloat16 = suite("Llama", torch.bfloat16)
# The window is shorter than the prompt, and longer than its first chunk.
TestSliding = suite("Mistral", torch.float32, sliding_window=10)
TestSlidingAndFull = suite("Gemma3Text", torch.float32, "sliding", "full", sliding_window=6)
TestLinearAndFull = suite("Qwen3_5Text", torch.float32, "linear", "full", **LINEAR)
TestLinearAndFullInBfloat16 = suite("Qwen3_5Text", torch.bfloat16, "linear", "full", **LINEAR)
TestConvolutionAndFull = suite("Lfm2", torch.float32, "conv", "full")


class TestKeysWiderThanValues(StateTests):
    """Rows of two shapes cannot be kept in one stack."""

    def make_model(self) -> PreTrainedModel:
        sizes = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
        ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4}
        return build("DeepseekV3", torch.float32, first_k_dense_replace=2, **sizes, **ranks)

    def test_the_rows_really_differ(self) -> None:
        model = self.make_model()
        _, snapshots = self.cold(model, self.ids(model), self.lane(model))
        assert set(snapshots[0][2]) == {"0.k", "0.v", "1.k", "1.v"}


def test_kinds_are_read_off_the_cache_that_upstream_builds() -> None:
    assert Shape.of(TestFull().make_model()).kinds == ("full", "full")
    assert Shape.of(TestSlidingAndFull().make_model()).kinds == ("sliding", "full")
    assert Shape.of(TestLinearAndFull().make_model()).kinds == ("linear", "full")
    assert not Shape.of(TestFull().make_model()).has_states
    assert not Shape.of(TestSliding().make_model()).has_states
    assert Shape.of(TestLinearAndFull().make_model()).has_states


def test_kinds_that_nobody_has_shown_exact_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Novel(transformers.cache_utils.DynamicLayer):
        pass

    def cache(config: Any) -> Any:
        return type("Cache", (), {"layers": [*layers, Novel()]})

    layers = DynamicCache(config=TestFull().make_model().config).layers
    monkeypatch.setattr("keepsight.core.decoding.state.DynamicCache", cache)
    with pytest.raises(UnsupportedModel, match="Novel"):
        Shape.of(TestFull().make_model())
    layers.clear()
    monkeypatch.setattr(
        "keepsight.core.decoding.state.DynamicCache", lambda config: type("C", (), {"layers": []})
    )
    with pytest.raises(UnsupportedModel, match="none"):
        Shape.of(TestFull().make_model())
