"""The suite for families must be able to fail: each way of breaking a family is caught by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import FamilyTests
from support.models import build

from keepsight.models.families.base import Family
from keepsight.models.families.one_block import Gemma3
from keepsight.models.families.packed import Ernie45VLMoe
from keepsight.models.families.pixels import Pixels
from keepsight.models.families.sized import Mistral3


def plain_positions(family: Any, ids: Any, types: Any, grids: Any) -> torch.Tensor:
    """One dimension where there should be three."""
    return torch.arange(len(ids))[None, None].expand(4, 1, -1)


def no_deepstack(right: Callable[..., Any]) -> Callable[..., Any]:
    def encoder_outputs(family: Any, parts: Any) -> Any:
        output = right(family, parts)
        for level in output["image"].deepstack_features:
            for rows in level:
                rows.zero_()
        return output

    return encoder_outputs


def first_rows(right: Callable[..., Any]) -> Callable[..., Any]:
    """Rows from the start of a picture, whichever part of it a chunk holds."""

    def encoder_outputs(family: Any, parts: Any) -> Any:
        return right(family, [(package, 0, b - a) for package, a, b in parts])

    return encoder_outputs


def suffix_types(family: Any, ids: Any, types: Any, start: int, end: int) -> Any:
    return {"token_type_ids": torch.from_numpy(types[start:end].astype("int64"))[None]}


def nothing(*_: Any) -> dict[str, Any]:
    return {}


def uncropped(right: Callable[..., Any]) -> Callable[..., Any]:
    """Every picture as large as its largest neighbour."""

    def split(family: Any, tensors: Any, rows: Any) -> Any:
        media = right(family, tensors, rows)
        return [
            Pixels(
                {**m.tensors, "pixel_values": tensors["pixel_values"][i : i + 1]}, m.grid, m.layout
            )
            for i, m in enumerate(media)
        ]

    return split


BREAKS: list[tuple[str, str, type, str, Any]] = [
    ("positions", "qwen3_vl", Family, "positions", plain_positions),
    ("deepstack", "qwen3_vl", Family, "encoder_outputs", no_deepstack),
    ("rows", "llava", Family, "encoder_outputs", first_rows),
    ("a blind key", "qwen2_vl", Pixels, "key", property(lambda pixels: "0" * 64)),
    ("cut blocks", "gemma3", Gemma3, "sees_whole_media", False),
    ("short types", "gemma3", Gemma3, "chunk_inputs", suffix_types),
    ("no routes", "ernie4_5_vl_moe", Ernie45VLMoe, "chunk_inputs", nothing),
    ("padding", "mistral3", Mistral3, "split_tensors", uncropped),
    ("no reuse", "llava", Family, "reuse", "whole prompt"),
]
TAKES_THE_RIGHT_ONE = (no_deepstack, first_rows, uncropped)


@pytest.mark.parametrize(
    ("kind", "owner", "name", "wrong"), [row[1:] for row in BREAKS], ids=[row[0] for row in BREAKS]
)
def test_a_broken_family_is_caught(
    kind: str, owner: type, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Suite(FamilyTests):
        long_words = 100

        def make_model(self) -> tuple[Any, Any]:
            return build(kind)

    if wrong in TAKES_THE_RIGHT_ONE:
        wrong = wrong(getattr(owner, name))
    monkeypatch.setattr(owner, name, wrong)
    suite = Suite()
    caught: list[Exception] = []
    for test in (
        suite.test_answers_are_those_of_stock_and_warm_equals_cold,
        suite.test_it_reuses_what_it_says,
        suite.test_cuts_every_few_tokens,
        suite.test_neighbours_change_nothing,
        suite.test_pictures_matter,
    ):
        try:
            test()
        except Exception as error:  # a broken family may also crash in some of them
            caught.append(error)
            if isinstance(error, AssertionError):
                break
    # A crash alone would not show that the suite looks at answers.
    assert any(isinstance(error, AssertionError) for error in caught), caught
