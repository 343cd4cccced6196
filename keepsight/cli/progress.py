"""Progress of an encoding run: the numbers, and a bar or lines that show them.

Rates count only this run's work, so a resumed run does not look faster than it is. The remaining
time is estimated from all processed images, because known ones cost time too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from keepsight.kinds import Record
from keepsight.system.units import bytes_text

if TYPE_CHECKING:
    from keepsight.encode import Encoded

_STATUSES = ("encoded", "kept", "duplicate", "skipped", "refused", "broken")
_MOST_TOLD = 1000  # broken images listed at the end; a file takes any number
_LINES = 10.0  # seconds between two lines without a terminal
Problem = tuple[str, str, str]  # name, status, reason


@dataclass
class EncodeCounts:
    """The results of images so far."""

    total: int | None = None  # once it is known
    counts: dict[str, int] = field(default_factory=dict)
    tokens: int = 0  # encoded in this run
    nbytes: int = 0  # written in this run
    problems: list[Problem] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0

    def add(self, result: Encoded) -> None:
        """Count one image."""
        self.counts[result.status] = self.counts.get(result.status, 0) + 1
        if result.status == "encoded":
            self.tokens += result.tokens
            self.nbytes += result.nbytes
        if result.error is not None and len(self.problems) < _MOST_TOLD:
            self.problems.append((result.image, result.status, result.error))
        self.seconds = time.perf_counter() - self.started

    @property
    def done(self) -> int:
        """The number of processed images."""
        return sum(self.counts.values())

    @property
    def failed(self) -> int:
        """Images that could not be used, or whose packages the store refused."""
        return self.counts.get("broken", 0) + self.counts.get("refused", 0)

    def rates(self) -> tuple[float, float]:
        """Encoded images and tokens per second."""
        seconds = max(self.seconds, 1e-9)
        return self.counts.get("encoded", 0) / seconds, self.tokens / seconds

    def left(self) -> float | None:
        """Estimated seconds until the end, if the number of images is known."""
        if self.total is None or not self.done:
            return None
        return max(0, self.total - self.done) * self.seconds / self.done

    def to_dict(self) -> Record:
        """Plain data for JSON."""
        images, tokens = self.rates()
        left = self.left()
        return {
            "images": self.done,
            "total": self.total,
            **{name: self.counts.get(name, 0) for name in _STATUSES},
            "tokens": self.tokens,
            "bytes": self.nbytes,
            "seconds": round(self.seconds, 3),
            "images_per_second": round(images, 3),
            "tokens_per_second": round(tokens, 1),
            "seconds_left": None if left is None else round(left, 1),
        }

    def __str__(self) -> str:
        counts = [f"{n} {name}" for name in _STATUSES if (n := self.counts.get(name, 0))]
        return f"{', '.join(counts) or 'no images'}; {self.pace()}"

    def pace(self) -> str:
        """The rates as text."""
        if self.done and not self.counts.keys() - {"kept", "duplicate"}:
            return "nothing new"
        images, tokens = self.rates()
        return f"{images:.1f} images/s, {tokens:.0f} tokens/s, {bytes_text(self.nbytes)} written"

    def line(self) -> str:
        """Everything on one line, for a log."""
        left = self.left()
        rest = "" if left is None else f", {duration(left)} left"
        return f"{self.done}/{self.total or '?'} images: {self}{rest}"


def duration(seconds: float) -> str:
    """`5025` as `1:23:45`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shown(
    results: Iterable[Encoded], tally: EncodeCounts, console: Console, as_json: bool = False
) -> Iterator[Encoded]:
    """Pass on and count results: a bar on a terminal, otherwise a line now and then."""
    tally.started = time.perf_counter()
    if console.is_terminal and not as_json:
        yield from _with_bar(results, tally, console)
    else:
        yield from _with_lines(results, tally, console, as_json)


def _with_bar(
    results: Iterable[Encoded], tally: EncodeCounts, console: Console
) -> Iterator[Encoded]:
    columns = (
        TextColumn("encoding"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("encoding", total=tally.total, pace="")
        for result in results:
            tally.add(result)
            left = tally.left()
            rest = "" if left is None else f", {duration(left)} left"
            bar.update(task, total=tally.total, completed=tally.done, pace=tally.pace() + rest)
            yield result


def _with_lines(
    results: Iterable[Encoded], tally: EncodeCounts, console: Console, as_json: bool
) -> Iterator[Encoded]:
    last = tally.started
    for result in results:
        tally.add(result)
        if tally.started + tally.seconds - last >= _LINES:
            last = tally.started + tally.seconds
            text = json.dumps({"progress": tally.to_dict()}) if as_json else tally.line()
            console.out(text, highlight=False)
        yield result
