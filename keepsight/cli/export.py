"""The `export` command, and the description of an exported folder for `show`.

All work on models is in `keepsight.export`.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keepsight.cli.options import Json, Named, one_model
from keepsight.cli.terminal import console, json_line, plain, table
from keepsight.errors import InputError
from keepsight.kinds import Record
from keepsight.system.places import check_new_folder, expanded
from keepsight.system.units import bytes_text
from keepsight.system.words import check_export_words

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from keepsight.runtimes.manifest import Manifest


def export(
    to: Annotated[Path, typer.Option("--to", help="The new folder.", show_default=False)],
    named: Named = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="demo, demo-hybrid, demo-smol, a folder, or a hub id."),
    ] = None,
    runtime: Annotated[
        str, typer.Option("--format", help="onnx (ONNX Runtime) or openvino.")
    ] = "onnx",
    quantised: Annotated[
        str | None,
        typer.Option("--quant", help="int8 or int4; default: float32.", show_default=False),
    ] = None,
    max_patches: Annotated[
        int | None,
        typer.Option(min=1, help="Largest picture, in patches; default 16384.", show_default=False),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub id.", show_default=False)
    ] = None,
    as_json: Json = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also show what the exporters print.")
    ] = False,
) -> None:
    """Export a model to ONNX Runtime or OpenVINO; it sees and remembers there as it does here."""
    if named is None and model is None:
        raise InputError("which model? write: keepsight export MODEL --to FOLDER")
    check_export_words(runtime, quantised)
    _check_new(to)
    name = one_model(named, model)
    err = console(stderr=True)
    start = time.perf_counter()
    with _ending_tidily() as go_on:
        from transformers import logging

        from keepsight.export.graphs.exporter import export as make

        if not verbose:
            logging.set_verbosity_error()
            logging.disable_progress_bar()

        def tell(line: str) -> None:
            go_on()
            err.print(plain(line))

        manifest = make(
            name,
            to,
            runtime=runtime,
            quantised=quantised,
            max_patches=max_patches,
            revision=revision,
            verbose=verbose,
            tell=tell,
        )
    summary = _describe(to, manifest) | {"seconds": round(time.perf_counter() - start, 1)}
    if as_json:
        json_line(summary)
        return
    out = console()
    out.print(_summary(summary))
    out.print(f"\nTry it:\n  keepsight chat --model {shlex.quote(str(to))}", soft_wrap=True)


def _check_new(to: Path) -> None:
    try:
        check_new_folder(expanded(to))
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"{to} cannot be written: {why}; name another folder with --to") from error


@contextlib.contextmanager
def _ending_tidily() -> Iterator[Callable[[], None]]:
    """Let SIGTERM end the command like Ctrl-C, so that half an export is removed.

    Tracers sometimes swallow either, so the returned function checks again before each step and
    ends the command.
    """
    asked: list[int] = []

    def end(number: int, frame: object) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    def go_on() -> None:
        if asked:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield go_on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _describe(folder: Path, manifest: Manifest) -> Record:
    """The facts about an export, as plain data."""
    graphs = {}
    for part in ("tower", "embedding", "decoder", "head"):
        files = [
            f.bytes for name, f in manifest.files.items() if name.startswith(f"graphs/{part}.")
        ]
        graphs[part] = sum(files)
    return {
        "folder": str(folder),
        "kind": "export",
        "format": manifest.format,
        "runtime": manifest.runtime,
        "model": manifest.model_type,
        "quantised": manifest.quantised,
        "most_patches": manifest.most_patches,
        "bytes": manifest.bytes,
        "files": len(manifest.files),
        "graphs": graphs,
        "deviation": manifest.deviation,
        "weights": manifest.weights,
        "versions": manifest.versions,
    }


def describe(folder: Path) -> Record:
    """An export as plain data, after checking every byte. Damage raises a named error."""
    from keepsight.runtimes import load as exported

    start = time.perf_counter()
    manifest = exported.read(folder)
    seconds = time.perf_counter() - start
    others = exported.other_versions(manifest)
    return _describe(folder, manifest) | {
        "other_versions": {
            name: {"made": was, "here": here} for name, (was, here) in others.items()
        },
        "reading_ms": round(1e3 * seconds, 3),
        "integrity": f"sound: {len(manifest.files)} files match their digests",
    }


# -- for people ----------------------------------------------------------------------------------


def render(described: Record) -> RenderableType:
    """The tables that describe an export, and its libraries."""
    from rich.console import Group

    shown = _summary(described)
    speed = 1e3 * described["bytes"] / max(described["reading_ms"], 1e-3)
    shown.add_row("integrity", f"{described['integrity']} ({bytes_text(speed)}/s)", style="green")
    for name in ("all", "vision"):
        shown.add_row(f"weights, {name}", plain(described["weights"][name]))
    versions = table("library", "made with", "here", title="\nversions")
    for name, version in described["versions"].items():
        other = described["other_versions"].get(name)
        versions.add_row(plain(name), plain(version), plain(other["here"]) if other else "")
    return Group(shown, versions)


def _summary(summary: Record) -> Table:
    shown = table("", "")
    quantised = summary["quantised"]
    held = f"{quantised} (decoder and head), float32 (tower)" if quantised else "float32"
    if quantised == "int4":
        held = "int4 (decoder), int8 (head), float32 (tower)"
    shown.add_row("folder", plain(summary["folder"]), style="bold")
    shown.add_row("what", f"an export of {summary['model']} for {_RUNTIMES[summary['runtime']]}")
    shown.add_row("weights held in", plain(held))
    parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in summary["graphs"].items())
    shown.add_row("size", f"{bytes_text(summary['bytes'])} in {summary['files']} files: {parts}")
    if summary["most_patches"] is not None:
        shown.add_row("largest picture", f"{summary['most_patches']} patches")
    for name, said in _off(summary["deviation"]):
        shown.add_row(name, said)
    return shown


_RUNTIMES = {"onnx": "ONNX Runtime", "openvino": "OpenVINO"}


def _off(deviation: Record) -> Iterator[tuple[str, str]]:
    """How far it is from the model, as measured when it was made."""
    for name in ("features", "logits"):
        value = deviation.get(name)
        if isinstance(value, int | float):
            yield f"{name} off by", f"{value:.1e} of their scale"
    same, count = deviation.get("same_tokens"), deviation.get("tokens")
    if same is not None and count is not None:
        yield "same tokens", plain(f"{same} of {count}")
