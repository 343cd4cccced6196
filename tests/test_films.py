"""Films through the tower step by step: each step in time is a medium of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_video import GLM, KINDS, Script, ask, assert_exact

import keepsight as ks
from keepsight.models.families.qwen_vl import QwenVL

QWEN = ("qwen2_5_vl", "qwen3_vl")


def film(kind: str, steps: list[int], h: int = 8) -> Script:
    """A film whose steps are drawn from a row of seeds, between words."""
    script = Script(kind).text(1, 20).video(1, t=len(steps), h=h)
    size = h * 4
    script.pixels[2] = [torch.cat([step(script, seed, size) for seed in steps])]
    return script.text(2)


def step(script: Script, seed: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(size, script.width, generator=generator)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The grids of films that went through towers, pass by pass."""
    grids: list[list[int]] = []
    whole = QwenVL.features_of

    def noted(family: QwenVL, inputs: dict[str, torch.Tensor]) -> Any:
        grids.extend(inputs["video_grid_thw"].tolist())
        return whole(family, inputs)

    monkeypatch.setattr(QwenVL, "features_of", noted)
    return grids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("h", [4, 8])
def test_a_tower_sees_one_step_of_a_film_at_a_time(kind: str, h: int) -> None:
    """The whole film in one pass gives bit for bit what its steps give, in passes of their own."""
    core, script = Script(kind).model.base_model, film(kind, [1, 2, 3], h)
    pixels = script.inputs()["pixel_values_videos"]

    def towers(pixels: torch.Tensor, t: int) -> list[torch.Tensor]:
        grid = torch.tensor([[t, h, 4]])
        with torch.no_grad():
            out = core.get_video_features(pixels, grid, return_dict=True)
        levels = getattr(out, "deepstack_features", None) or []
        return [out.pooler_output[0], *(level[0] for level in levels)]

    whole = towers(pixels, 3)
    alone = [towers(part, 1) for part in pixels.chunk(3)]
    for level, one in enumerate(whole):
        assert torch.equal(one, torch.cat([each[level] for each in alone]))


@pytest.mark.parametrize("kind", [*QWEN, *GLM[:1]])
def test_a_film_that_grows_or_slides_encodes_its_new_steps(
    kind: str, passes: list[list[int]]
) -> None:
    first = film(kind, [1, 2, 3])
    with ks.wrap(first.model, None, grain=16) as vlm:
        for steps, new in (([1, 2, 3], 3), ([1, 2, 3, 4, 5], 2), ([2, 3, 4], 0), ([5, 6, 6], 1)):
            passes.clear()
            ask(vlm, film(kind, steps))
            assert passes == [[1, 8, 4]] * new
        assert_exact(vlm, film(kind, [1, 2, 3, 4, 5, 6]))
