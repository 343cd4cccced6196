"""The conversation of `keepsight chat`: a prompt, a few commands, one dim line of measurements.

A wrong command or a bad picture is an error message, and the conversation continues. Lines may also
come through a pipe; then they are echoed, so that the output reads like a conversation.
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

from keepsight.cli.line_editor import line_editor
from keepsight.cli.terminal import WrittenWords, json_line, plain, report_table, show_thumbnail
from keepsight.cli.typed_pictures import open_pictures, split_pictures
from keepsight.errors import InputError, KeepsightError
from keepsight.kinds import Message, Options, Record
from keepsight.media.medium import Medium
from keepsight.prompt.question import user_turn
from keepsight.system import private_files

if TYPE_CHECKING:
    from keepsight.report import Report, Usage
    from keepsight.session import Session
    from keepsight.vlm import VLM

_PROMPT = "> "


class _Stopped(KeyboardInterrupt):
    """Ctrl-C while an answer came: the conversation with its question, and the words so far."""

    def __init__(self, asked: list[Message], said: str) -> None:
        super().__init__()
        self.asked, self.said = asked, said


@dataclass
class Shell:
    """The interactive loop of `keepsight chat`."""

    vlm: VLM
    console: Console
    options: Options
    waiting: list[tuple[str, Medium]] = field(default_factory=list)  # for the next question
    history: Path | None = None
    reports: bool = False  # a report after every answer
    as_json: bool = False  # answers and errors are lines of JSON; `console` is for all else
    last: Report | None = None

    def __post_init__(self) -> None:
        self.branches: list[Session] = [self.vlm.session()]
        self.session = self.branches[0]

    def run(self) -> None:
        """Read lines until there are no more, or `/exit`."""
        for line in self._lines():
            try:
                if not self.is_command(line):
                    self.typed(line)
                elif not self.command(line):
                    return
            except (KeepsightError, OSError) as error:
                if self.as_json:
                    json_line({"error": str(error)})
                else:
                    self.console.print(Text(f"error: {plain(str(error))}", "red"))
            except KeyboardInterrupt:
                self._say("\nstopped; nothing of it is in the history: ask again, or /exit")

    def _lines(self) -> Iterator[str]:
        interactive = sys.stdin.isatty() and not self.as_json  # a prompt would be among the JSON
        read: Callable[[str], str] = input
        if interactive:
            read = self._reader()
        while True:
            try:
                line = read(_PROMPT) if interactive else sys.stdin.readline()
            except EOFError:
                line = ""
                self.console.print()
                return
            except KeyboardInterrupt:
                self._say("\n/exit or Ctrl-D ends the chat")
                continue
            if not interactive and not line:
                return
            line = line.strip()
            if line:
                if not interactive:
                    self.console.print(Text(_PROMPT + plain(line), "bold"))
                yield line

    def _reader(self) -> Callable[[str], str]:
        """The function that reads a line on a terminal."""
        lines = self.history.with_name("chat-lines") if self.history else None
        edited = line_editor([*self._commands(), "exit"], lines)
        more = ", Alt-Enter starts a new line" if edited else ""
        self._say(f"/help lists the commands{more}; drop pictures here")
        if edited is None:
            self._start_history()
        return edited or input

    def _start_history(self) -> None:
        """Start line editing, with a history file only if a store was named (law 12)."""
        try:
            import atexit
            import readline
        except ImportError:  # missing on some platforms
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

    def typed(self, line: str) -> None:
        """Handle a line that is no command: pictures, a question, or both."""
        names, question = split_pictures(line)
        for name in names:
            then = "goes with this question" if question else "waits for your next question"
            self._take(name, then)
        if question:
            self.ask(question)

    def ask(self, question: str) -> None:
        """Ask the next question and print the answer as it comes."""
        try:
            self._answer(self.session, question, [medium for _, medium in self.waiting])
        except _Stopped as stopped:
            if not stopped.said:
                raise
            self.session.remember(stopped.asked, stopped.said)
            self._say("\nstopped; the answer so far is in the history: /retry asks again")
        self.waiting = []

    def _answer(self, session: Session, question: str, images: list[Medium]) -> None:
        if self.as_json:
            self._answer_in_json(session, question, images)
            return
        start = time.perf_counter()
        first, said = None, ""
        words = WrittenWords(self.console)
        asked = [*session.messages, *session.named([user_turn((question, images or None), {})])]
        pieces = session.answer(asked, dict(self.options))
        try:
            with closing(pieces):  # type: ignore[type-var]  # stopping it releases its memory
                for piece in pieces:
                    if first is None and piece.token is not None:
                        first = 1e3 * (time.perf_counter() - start)
                    said += piece.text
                    words.write(piece.text)
                    if piece.usage is not None and piece.report is not None:
                        words.end()
                        self.console.print()
                        self.last = piece.report
                        self._say(measurements(piece.usage, piece.report, first))
        except KeyboardInterrupt:
            words.end()
            raise _Stopped(asked, said) from None
        if self.reports and self.last is not None:
            self.console.print(report_table(self.last))

    def _answer_in_json(self, session: Session, question: str, images: list[Medium]) -> None:
        """One answer as `keepsight ask --json` writes it, with the question before it."""
        reply = session.ask(question, images or None, **self.options)
        self.last = reply.report
        told: Record = {
            "question": question,
            "text": reply.text,
            "finish_reason": reply.finish_reason,
        }
        told |= {"usage": vars(reply.usage)}
        json_line(told | ({"report": reply.report.to_dict()} if self.reports else {}))

    # -- commands --------------------------------------------------------------------------------

    def is_command(self, line: str) -> bool:
        """Whether a line is a command; `/tmp/a.png` is a path."""
        if not line.startswith("/"):
            return False
        word = line[1:].split(" ")[0]
        known = (*self._commands(), "fork", "exit", "quit")
        return word in known or not ("/" in word or Path("/", word).exists())

    def command(self, line: str) -> bool:
        """Run one command; False when the conversation is over."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name in ("exit", "quit"):
            return False
        known = self._commands() | {"fork": self.branch}  # the old name
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
            "images": self.images,
            "edit": self.edit,
            "retry": self.retry,
            "clear": self.clear,
            "branch": self.branch,
            "save": self.save,
            "load": self.load,
            "report": self.report,
            "help": self.help,
        }

    def image(self, name: str) -> None:
        """/image PATH     a picture (file, URL, folder, PDF, .sight) for the next question"""
        if not name:
            raise InputError("/image wants a path or URL")
        self._take(name, "waits for your next question")

    def _take(self, name: str, then: str) -> None:
        for label, image in open_pictures(name):
            part = {"type": "image", "image": image}
            [named] = self.session.named([{"role": "user", "content": [part]}])
            medium = named["content"][0]["image"]
            self.waiting.append((label, medium))
            self._thumbnail(image)
            self._say(f"{label}: {medium.tokens} tokens, {then}")

    def _thumbnail(self, image: object) -> None:
        from PIL import Image

        with suppress(OSError, ValueError):  # the library has read it; this is only for display
            if isinstance(image, str) and Path(image).is_file():
                image = Image.open(image)
            if isinstance(image, Image.Image):
                show_thumbnail(image, self.console)

    def images(self, rest: str) -> None:
        """/images [N|all] the pictures that wait; with a number, or all: remove them"""
        first, _, last = rest.partition(" ")
        if first in ("remove", "rm", "delete"):  # what people type first
            rest = last.strip()
            if not rest:
                raise InputError(f"/images {first}: which? write /images N, or /images all")
        if rest == "all":
            self.waiting = []
        elif rest:
            at = _number("/images", rest, len(self.waiting), "picture") - 1
            self._say(f"removed {self.waiting.pop(at)[0]}")
        for number, (label, medium) in enumerate(self.waiting, 1):
            self._say(f"{number}  {label}: {medium.tokens} tokens")
        if not self.waiting:
            self._say("no picture waits")

    def edit(self, rest: str) -> None:
        """/edit [N] TEXT  ask TEXT in place of question N, or of the last; later ones go"""
        number, _, text = rest.partition(" ")
        questions = sum(message["role"] == "user" for message in self.session.messages)
        if not number.isdigit():
            number, text = str(questions), rest
        if not text.strip():
            raise InputError("/edit wants the new question, for example /edit 1 What is it?")
        self._again(_number("/edit", number, questions, "question"), text.strip())

    def retry(self, rest: str) -> None:
        """/retry          answer the last question again"""
        _no_argument("retry", rest)
        questions = sum(message["role"] == "user" for message in self.session.messages)
        self._again(_number("/retry", str(questions), questions, "question"), None)

    def _again(self, number: int, text: str | None) -> None:
        """Answer question `number` again, with its pictures; nothing is lost if that stops."""
        other = self.session.fork()
        spots = [i for i, m in enumerate(other.messages) if m["role"] == "user"]
        content = other.messages[spots[number - 1]]["content"]
        other.messages = other.messages[: spots[number - 1]]
        images = [part["image"] for part in content if part["type"] == "image"]
        before = "".join(part["text"] for part in content if part["type"] == "text")
        self._answer(other, before if text is None else text, images)
        self._switch(other)

    def clear(self, rest: str) -> None:
        """/clear          a new conversation; what was seen stays in memory"""
        _no_argument("clear", rest)
        self.waiting, self.last = [], None
        self._switch(self.vlm.session())
        self._say("a new conversation")

    def branch(self, number: str) -> None:
        """/branch [N]     branch off here; with a number, go to that branch"""
        if number:
            chosen = _number("/branch", number, len(self.branches), "branch")
            self.session = self.branches[chosen - 1]
        else:
            self.branches.append(self.session.fork())
            self.session = self.branches[-1]
        here = next(i for i, b in enumerate(self.branches, 1) if b is self.session)
        turns = sum(message["role"] == "user" for message in self.session.messages)
        self._say(f"branch {here} of {len(self.branches)}, {turns} questions so far")

    def save(self, name: str) -> None:
        """/save FILE      the conversation, its pictures and its memory, in one file"""
        if not name:
            raise InputError("/save needs a file name, for example: /save talk.keep")
        path = self.session.save(name)
        self._say(f"saved to {path}")

    def load(self, name: str) -> None:
        """/load FILE      go on with a saved conversation"""
        if not name:
            raise InputError("/load needs a file name, for example: /load talk.keep")
        session = self.vlm.resume(name)
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
        """Replace the current conversation by another."""
        spot = next(i for i, b in enumerate(self.branches) if b is self.session)
        self.branches[spot] = self.session = session


def measurements(usage: Usage, report: Report, first: float | None) -> str:
    """One line: what was reused, what was computed, and how long the first token took."""
    images = ""
    if usage.images:
        images = f", {usage.images_encoded} of {usage.images} images encoded"
    wait = "" if first is None else f", first token after {first:.0f} ms"
    return f"[{usage.cached_tokens} tokens reused, {report.computed_tokens} computed{images}{wait}]"


def _number(command: str, given: str, most: int, what: str) -> int:
    """The number given to a command, from 1 to `most`."""
    if not most:
        raise InputError(f"{command}: there is no {what} yet")
    if not given.isdecimal() or not 1 <= int(given) <= most:
        raise InputError(f"{command} {given}: expected a {what} from 1 to {most}")
    return int(given)


def _no_argument(name: str, rest: str) -> None:
    if rest:
        raise InputError(f"/{name} takes no argument, got {rest!r}")


def _write_history(readline: ModuleType, path: str) -> None:
    with suppress(OSError):  # losing a chat's history is no reason for a traceback
        readline.write_history_file(path)
