"""Tests that ask for more than an Intel processor with AVX2 only gives.

There products of 32 rows and of 128 add in another order, so gated delta rules are equal
to rounding (docs/exactness.md), plain weights with several threads too, and attention takes its
queries in one way only. Held down to AVX2, a larger processor does the same:

    MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 make test
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

_CPUINFO = Path("/proc/cpuinfo")
_HYBRIDS = ("qwen3_5", "minicpmv4_6")
# Names of tests, and what stands in the brackets behind them; all of them where nothing is named.
ASK_FOR_MORE: dict[str, tuple[str, ...]] = {
    "test_it_holds_for": _HYBRIDS,
    "test_a_matrix_unit_that_takes_few_rows_in_one_way_is_given_few": ("bf16",),
    "test_threads_that_share_numbers_leave_none_over": (),
    "test_a_model_is_tried_once_for_a_store": _HYBRIDS,
    "test_the_delta_rule_gives_rows_that_do_not_depend_on_the_cut": (),
    "test_prompts_that_part_anywhere": _HYBRIDS,
    "test_what_was_decoded_is_not_computed_again": _HYBRIDS,
    "test_rows_of_a_batch_have_the_bits_they_have_alone": _HYBRIDS,
    "test_other_layers_under_a_known_name_mean_rounding": (),
    "test_rows_are_filled_up_to_what_gives_equal_bits": ("8]", "16]", "32]"),
    "test_each_kind_of_attention_has_its_own": (),
    "test_random_conversations": _HYBRIDS,
    "test_delete_means_gone_from_every_tier": ("demo-hybrid",),
    "test_a_session_is_of_the_tenant_that_resumes_it": ("demo-hybrid",),
}


def is_here() -> bool:
    """Whether this is such a processor, or one held down to it."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2" or not _CPUINFO.exists():
        return False
    return "GenuineIntel" in _CPUINFO.read_text()


def skip_what_asks_for_more(items: list[pytest.Item]) -> None:
    """Mark these tests, where they cannot pass."""
    for item in items if is_here() else ():
        name, _, case = item.name.partition("[")
        wanted = ASK_FOR_MORE.get(name)
        if wanted is not None and (not wanted or any(one in case for one in wanted)):
            item.add_marker(pytest.mark.skip(reason="Intel's AVX2 adds in other orders"))
