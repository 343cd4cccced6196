"""What `keepsight bench` can be asked for, and the scales of its workloads. PyTorch is not imported
here, so a wrong option is refused at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

QUICK = ("W1", "W5")  # the default workloads of --quick
WORKLOADS = ("W1", "W4", "W5", "W7", "peers", "cold", "restart", "roofline")
SHAPES = ("qwen3_vl", "qwen2_5_vl", "qwen3_5")  # those of `checkpoints.SHAPES`
SIZES = ("tiny", "small", "base", "large")  # those of `checkpoints.SIZES`
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Scale:
    """How much of a workload is run; sizes of pictures in pixels, of texts in words."""

    picture: tuple[int, int]  # of W1, W5 and W7
    small: tuple[int, int]  # of cold runs
    page: tuple[int, int]  # of W4
    large: tuple[int, int] | None = None  # of a second W1
    peers: int = 64  # width and height in the peers' conversation
    turns: int = 2  # of W1
    requests: int = 2  # of W4, W5 and W7
    pages: int = 2  # in one request of W4
    references: int = 1  # of W7
    system: int = 20  # of W5's system prompt
    question: int = 10
    answer: int = 20
    repetitions: int = 1

    @property
    def fewer(self) -> int:
        """Repetitions for workloads in which stock encodes many pictures each time."""
        return (self.repetitions + 1) // 2


_SMOKE, _QUICK = (64, 64), (384, 384)
SCALES = {
    "full": Scale(
        (1280, 800), (512, 512), (704, 736), (1920, 1080), 672, 6, 4, 4, 2, 500, 22, 45, 5
    ),
    "quick": Scale(_QUICK, _QUICK, _QUICK, None, 384, 2, 2, 2, 1, 60, 12, 20, 2),
    "smoke": Scale(_SMOKE, _SMOKE, _SMOKE),
}


@dataclass(frozen=True)
class Asked:
    """What is to be measured: a model that is named, or checkpoints of some shapes; without names,
    what suits the scale."""

    model: str | None = None
    shapes: Sequence[str] = ()
    size: str = "small"
    workloads: Sequence[str] = ()
    scale: str = "full"
    dtypes: Sequence[str] = DTYPES[:1]
    device_map: str | None = None
    turns: int | None = None
    repetitions: int | None = None
    folder: Path = Path()

    def plan(self) -> dict[str, list[str]]:
        """The workloads of each model; without names each shape runs those that suit it."""
        quick = self.scale == "quick"
        names = list(self.workloads or (QUICK if quick else WORKLOADS))
        if self.model is not None:
            return {Path(self.model).name: names}
        if quick and not self.shapes:
            return {"qwen3_vl": names}
        if not self.shapes and not self.workloads:
            return {"qwen3_vl": names, "qwen3_5": names, "qwen2_5_vl": ["peers"]}
        return dict.fromkeys(self.shapes or ["qwen3_vl", "qwen3_5"], names)

    def amount(self) -> Scale:
        """How much is run."""
        scale = SCALES[self.scale]
        return replace(
            scale,
            turns=self.turns or scale.turns,
            requests=self.turns or scale.requests,
            repetitions=self.repetitions or scale.repetitions,
        )
