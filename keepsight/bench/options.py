"""The options of `keepsight bench`, and the scales of its workloads. Imports no PyTorch.

So a wrong option is refused at once.
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
_ABOUT = """Measure Keepsight against stock Transformers and the limit.

It builds a random-weight checkpoint, or takes a model that is named (an exported one too), runs the
workloads in one process, prints tables for people and one line of JSON for machines."""
CheckModel: TypeAlias = Callable[[str], None]  # raises for impossible model names


@dataclass(frozen=True)
class Scale:
    """How much of a workload is run."""

    picture: tuple[int, int]  # of W1, W5 and W7
    large: tuple[int, int] | None  # of a second W1
    small: tuple[int, int]  # of cold runs
    page: tuple[int, int]  # of W4
    peers: int  # width and height in the peers' conversation
    turns: int  # of W1
    requests: int  # of W4, W5 and W7
    pages: int  # in one request of W4
    references: int  # of W7
    system: int  # words of W5's system prompt
    question: int  # words
    answer: int  # words
    repetitions: int

    @property
    def fewer(self) -> int:
        """Repetitions for workloads in which stock encodes many pictures each time."""
        return (self.repetitions + 1) // 2


SCALES = {
    "full": Scale(
        (1280, 800), (1920, 1080), (512, 512), (704, 736), 672, 6, 4, 4, 2, 500, 22, 45, 5
    ),
    "quick": Scale((384, 384), None, (384, 384), (384, 384), 384, 2, 2, 2, 1, 60, 12, 20, 2),
    "smoke": Scale((64, 64), None, (64, 64), (64, 64), 64, 2, 2, 2, 1, 20, 10, 20, 1),
}


def parse(argv: list[str], check_model: CheckModel | None = None) -> argparse.Namespace:
    """Parse the options; an error ends the program with one line."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.model is not None and options.option is not None:
        parser.error(f"{options.model!r} and --model {options.option}: name one model")
    options.model = options.model or options.option
    if options.model is None:
        return options
    if options.model_shape is not None:
        parser.error("a model is named, so none is built: leave --model-shape out")
    if check_model is not None:
        check_model(options.model)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="keepsight bench", description=_ABOUT)
    parser.add_argument("model", nargs="?", help="a checkpoint or an export; else one is built")
    parser.add_argument("--model", "-m", dest="option", help="as MODEL, said with an option")
    parser.add_argument("--model-shape", type=_several(SHAPES))
    parser.add_argument("--workload", type=_several(WORKLOADS))
    parser.add_argument("--dtype", type=_several(("float32", "bfloat16")), default=["float32"])
    parser.add_argument("--size", choices=SIZES, default="small", help="of the checkpoint")
    parser.add_argument("--turns", type=_positive, help="turns, steps or requests of each workload")
    parser.add_argument("--repetitions", type=_positive, help="of each workload")
    parser.add_argument(
        "--device", "--device-map", default=None, help="where it goes, such as cuda"
    )
    parser.add_argument("--scale", choices=SCALES, default="full", help="of the workloads")
    parser.add_argument(
        "--quick",
        dest="scale",
        action="store_const",
        const="quick",
        help="small pictures, two workloads, under a minute",
    )
    parser.add_argument("--folder", type=Path, default=_folder(), help="where checkpoints are kept")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    parser.add_argument("--json", action="store_true", help="JSON for machines, and no tables")
    return parser


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
