"""Switches of a process or a thread that change bits: warm answers are those of a fresh wrap.

A lane, a snapshot or a package made under one setting must not serve under another, in any order.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.answers import cold, logits
from support.common import in_threads
from support.hostile import finished, start
from support.models import build, picture, turn
from torch.nn.attention import SDPBackend, sdpa_kernel

import keepsight as ks
from keepsight.errors import ModelError
from keepsight.models import switches

FIRST = [turn("What do you see in this picture here?", picture(1))]
SECOND = [*FIRST, turn("A pattern.", role="assistant"), turn("And this one?", picture(2))]
OTHERS = [[turn(f"Please tell me number {i}: what is in it?", picture(1))] for i in range(4)]
Switch = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def set_to(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


def mkldnn(**flags: Any) -> Switch:
    return lambda: torch.backends.mkldnn.flags(**{"enabled": True, **flags})


SWITCHES: dict[str, Switch] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "math attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "order of attention": lambda: sdpa_kernel(
        [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True
    ),
    "no mkldnn": mkldnn(enabled=False),
    "mkldnn deterministic": mkldnn(deterministic=True),
    "deterministic": lambda: set_to(torch.use_deterministic_algorithms, True, False),
    "deterministic fill": lambda: set_to(
        lambda v: setattr(torch.utils.deterministic, "fill_uninitialized_memory", v), False, True
    ),
    "default dtype": lambda: set_to(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda: torch.device("cpu"),
    "flush denormals": lambda: set_to(torch.set_flush_denormal, True, False),
    "matmul precision": lambda: set_to(torch.set_float32_matmul_precision, "medium", "highest"),
    "conv precision": lambda: set_to(
        lambda v: setattr(torch.backends.mkldnn.conv, "fp32_precision", v), "bf16", "none"
    ),
    "mixed precisions": lambda: torch.backends.flags(fp32_precision="tf32"),
    "no nnpack": lambda: torch.backends.nnpack.flags(enabled=False),
    "no fast path": lambda: set_to(torch.backends.mha.set_fastpath_enabled, False, True),
    "eager compiler": lambda: torch.compiler.set_stance("force_eager"),
    "threads": lambda: set_to(
        torch.set_num_threads, 3 - min(2, torch.get_num_threads()), torch.get_num_threads()
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_each_switch_has_a_namespace_of_its_own(vlm: Any, name: str) -> None:
    before = vlm.runtime.refresh()
    vlm.chat(FIRST, max_new_tokens=1)
    with SWITCHES[name]():
        assert vlm.runtime.refresh() != before
        report = vlm.explain(FIRST)
        assert report.cached_tokens == 0
        assert {segment.reason for segment in report.segments} == {"other settings"}
    assert vlm.runtime.refresh() == before


def _random_walk(vlm: Any, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    prompts = [FIRST, SECOND, *OTHERS]
    for _ in range(steps):
        if rng.random() < 0.3:
            vlm.model.to(rng.choice([torch.float32, torch.bfloat16]))
        with contextlib.ExitStack() as stack:
            for name in rng.sample(sorted(SWITCHES), rng.randrange(4)):
                stack.enter_context(SWITCHES[name]())
            for messages in rng.sample(prompts, 2):
                assert torch.equal(logits(vlm, messages), cold(vlm, messages))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_switches_and_casts_answers_like_a_fresh_wrap(vlm: Any, seed: int) -> None:
    _random_walk(vlm, seed, 8)
    vlm.runtime.tree.check()


def test_a_cast_in_the_middle_of_a_turn_is_refused_by_name(vlm: Any) -> None:
    pieces = vlm.stream(FIRST, max_new_tokens=4)
    next(pieces)
    vlm.model.to(torch.bfloat16)
    with pytest.raises(ModelError, match="while the turn was running"):
        list(pieces)
    assert torch.equal(logits(vlm, FIRST), cold(vlm, FIRST))


def test_features_made_while_weights_changed_are_not_remembered(vlm: Any) -> None:
    weight = vlm.model.base_model.visual.blocks[0].mlp.linear_fc1.weight
    encode, before = vlm.runtime.family.encode, weight.detach().clone()

    def in_between(pixels: Any) -> Any:
        found = encode(pixels)
        with torch.no_grad():
            weight.mul_(1.5)
        return found

    vlm.runtime.family.encode = in_between
    vlm.chat(FIRST, max_new_tokens=1)
    del vlm.runtime.family.encode
    with torch.no_grad():
        weight.copy_(before)
    assert vlm.chat(FIRST, max_new_tokens=1).usage.images_encoded == 1
    assert torch.equal(logits(vlm, FIRST), cold(vlm, FIRST))


def test_snapshots_in_a_store_are_known_again_in_each_dtype(tmp_path: Any) -> None:
    """The shape of a snapshot belongs to the dtype: after a cast entries were taken for damaged."""
    model, processor = build("qwen3_5")
    for rounds in range(2):
        with ks.wrap(model, processor, store=tmp_path) as vlm:
            for dtype in (torch.float32, torch.bfloat16, torch.float32):
                model.to(dtype)
                assert bool(vlm.prepare(FIRST).cached_tokens) == bool(rounds)
                vlm.clear()


def test_what_runs_the_experts_is_part_of_the_namespace() -> None:
    model, processor = build("qwen3_vl_moe")
    with ks.wrap(model, processor) as vlm:
        usual, before = model.config._experts_implementation, vlm.runtime.refresh()
        other = "batched_mm" if usual == "eager" else "eager"
        model.set_experts_implementation(other)
        try:
            assert vlm.runtime.refresh() != before
        finally:
            model.set_experts_implementation(usual)
        assert vlm.runtime.refresh() == before


def test_compiling_is_noticed(vlm: Any) -> None:
    """Nothing is compiled here: that happens in the first pass."""
    before = vlm.runtime.refresh()
    features = vlm.encode(picture(1)).feature_id
    decoder, tower = vlm.model.get_decoder().layers[1], vlm.model.base_model.visual.blocks[0]
    seen = {before}
    for part in (vlm.model, decoder, tower, vlm.model):
        part.compile(backend="eager")
        seen.add(vlm.runtime.refresh())
        ours = vlm.runtime._provenance(vlm.runtime._now())["compiled"]
        assert bool(ours) == (part is tower)
        part._compiled_call_impl = None
    assert len(seen) == 5 and vlm.runtime.refresh() == before
    assert vlm.encode(picture(1)).feature_id == features


# -- what is read -------------------------------------------------------------------------------

# Functions of torch._C by the same name that read no switch of a computation.
_HARMLESS = """
    DTensor_sharding_propagator_cache_stats accelerator all_dtypes autograd_fallback_mode
    backcompat_broadcast_warn backcompat_keepdim_warn blas_default_backend
    caught_jit_exception_class_name caught_jit_exception_original_msg cpu_capability
    cudnn_batch_norm_reserve_space_size default_device dtensor_allow_implicit_replication
    file_format graph_exec_group graph_executor_optimize max_operator_version operator_version_map
    privateuse1_backend_name symbolize_mode thread_name torch_function_state tracing_state
    upgraders_entry_map upgraders_map_size value_trace version_calculator_flag warnAlways
"""


def test_every_switch_of_the_installed_torch_is_known() -> None:
    known = {*switches.ANYWHERE, *switches.ON_CUDA, *_HARMLESS.split(), "sdp_priority_order"}
    unknown = []
    for name in dir(torch._C):
        if name.startswith("_get_") and name.removeprefix("_get_") not in known:
            with contextlib.suppress(TypeError):  # it takes arguments, so it reads no switch
                getattr(torch._C, name)()
                unknown.append(name)
    assert not unknown, "do these change bits? then they belong into keepsight/models/switches.py"


def test_a_new_process_has_nothing_unusual_but_its_environment() -> None:
    code = """
import os
os.environ |= {"MKL_CBWR": "COMPATIBLE", "MKL_VERBOSE": "0"}
from keepsight.models.switches import switches
print(switches("cpu", []), switches("cuda", []))
"""
    out = finished(start(code))
    own = r"(MKL_CBWR|OMP_\w+|[a-z-]+)=\S+"  # variables and installed libraries
    assert "MKL_CBWR=COMPATIBLE" in out and all(
        re.fullmatch(own, one) for one in re.findall(r"'([^']*)'", out)
    )


def test_pixels_follow_the_default_dtype() -> None:
    """A processor that makes tensors of its own makes them in that dtype: a name is not enough."""
    model, processor = build("lfm2_vl")
    with ks.wrap(model, processor) as vlm:
        vlm.chat(FIRST, max_new_tokens=1)
        with SWITCHES["default dtype"]():
            assert torch.equal(logits(vlm, FIRST), cold(vlm, FIRST))
        assert torch.equal(logits(vlm, FIRST), cold(vlm, FIRST))


def test_a_used_lane_of_another_dtype_is_left_alone(vlm: Any) -> None:
    for messages in OTHERS:  # as many lanes as are kept
        vlm.chat(messages, max_new_tokens=1)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        vlm.model.to(dtype)
        assert torch.equal(logits(vlm, SECOND), cold(vlm, SECOND))
    with torch.autocast("cpu", torch.bfloat16):
        for messages in (SECOND, FIRST, *OTHERS):
            assert torch.equal(logits(vlm, messages), cold(vlm, messages))
    for messages in (SECOND, FIRST, *OTHERS):
        assert torch.equal(logits(vlm, messages), cold(vlm, messages))


def test_a_lane_serves_other_tenants_and_no_other_making(vlm: Any) -> None:
    for i in range(6):
        vlm.chat(FIRST, max_new_tokens=1, tenant=str(i))
    lanes = vlm.runtime.engine.lanes
    rooms = {layer.key_buffer.data_ptr() for lane in lanes._idle for layer in lane.full}
    vlm.chat(SECOND, max_new_tokens=1, tenant="new")
    assert {layer.key_buffer.data_ptr() for lane in lanes._idle for layer in lane.full} == rooms
    vlm.model.to(torch.bfloat16)
    vlm.chat(FIRST, max_new_tokens=1)
    dtypes = [lane.full[0].key_buffer.dtype for lane in lanes._idle]
    assert dtypes.count(torch.bfloat16) == 1 and len(dtypes) == 4


def test_what_ran_while_another_thread_changed_a_switch_is_run_again(vlm: Any) -> None:
    """The other thread comes in the first pass of the prompt and is gone before the second."""
    passes: list[bool] = []

    def other_thread(*_: Any) -> None:
        change = {0: True, 1: False}.get(len(passes))
        passes.append(True)
        if change is not None:
            in_threads(lambda: torch.use_deterministic_algorithms(change))

    engine = vlm.runtime.engine
    forward, longest = engine.decoder.forward, engine.longest_pass

    def watched(*arguments: Any) -> Any:
        other_thread()
        return forward(*arguments)

    engine.decoder.forward, engine.longest_pass = watched, 16
    try:
        report = vlm.prepare(SECOND)
    finally:
        torch.use_deterministic_algorithms(False)
        engine.longest_pass = longest
        del engine.decoder.forward
    assert len(passes) > -(-report.prompt_tokens // 16) and report.cached_tokens == 0  # again
    assert torch.equal(logits(vlm, SECOND), cold(vlm, SECOND))
    vlm.runtime.tree.check()
