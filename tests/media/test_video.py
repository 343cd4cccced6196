"""Videos as tensors, for the families that lay frames on a grid through time.

Patches are made by hand here, so nothing of torchvision is needed; `test_video_files.py` goes
through the real video processors.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from support.films import EACH, GLM, IMAGE, Script, ask, assert_exact
from support.models import picture

import keepsight as ks
from keepsight.errors import ImageError, InputError, PlaceholderMismatch
from keepsight.media.clips import is_rate, open_clip


@pytest.mark.parametrize("kind", EACH)
def test_videos_are_remembered(kind: str) -> None:
    first = Script(kind).text(1).video(1).text(2)
    turn = first.go_on().text(3)
    another = turn.go_on().video(2, t=2).text(4)
    mixed = turn.go_on().medium(3, IMAGE, 1).text(5).video(1).text(6)
    swapped = Script(kind).text(1).video(2).text(2)
    with ks.wrap(first.model, None) as vlm:
        assert_exact(vlm, first)
        out = assert_exact(vlm, turn)
        assert out.usage.cached_tokens > 0 and out.usage.images_encoded == 0
        out = assert_exact(vlm, another)
        assert out.usage.cached_tokens > 0 and out.usage.images_encoded == 1
        out = assert_exact(vlm, mixed)
        assert out.usage.images == 3 and out.usage.images_encoded == 1
        assert "video" in str(out.report) and "image" in str(out.report)
        one, other = ask(vlm, first).logits[0], ask(vlm, swapped).logits[0]
        assert float((one - other).abs().max()) > 1e-2 * float(one.abs().max())


@pytest.mark.parametrize("kind", GLM[:1])
def test_stock_cannot_take_an_image_beside_a_video(kind: str) -> None:
    """Stepped around in families/packed.py: features of both go in together, in their order."""
    mixed = Script(kind).text(1).video(1).text(2).medium(3, IMAGE, 1).text(5)
    with pytest.raises(ValueError, match="do not match"):
        ask(mixed.model, mixed)
    alone = Script(kind).text(1).video(1).text(2)
    with ks.wrap(mixed.model, None) as vlm:
        assert_exact(vlm, alone)
        out = assert_exact(vlm, mixed)
        assert out.usage.cached_tokens > 0 and out.usage.images_encoded == 1


def test_the_speed_of_a_video_is_part_of_its_name() -> None:
    """Qwen2.5-VL lays positions out by seconds: same frames, same ids, other positions."""
    slow = Script("qwen2_5_vl").text(1).video(1, seconds=4.0).text(2)
    quick = Script("qwen2_5_vl").text(1).video(1, seconds=0.5).text(2)
    with ks.wrap(slow.model, None) as vlm:
        one, other = assert_exact(vlm, slow), assert_exact(vlm, quick)
        start = next(s.start for s in other.report.segments if s.kind == "video")
        assert other.usage.cached_tokens == start
        assert not torch.equal(one.logits[0], other.logits[0])


def test_bad_videos_are_refused_by_name() -> None:
    script = Script("qwen3_vl").text(1).video(1).text(2)
    with ks.wrap(script.model, None) as vlm:
        for change, error in (
            ({"video_grid_thw": torch.tensor([[9, 4, 4]])}, PlaceholderMismatch),
            ({"video_grid_thw": None}, InputError),
            ({"pixel_values_videos": None, "video_grid_thw": None}, PlaceholderMismatch),
        ):
            with pytest.raises(error):
                vlm.generate(**{**script.inputs(), **change})
        assert_exact(vlm, script)


def test_clips_with_fields_that_would_be_ignored_are_refused() -> None:
    film = np.zeros((4, 32, 32, 3), np.uint8)
    for wrong, words in (
        ({"fpx": 2.0}, "a video has no field 'fpx'; did you mean 'fps'"),
        ({"start": 2.0}, "a video has no field 'start'; known: frames, fps"),
        *(({"fps": fps}, f"a video at {fps!r} frames") for fps in (0, "x", [2], True, -1.0)),
    ):
        with pytest.raises(ImageError) as error:
            open_clip({"frames": film, **wrong}, "video")
        assert words in str(error.value)
    for wrong, words in (
        ({"rate": 16_000}, "sound has no field 'rate'"),
        ({"sampling_rate": "16k"}, "sound at '16k' samples per second"),
        ({"sampling_rate": 0}, "sound at 0 samples per second"),
    ):
        with pytest.raises(ImageError) as error:
            open_clip({"array": film[0, 0, :, 0], **wrong}, "audio")
        assert words in str(error.value)
    assert open_clip({"frames": film, "fps": np.float32(2)}, "video").name


def test_a_package_with_another_grid_is_another_prompt(vlm: Any) -> None:
    """Same rows, same claims, another shape or speed: it must not find what the true one left."""
    question = "Please look at this picture very carefully and tell what it is."
    pack = vlm.encode(picture(3, 160, 96))
    (t, h, w) = pack.grid["image_grid_thw"][0]
    turned = dataclasses.replace(pack, grid={"image_grid_thw": [[t, w, h]]})
    assert h != w
    true = vlm.ask(pack, question, max_new_tokens=1)
    other = vlm.ask(turned, question, max_new_tokens=1)
    start = next(s.start for s in other.report.segments if s.kind == "image")
    assert (true.usage.cached_tokens, other.usage.cached_tokens) == (0, start)
    assert vlm.ask(pack, question, max_new_tokens=1).usage.cached_tokens > 0


def test_a_package_of_another_modality_is_refused_by_name(vlm: Any) -> None:
    pack = dataclasses.replace(vlm.encode(picture(1)), modality="smell")
    with pytest.raises(ImageError, match="smell"):
        vlm.ask(pack, "What is it?")


def test_a_rate_may_be_any_real_number() -> None:
    """A fraction is what PyAV calls the rate of a stream."""
    assert is_rate(Fraction(30000, 1001), 100) and is_rate(np.float32(2.5), 100)
    for wrong in (Fraction(0), Fraction(-1, 2), True, "2", [2], float("nan"), 100):
        assert not is_rate(wrong, 100)
