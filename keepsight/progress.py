"""How far an encoding run is: the numbers, and a bar that shows them.

Rates count what this run did, so a run that resumes does not look faster than it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from keepsight.terminal import bytes_text

if TYPE_CHECKING:
    from keepsight.encode import Encoded


@dataclass
class Tally:
    """What became of the images so far."""

    total: int
    counts: dict[str, int] = field(default_factory=dict)
    tokens: int = 0  # encoded in this run
    nbytes: int = 0  # written in this run
    broken: list[tuple[str, str]] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0

    def add(self, result: Encoded) -> None:
        """Count one image."""
        self.counts[result.status] = self.counts.get(result.status, 0) + 1
        if result.status == "encoded":
            self.tokens += result.tokens
            self.nbytes += result.nbytes
        if result.status == "broken":
            self.broken.append((str(result.image), result.error or ""))
        self.seconds = time.perf_counter() - self.started

    def rates(self) -> tuple[float, float]:
        """Images and tokens a second, of those that were encoded."""
        seconds = max(self.seconds, 1e-9)
        return self.counts.get("encoded", 0) / seconds, self.tokens / seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        images, tokens = self.rates()
        return {
            "images": self.total,
            **{name: self.counts.get(name, 0) for name in _STATUSES},
            "tokens": self.tokens,
            "bytes": self.nbytes,
            "seconds": round(self.seconds, 3),
            "images_per_second": round(images, 3),
            "tokens_per_second": round(tokens, 1),
        }

    def __str__(self) -> str:
        told = [f"{n} {name}" for name in _STATUSES if (n := self.counts.get(name, 0))]
        return f"{', '.join(told) or 'no images'}; {self.pace()}"

    def pace(self) -> str:
        """The rates, for people."""
        images, tokens = self.rates()
        return f"{images:.1f} images/s, {tokens:.0f} tokens/s, {bytes_text(self.nbytes)} written"


_STATUSES = ("encoded", "kept", "duplicate", "broken")


def shown(results: Iterable[Encoded], tally: Tally, console: Console) -> Iterator[Encoded]:
    """The results as they come, counted, with a bar on the console."""
    columns = (
        TextColumn("encoding"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("encoding", total=tally.total, pace="")
        tally.started = time.perf_counter()
        for result in results:
            tally.add(result)
            bar.update(task, advance=1, pace=tally.pace())
            yield result
