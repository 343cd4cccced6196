"""A bank of pictures as the frozen tower of qwen3_vl sees them.

The tower does not learn in stage 2, so the same picture gives the same features at every step.
Drawing and encoding once, instead of at every step, leaves the whole processor to the language
model. The tower of qwen3_5 is the same without deepstack, so one bank does for both. Every
possible picture is in the bank several times, each time with another jitter of shade and place.
"""

import argparse
import itertools
import random
from pathlib import Path

import numpy as np
import tiny
import torch
from patches import cut, merged
from torch import Tensor, nn

from keepsight.demo.scene import BACKGROUNDS, COLORS, COLS, ROWS, SCALES, SHAPES, SIDES, Scene

Key = tuple[str, str, str, str, str, str, int, int]


def key(scene: Scene) -> Key:
    """What tells two pictures apart, the jitter left out."""
    looks = (scene.color, scene.shape, scene.scale, scene.background, scene.row, scene.col)
    return (*looks, scene.width, scene.height)


def every_key() -> list[Key]:
    """All pictures of the world, the jitter left out."""
    looks = (COLORS, SHAPES, SCALES, BACKGROUNDS, ROWS, COLS, SIDES, SIDES)
    return list(itertools.product(*looks))


class Bank:
    """Tower features of every picture, one row a token: the last layer's, then the deepstack's."""

    def __init__(self, tokens: Tensor, starts: dict[Key, list[int]]) -> None:
        self.tokens, self.starts = tokens, starts

    @classmethod
    def load(cls, path: Path) -> "Bank":
        """Read a bank that ``save`` wrote."""
        stored = torch.load(path, weights_only=True)
        return cls(stored["tokens"], stored["starts"])

    def save(self, path: Path) -> None:
        """Write the bank, so that both models can be trained from it."""
        torch.save({"tokens": self.tokens, "starts": self.starts}, path)

    def rows(self, rng: random.Random, scene: Scene) -> range:
        """The rows of ``tokens`` that hold one of the drawings of a scene."""
        rows, cols = merged(scene.width, scene.height)
        start = rng.choice(self.starts[key(scene)])
        return range(start, start + rows * cols)


def build(tower: nn.Module, variants: int, seed: int, batch: int = 128) -> Bank:
    """Draw every picture ``variants`` times and keep what the tower makes of it.

    Every other variant is encoded in bfloat16, so that the language model meets both roundings
    that its users will run it in.
    """
    rng = random.Random(seed)
    starts: dict[Key, list[int]] = {}
    parts: list[Tensor] = []
    total = 0
    dtypes = itertools.cycle((torch.float32, torch.bfloat16))
    for _, dtype in zip(range(variants), dtypes, strict=False):
        tower.to(dtype)
        for width, height in itertools.product(SIDES, SIDES):
            keys = [k for k in every_key() if k[-2:] == (width, height)]
            per_picture = int(np.prod(merged(width, height)))
            for at in range(0, len(keys), batch):
                some = keys[at : at + batch]
                parts.append(_encode(tower, [_scene(k, rng) for k in some]))
                for number, picture in enumerate(some):
                    starts.setdefault(picture, []).append(total + number * per_picture)
                total += len(some) * per_picture
    tower.to(torch.float32)
    return Bank(torch.cat(parts), starts)


def _scene(wanted: Key, rng: random.Random) -> Scene:
    color, shape, scale, background, row, col, width, height = wanted
    return Scene.of(
        color=color,
        shape=shape,
        scale=scale,
        background=background,
        row=row,
        col=col,
        size=(width, height),
        seed=rng.randrange(2**32),
    )


@torch.inference_mode()
def _encode(tower: nn.Module, scenes: list[Scene]) -> Tensor:
    patches, grids = zip(*(cut(scene.draw()) for scene in scenes), strict=True)
    pixels = torch.from_numpy(np.concatenate(patches)).to(next(tower.parameters()).dtype)
    seen = tower(pixels, grid_thw=torch.tensor(grids), return_dict=True)
    layers = [seen.pooler_output, *seen.deepstack_features]
    return torch.cat([layer.to(torch.bfloat16) for layer in layers], dim=-1)


def main() -> None:
    """Draw and encode the bank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tower", type=Path, help="what pretrain.py wrote")
    parser.add_argument("out", type=Path)
    parser.add_argument("--variants", type=int, default=6, help="drawings of every picture")
    options = parser.parse_args()
    model = tiny.with_tower(tiny.fresh("qwen3_vl"), options.tower)
    build(model.model.visual, options.variants, seed=11).save(options.out)


if __name__ == "__main__":
    main()
