"""Any cut gives the same bits where layers remember a state of fixed size: gated delta rules and
convolutions. A prompt goes on from the nearest state that was captured; where prompts part, one is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.answers import Catch, logits
from support.cuts import (
    BOTH,
    GREEDY,
    assert_bits,
    ids_of,
    logits_of,
    rows,
    why_rounding,
    wrapped,
)
from support.models import in_both, picture, turn
from torch.nn import functional

import keepsight as ks
from keepsight.core import any_cut
from keepsight.core.kernels import delta, mixers

STATES = pytest.mark.parametrize("kind", ["qwen3_5", "lfm2_vl"])


@STATES
@BOTH
def test_prompts_that_part_anywhere(kind: str, dtype: torch.dtype) -> None:
    """The second prompt that parts from one at a place leaves a state there for the third."""
    with wrapped(kind, dtype) as vlm, wrapped(kind, dtype) as other:
        ids = ids_of(vlm, 150)
        logits_of(vlm, ids)
        for shared in (31, 64, 77, 128, 150):
            for seed in (1, 2):
                behind = ids_of(vlm, 9, seed=shared + seed) + 100
                prompt, before = torch.cat([ids[:, :shared], behind], dim=1), rows(vlm)
                found, ran = logits_of(vlm, prompt), rows(vlm) - before
                other.clear()
                assert torch.equal(found, logits_of(other, prompt))
            assert ran < 9 + 16
        vlm.runtime.check()


@STATES
def test_the_words_that_open_every_prompt_are_computed_twice_at_most(kind: str) -> None:
    """A template writes them before the first word of a user."""
    with wrapped(kind) as vlm, wrapped(kind) as other:
        for seed, again in ((1, 20), (2, 20), (3, 0), (4, 0)):
            prompt = torch.cat([ids_of(vlm, 20), ids_of(vlm, 40, seed) + 100], dim=1)
            before, found = rows(vlm), logits_of(vlm, prompt)
            assert rows(vlm) - before == 40 + again
            assert torch.equal(found, logits_of(other, prompt))
            other.clear()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    in_both(
        ["qwen3_vl", "sliding", "gemma3_sliding", "cohere2_vision", "qwen3_5", "lfm2_vl"],
        ["gemma3_sliding", "cohere2_vision"],
    ),
)
def test_a_conversation_with_pictures_and_a_restart(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    first = [turn("What do you see in it?", picture(1))]
    more = [*first, turn("A pattern.", role="assistant"), turn("And this?", picture(2))]
    for messages in (first, more, first, more):
        with wrapped(kind, dtype, store=tmp_path) as vlm, wrapped(kind, dtype) as other:
            catch = Catch()
            answer = vlm.chat(messages, max_new_tokens=4, logits_processor=[catch])
            assert torch.equal(catch.rows[0], logits(other, messages))
            assert vlm.verify(messages, stock=True)
            vlm.runtime.check()
            vlm.flush()
    assert answer.usage.cached_tokens == answer.usage.prompt_tokens


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5", "lfm2_vl"])
@BOTH
def test_rows_of_a_batch_have_the_bits_they_have_alone(kind: str, dtype: torch.dtype) -> None:
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "return_dict_in_generate": True, **GREEDY}
    with wrapped(kind, dtype) as vlm:
        prompts = [ids_of(vlm, 70, 3), ids_of(vlm, 61, 4)]
        mask = torch.ones(2, 70, dtype=torch.long)
        mask[1, :9] = 0
        both = torch.cat([prompts[0], functional.pad(prompts[1], (9, 0))])
        together: Any = vlm.generate(
            input_ids=both, attention_mask=mask, output_logits=True, **options
        )
        for row, ids in enumerate(prompts):
            vlm.clear()
            alone: Any = vlm.generate(input_ids=ids, output_logits=True, **options)
            for one, other in zip(alone.logits, together.logits, strict=True):
                assert torch.equal(one[0], other[row])


@pytest.mark.tries_anew
def test_a_delta_rule_that_depends_on_its_rows_means_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(any_cut, "delta_rows_are_equal", lambda heads: False)
    with wrapped("qwen3_5") as vlm:
        assert "depends on the number of rows" in why_rounding(vlm)


@pytest.mark.tries_anew
def test_other_layers_under_a_known_name_mean_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What upstream computes is compared with what we do."""
    normal = delta._normal
    monkeypatch.setattr(delta, "_normal", lambda rows: 2 * normal(rows))
    with wrapped("qwen3_5") as vlm:
        assert "known by their class name" in why_rounding(vlm)


WRONG = ("_chunk_reads", "_next", "_keys", "convolve")


def _a_hundredth_more(function: Any) -> Any:
    """The same function, of which one result is too large."""

    def wrong(*given: Any) -> Any:
        found = function(*given)
        if isinstance(found, torch.Tensor):
            return found * 1.01
        part = found[0] if isinstance(found, tuple) else found.values
        part.mul_(1.01)
        return found

    return wrong


@pytest.mark.tries_anew
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in WRONG),
        *(("_chunk_reads", torch.bfloat16), ("convolve", torch.bfloat16), ("_next", torch.float16)),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for name in WRONG
            for dtype in (torch.bfloat16, torch.float16)
        ),
    ],
)
def test_a_rule_that_is_wrong_by_a_hundredth_means_rounding(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which logits of a few digits do not show, nor those of layers that forget at once."""
    place = mixers if name == "convolve" else delta
    monkeypatch.setattr(place, name, _a_hundredth_more(getattr(place, name)))
    with wrapped("lfm2_vl" if name == "convolve" else "qwen3_5", dtype) as vlm:
        assert "known by their class name" in why_rounding(vlm)


@pytest.mark.parametrize("heads", [(1, 1, 16, 16), (2, 4, 16, 32), (4, 8, 128, 128)])
def test_the_delta_rule_gives_rows_that_do_not_depend_on_the_cut(heads: Any) -> None:
    assert delta.delta_rows_are_equal(delta.DeltaHeads(*heads))


def test_float16_may_differ_from_stock_by_its_rounding() -> None:
    """And by no more than that; the demo model's logits do."""
    with ks.load("demo-hybrid", dtype="float16") as vlm:
        assert_bits(vlm)
        found = vlm.verify([turn("What do you see in it?", picture(1))], stock=True)
        assert found and found.stock_max_difference is not None and found.stock_scale is not None
        assert 0 < found.stock_max_difference < 1e-2 * found.stock_scale
