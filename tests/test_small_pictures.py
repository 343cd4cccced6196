"""Small pictures share calls of the tower where a trial showed that no bit changes, only there."""

from __future__ import annotations

from functools import partial
from typing import Any

import models
import pytest
import torch

import keepsight as ks
from keepsight.media import shared_passes
from keepsight.media.shared_passes import MOST
from keepsight.models import batch_trial

KINDS = ("qwen3_vl", "qwen2_5_vl", "gemma3", "paligemma")
SIDE = 112  # pixels
WORTH = 16  # pictures before a trial, so that few will do here
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _few_pictures_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_passes, "WORTH", WORTH)


class Passes:
    """Counts the calls of a tower."""

    def __init__(self, vlm: ks.VLM) -> None:
        self.sizes: list[int] = []
        family = vlm.runtime.family
        together = family.encode_together

        def counted(media: Any) -> Any:
            self.sizes.append(len(media))
            return together(media)

        family.encode_together = counted  # type: ignore[method-assign]


def pictures(count: int, start: int = 0, side: int = SIDE) -> list[Any]:
    return [models.picture(start + number, side, side) for number in range(count)]


def features(packages: list[ks.Package]) -> list[Tensors]:
    return [package.tensors for package in packages]


def expect_equal(
    some: list[dict[str, torch.Tensor]], others: list[dict[str, torch.Tensor]]
) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_together_they_have_the_bits_that_each_has_alone(kind: str, dtype: torch.dtype) -> None:
    model, processor = models.build(kind, dtype)
    shown = pictures(40)
    with ks.wrap(model, processor) as vlm:
        alone = features([vlm.encode(picture) for picture in shown])
        assert vlm.stats()["features"]["together"] == 0
    with ks.wrap(model, processor) as vlm:
        passes = Passes(vlm)
        expect_equal(features(vlm.encode(shown)), alone)
        found = vlm.stats()["features"]
        assert found["encoded"] == 40 and found["together"] == 24
        assert passes.sizes[-3:] == [MOST] * 3


def test_a_tower_that_rounds_otherwise_in_company_is_asked_for_one_at_a_time() -> None:
    model, processor = models.build("qwen3_vl")
    shown = pictures(40)
    with ks.wrap(model, processor) as vlm:
        alone = features([vlm.encode(picture) for picture in shown])
    layer = model.model.visual.blocks[1].mlp.linear_fc1

    def round_otherwise(
        module: torch.nn.Linear, given: tuple[torch.Tensor], found: torch.Tensor
    ) -> torch.Tensor:
        return found if len(given[0]) <= 64 else found.nextafter(found + 1)

    handle = layer.register_forward_hook(round_otherwise)
    try:
        with ks.wrap(model, processor) as vlm:
            expect_equal(features(vlm.encode(shown)), alone)
            found = vlm.stats()["features"]
            assert found["together"] == 0
            said = found["tried_together"]
            assert len(said) == 3 and {*said.values()} == {"other bits together: the features"}
    finally:
        handle.remove()


def test_an_operation_that_rounds_otherwise_is_seen_where_the_features_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LLaVA's projector is another operation for one picture than for several, and only the bias
    of zero of a model that was never trained hides it."""
    model, processor = models.build("llava")
    shown = pictures(24)
    with ks.wrap(model, processor) as vlm:
        vlm.encode(shown)
        found = vlm.stats()["features"]
        assert found["together"] == 0
        assert {*found["tried_together"].values()} == {"other bits together: mm"}
    monkeypatch.setattr(batch_trial, "_alike", lambda *_: True)
    with ks.wrap(model, processor) as vlm:
        vlm.encode(shown)
        assert vlm.stats()["features"]["together"] == 8  # so it is this look that tells


def test_a_first_turn_with_many_small_pictures() -> None:
    model, processor = models.build("qwen3_vl")
    asked = [
        {
            "role": "user",
            "content": [
                *({"type": "image", "image": picture} for picture in pictures(40)),
                {"type": "text", "text": "What is it?"},
            ],
        }
    ]
    with ks.wrap(model, processor) as vlm:
        for picture in pictures(40):
            vlm.encode(picture)
        wanted = vlm.chat(asked, max_new_tokens=4)
    with ks.wrap(model, processor) as vlm:
        passes = Passes(vlm)
        reply = vlm.chat(asked, max_new_tokens=4)
        assert reply.text == wanted.text
        assert reply.usage.images_encoded == 40 and passes.sizes[-4:] == [MOST] * 4
        assert len(passes.sizes) < 40


def test_few_pictures_pay_no_trial_and_large_ones_go_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, processor = models.build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        passes = Passes(vlm)
        vlm.encode(pictures(WORTH - 1))
        assert passes.sizes == [1] * (WORTH - 1)
        monkeypatch.setattr(shared_passes, "SMALL", 64 * 1536)  # less than a picture and its grid
        vlm.encode(pictures(24, 50))
        assert {*passes.sizes} == {1} and not vlm.stats()["features"]["tried_together"]


def test_company_is_bounded_by_the_budget() -> None:
    """Pixels with no room to wait share no pass: half of the budget is for features."""
    model, processor = models.build("qwen3_vl")
    with ks.wrap(model, processor, vision_budget=4 * 64 * 1536 * 4) as vlm:
        passes = Passes(vlm)
        vlm.encode(pictures(40))
        assert max(passes.sizes) == 2  # one more has room


def test_changed_weights_are_tried_anew() -> None:
    model, processor = models.build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        vlm.encode(pictures(24))
        assert vlm.stats()["features"]["together"] == 8
        weight = model.model.visual.blocks[0].mlp.linear_fc1.weight
        with torch.no_grad():
            weight.mul_(2)
        try:
            vlm.encode(pictures(8, 50))
            assert vlm.stats()["features"]["together"] == 8
        finally:
            with torch.no_grad():
                weight.div_(2)


@pytest.mark.parametrize("codec", ["exact", "int8"])
def test_a_folder_takes_fewer_calls(tmp_path: Any, codec: str) -> None:
    from keepsight.encode import encode

    model, processor = models.build("qwen3_vl")
    (tmp_path / "photos").mkdir()
    for number, picture in enumerate(pictures(40)):
        picture.save(tmp_path / "photos" / f"{number:02}.png")
    made = {}
    for way in ("store", "files", "one by one"):
        with ks.wrap(model, processor, store=tmp_path / way) as vlm:
            passes = Passes(vlm)
            if way == "one by one":
                made[way] = [vlm.encode(path) for path in sorted((tmp_path / "photos").iterdir())]
                continue
            files = tmp_path / "out" if way == "files" else None
            results = list(encode([tmp_path / "photos"], vlm, files=files, codec=codec))
            assert [result.status for result in results] == ["encoded"] * 40
            # 16 alone, of them eight for a trial (which calls once and eight at once), and 24.
            assert passes.sizes == [1] * 17 + [8] + [8] * 3
            found = vlm.stats()["features"]
            assert found["encoded"] == 40 and found["preprocessed"] == 40
            assert found["together"] == 24
            if codec == "exact" and way == "store":
                made[way] = [vlm.encode(path) for path in sorted((tmp_path / "photos").iterdir())]
                assert vlm.stats()["features"]["encoded"] == 40
            if codec == "exact" and way == "files":
                packages = {p.key: p for p in map(ks.Package.load, files.glob("*.sight"))}
                made[way] = [packages[one.key] for one in made["store"]]
    for found in made.values():
        expect_equal(features(found), features(made["one by one"]))


def test_what_shared_a_pass_is_computed_anew_where_its_caller_kept_nothing() -> None:
    """The caller keeps nothing where the weights changed meanwhile: no picture of that pass is
    better than the one he asked for."""
    model, processor = models.build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        vlm.encode(pictures(24))  # the trial
        vision = vlm.runtime.vision
        for kept in (True, False):
            first, *others = [vision.name(one) for one in pictures(8, 50 + 10 * kept)]
            passes = Passes(vlm)
            vision.package(first, partial(bool, kept), others)
            vision.package(others[0], beside=others[1:])
            assert passes.sizes[0] == MOST and (len(passes.sizes) == 1) == kept
