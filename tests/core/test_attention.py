"""Grouped queries are read in place in our own passes, and nobody else's pass is touched."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.common import in_threads
from support.models import build, picture, turn
from transformers.integrations import sdpa_attention

import keepsight as ks
from keepsight.core.kernels import passes
from keepsight.core.kernels.passes import grouped_queries

CPU = torch.device("cpu")


def asked() -> bool:
    """What upstream's attention would be told now, with a mask: by itself it would copy."""
    mask, heads = torch.zeros(1, 1, 2, 4), torch.zeros(1, 2, 4, 8)
    return sdpa_attention.use_gqa_in_sdpa(mask, heads, heads)


def test_only_the_thread_whose_pass_it_is_reads_in_place() -> None:
    """A variable of the process would also change a pass that another thread is in."""
    heard: list[bool] = []
    assert not asked()
    with grouped_queries(CPU):
        assert asked()
        with grouped_queries(CPU):
            assert asked()
        assert asked()
        in_threads(lambda: heard.append(asked()))
    assert not asked() and heard == [False]


def test_an_error_in_a_pass_ends_it() -> None:
    with pytest.raises(RuntimeError), grouped_queries(CPU):
        raise RuntimeError
    assert not asked()


def test_an_accelerator_keeps_its_copies() -> None:
    with grouped_queries(torch.device("meta")):
        assert not asked()


def test_the_variable_of_upstream_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    assert asked()


def test_a_turn_copies_no_keys_and_leaves_the_environment_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Changing the environment moves memory that C code of other threads reads without a lock."""
    passes.begin()  # else it would put ours over what is put there here
    copied: list[Any] = []
    seen: list[bool] = []
    repeat, sdpa = sdpa_attention.repeat_kv, torch.nn.functional.scaled_dot_product_attention

    def counted(states: torch.Tensor, times: int) -> torch.Tensor:
        copied.append(states.shape)
        return repeat(states, times)

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        seen.append("TRANSFORMERS_SDPA_FORCE_GQA" in os.environ)
        return sdpa(*args, **options)

    model, processor = build("qwen3_vl")
    monkeypatch.setattr(sdpa_attention, "repeat_kv", counted)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    with ks.wrap(model, processor) as vlm:
        messages = [turn("Look at this picture.", picture(1))]
        vlm.chat(messages, max_new_tokens=2)
        vlm.chat([*messages, turn("Fine.", role="assistant"), turn("Why?")], max_new_tokens=2)
    assert not copied, "upstream asks elsewhere now; see keepsight/core/kernels/passes.py"
    assert seen and not any(seen)
