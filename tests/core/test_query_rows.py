"""How many rows of queries attention is asked for at a time: found by trying, kind by kind.

Processors differ: on some, rows of wide heads come out the same in multiples of eight or sixteen
only. Both are made up here, whatever this machine does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.answers import Catch
from support.cuts import assert_bits, why_rounding
from support.models import build, picture, turn

import keepsight as ks
from keepsight import Together
from keepsight.core.kernels import attention
from keepsight.core.kernels.attention import QueryRows, RowPadding

pytestmark = pytest.mark.tries_anew
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
CHATS = [[turn("What is it?", picture(1))], [turn("Only words here. " * 30)]]


def logits(vlm: ks.VLM, ids: torch.Tensor, count: int = 10) -> torch.Tensor:
    """Of each token that is decoded."""
    catch, counts = Catch(), {"max_new_tokens": count, "min_new_tokens": count}
    vlm.generate(input_ids=ids, logits_processor=[catch], **counts)
    return torch.stack(catch.rows)


def some_ids(count: int) -> torch.Tensor:
    return torch.randint(10, 400, (1, count), generator=torch.Generator().manual_seed(count))


def picky(multiple: int, widths: tuple[int, ...] = ()) -> Any:
    """A kernel that adds in another order where rows are no multiple of a number."""
    plain = attention._plain

    def run(query: Any, key: Any, value: Any, attn_mask: Any, scale: Any) -> torch.Tensor:
        told_apart = not widths or query.shape[-1] in widths
        if told_apart and query.shape[-2] % multiple:
            query, key = query.flip(-1), key.flip(-1)
        return plain(query, key, value, attn_mask=attn_mask, scale=scale)

    return run


def turned(monkeypatch: pytest.MonkeyPatch, by: Callable[[Any, Any], int]) -> None:
    """Make the kernel add in another order for every number of rows, or of keys."""
    plain = attention._plain

    def run(query: Any, key: Any, value: Any, attn_mask: Any, scale: Any) -> torch.Tensor:
        places = by(query, key) % query.shape[-1]
        query, key = query.roll(places, -1), key.roll(places, -1)
        return plain(query, key, value, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(attention, "_plain", run)


def fillings(vlm: ks.VLM) -> set[RowPadding | None]:
    kernels = vlm.runtime.finding.kernels
    assert kernels is not None
    return set(kernels.query_rows.fillings.values())


def answers(vlm: ks.VLM, *counts: int) -> tuple[list[Any], list[list[int]]]:
    """Prompts with their logits, token by token, and the tokens of chats."""
    rows = [(some_ids(count), logits(vlm, some_ids(count))) for count in counts]
    return rows, [vlm.chat(chat, **GREEDY).tokens for chat in CHATS]


def expect_the_same_together(
    model: Any, processor: Any, wanted: Any, cuts: Any, **how: Any
) -> None:
    """In pieces that end anywhere, in single steps and in several conversations at once."""
    with ks.wrap(model, processor, **how) as vlm, Together(vlm) as together:
        for count, steps in cuts:
            logits(vlm, some_ids(700)[:, :count], steps)
        for ids, rows in wanted[0]:
            assert torch.equal(logits(vlm, ids), rows)
        with vlm.runtime.lock:
            asked = [together.submit(chat, **GREEDY) for chat in CHATS]
        assert [one.result().tokens for one in asked] == wanted[1]


@pytest.mark.parametrize(
    ("kind", "multiple"),
    [
        *(("qwen3_vl", 8), ("qwen3_vl", 16), ("qwen3_vl", 32), ("sliding", 16)),
        *(pytest.param("sliding", multiple, marks=pytest.mark.slow) for multiple in (8, 32)),
    ],
)
def test_rows_are_filled_up_to_what_gives_equal_bits(
    kind: str, multiple: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prefilled in one pass, in pieces, decoded alone and together."""
    monkeypatch.setattr(attention, "_plain", picky(multiple))
    model, processor = build(kind)
    with ks.wrap(model, processor) as vlm:
        assert_bits(vlm)
        assert fillings(vlm) == {RowPadding(multiple)}
        wanted = answers(vlm, 40, 507)
        assert vlm.verify(CHATS[0]).equal
    expect_the_same_together(model, processor, wanted, (), store=tmp_path)
    with ks.wrap(model, processor, store=tmp_path) as vlm:  # what was found is in the store
        assert vlm.chat(CHATS[0], **GREEDY).tokens == wanted[1][0]
        assert fillings(vlm) == {RowPadding(multiple)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_kernel_that_counts_rows_is_given_as_many_each_time(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some processors with AVX2: any two numbers of rows may be added in two orders, so blocks
    of one number lie side by side as sequences of a batch do."""
    turned(monkeypatch, lambda query, key: query.shape[-2] // 16)
    model, processor = build("qwen3_vl", dtype)
    with ks.wrap(model, processor) as vlm:
        assert {how.apart for how in fillings(vlm) if how is not None} == {True}
        wanted = answers(vlm, 40, 507, 700)
    expect_the_same_together(model, processor, wanted, [(300, 1)])


def test_calls_as_long_as_they_get_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind 2,048 keys calls have twice the rows of those before, and may take another kernel."""
    turned(monkeypatch, lambda query, key: query.shape[-2] > 2 * 128)
    rule = QueryRows().of((4, 2, 16, torch.float32))
    assert rule is None or rule.apart, rule


@pytest.mark.parametrize("kind", ["qwen3_vl", "sliding", "qwen3_5"])
def test_a_row_reads_as_many_keys_whatever_is_computed_beside_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass, pieces that end anywhere, single steps and several conversations, with a kernel
    that adds in another order for every number of keys."""
    turned(monkeypatch, lambda query, key: key.shape[-2] // 128)
    model, processor = build(kind)
    with ks.wrap(model, processor) as vlm:
        assert_bits(vlm)
        wanted = answers(vlm, 40, 150, 700)
    cuts = [(count, 2) for count in (100, 127, 300, 520)]
    expect_the_same_together(model, processor, wanted, cuts)


def test_where_no_number_does_answers_are_equal_to_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, flipped = attention._plain, picky(4096)

    def by_size(query: Any, *args: Any, **options: Any) -> torch.Tensor:
        seen = query.shape[0] * query.shape[-2]
        return (flipped if seen < 200 else plain)(query, *args, **options)

    monkeypatch.setattr(attention, "_plain", by_size)
    with ks.wrap(*build("qwen3_vl")) as vlm:
        assert "attention of" in why_rounding(vlm)


def test_each_kind_of_attention_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one model may have heads of two widths, with masks of their own."""
    monkeypatch.setattr(attention, "_plain", picky(32, widths=(64,)))
    rows = QueryRows()
    wide, narrow = rows.of((4, 2, 64, torch.float32)), rows.of((4, 2, 16, torch.float32))
    assert wide == RowPadding(32) and narrow is not None
    calls: list[tuple[int, int]] = []
    plain = attention._plain

    def counted(query: Any, key: Any, value: Any, attn_mask: Any, scale: Any) -> torch.Tensor:
        assert query.shape[-2] == attn_mask.shape[-2]
        calls.append((query.shape[-1], query.shape[-2]))
        return plain(query, key, value, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(attention, "_plain", counted)
    one = attention.Attention(rows, [])
    for width in (16, 64):
        query, key = torch.randn(1, 4, 1, width), torch.randn(1, 2, 40, width)
        one(query, key, key, None, True, None)
    assert calls == [(16, narrow.step), (64, 32)]


@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_real_widths_hold_here(width: int, dtype: torch.dtype) -> None:
    """As checkpoints have them: if this fails, answers of this width are equal to rounding here."""
    for queries, keys in ((8, 2), (4, 4)):
        assert QueryRows().of((queries, keys, width, dtype)) is not None


@pytest.mark.parametrize("widths", [(24, 16), (16, 40)], ids=["narrower", "wider"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_values_may_have_another_width_than_keys(
    widths: tuple[int, int], dtype: torch.dtype
) -> None:
    """As in multi-head latent attention. Torch has another kernel for these, which depends on
    the cut; the trial is of values that are as wide as keys."""
    generator = torch.Generator().manual_seed(1)
    wide, other = widths
    query, key, value = (
        torch.randn(1, 2, 1100, width, generator=generator).to(dtype)
        for width in (wide, wide, other)
    )

    def over(start: int, stop: int, rows: QueryRows) -> torch.Tensor:
        own = query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop]
        return attention.Attention(rows, [])(*own, None, True, None)

    rows = QueryRows()
    found = over(0, 1100, rows)
    assert found.shape == value.shape
    assert list(rows.fillings) == [(2, 2, max(widths), dtype)]
    for start, stop in ((0, 7), (509, 514), (777, 1100), (1099, 1100)):
        assert torch.equal(over(start, stop, rows), found[:, :, start:stop])
    stock = attention._plain(query.float(), key.float(), value.float(), is_causal=True)
    near = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), stock, rtol=0, atol=near)
