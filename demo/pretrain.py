"""Stage 1: teach the tower to see.

Every token that the tower hands on must name the picture's colour, shape, size, background, row
and column. A language model that learns together with its tower finds the colours alone: without
this stage shapes and places stayed at chance.
"""

import argparse
import math
import random
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tiny
import torch
import torch.nn.functional as F
from patches import cut
from safetensors.torch import save_file
from torch import Tensor, nn

from keepsight.demo.scene import BACKGROUNDS, COLORS, COLS, ROWS, SCALES, SHAPES, SIDES, Scene

FIELDS: dict[str, tuple[str, ...]] = {
    "color": tuple(COLORS),
    "shape": SHAPES,
    "scale": SCALES,
    "background": tuple(BACKGROUNDS),
    "row": ROWS,
    "col": COLS,
}
MUON_RATE, ADAM_RATE = 6e-3, 3e-3
WARM_UP = 100
DEEP_WEIGHT = 0.3


class Heads(nn.Module):
    """One small classifier for each thing that a token must name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.by_field = nn.ModuleDict({k: nn.Linear(width, len(v)) for k, v in FIELDS.items()})

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses, and for each field the share of tokens that are right."""
        loss, right = torch.zeros(()), []
        for number, head in enumerate(self.by_field.values()):
            logits, target = head(tokens), labels[:, number]
            loss = loss + F.cross_entropy(logits, target)
            right.append((logits.argmax(-1) == target).float().mean())
        return loss, torch.stack(right)


def pictures(batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Endless batches of pictures of one size: patches, grids and what is to be named."""
    rng = random.Random(seed)
    while True:
        size = (rng.choice(SIDES), rng.choice(SIDES))
        scenes = [Scene(rng, size) for _ in range(batch)]
        patches, grids = zip(*(cut(scene.draw()) for scene in scenes), strict=True)
        labels = [[v.index(getattr(scene, k)) for k, v in FIELDS.items()] for scene in scenes]
        yield torch.from_numpy(np.concatenate(patches)), torch.tensor(grids), torch.tensor(labels)


def optimizers(tower: nn.Module, heads: nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the tower's matrices, AdamW for everything else."""
    named = list(tower.named_parameters())
    inner = [p for name, p in named if p.ndim == 2 and "pos_embed" not in name]
    taken = {id(p) for p in inner}
    rest = [p for _, p in named if id(p) not in taken] + list(heads.parameters())
    muon = torch.optim.Muon(
        inner, lr=MUON_RATE, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    return [(muon, MUON_RATE), (adam, ADAM_RATE)]


def learn(tower: nn.Module, width: int, options: argparse.Namespace) -> None:
    """Train until the time is over.

    The deepstack layers name things too, with less weight: they see earlier layers of the tower.
    """
    heads = nn.ModuleList([Heads(width), Heads(width)])
    parts = optimizers(tower, heads)
    stream = pictures(options.batch, options.seed)
    recent: deque[Tensor] = deque(maxlen=20)
    start, step = time.monotonic(), 0
    while (passed := time.monotonic() - start) < options.minutes * 60:
        _set_rates(parts, step, passed / (options.minutes * 60))
        patches, grids, labels = next(stream)
        seen = tower(patches, grid_thw=grids, return_dict=True)
        each = labels.repeat_interleave(len(seen.pooler_output) // len(labels), 0)
        loss, right = heads[0](seen.pooler_output, each)
        loss = loss + DEEP_WEIGHT * heads[1](seen.deepstack_features[-1], each)[0]
        tower.zero_grad(set_to_none=True)
        heads.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        for optimizer, _ in parts:
            optimizer.step()
        recent.append(right)
        if step % 100 == 0:
            _report(step, passed, torch.stack(list(recent)).mean(0))
        step += 1
    _report(step, passed, torch.stack(list(recent)).mean(0))


def main() -> None:
    """Train a tower and write its weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    # Inputs of matrix products in bfloat16: twice the speed where the processor has such units.
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    model = tiny.fresh("qwen3_vl")
    tower = model.model.visual
    learn(tower, model.config.text_config.hidden_size, options)
    save_file({k: v.to(torch.bfloat16) for k, v in tower.state_dict().items()}, options.out)


def _set_rates(parts: list[tuple[torch.optim.Optimizer, float]], step: int, done: float) -> None:
    warm = min(1.0, (step + 1) / WARM_UP)
    share = warm * (0.49 * (1 + math.cos(math.pi * done)) + 0.02)
    for optimizer, full in parts:
        for group in optimizer.param_groups:
            group["lr"] = full * share


def _report(step: int, passed: float, right: Tensor) -> None:
    shares = " ".join(f"{name} {share:.4f}" for name, share in zip(FIELDS, right, strict=True))
    print(f"{step} {passed:.0f}s {shares}", flush=True)


if __name__ == "__main__":
    main()
