"""A progress line while a model is loaded: the bytes from the Hub so far, and the time.

It is on stderr, on a terminal only, and disappears when the model is loaded. Errors, warnings and
answers are printed as usual.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.live import Live
from rich.spinner import Spinner

from keepsight.cli.terminal import console, plain
from keepsight.system.places import expanded
from keepsight.system.units import bytes_text

_LOOK = 1.0  # seconds between two checks of the Hub's cache


@dataclass
class LoadingLine:
    """The model being loaded, since when, and the size of its cache at the start."""

    name: str
    folder: Path | None
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.at_first = self.came = self._bytes()
        self.looked = self.began
        self.spinner = Spinner("line")

    def text(self) -> str:
        """The current line."""
        now = time.monotonic()
        if now - self.looked > _LOOK:
            self.came, self.looked = self._bytes(), now
        new = self.came - self.at_first
        source = f", {bytes_text(new)} from the Hub" if new else ""
        return f"loading {plain(self.name)} ... {now - self.began:.0f} s{source}"

    def line(self) -> Spinner:
        """The line, with a spinner."""
        self.spinner.update(text=self.text())
        return self.spinner

    def _bytes(self) -> int:
        """Bytes in the Hub's cache for this model, including partial files."""
        if self.folder is None:
            return 0
        try:
            return sum(entry.stat().st_size for entry in os.scandir(self.folder))
        except OSError:  # not there yet, or just renamed
            return 0


def hub_folder(name: str) -> Path | None:
    """The folder of a model in the Hub's cache; None if the name is no hub id."""
    if "/" not in name or expanded(name).exists():
        return None
    from huggingface_hub import constants  # start-up time: a folder needs no Hub

    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"


@contextmanager
def loading_line(name: str) -> Iterator[None]:
    """Show the line during a block, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    shown = LoadingLine(name, hub_folder(name))
    with Live(
        get_renderable=shown.line,
        console=console(stderr=True),
        transient=True,
        redirect_stdout=False,
        refresh_per_second=4,
    ):
        yield
