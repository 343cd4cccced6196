"""The kernels by which any cut gives the same bits: what is tried is what is used, and shows it.

Libraries are replaced by some that round otherwise where a machine at hand does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.answers import Catch
from support.cuts import assert_bits, ids_of, logits_of, why_rounding, wrapped
from support.models import build, turn
from torch.nn import functional

import keepsight as ks
from keepsight.core.decoding.lane_layer import LaneLayer
from keepsight.core.kernels import attention, linear
from keepsight.core.kernels.elementwise import in_whole_vectors
from keepsight.core.kernels.linear import Linears, Rows, kernels_for, rows_of
from keepsight.core.kernels.packing import Packing, groups_in

plain = linear._plain
SHAPE = (64, 64, torch.float32, False, linear.PLAIN)


def in_another_order(rows: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    return plain(rows.flip(-1), weight.flip(-1), bias)


@pytest.fixture
def sizes(monkeypatch: Any) -> set[int]:
    """The numbers of rows that plain products get."""
    found: set[int] = set()

    def counting(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        found.add(len(rows))
        return plain(rows, weight, bias)

    monkeypatch.setattr(linear, "_plain", counting)
    return found


@pytest.mark.tries_anew
def test_numbers_of_rows_that_were_not_tried_are_not_used(sizes: set[int]) -> None:
    """A kernel may add in another order for numbers of rows of which nobody knows."""
    with torch.inference_mode():
        rule = rows_of(SHAPE)
        assert rule is not None
        tried = set(sizes)
        layer, weight = Linears(tried={SHAPE: rule}), torch.randn(64, 64)
        for count in [*range(1, 530), 1000, 1024, 2048, 5000]:
            assert len(layer(torch.randn(count, 64), weight, None)) == count
    assert sizes == tried


@pytest.mark.tries_anew
def test_an_output_head_is_tried_with_few_rows_only(sizes: set[int]) -> None:
    """It has few at a time, and more would take most of the time of loading a model."""
    with torch.inference_mode():
        rule = rows_of((20_000, 16, torch.float32, False, linear.PLAIN))
    assert rule is not None and rule.most <= max(sizes) <= 128


@pytest.mark.tries_anew
@pytest.mark.parametrize("odd", [52, 104, 240])
def test_a_kernel_that_adds_in_another_order_between_the_usual_numbers(
    monkeypatch: Any, odd: int
) -> None:
    """The usual ones are then used, and few rows still need no more."""

    def moody(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if len(rows) == odd:
            rows, weight = rows.flip(-1), weight.flip(-1)
        return plain(rows, weight, bias)

    with torch.inference_mode():
        usual = rows_of(SHAPE)
        monkeypatch.setattr(linear, "_plain", moody)
        rule = rows_of(SHAPE)
    assert usual is not None and usual.fine
    assert rule == dataclasses.replace(usual, fine=False)
    assert odd not in {rule.fill(count) for count in range(1, 513)}


@pytest.mark.tries_anew
@pytest.mark.parametrize("odd", [range(513, 10_000), range(300, 400), range(1, 40)])
def test_a_kernel_for_many_rows_that_adds_in_another_order(monkeypatch: Any, odd: range) -> None:
    """As processors have that multiply matrices in tiles: a long prompt and its last words."""

    def moody(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if len(rows) in odd:
            return in_another_order(rows, weight, bias)
        return plain(rows, weight, bias)

    monkeypatch.setattr(linear, "_plain", moody)
    with torch.inference_mode():
        layer = Linears()
        weight, rows = torch.randn(64, 64), torch.randn(1300, 64)
        whole = layer(rows, weight, None)
        for count in (1, 7, 45, 290, 310, 399, 512, 600, 1299):
            for piece, wanted in zip(rows.split(count), whole.split(count), strict=True):
                assert torch.equal(layer(piece.clone(), weight, None), wanted)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("biased", [False, True])
def test_short_sums_show_their_order(width: int, biased: bool) -> None:
    """As adapters of a low rank have them. The last product, and a bias, are part of a sum."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = linear._cancelling(64, width, torch.float32, generator)
    bias = torch.randn(64, generator=generator) * (linear._TINY if biased else 0)
    parts = [rows[:, i, None] * weight[None, :, i] for i in range(width)] + [bias.expand(512, 64)]
    there = sum(parts[1:], parts[0])
    if width + biased > 2:
        back = sum(reversed(parts[:-1]), parts[-1])
        assert not torch.equal(there, back)
    assert bool((weight != 0).all()) and bool((rows != 0).all())


@pytest.mark.tries_anew
def test_rows_that_do_not_lie_side_by_side(monkeypatch: Any) -> None:
    """Such as a convolution leaves; they are computed as those that were tried."""

    def picky(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if not rows.is_contiguous():
            return in_another_order(rows, weight, bias)
        return plain(rows, weight, bias)

    monkeypatch.setattr(linear, "_plain", picky)
    with torch.inference_mode():
        weight, rows = torch.randn(64, 64), torch.randn(64, 96)
        layer, wanted = Linears(), plain(rows.T.contiguous(), weight, None)
        assert torch.equal(layer(rows.T, weight, None), wanted)
        apart = torch.randn(2, 512, 3)[0, :, 1:2]
        wanted = in_whole_vectors(functional.silu, apart.contiguous())
        assert torch.equal(in_whole_vectors(functional.silu, apart), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_prompt_and_its_pieces(dtype: torch.dtype) -> None:
    """Layers of some hundred numbers, and more rows than are tried at once."""
    with wrapped("qwen3_vl", dtype) as vlm, wrapped("qwen3_vl", dtype) as other:
        ids = ids_of(vlm, 1400)
        for shared in (9, 300, 700, 1399):
            logits_of(vlm, ids[:, :shared])
        assert torch.equal(logits_of(vlm, ids), logits_of(other, ids))


def test_adapters_of_rank_three() -> None:
    """Their rows are filled up where one row alone comes out otherwise."""
    from peft import LoraConfig, inject_adapter_in_model

    model, processor = build("qwen3_vl", torch.bfloat16)
    config = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    inject_adapter_in_model(config, model.get_decoder())
    model.eval()
    with ks.wrap(model, processor) as vlm, ks.wrap(model, processor) as other:
        ids = ids_of(vlm, 90)
        for shared in (1, 2, 40, 41, 89):
            logits_of(vlm, ids[:, :shared])
        assert torch.equal(logits_of(vlm, ids), logits_of(other, ids))


def turned(x: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:2], -1, 2))
    return torch.view_as_real(pairs * 1.1j).flatten(2)


OF_ITS_OWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matmul": lambda x: x @ torch.eye(x.shape[-1]),
    "einsum": lambda x: torch.einsum("bij,jk->bik", x, torch.eye(x.shape[-1])),
    "tensordot": lambda x: torch.tensordot(x, torch.eye(x.shape[-1]), 1),
    "inner": lambda x: torch.inner(x, torch.eye(x.shape[-1])),
    # Of a width that is no multiple of a vector's.
    "selu": lambda x: functional.selu(x[..., 1:]),
    "glu": lambda x: functional.glu(torch.cat([x, x], -1)[..., 1:-1].contiguous()),
    "expit": lambda x: torch.special.expit(x[..., 1:]),
    "complex": lambda x: turned(x[..., 2:]),
    "scaled": lambda x: torch.add(x[..., 1:], x[..., 1:], alpha=0.3),
}


@pytest.mark.tries_anew
@pytest.mark.parametrize("name", OF_ITS_OWN)
def test_functions_that_are_made_of_others_are_taken_apart(name: str) -> None:
    """A product, or a function that leaves numbers over, under a name of its own."""
    model, processor = build("qwen3_vl")
    mlp = model.get_decoder().layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + OF_ITS_OWN[name](x).repeat(1, 1, 2)[..., : x.shape[-1]]
    with ks.wrap(model, processor) as vlm:
        assert "neighbouring rows" in why_rounding(vlm)


def test_values_that_changed_on_their_way_from_the_lane_are_those_that_count() -> None:
    """Differential attention asks twice over one layer's keys, for halves of its values."""
    query, keys, values = torch.randn(3, 1, 4, 5, 16)
    layer, attend = LaneLayer(), attention.Attention(attention.QueryRows(), [])
    layer.append(keys, values)
    attend.note(layer.keys, layer.values, [layer])
    for other in (values, values.flip(1)):
        held = layer.values if other is values else other
        wanted = functional.scaled_dot_product_attention(query, keys, other, is_causal=True)
        found = attend(query, layer.keys, held, None, True, None)
        torch.testing.assert_close(found, wanted)


@pytest.mark.tries_anew
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_computes_something_else_than_the_model_means_rounding(
    dtype: torch.dtype, monkeypatch: Any
) -> None:
    """However equal its bits are: attention that forgets one of its arguments, say."""
    attend = attention._plain
    monkeypatch.setattr(
        attention,
        "_plain",
        lambda query, key, value, attn_mask, scale: attend(query, key, value, attn_mask),
    )
    model, processor = build("qwen3_vl", dtype)
    for layer in model.get_decoder().layers:
        layer.self_attn.scaling = 0.9
    with ks.wrap(model, processor) as vlm:
        assert "something else" in why_rounding(vlm)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kernel", kernels_for(torch.float32))
def test_packed_weights_give_the_layer(kernel: str, biased: bool) -> None:
    layer, rows = torch.nn.Linear(96, 80, bias=biased), torch.randn(70, 96)
    with torch.inference_mode():
        packed = linear.Packed.of([layer], kernel)
        for count in (1, 3, 70):
            found = packed.run(rows[:count], layer.bias)
            assert torch.allclose(found, layer(rows[:count]), atol=1e-5)


@pytest.mark.parametrize(("took", "few"), [({1: 3.0, 4: 2.0}, 4), ({1: 2.0, 4: 3.0}, 1)])
def test_weights_are_read_by_the_rows_that_take_the_least_time(
    took: dict[int, float], few: int, monkeypatch: Any
) -> None:
    """Timed once: threads that change and change back, or one weight that does, cost no look."""
    now, timed = [0.0], list[int]()

    def run(self: linear.Packed, rows: torch.Tensor, bias: Any) -> None:
        timed.append(len(rows))
        now[0] += took[len(rows)]

    monkeypatch.setattr(linear.Packed, "run", run)
    monkeypatch.setattr(linear.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr("keepsight.core.kernels.packing.rows_of", lambda shape: Rows())
    module, packing = Attention(bias=True), Packing(wanted=True)
    for environment in ("here", "there"):
        packing.follow(groups_in(module), environment)
    before = len(timed)
    packing.follow(groups_in(module), "here")
    packing.forget([module.o_proj.weight])
    packing.follow(groups_in(module), "here")
    assert before == len(timed) > 0 and {one.few for one in packing.packed.values()} == {few}


class Attention(torch.nn.Module):
    def __init__(self, bias: bool, other: int = 64) -> None:
        super().__init__()
        self.o_proj = torch.nn.Linear(48, 64)
        for name, out in (("q_proj", 48), ("k_proj", 16), ("v_proj", 16)):
            width = other if name == "v_proj" else 64
            setattr(self, name, torch.nn.Linear(width, out, bias=bias))


def joined(module: Attention) -> tuple[Packing, Linears, list[torch.nn.Linear]]:
    packing = Packing(wanted=True)
    packing.follow(groups_in(module), "here")
    parts = [getattr(module, f"{letter}_proj") for letter in "qkv"]
    return packing, Linears(lambda: packing.packed, packing.rules), parts


def expect_each(linears: Linears, parts: list[torch.nn.Linear], rows: torch.Tensor) -> None:
    """What is read together gives what each layer gives by itself."""
    for one in parts:
        found = linears(rows, one.weight, one.bias)
        assert torch.allclose(found, one(rows), atol=1e-5) and found.is_contiguous()


@pytest.mark.parametrize("biased", [False, True])
def test_layers_that_read_one_input_are_read_together(biased: bool, monkeypatch: Any) -> None:
    module = Attention(biased)
    ran: list[int] = []
    run = linear.Packed.run

    def counted(self: linear.Packed, rows: torch.Tensor, bias: Any) -> torch.Tensor:
        ran.append(len(self.layers))
        return run(self, rows, bias)

    with torch.inference_mode():
        packing, linears, parts = joined(module)
        assert len({id(one) for one in packing.packed.values()}) == 2
        assert packing.nbytes == sum(one.weight.nbytes for one in (*parts, module.o_proj))
        monkeypatch.setattr(linear.Packed, "run", counted)
        for count in (1, 7):
            rows = torch.randn(1, count, 64)
            expect_each(linears, [*parts, *parts[::-1]], rows)
            other = torch.randn(1, count, 64)  # between two that read one input
            expect_each(linears, parts[:1], rows)
            expect_each(linears, parts[1:], other)
        assert ran == [3] * 8
        parts[1].weight.mul_(2)
        if biased:
            parts[1].bias.mul_(3)
        packing.forget([parts[1].weight])
        assert packing.is_behind and not packing.packed.keys() & {id(x.weight) for x in parts}
        packing.follow(groups_in(module), "here")
        expect_each(linears, parts, torch.randn(2, 64))


def test_a_bias_is_read_as_it_is_now() -> None:
    with torch.inference_mode():
        _, linears, parts = joined(Attention(bias=True))
        parts[2].bias.mul_(3)
        rows, q = torch.randn(2, 64), parts[0]
        expect_each(linears, parts, rows)
        found = linears(rows, q.weight, None)  # a caller who leaves it out
        assert torch.allclose(found, functional.linear(rows, q.weight), atol=1e-5)


def test_layers_of_one_weight_keep_their_own_biases() -> None:
    module = Attention(bias=True)
    module.v_proj.weight = module.k_proj.weight
    with torch.inference_mode():
        _, linears, parts = joined(module)
        expect_each(linears, parts, torch.randn(2, 64))


def test_layers_of_other_inputs_are_read_apart() -> None:
    with torch.inference_mode():
        packing, _, parts = joined(Attention(bias=False, other=32))
        assert {len(packing.packed[id(one.weight)].layers) for one in parts} == {1}


def test_an_input_that_is_changed_between_layers_is_noticed() -> None:
    with torch.inference_mode():
        _, linears, parts = joined(Attention(bias=False))
        linears.is_watched = True
        rows = torch.randn(2, 64)
        linears(rows, parts[0].weight, None)
        assert not linears.doubts
        rows.add_(1)
        linears(rows, parts[1].weight, None)
        assert linears.doubts


def test_a_hook_that_changes_what_the_next_layer_reads_is_not_passed_by() -> None:
    """On long prompts only, which no trial at load sees; set before and while the model is used."""
    model, processor = build("qwen3_vl")
    layer = model.get_decoder().layers[1].self_attn.q_proj
    asked = [turn("one two three four " * 40)]

    def logits(vlm: ks.VLM) -> list[torch.Tensor]:
        catch = Catch()
        vlm.chat(asked, max_new_tokens=2, do_sample=False, logits_processor=[catch])
        return catch.rows

    def change(module: Any, given: Any, found: Any) -> None:
        if given[0].shape[-2] > 120:
            given[0].mul_(0.5)

    with ks.wrap(model, processor, pack=True) as live:
        before = logits(live)
        layer.register_forward_hook(change)
        found = [logits(live)]
    for pack in (True, False):
        with ks.wrap(model, processor, pack=pack) as vlm:
            assert_bits(vlm)
            found.append(logits(vlm))
    wanted = found.pop()
    assert not torch.equal(before[0], wanted[0])
    for one in found:
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(one, wanted, strict=True))


@pytest.mark.tries_anew
def test_inputs_are_watched_while_a_model_is_tried(monkeypatch: Any) -> None:
    """Whatever changes them, between layers that are read together."""
    split = linear.Packed.split

    def changing(self: linear.Packed, given: torch.Tensor) -> Any:
        monkeypatch.setattr(linear.torch, "equal", lambda *both: False)
        return split(self, given)

    monkeypatch.setattr(linear.Packed, "split", changing)
    with wrapped("qwen3_vl", pack=True) as vlm:
        assert "changes between layers" in why_rounding(vlm)


@pytest.mark.tries_anew
def test_the_kernel_is_the_one_that_pads_rows_least(monkeypatch: Any) -> None:
    rules: dict[str, Rows | None] = {"slow": Rows(4, 4), "good": Rows(), "never asked": Rows()}
    where = "keepsight.core.kernels.packing"
    monkeypatch.setattr(f"{where}.kernels_for", lambda dtype: list(rules))
    monkeypatch.setattr(f"{where}.rows_of", lambda shape: rules[shape[-1]])
    packing, layer = Packing(wanted=True), torch.nn.Linear(64, 48)
    assert packing.kernel_of((layer,)) == "good" and len(packing.rules) == 2
    packing.rules.clear()
    rules["good"] = Rows(least=2)
    rules["never asked"] = Rows(least=4)
    assert packing.kernel_of((layer,)) == "good"
    packing.rules.clear()
    rules["good"] = None
    rules["never asked"] = None
    assert packing.kernel_of((layer,)) == "slow"
    packing.rules.clear()
    rules["slow"] = None
    assert packing.kernel_of((layer,)) == ""
