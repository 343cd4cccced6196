"""A line that moves while a model is loaded: what came from the Hub so far, and for how long.

It stands on stderr, on a terminal only, and is gone when the model is there. Errors, warnings and
answers are printed as ever.
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
from keepsight.system.units import bytes_text

_LOOK = 1.0  # seconds between two looks into the cache of the Hub


@dataclass
class LoadingLine:
    """What is loaded, since when, and what the cache of the Hub had of it at first."""

    name: str
    folder: Path | None
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.at_first = self.came = self._bytes()
        self.looked = self.began
        self.spinner = Spinner("line")

    def text(self) -> str:
        """The line as it is now."""
        now = time.monotonic()
        if now - self.looked > _LOOK:
            self.came, self.looked = self._bytes(), now
        new = self.came - self.at_first
        source = f", {bytes_text(new)} from the Hub" if new else ""
        return f"loading {plain(self.name)} ... {now - self.began:.0f} s{source}"

    def line(self) -> Spinner:
        """The line, with a mark that turns."""
        self.spinner.update(text=self.text())
        return self.spinner

    def _bytes(self) -> int:
        """What lies in the cache of the Hub for this model, whole files and begun ones."""
        if self.folder is None:
            return 0
        try:
            return sum(entry.stat().st_size for entry in os.scandir(self.folder))
        except OSError:  # nothing yet, or a file that just got its name
            return 0


def hub_folder(name: str) -> Path | None:
    """The folder in the Hub's cache for a model; None where the name is no hub id."""
    if "/" not in name or Path(name).expanduser().exists():
        return None
    from huggingface_hub import constants  # start-up time: a folder needs no Hub

    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"


@contextmanager
def loading_line(name: str) -> Iterator[None]:
    """Show the line for the length of a block, where stderr is a terminal."""
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
