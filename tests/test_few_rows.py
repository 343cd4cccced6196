"""The fewest rows of a call: chosen by time where weights are large, and without effect on bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, picture, turn
from test_query_rows import logits, some_ids

import keepsight as ks
from keepsight import Together
from keepsight.core.kernels import few_rows
from keepsight.core.kernels.few_rows import NUMBERS, fewest_rows
from keepsight.core.kernels.linear import ONEDNN, Packed, Rows, kernels_for
from keepsight.core.trials import any_cut

pytestmark = [
    pytest.mark.tries_anew,
    pytest.mark.skipif(not kernels_for(torch.float32), reason="this torch packs no weights"),
]
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
CHATS = [[turn("What is it?", picture(1))], [turn("Only words here. " * 30)]]


def few(vlm: ks.VLM) -> int:
    kernels = vlm.runtime.finding.kernels
    assert kernels is not None
    return kernels.linears.few


def packed() -> tuple[Packed, dict[Any, Rows | None]]:
    layer = Packed.of([torch.nn.Linear(64, 32)], ONEDNN)
    return layer, {layer.shape: Rows()}


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ((10, 12, 8, 9), 4),
        ((10, 9.8, 9.75, 9.9), 1),  # not worth it
        ((10, 9, 8.9, 12), 2),  # four are no more than a little better than two
        ((10, 9, 8, 7), 8),
    ],
)
def test_the_fastest_number_is_chosen(
    times: tuple[float, ...], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, rules = packed()
    monkeypatch.setattr(few_rows, "_CACHED", 0)
    given = dict(zip(NUMBERS, times, strict=True))
    monkeypatch.setattr(few_rows, "_seconds", lambda layers, number: given[number])
    assert fewest_rows([layer], rules) == chosen


def test_small_weights_and_shapes_without_a_rule_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, rules = packed()
    with monkeypatch.context() as patch:
        patch.setattr(few_rows, "_seconds", lambda layers, number: pytest.fail("timed"))
        assert fewest_rows([layer], rules) == 1
        patch.setattr(few_rows, "_CACHED", 1)
        assert fewest_rows([layer], {}) == fewest_rows([layer], {layer.shape: None}) == 1
    monkeypatch.setattr(few_rows, "_CACHED", 0)
    assert fewest_rows([layer], rules) in NUMBERS  # really timed


@pytest.mark.parametrize("number", [2, 4, 8])
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_bits_are_the_same_for_every_number(
    kind: str, dtype: torch.dtype, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded alone and together."""
    model, processor = build(kind, dtype)
    with ks.wrap(model, processor, pack=True) as vlm:
        assert few(vlm) == 1
        wanted = [logits(vlm, some_ids(count)) for count in (40, 131)]
        alone = [vlm.chat(chat, **GREEDY).tokens for chat in CHATS]
    called: set[int] = set()
    run = Packed.run

    def counted(self: Packed, rows: torch.Tensor, bias: Any) -> torch.Tensor:
        called.add(len(rows))
        return run(self, rows, bias)

    monkeypatch.setattr(any_cut, "fewest_rows", lambda packed, rules: number)
    with ks.wrap(model, processor, pack=True) as vlm, Together(vlm) as together:
        monkeypatch.setattr(Packed, "run", counted)
        assert few(vlm) == number == vlm.stats()["engine"]["fewest_rows"]
        found = [logits(vlm, some_ids(count)) for count in (40, 131)]
        assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))
        with vlm.runtime.lock:
            asked = [together.submit(chat, **GREEDY) for chat in CHATS]
        assert [one.result().tokens for one in asked] == alone
    assert min(called) == number


def test_each_process_times_anew_and_the_number_changes_no_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a store tells was found by another process, perhaps on a machine that was busy."""
    found = []
    for number in (4, 1, 8):
        monkeypatch.setattr(any_cut, "fewest_rows", lambda packed, rules, number=number: number)
        with ks.wrap(*build("qwen3_vl"), store=tmp_path, pack=True) as vlm:
            reply = vlm.chat(CHATS[0], **GREEDY)
            assert few(vlm) == number and vlm.runtime.finding is not None
            found.append((reply.tokens, vlm.runtime.finding.names))
            assert bool(reply.report.cached_tokens) == (number != 4)
            vlm.flush()
    assert found[0] == found[1] == found[2]
