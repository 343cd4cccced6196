"""Progress of an encoding run: the numbers, and a bar or lines that show them.

Rates count only this run's work, so a resumed run does not look faster than it is. The remaining
time is estimated from all processed images, because known ones cost time too.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from keepsight.cli.terminal import say, tell
from keepsight.kinds import Record
from keepsight.system.units import bytes_text

if TYPE_CHECKING:
    from keepsight.encode import Encoded

_STATUSES = ("encoded", "kept", "duplicate", "skipped", "refused", "broken")
_MOST_TOLD = 1000  # broken images listed at the end; a file takes any number
_LINES = 10.0  # seconds between two lines without a terminal


@dataclass
class EncodeCounts:
    """The results of images so far."""

    total: int | None = None  # once it is known
    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0  # encoded in this run
    nbytes: int = 0  # written in this run
    problems: list[tuple[str, str, str]] = field(default_factory=list)  # name, status, reason
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0

    def add(self, result: Encoded) -> None:
        """Count one image."""
        self.counts[result.status] += 1
        if result.status == "encoded":
            self.tokens += result.tokens
            self.nbytes += result.nbytes
        if result.error is not None and len(self.problems) < _MOST_TOLD:
            self.problems.append((result.image, result.status, result.error))
        self.seconds = time.perf_counter() - self.started

    @property
    def done(self) -> int:
        """The number of processed images."""
        return self.counts.total()

    @property
    def failed(self) -> int:
        """Images that could not be used, or whose packages the store refused."""
        return self.counts["broken"] + self.counts["refused"]

    def rates(self) -> tuple[float, float]:
        """Encoded images and tokens per second."""
        seconds = max(self.seconds, 1e-9)
        return self.counts["encoded"] / seconds, self.tokens / seconds

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
            **{name: self.counts[name] for name in _STATUSES},
            "tokens": self.tokens,
            "bytes": self.nbytes,
            "seconds": round(self.seconds, 3),
            "images_per_second": round(images, 3),
            "tokens_per_second": round(tokens, 1),
            "seconds_left": None if left is None else round(left, 1),
        }

    def __str__(self) -> str:
        counts = [f"{n} {name}" for name in _STATUSES if (n := self.counts[name])]
        return f"{', '.join(counts) or 'no images'}; {self.pace()}"

    def pace(self) -> str:
        """The rates, and the time that is left, as text."""
        rest = "" if not (left := self.left()) else f", {duration(left)} left"
        if self.done and self.done == self.counts["kept"] + self.counts["duplicate"]:
            return f"nothing new{rest}"
        images, tokens = self.rates()
        written = bytes_text(self.nbytes)
        return f"{images:.1f} images/s, {tokens:.0f} tokens/s, {written} written{rest}"

    def tell(self, to: str, errors: Path | None, as_json: bool) -> None:
        """The end of a run: what became of all, and of each that was left out."""
        self.total = self.done
        say(as_json, self.to_dict(), f"{self}\nin {to}")
        for name, status, error in self.problems:
            why = error if error.startswith(name) else f"{name}: {error}"
            tell(f"{status}: {why}", "" if status == "skipped" else "red")
        untold = self.failed + self.counts["skipped"] - len(self.problems)
        if untold > 0:
            where = errors or "a file, with --errors FILE"
            tell(f"and {untold} more; all are listed in {where}")


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
    last = 0.0
    columns = ("encoding", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[pace]}"))
    drawn = console.is_terminal and not as_json
    with Progress(*columns, console=console) if drawn else nullcontext() as bar:
        task = None if bar is None else bar.add_task("", total=tally.total, pace="")
        for result in results:
            tally.add(result)
            if bar is not None and task is not None:
                bar.update(task, total=tally.total, completed=tally.done, pace=tally.pace())
            elif tally.seconds - last >= _LINES:
                last = tally.seconds
                line = f"{tally.done}/{tally.total or '?'} images: {tally}"
                text = json.dumps({"progress": tally.to_dict()}) if as_json else line
                console.out(text, highlight=False)
            yield result
