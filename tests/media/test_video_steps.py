"""Films through the tower step by step: each step in time is a medium of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.films import EACH, GLM, Script, ask, assert_exact

import keepsight as ks
from keepsight.core.pins import delete_images
from keepsight.media.video_steps import FeatureOrigin, steps_from
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


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("h", [4, 8])
def test_a_tower_sees_one_step_of_a_film_at_a_time(kind: str, h: int) -> None:
    """The whole film in one pass gives what its steps give, in passes of their own: bit for bit
    whatever the other steps show, and up to rounding whatever their number, since a matrix product
    may add in another order for another number of rows."""
    core, script = Script(kind).model.base_model, film(kind, [1, 2, 3], h)
    pixels = script.inputs()["pixel_values_videos"]

    def towers(pixels: torch.Tensor, t: int) -> list[torch.Tensor]:
        grid = torch.tensor([[t, h, 4]])
        with torch.no_grad():
            out = core.get_video_features(pixels, grid, return_dict=True)
        levels = getattr(out, "deepstack_features", None) or []
        return [out.pooler_output[0], *(level[0] for level in levels)]

    whole = towers(pixels, 3)
    others = towers(film(kind, [1, 8, 9], h).inputs()["pixel_values_videos"], 3)
    alone = [towers(part, 1) for part in pixels.chunk(3)]
    for level, one in enumerate(whole):
        rows = len(one) // 3
        assert torch.equal(one[:rows], others[level][:rows])
        assert not torch.allclose(one[rows:], others[level][rows:])
        each = torch.cat([step[level] for step in alone])
        torch.testing.assert_close(one, each, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [*QWEN, *GLM[:1]])
def test_a_film_that_grows_or_slides_encodes_its_new_steps(
    kind: str, passes: list[list[int]]
) -> None:
    first = film(kind, [1, 2, 3])
    with ks.wrap(first.model, None) as vlm:
        for steps, new in (([1, 2, 3], 3), ([1, 2, 3, 4, 5], 2), ([2, 3, 4], 0), ([5, 6, 6], 1)):
            passes.clear()
            ask(vlm, film(kind, steps))
            assert passes == [[1, 8, 4]] * new
        assert_exact(vlm, film(kind, [1, 2, 3, 4, 5, 6]))


def behind_step(script: Script, number: int) -> int:
    """Where the tokens of so many steps end in a prompt."""
    places = [place for place, kind in enumerate(script.types) if kind == 2]
    return places[len(places) // script.grids[2][0][0] * number - 1] + 1


def fresh(script: Script) -> Any:
    with ks.wrap(script.model, None) as vlm:
        return ask(vlm, script).logits[0]


def assert_as_fresh(vlm: Any, script: Script) -> Any:
    warm = ask(vlm, script)
    assert torch.equal(fresh(script), warm.logits[0])
    stock = ask(vlm.model, script).logits[0]
    assert float((stock - warm.logits[0]).abs().max()) < 1e-4 * float(stock.abs().max())
    return warm.usage


@pytest.mark.parametrize("kind", EACH)
def test_a_film_that_grows_prefills_its_new_steps(kind: str) -> None:
    least = 1 if kind in ("qwen2_vl", "qwen2_5_vl", *GLM) else 2  # else one step has no time
    one, short, long = (film(kind, list(range(1, count + 1))) for count in (least, 3, 5))
    again = 63 if kind.startswith("qwen3_5") else 0  # to where a state of fixed size was captured
    with ks.wrap(one.model, None) as vlm:
        exact = vlm.stats()["engine"]["exactness"] == "bits"
        ask(vlm, one)
        for before, now in ((least, short), (3, long)):
            usage = assert_as_fresh(vlm, now)
            assert not exact or usage.cached_tokens >= behind_step(now, before) - again
        report = str(ask(vlm, long).report)
        assert report.count("video") <= 5  # a line for each stretch, not one for each row
        changed = film(kind, [1, 2, 9, 4, 5])
        usage = assert_as_fresh(vlm, changed)
        if exact:
            known = behind_step(changed, 2)
            assert known - again <= usage.cached_tokens < behind_step(changed, 3)


def test_the_same_steps_at_another_speed_are_another_prompt() -> None:
    slow, fast = film("qwen2_5_vl", [1, 2, 3]), film("qwen2_5_vl", [1, 2, 3])
    slow.seconds, fast.seconds = [2.0], [1.0]
    with ks.wrap(slow.model, None) as vlm:
        assert_as_fresh(vlm, slow)
        assert assert_as_fresh(vlm, fast).cached_tokens < behind_step(fast, 1)


def test_a_step_is_known_by_its_place_and_the_speed_of_its_film() -> None:
    same = ["a" * 64] * 3
    slow, fast = ({"video_grid_thw": [[3, 4, 4]], "second_per_grid_ts": [s]} for s in (2.0, 1.0))
    steps = [*steps_from(same, slow, FeatureOrigin()), *steps_from(same, fast, FeatureOrigin())]
    assert len({step.path for step in steps}) == 6
    assert len({step.feature_id for step in steps}) == 1


def test_steps_lie_in_a_store_and_go_with_their_film(tmp_path: Path, passes: list[Any]) -> None:
    first, longer = film("qwen3_vl", [1, 2, 3]), film("qwen3_vl", [2, 3, 4])
    with ks.wrap(first.model, None, store=tmp_path) as vlm:
        ask(vlm, first)
    passes.clear()
    with ks.wrap(first.model, None, store=tmp_path) as vlm:
        assert ask(vlm, longer).usage.images_encoded == 1
        assert passes == [[1, 8, 4]]
        vlm.flush()
        assert vlm.stats()["store"]["kinds"]["package"]["entries"] == 4
        whose = next(s.key for s in ask(vlm, first).report.segments if s.kind == "video")
        assert delete_images(vlm.runtime, [whose], "") > 0
        assert vlm.stats()["store"]["kinds"]["package"]["entries"] == 1
        passes.clear()
        ask(vlm, film("qwen3_vl", [3, 2, 4]))
        assert passes == [[1, 8, 4]] * 2  # what both showed is gone, what one showed is not
