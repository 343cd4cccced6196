"""Films of a few frames, and answers about them against stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import keepsight as ks
from support.models import build

START, END, IMAGE, VIDEO = 3, 4, 6, 7
GLM = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")  # videos are written with image placeholders


KINDS = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("cosmos3_omni", *GLM),
)
# Films are laid out by these as by another one; what differs is the decoder.
AGAIN = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "glm46v")
EACH = [pytest.param(k, marks=[pytest.mark.slow] if k in AGAIN else []) for k in KINDS]


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
