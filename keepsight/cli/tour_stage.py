"""Shared by the acts of the demo: the pictures of one run, and the printing of turns.

All that is printed is recorded too, by a console of `rich` that makes a page of it. The acts are in
`tour.py`.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from keepsight.cli.terminal import plain, share_bar, thumbnail
from keepsight.cli.tour_page import PAGE
from keepsight.demo.scene import Scene, difference
from keepsight.errors import StoreError
from keepsight.report import Reply
from keepsight.system.places import expanded

if TYPE_CHECKING:
    from keepsight.session import Session

PICTURES = 4
_INDENT = " " * 7
_BAR = 18  # columns; together with the text beside it at most 80


@dataclass(frozen=True)
class Ask:
    """One turn of a script: the question, its new pictures, and what a right answer says."""

    text: str
    new: tuple[int, ...]
    truth: str


@dataclass
class TurnTimes:
    """Results of one turn: times are milliseconds from the question to the first token."""

    reply: Reply
    ms: float
    stock_ms: float
    stock_text: str

    @property
    def same(self) -> bool:
        """Whether stock, computing everything, gives the same text."""
        return self.reply.text.strip() == self.stock_text


def scenes_of(seed: int) -> list[Scene]:
    """Pictures that all show different things, so that every question has one answer."""
    rng = random.Random(seed)
    scenes: list[Scene] = []
    while len(scenes) < PICTURES:
        scene = Scene(rng)
        if scene.name not in [other.name for other in scenes]:
            scenes.append(scene)
    return scenes


def script(scenes: Sequence[Scene]) -> list[Ask]:
    """A conversation about the pictures, with the right answers from the scenes."""
    a, b = scenes[0], scenes[1]
    both = f"Picture 1 shows a {a.name}, picture 2 shows a {b.name}. {difference(a, b)}"
    listed = " ".join(f"{i}: {scene.name}." for i, scene in enumerate(scenes, 1))
    place = b.place[0].upper() + b.place[1:]
    return [
        Ask("Compare the pictures.", (0, 1), both),
        Ask("What color is the shape in picture 1?", (), f"{a.color.capitalize()}."),
        Ask("List the pictures.", (2, 3), listed),
        Ask(f"Which picture shows a {scenes[2].name}?", (), "Picture 3."),
        Ask("Where is the shape in picture 2?", (), f"{place}."),
    ]


@dataclass
class Stage:
    """Where to print, the folder for files, and the pictures of this run."""

    console: Console
    out: Path
    scenes: list[Scene]
    pictures: list[Path] = field(default_factory=list)
    made: list[Path] = field(default_factory=list)
    recorder: Console = field(default_factory=lambda: _recorder())

    def draw(self) -> None:
        """Write the pictures to files."""
        folder = self.out / "pictures"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for number, scene in enumerate(self.scenes, 1):
                path = folder / f"picture-{number}.png"
                scene.draw().save(path)
                self.pictures.append(path)
                self.made.append(path)
        except OSError as error:
            raise StoreError(f"{folder} cannot be written: {error.strerror or error}") from error

    def show(self, shown: RenderableType = "", soft_wrap: bool = False) -> None:
        """Print something, and record it."""
        for console in (self.console, self.recorder):
            console.print(shown, soft_wrap=soft_wrap and console is self.console)

    def say(self, text: str = "", style: str = "") -> None:
        """One line."""
        self.show(Text(plain(text), style), soft_wrap=True)

    def explain(self, text: str) -> None:
        """A paragraph, wrapped between words."""
        self.show(Text(text, "dim"))

    def act(self, title: str, about: str) -> None:
        """The heading of an act."""
        self.show()
        self.show(Rule(Text(title, "bold"), align="left"))
        self.explain(about)
        self.show()

    def exchange(self, asked: str, reply: Reply, truth: str | None = None) -> None:
        """Print a question and its answer, with what was reused."""
        self.show(Text.assemble(("you    ", "bold cyan"), asked))
        right = truth is not None and truth.lower() in reply.text.lower()
        mark = "" if truth is None else "✓ " if right else "✗ "
        self.show(
            Text.assemble(
                ("model  ", "bold magenta"),
                (mark, "green" if right else "red"),
                plain(reply.text),
                "" if truth is None or right else (f"  (it is: {truth})", "red"),
            )
        )
        bar = share_bar(reply.report.cached_tokens, reply.report.prompt_tokens, _BAR)
        self.show(Text.assemble(_INDENT, bar, f" {reuse_of(reply)}"))

    def turn(self, ask: Ask, new: Sequence[Path], turn: TurnTimes) -> None:
        """Print one turn of a conversation, beside stock."""
        if new:
            self.show_pictures(new)
        self.exchange(ask.text, turn.reply, ask.truth)
        words = "the same words" if turn.same else f"OTHER words: {turn.stock_text}"
        stock = f"stock {turn.stock_ms:.0f} ms, {words}"
        self.say(f"{_INDENT}first token after {turn.ms:.0f} ms; {stock}\n", "dim")

    def show_pictures(self, paths: Sequence[Path]) -> None:
        """Small pictures where there are colours; their names in any case."""
        images = [Image.open(path) for path in paths]
        names = [f"{p.name}, {i.width}x{i.height}" for p, i in zip(paths, images, strict=True)]
        row = Table.grid(padding=(0, 3))
        row.add_row(" " * 4, *map(thumbnail, images))
        for console in (self.console, self.recorder):
            if console.color_system is not None:
                console.print(row)
        for name in names:
            self.say(f"{_INDENT}{name}", "dim")

    def verdict(self, who: str, text: str, verdict: str, right: bool) -> None:
        """Who answered, how that compares with the truth, and the answer."""
        style = "green" if right else "red"
        mark = "✓ " if right else "✗ "
        self.show(Text.assemble((mark, style), (who, "bold"), ": ", (verdict, style)))
        self.show(Text(f"     {plain(text)}"))

    def save(self, path: Path) -> None:
        """Write what was printed as one page, without scripts and without network."""
        page = self.recorder.export_html(code_format=PAGE)
        try:
            expanded(path).write_text(page, encoding="utf-8")
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def _recorder() -> Console:
    """Records in colours, whatever the terminal can show."""
    return Console(
        record=True,
        file=io.StringIO(),
        width=100,
        color_system="truecolor",
        force_terminal=True,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def reuse_of(reply: Reply) -> str:
    """What was reused for an answer, in words."""
    report, usage = reply.report, reply.usage
    reused = f"{report.cached_tokens} of {report.prompt_tokens} tokens reused"
    if not usage.images:
        return reused
    return f"{reused}, {usage.images_encoded} of {usage.images} pictures looked at"


def timed(
    session: Session, text: str, pictures: Sequence[Path], **options: Any
) -> tuple[Reply, float]:
    """An answer, and the milliseconds from the question to its first token."""
    start, first = time.perf_counter(), 0.0
    pieces = []
    for piece in session.stream(text, list(pictures) or None, **options):
        first = first or 1e3 * (time.perf_counter() - start)
        pieces.append(piece)
    return Reply.of(pieces), first
