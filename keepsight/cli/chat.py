"""The conversation of `keepsight chat`: a prompt, a few commands, one dim line of measurements.

A wrong command or a bad picture is an error message, and the conversation goes on. Lines may also
come through a pipe; then they are echoed, so that what is printed reads like a conversation.
"""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from keepsight.cli.terminal import plain, report_table
from keepsight.errors import InputError, KeepsightError
from keepsight.formats.package import Package
from keepsight.kinds import Options
from keepsight.media.medium import Medium
from keepsight.system import private_files

if TYPE_CHECKING:
    from keepsight.report import Report, Usage
    from keepsight.session import Session
    from keepsight.vlm import VLM

_PROMPT = "> "


def open_image(name: str) -> str | Package:
    """What the library takes for an image named on a command line; `.sight` files are packages."""
    return Package.load(name) if name.lower().endswith(".sight") else name


@dataclass
class Shell:
    """One `keepsight chat`."""

    vlm: VLM
    console: Console
    options: Options
    waiting: list[str | Package | Medium] = field(
        default_factory=list
    )  # pictures for the next question
    history: Path | None = None
    reports: bool = False  # a report after every answer
    last: Report | None = None

    def __post_init__(self) -> None:
        self.branches: list[Session] = [self.vlm.session()]
        self.session = self.branches[0]

    def run(self) -> None:
        """Read lines until there are no more, or `/exit`."""
        for line in self._lines():
            try:
                if not line.startswith("/"):
                    self.ask(line)
                elif not self.command(line):
                    return
            except (KeepsightError, OSError) as error:
                self.console.print(Text(f"error: {plain(str(error))}", "red"))
            except KeyboardInterrupt:
                self.console.print(
                    Text("\nstopped; the question is not part of the history", "dim")
                )

    def _lines(self) -> Iterator[str]:
        interactive = sys.stdin.isatty()
        if interactive:
            self._start_history()
            self._say("/help lists the commands; an empty line does nothing")
        while True:
            try:
                line = input(_PROMPT) if interactive else sys.stdin.readline()
            except EOFError:
                line = ""
                self.console.print()
                return
            except KeyboardInterrupt:
                self.console.print()
                continue
            if not interactive and not line:
                return
            line = line.strip()
            if line:
                if not interactive:
                    self.console.print(Text(_PROMPT + plain(line), "bold"))
                yield line

    def _start_history(self) -> None:
        """Line editing, and a history file only where a store was named (law 12)."""
        try:
            import atexit
            import readline
        except ImportError:  # not on every platform
            return
        if self.history is None:
            return
        path = str(self.history)
        with suppress(OSError):  # the store itself reports that it cannot be written
            private_files.make_folders(self.history.parent)
            private_files.reserve(self.history)
            readline.read_history_file(path)
        atexit.register(_write_history, readline, path)

    def _say(self, text: str) -> None:
        self.console.print(Text(plain(text), "dim"))

    # -- answering -------------------------------------------------------------------------------

    def ask(self, question: str) -> None:
        """The next turn, printed as it comes."""
        start = time.perf_counter()
        first = None
        pieces = self.session.stream(question, self.waiting or None, **self.options)
        with closing(pieces):  # type: ignore[type-var]  # whoever stops it lets go of its memory
            for piece in pieces:
                if first is None and piece.token is not None:
                    first = 1e3 * (time.perf_counter() - start)
                self.console.print(Text(plain(piece.text)), end="", soft_wrap=True)
                if piece.usage is not None and piece.report is not None:
                    self.console.print()
                    self.waiting = []
                    self.last = piece.report
                    self._say(measurements(piece.usage, piece.report, first))
        if self.reports and self.last is not None:
            self.console.print(report_table(self.last))

    # -- commands --------------------------------------------------------------------------------

    def command(self, line: str) -> bool:
        """One command; false when the conversation is over."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name in ("exit", "quit"):
            return False
        known = self._commands()
        if name not in known:
            near = difflib.get_close_matches(name, [*known, "exit"], n=1)
            raise InputError(
                f"no command /{name}; {f'did you mean /{near[0]}?' if near else '/help'}"
            )
        known[name](rest)
        return True

    def _commands(self) -> dict[str, Callable[[str], None]]:
        return {
            "image": self.image,
            "clear": self.clear,
            "fork": self.fork,
            "save": self.save,
            "load": self.load,
            "report": self.report,
            "help": self.help,
        }

    def image(self, name: str) -> None:
        """/image PATH     a picture (file, URL or .sight) for the next question"""
        if not name:
            raise InputError("/image wants a path or URL")
        image = open_image(name.strip("'\""))
        with self.vlm.runtime.lock:
            self.vlm.runtime.refresh()
            medium = self.vlm.runtime.vision.name(image)
        self.waiting.append(medium)
        self._say(f"{name}: {medium.tokens} tokens, waits for your next question")

    def clear(self, rest: str) -> None:
        """/clear          a new conversation; what was seen stays in memory"""
        _no_argument("clear", rest)
        self.waiting, self.last = [], None
        self._switch(self.vlm.session())
        self._say("a new conversation")

    def fork(self, number: str) -> None:
        """/fork [N]       branch off here; with a number, go to that branch"""
        if number:
            if not number.isdigit() or not 1 <= int(number) <= len(self.branches):
                raise InputError(f"/fork {number}: the branches are 1 to {len(self.branches)}")
            self.session = self.branches[int(number) - 1]
        else:
            self.branches.append(self.session.fork())
            self.session = self.branches[-1]
        here = next(i for i, b in enumerate(self.branches, 1) if b is self.session)
        turns = sum(message["role"] == "user" for message in self.session.messages)
        self._say(f"branch {here} of {len(self.branches)}, {turns} questions so far")

    def save(self, name: str) -> None:
        """/save FILE      the conversation, its pictures and its memory, in one file"""
        if not name:
            raise InputError("/save wants a file, for example talk.keep")
        path = self.session.save(Path(name).expanduser())
        self._say(f"saved to {path}")

    def load(self, name: str) -> None:
        """/load FILE      go on with a saved conversation"""
        if not name:
            raise InputError("/load wants a file, for example talk.keep")
        session = self.vlm.resume(Path(name).expanduser())
        self._switch(session)
        for note in session.notes:
            self._say(f"note: {note}")
        self._say(f"{name}: {len(session.messages)} messages")

    def report(self, rest: str) -> None:
        """/report         what was reused for the last answer, and why"""
        _no_argument("report", rest)
        if self.last is None:
            raise InputError("there is no answer to report on yet")
        self.console.print(report_table(self.last))

    def help(self, rest: str) -> None:
        """/help           these lines"""
        _no_argument("help", rest)
        for command in self._commands().values():
            self._say(str(command.__doc__))
        self._say("/exit           the end (Ctrl-D does it too)")

    def _switch(self, session: Session) -> None:
        """Put another conversation in the place of the present one."""
        spot = next(i for i, b in enumerate(self.branches) if b is self.session)
        self.branches[spot] = self.session = session


def measurements(usage: Usage, report: Report, first: float | None) -> str:
    """One line: what was reused, what was computed, and how long the first token took."""
    images = ""
    if usage.images:
        images = f", {usage.images_encoded} of {usage.images} images encoded"
    wait = "" if first is None else f", first token after {first:.0f} ms"
    return f"[{usage.cached_tokens} tokens reused, {report.computed_tokens} computed{images}{wait}]"


def _no_argument(name: str, rest: str) -> None:
    if rest:
        raise InputError(f"/{name} takes no argument, got {rest!r}")


def _write_history(readline: ModuleType, path: str) -> None:
    with suppress(OSError):  # the history of a chat is not worth a traceback at its end
        readline.write_history_file(path)
