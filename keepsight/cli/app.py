"""The command line: a table of commands, each a thin wrapper of a plain function.

torch and Transformers are imported inside the commands, so `keepsight --help` answers at once.
Every option is honoured or refused by name. An error is one line on stderr and exit code 2; exit
code 1 means that the command ran and a check failed.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from keepsight import __version__
from keepsight.cli import ask, bench, cache, decide, encode, export, families, plan, serve
from keepsight.cli.options import (
    IMAGES,
    JSON,
    REPORT,
    Decoding,
    Named,
    Remembering,
    Stored,
    check_how,
    check_images,
    check_shown,
    grouped,
    option,
)
from keepsight.cli.terminal import ErrorsByName, console, loading_line, say, table
from keepsight.errors import InputError
from keepsight.system.places import expanded

app = typer.Typer(
    cls=ErrorsByName,
    help="Memory for vision-language models. Look once, remember.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The `keepsight` command. A closed stream is like an empty one, and what an encoding lacks is
    escaped, as Python does on standard error."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)
    app(prog_name="keepsight")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"keepsight {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = option(
        "Print the version and exit.", "--version", is_eager=True, callback=_version, default=False
    ),
) -> None:
    pass


_ASKING, _LOOKING = "Ask", "Prepare and look"


@app.command(rich_help_panel=_ASKING)
def demo(
    out: Path = option(
        "Folder for its files; if it has others, demo-out in it is taken.", default=Path("demo-out")
    ),
    seed: int = option("Seed of the pictures.", min=0, default=1),
    save: Path | None = option("Also write the tour to this file, as one HTML page."),
) -> None:
    """See a vision-language model remember pictures; no network, under two minutes."""
    if expanded(out).is_file():
        raise InputError(f"--out {out} cannot be written: it is a file; name a folder")
    if save is not None and (save.exists() or not expanded(save).parent.is_dir()):
        raise InputError(f"--save {save} cannot be written; name a new file in a folder")
    import keepsight.cli.tour as tour

    tour.run(console(), out, seed, save)


app.command("ask", rich_help_panel=_ASKING)(grouped(ask.ask))
app.command("decide", rich_help_panel=_ASKING)(grouped(decide.decide))


@app.command(rich_help_panel=_ASKING)
@grouped
def chat(
    model: Remembering,
    decoding: Decoding,
    named: Named = None,
    image: list[str] | None = IMAGES,
    as_json: bool = JSON,
    report: bool = REPORT,
) -> None:
    """Hold a conversation; /help lists its commands."""
    options = decoding.options()
    check_images(image or [])
    model.choose(named)
    store = model.store  # an address has no lines typed here
    history = expanded(store) / "chat-lines" if store and "://" not in store else None
    with model.load() as vlm:
        from keepsight.cli.chat import Shell  # start-up time: import while the line moves

        out = console(stderr=as_json)  # JSON is alone on standard output
        shell = Shell(vlm, out, options, history=history, reports=report, as_json=as_json)
        for name in image or []:
            shell.do_image(name)
        shell.run()


app.command("serve", cls=serve.ServeCommand, rich_help_panel=_ASKING)(serve.serve)
app.command("encode", rich_help_panel=_LOOKING)(grouped(encode.encode))
app.command("export", rich_help_panel=_LOOKING)(export.export)
app.command("plan", rich_help_panel=_LOOKING)(plan.plan)


@app.command(rich_help_panel=_LOOKING)
def show(
    file: Annotated[
        Path, typer.Argument(help="A .sight or .keep file, an exported model's folder, a store.")
    ],
    as_json: bool = JSON,
) -> None:
    """Describe a package, a saved session or an export, and check it for damage; for a store, print
    what `keepsight cache stats` prints."""
    if (expanded(file) / "store.json").is_file():
        cache.stats(store=str(file), tenant=None, as_json=as_json)
        return
    check_shown(expanded(file))
    with loading_line("PyTorch"):
        from keepsight.cli.show import describe, render

    described = describe(expanded(file))
    say(as_json, described, render(described))


@app.command(rich_help_panel=_LOOKING)
@grouped
def verify(
    model: Stored,
    named: Named = None,
    image: list[str] | None = IMAGES,
    prompt: str = option("The question.", "--prompt", "-p", default="Describe the picture."),
    as_json: bool = JSON,
) -> None:
    """Compare warm answers with cold ones and stock Transformers, on your own model and images."""
    check_images(image or [])
    check_how(model.choose(named), model.runtime, model.weights, model.store)
    import random

    with loading_line("PyTorch"):
        from keepsight.cli.pictures import pictures_at
        from keepsight.demo.scene import Scene
        from keepsight.stock.verify import certify

    images: list[Any] = [picture for name in image or [] for _, picture in pictures_at(name)]
    images = images or [Scene(random.Random(seed)).draw() for seed in (1, 2)]
    with model.load() as vlm:
        found = certify(vlm.runtime, images, prompt)
    names = ("looked at", "holds", "largest difference", "")
    rows = [
        (check.what, "yes" if check.ok else "NO", f"{check.difference:.3g}", check.note)
        for check in found.checks
    ]
    shown = table(*names, right=names[2:3], rows=rows)
    say(as_json, found.to_dict(), shown, found.verdict)
    raise typer.Exit(0 if found else 1)


app.command("families", rich_help_panel=_LOOKING)(families.families)
app.add_typer(cache.app, name="cache", rich_help_panel=_LOOKING)
app.command("bench", cls=bench.ToldCommand, rich_help_panel=_LOOKING)(bench.bench)
