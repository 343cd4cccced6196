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
from models import build, picture

import keepsight as ks
from keepsight.errors import ImageError, InputError, PlaceholderMismatch
from keepsight.media.clips import is_rate, open_clip

START, END, IMAGE, VIDEO = 3, 4, 6, 7
GLM = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")  # videos are written with image placeholders
KINDS = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("cosmos3_omni", *GLM),
)


class Script:
    """A prompt written token by token, with the tensors of its media."""

    def __init__(self, kind: str) -> None:
        self.model, _ = build(kind)
        self.glm = kind in GLM
        self.stamped = not kind.startswith("qwen2")  # whether frames stand apart, each with a time
        self.vision = self.model.config.vision_config
        channels = getattr(self.vision, "in_channels", 3)
        self.width = channels * 2 * self.vision.patch_size**2
        self.ids: list[int] = []
        self.types: list[int] = []
        self.grids: dict[int, list[list[int]]] = {1: [], 2: []}
        self.pixels: dict[int, list[torch.Tensor]] = {1: [], 2: []}
        self.seconds: list[float] = []

    def text(self, seed: int, count: int = 12) -> Script:
        generator = torch.Generator().manual_seed(seed)
        self.ids += torch.randint(20, 500, (count,), generator=generator).tolist()
        self.types += [0] * count
        return self

    def medium(self, seed: int, token: int, t: int, h: int = 4, w: int = 4) -> Script:
        generator = torch.Generator().manual_seed(seed)
        kind = {IMAGE: 1, VIDEO: 2}[token]
        config = self.model.config
        if self.glm and kind == 2:
            return self._film(kind, t, h, w, generator)
        if self.glm:
            token = config.image_token_id
        self.grids[kind].append([t, h, w])
        self.pixels[kind].append(torch.randn(t * h * w, self.width, generator=generator))
        split = t if token == VIDEO and self.stamped else 1
        for frame in range(split):
            count = t * h * w // 4 // split
            stamp = [100 + frame] if split > 1 else []
            self.ids += [*stamp, START, *[token] * count, END]
            self.types += [0] * len(stamp) + [0, *[kind] * count, 0]
        return self

    def _film(self, kind: int, t: int, h: int, w: int, generator: torch.Generator) -> Script:
        """A video of GLM-4V: image placeholders between its marks, a run for each step in time."""
        config = self.model.config
        self.grids[kind].append([t, h, w])
        self.pixels[kind].append(torch.randn(t * h * w, self.width, generator=generator))
        self.ids.append(config.video_start_token_id)
        self.types.append(0)
        for frame in range(t):
            count = h * w // 4
            self.ids += [START, *[config.image_token_id] * count, END, 100 + frame]
            self.types += [0, *[kind] * count, 0, 0]
        self.ids.append(config.video_end_token_id)
        self.types.append(0)
        return self

    def video(self, seed: int, t: int = 3, h: int = 4, seconds: float | None = None) -> Script:
        if seconds is not None:
            self.seconds.append(seconds)
        return self.medium(seed, VIDEO, t, h)

    def inputs(self) -> dict[str, torch.Tensor]:
        inputs = {
            "input_ids": torch.tensor([self.ids]),
            "attention_mask": torch.ones(1, len(self.ids), dtype=torch.long),
            "mm_token_type_ids": torch.tensor([self.types]),
        }
        for kind, names in (
            (1, ("pixel_values", "image_grid_thw")),
            (2, ("pixel_values_videos", "video_grid_thw")),
        ):
            if self.grids[kind]:
                inputs[names[0]] = torch.cat(self.pixels[kind])
                inputs[names[1]] = torch.tensor(self.grids[kind])
        if self.seconds:
            inputs["second_per_grid_ts"] = torch.tensor(self.seconds)
        return inputs

    def go_on(self) -> Script:
        """A copy to write on in."""
        other = Script.__new__(Script)
        other.__dict__ = {k: (list(v) if isinstance(v, list) else v) for k, v in vars(self).items()}
        other.grids = {k: list(v) for k, v in self.grids.items()}
        other.pixels = {k: list(v) for k, v in self.pixels.items()}
        return other


def ask(owner: Any, script: Script) -> Any:
    return owner.generate(
        **script.inputs(),
        max_new_tokens=4,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


def assert_exact(vlm: Any, script: Script) -> Any:
    warm = ask(vlm, script)
    both = script.glm and script.grids[1] and script.grids[2]  # which stock cannot take together
    stock = None if both else ask(vlm.model, script)
    for wanted, found in zip(stock.logits, warm.logits, strict=True) if stock else ():
        assert float((wanted - found).abs().max()) < 1e-4 * float(wanted.abs().max())
    with ks.wrap(vlm.model, None) as fresh:
        assert torch.equal(ask(fresh, script).logits[0], warm.logits[0])
    return warm


@pytest.mark.parametrize("kind", KINDS)
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


def test_a_package_with_another_grid_is_another_prompt() -> None:
    """Same rows, same claims, another shape or speed: it must not find what the true one left."""
    model, processor = build("qwen3_vl")
    question = "Please look at this picture very carefully and tell what it is."
    with ks.wrap(model, processor) as vlm:
        pack = vlm.encode(picture(3, 160, 96))
        (t, h, w) = pack.grid["image_grid_thw"][0]
        turned = dataclasses.replace(pack, grid={"image_grid_thw": [[t, w, h]]})
        assert h != w
        true = vlm.ask(pack, question, max_new_tokens=1)
        other = vlm.ask(turned, question, max_new_tokens=1)
        start = next(s.start for s in other.report.segments if s.kind == "image")
        assert (true.usage.cached_tokens, other.usage.cached_tokens) == (0, start)
        assert vlm.ask(pack, question, max_new_tokens=1).usage.cached_tokens > 0


def test_a_package_of_another_modality_is_refused_by_name() -> None:
    model, processor = build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        pack = dataclasses.replace(vlm.encode(picture(1)), modality="smell")
        with pytest.raises(ImageError, match="smell"):
            vlm.ask(pack, "What is it?")


def test_a_rate_may_be_any_real_number() -> None:
    """A fraction is what PyAV calls the rate of a stream."""
    assert is_rate(Fraction(30000, 1001), 100) and is_rate(np.float32(2.5), 100)
    for wrong in (Fraction(0), Fraction(-1, 2), True, "2", [2], float("nan"), 100):
        assert not is_rate(wrong, 100)
