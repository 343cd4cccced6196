"""What the command line prints with: a console, errors by name, tables, pictures, a moving line.

Nothing slow is imported here, so `keepsight --help` stays quick. Text from files and models goes
through `plain` first: a file must not control the reader's terminal.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.style import Style
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from keepsight.errors import KeepsightError, WrongTorchvision
from keepsight.system.places import expanded
from keepsight.system.units import bytes_text

if TYPE_CHECKING:
    from PIL.Image import Image

    from keepsight.report import Report

_WIDTH_WITHOUT_TERMINAL = 100
_COLUMNS = 16  # of a thumbnail
_LONGEST = 300  # characters of a file's name in an error
_BOX = 4  # PIL.Image.Resampling.BOX, without importing PIL for every `--help`


class ErrorsByName(TyperGroup):
    """A group of commands whose Keepsight errors are one line on stderr and exit code 2."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command; an error that Keepsight raises on purpose needs no traceback, and
        neither does what a disk refuses."""
        try:
            return super().main(*args, **options)
        except BrokenPipeError:
            raise  # Click ends quietly
        except Exception as error:
            told = _told(error)
            if told is None:
                raise
            line = re.sub(r"\s*\n\s*", " ", plain(told).strip())
            with suppress(OSError):  # a full disk, or nobody reads
                typer.echo(f"error: {line}", err=True)
            _drop_unwritten()
            sys.exit(2)


def _drop_unwritten() -> None:
    """What a full disk did not take of the output is not tried again when Python ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _told(error: Exception) -> str | None:
    """An error in words; None if only a traceback tells it."""
    if isinstance(error, FileNotFoundError) and not _has_folder():
        return "the folder that this command was started in is gone; change to another"
    if isinstance(error, OSError) and not isinstance(error, KeepsightError):
        name = "" if error.filename is None else f"{str(error.filename)[:_LONGEST]}: "
        return f"{name}{error.strerror or error}"
    known = error if isinstance(error, KeepsightError) else WrongTorchvision.behind(error)
    return None if known is None else str(known)


def _has_folder() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def console(stderr: bool = False) -> Console:
    """A console for one command. It uses the current streams, which tests replace."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    fixed = None if terminal or os.environ.get("COLUMNS", "0") != "0" else _WIDTH_WITHOUT_TERMINAL
    return Console(stderr=stderr, width=fixed, highlight=False, markup=False, emoji=False)


def plain(text: str) -> str:
    """The text without control characters; line ends and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def json_line(data: object) -> None:
    """Print one line of JSON on standard output."""
    typer.echo(json.dumps(data, default=str))


def say(as_json: bool, data: object, *shown: RenderableType) -> None:
    """The result of a command: JSON for machines, or what is shown to people."""
    if as_json:
        json_line(data)
        return
    for part in shown:
        typer.echo(plain(part)) if isinstance(part, str) else console().print(part)


def tell(text: str, style: str = "") -> None:
    """A line beside the result, on stderr."""
    console(stderr=True).print(Text(plain(text), style), soft_wrap=True)


def age_text(seconds: float) -> str:
    """`7300` as `2 h`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# -- tables ------------------------------------------------------------------------------------


def table(
    *columns: str,
    right: Sequence[str] = (),
    title: str | None = None,
    rows: Iterable[Iterable[object]] = (),
) -> Table:
    """A table in this program's style; columns named in `right` hold numbers."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    made.show_header = any(columns)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else plain(str(cell)) for cell in row))
    return made


def facts(of: Mapping[str, object], title: str | None = None) -> Table:
    """A line for each thing that is known; what is None or empty is left out."""
    return table("", "", title=title, rows=[row for row in of.items() if row[1] not in (None, "")])


def report_table(report: Report) -> Group:
    """A report for people; neighbours that say the same are one row."""
    share = 100 * report.cached_tokens // max(1, report.prompt_tokens)
    title = f"{report.prompt_tokens} prompt tokens, {report.cached_tokens} reused ({share} %)"
    made = table("tokens", "what", "status", "why", "features", title=title)
    for (name, status, why, features), alike in itertools.groupby(
        report.segments, lambda s: (s.name, s.status, s.why, s.features or "")
    ):
        first, *more = alike
        tokens = f"{first.start}-{(more or [first])[-1].end}"
        style = "green" if status == "reused" else "yellow"
        made.add_row(tokens, name, Text(status, style), why, features)
    stages = ", ".join(f"{name} {ms:.1f}" for name, ms in report.milliseconds.items())
    lines = [f"ms: {stages}"] if stages else []
    lines += [f"note: {note}" for note in report.notes]
    return Group(made, *(Text(plain(line), "dim") for line in lines))


# -- text that comes in pieces -----------------------------------------------------------------


class WrittenWords:
    """Text that comes in pieces, broken between words where a line of a terminal is full."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.width = console.width if console.is_terminal else 0  # a pipe gets the text as it is
        self.column, self.word = 0, ""

    def write(self, text: str) -> None:
        """Print what is whole of the text; the word that it ends in waits for its end."""
        *whole, self.word = re.split(r"(?<=\s)", self.word + plain(text))
        for word in whole:
            self._print(word)
        if not self.width or cell_len(self.word) > len(self.word):  # or a script without spaces
            self.end()

    def end(self) -> None:
        """Print the last word."""
        self._print(self.word)
        self.word = ""

    def _print(self, word: str) -> None:
        seen = word.rstrip(" ")
        if self.width and self.column and self.column + cell_len(seen.rstrip()) > self.width:
            self.console.print()
            self.column = 0
        wide = self.width and self.column + cell_len(word) > self.width
        self.console.print(Text(seen if wide else word), end="", soft_wrap=True)
        self.column = 0 if word.endswith("\n") else self.column + cell_len(word)


def hush() -> None:
    """Let Transformers say nothing but errors, and draw no bars."""
    from transformers import logging  # start-up time

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def loading_line(name: str) -> Iterator[None]:
    """While something is loaded, show how long it takes, and what came from the Hub; only on a
    terminal, on stderr."""
    if not sys.stderr.isatty():
        yield
        return
    began, before, spinner = time.monotonic(), _bytes_from_hub(name), Spinner("line")

    def line() -> Spinner:
        new = _bytes_from_hub(name) - before
        source = f", {bytes_text(new)} from the Hub" if new else ""
        seconds = time.monotonic() - began
        spinner.update(text=f"loading {plain(name)} ... {seconds:.0f} s{source}")
        return spinner

    err = console(stderr=True)
    options = {"transient": True, "redirect_stdout": False, "refresh_per_second": 4}
    with Live(get_renderable=line, console=err, **options):  # type: ignore[arg-type]
        yield


def _bytes_from_hub(name: str) -> int:
    """Bytes in the Hub's cache for a model, including partial files."""
    if "/" not in name or expanded(name).exists():
        return 0
    from huggingface_hub import constants  # start-up time: a folder needs no Hub

    blobs = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"
    try:
        return sum(entry.stat().st_size for entry in os.scandir(blobs))
    except OSError:  # not there yet, or just renamed
        return 0


# -- pictures ----------------------------------------------------------------------------------


def share_bar(part: int, whole: int, width: int = 24) -> Text:
    """A bar of `part` in `whole`: green for reused, yellow for computed."""
    filled = round(width * part / whole) if whole else 0
    return Text.assemble(("█" * filled, "green"), ("░" * (width - filled), "yellow"))


def thumbnail(picture: Image, width: int = _COLUMNS) -> Text:
    """A picture in half blocks: each character shows two pixels, one above the other."""
    height = max(2, 2 * round(width * picture.height / picture.width / 2))
    small: Any = picture.convert("RGB").resize((width, height), _BOX)
    text = Text()
    for y in range(0, height, 2):
        for x in range(width):
            upper, lower = ("rgb({},{},{})".format(*small.getpixel((x, y + i))) for i in (0, 1))
            text.append("▀", Style.parse(f"{upper} on {lower}"))
        text.append("\n" if y + 2 < height else "")
    return text


def show_thumbnail(picture: Image, console: Console) -> None:
    """Show a picture if colours are visible; a pipe and NO_COLOR get none.

    Where textual-image is installed and the terminal draws pictures (kitty's protocol or sixel),
    dot by dot; else in half blocks.
    """
    if not console.is_terminal or console.no_color:
        return
    try:
        from textual_image import renderable  # asks the terminal what it can

        sharp = renderable.Image in (renderable.SixelImage, renderable.TGPImage)
    except ImportError:
        sharp = False
    console.print(renderable.Image(picture, width=_COLUMNS) if sharp else thumbnail(picture))
