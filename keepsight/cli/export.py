"""`keepsight export`; all work on models is in `keepsight.export`."""

from __future__ import annotations

import contextlib
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from keepsight.cli.options import JSON, MODEL, REVISION, Named, one_model, option
from keepsight.cli.terminal import hush, say, tell
from keepsight.errors import InputError
from keepsight.kinds import Options
from keepsight.system.words import check_export_words


def export(
    to: Path = option("The new folder.", "--to", show_default=False, default=...),
    named: Named = None,
    model: str | None = MODEL,
    runtime: str = option("onnx (ONNX Runtime) or openvino.", "--format", default="onnx"),
    quantised: str | None = option("int8 or int4; default: float32.", "--quant"),
    max_patches: int | None = option("Largest picture, in patches; default 16384.", min=1),
    revision: str | None = REVISION,
    as_json: bool = JSON,
    verbose: bool = option("Also show what the exporters print.", "--verbose", default=False),
) -> None:
    """Export a model to ONNX Runtime or OpenVINO; it sees and remembers there as it does here."""
    if named is None and model is None:
        raise InputError("which model? write: keepsight export MODEL --to FOLDER")
    check_export_words(runtime, quantised)
    from keepsight.export.graphs.target import check_target  # start-up time

    check_target(to)
    name = one_model(named, model)
    start = time.perf_counter()
    with _ending_tidily() as go_on:
        from keepsight.export.graphs.exporter import export as make

        if not verbose:
            hush()

        def told(line: str) -> None:
            go_on()
            tell(line)

        options: Options = {"runtime": runtime, "quantised": quantised, "max_patches": max_patches}
        manifest = make(name, to, **options, revision=revision, verbose=verbose, tell=told)
    from keepsight.cli import show  # start-up time

    made = show.of_manifest(to, manifest) | {"seconds": round(time.perf_counter() - start, 1)}
    hint = f"\nTry it:\n  keepsight chat --model {shlex.quote(str(to))}"
    say(as_json, made, show.render(made), hint)


@contextlib.contextmanager
def _ending_tidily() -> Iterator[Callable[[], None]]:
    """Let SIGTERM and SIGHUP end the command like Ctrl-C, so that half an export is removed. One
    that is ignored, as SIGHUP is under `nohup`, stays so.

    Tracers sometimes swallow either, so the returned function checks again before each step.
    """
    asked = list[int]()

    def end(number: int, frame: object) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    def go_on() -> None:
        if asked:
            raise KeyboardInterrupt

    ends = [one for one in signal.Signals if one.name in ("SIGINT", "SIGTERM", "SIGHUP")]
    heard = [one for one in ends if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield go_on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
