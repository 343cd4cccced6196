"""`keepsight bench`; all measuring is in `keepsight.bench`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from keepsight.bench.options import DTYPES, SCALES, SHAPES, SIZES, WORKLOADS, Asked
from keepsight.cli.options import JSON, one_model, option
from keepsight.cli.terminal import hush
from keepsight.errors import InputError
from keepsight.system.places import check_device


class ToldCommand(TyperCommand):
    """A command that knows what was typed, because a result says so."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words, and parse them."""
        ctx.meta["typed"] = list(args)
        return super().parse_args(ctx, args)


def _some(flag: str, known: tuple[str, ...]) -> Callable[[str], None]:
    """A check of `a,b` that accepts known names only."""

    def check(text: str) -> None:
        for name in text.split(","):
            if name not in known:
                raise InputError(f"{flag} {name}: choose from {', '.join(known)}")

    return check


def bench(
    context: typer.Context,
    named: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A checkpoint or an export; else one is built."),
    ] = None,
    model: str | None = option("The model, said with an option.", "--model", "-m"),
    model_shape: str | None = option(
        f"Of the checkpoint that is built: {', '.join(SHAPES)}; several with commas.",
        check=_some("--model-shape", SHAPES),
    ),
    size: str = option(
        f"Of the checkpoint: {', '.join(SIZES)}.", check=_some("--size", SIZES), default="small"
    ),
    workload: str | None = option(
        f"Some of {','.join(WORKLOADS)}.", check=_some("--workload", WORKLOADS)
    ),
    scale: str = option(
        f"Of the workloads: {', '.join(SCALES)}.",
        check=_some("--scale", tuple(SCALES)),
        default="full",
    ),
    quick: bool = option(
        "Small pictures, two workloads, under a minute.", "--quick", default=False
    ),
    dtype: str = option(
        f"{' or '.join(DTYPES)}, or both with a comma.",
        check=_some("--dtype", DTYPES),
        default="float32",
    ),
    device_map: str | None = option(
        "Where it goes, such as cuda.", "--device", "--device-map", check=check_device
    ),
    turns: int | None = option("Turns, steps or requests of each workload.", min=1),
    repetitions: int | None = option("Of each workload.", min=1),
    folder: Path | None = option(
        "Where checkpoints are kept. Default: bench/checkpoints of a clone, or a temporary folder."
    ),
    out: Path | None = option("Write the result here, as JSON."),
    as_json: bool = JSON,
) -> None:
    """Measure against stock Transformers and against the limit; exit code 1 if an answer is wrong.

    It builds a random-weight checkpoint, or takes a model that is named, runs the workloads in one
    process, prints tables for people and one line of JSON for machines.
    """
    name = None if named is None and model is None else one_model(named, model)
    if name is not None and model_shape is not None:
        raise InputError("a model is named, so none is built: leave --model-shape out")
    clone = Path("bench")  # git ignores checkpoints in it
    made = clone / "checkpoints" if clone.is_dir() else Path(gettempdir()) / "keepsight-bench"
    asked = Asked(
        model=name,
        shapes=model_shape.split(",") if model_shape else [],
        size=size,
        workloads=workload.split(",") if workload else [],
        scale="quick" if quick else scale,
        dtypes=dtype.split(","),
        device_map=device_map,
        turns=turns,
        repetitions=repetitions,
        folder=folder or made,
    )
    if out is not None:  # before anything is measured
        out.parent.mkdir(parents=True, exist_ok=True)
    from keepsight.bench import suite  # start-up time

    hush()
    raise typer.Exit(suite.run(context.meta["typed"], asked, out, as_json))
