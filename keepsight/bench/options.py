"""The options of `keepsight bench`, and the scales of its workloads.

PyTorch is not imported here, so a wrong option is refused at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import TypeAlias

QUICK = ("W1", "W5")  # the default workloads of --quick
WORKLOADS = ("W1", "W4", "W5", "W7", "peers", "cold", "restart", "roofline")
SHAPES = ("qwen3_vl", "qwen2_5_vl", "qwen3_5")  # those of `checkpoints.SHAPES`
SIZES = ("tiny", "small", "base", "large")  # those of `checkpoints.SIZES`
DTYPES = ("float32", "bfloat16")
_ABOUT = """Measure Keepsight against stock Transformers and the limit.

It builds a random-weight checkpoint, or takes a model that is named (an exported one too), runs the
workloads in one process, prints tables for people and one line of JSON for machines."""
CheckModel: TypeAlias = Callable[[str], None]  # raises for impossible model names


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


def parse(argv: list[str], check_model: CheckModel | None = None) -> argparse.Namespace:
    """Parse the options; an error ends the program with one line."""
    parser = argparse.ArgumentParser(prog="keepsight bench", description=_ABOUT)
    add = parser.add_argument
    add("model", nargs="?", help="a checkpoint or an export; else one is built")
    add("--model", "-m", dest="option", help="as MODEL, said with an option")
    add("--model-shape", type=_several(SHAPES))
    add("--workload", type=_several(WORKLOADS))
    add("--dtype", type=_several(DTYPES), default=["float32"])
    add("--size", choices=SIZES, default="small", help="of the checkpoint")
    add("--turns", type=_positive, help="turns, steps or requests of each workload")
    add("--repetitions", type=_positive, help="of each workload")
    add("--device", "--device-map", help="where it goes, such as cuda")
    add("--scale", choices=SCALES, default="full", help="of the workloads")
    quick = "small pictures, two workloads, under a minute"
    add("--quick", dest="scale", action="store_const", const="quick", help=quick)
    add("--folder", type=Path, default=_folder(), help="where checkpoints are kept")
    add("--out", type=Path, help="write the result here, as JSON")
    add("--json", action="store_true", help="JSON for machines, and no tables")
    options = parser.parse_args(argv)
    if options.model is not None and options.option is not None:
        parser.error(f"{options.model!r} and --model {options.option}: name one model")
    options.model = options.model or options.option
    if options.model is not None and options.model_shape is not None:
        parser.error("a model is named, so none is built: leave --model-shape out")
    if options.model is not None and check_model is not None:
        check_model(options.model)
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}; expected at least 1")
    return number


def _several(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A parser of `a,b` that accepts known names only."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}; choose from {', '.join(known)}")
        return names

    return parse


def _folder() -> Path:
    """`bench/checkpoints` in a clone of the project (git ignores it), else a temporary folder."""
    clone = Path("bench")
    return clone / "checkpoints" if clone.is_dir() else Path(gettempdir()) / "keepsight-bench"
