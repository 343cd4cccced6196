"""The conversation of `keepsight chat`: a prompt, a few commands, one dim line of measurements.

A wrong command or a bad picture is an error message, and the conversation continues. Lines may also
come through a pipe; then they are echoed, so that the output reads like a conversation.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from rich.console import Console
from rich.text import Text

from keepsight.cli.line_editor import line_editor
from keepsight.cli.pictures import open_pictures, split_pictures
from keepsight.cli.terminal import WrittenWords, json_line, plain, report_table, show_thumbnail
from keepsight.errors import InputError, KeepsightError
from keepsight.kinds import Message, Options, Record
from keepsight.media.medium import Medium
from keepsight.prompt.question import user_turn
from keepsight.report import Piece, Reply, Report

if TYPE_CHECKING:
    from keepsight.session import Session
    from keepsight.vlm import VLM

_PROMPT = "> "


@dataclass
class Shell:
    """The interactive loop. A method `do_x` is the command /x, its docstring the line of /help."""

    vlm: VLM
    console: Console
    options: Options
    waiting: list[tuple[str, Medium]] = field(default_factory=list)  # for the next question
    history: Path | None = None  # file for the lines that are typed
    reports: bool = False  # a report after every answer
    as_json: bool = False  # answers and errors are lines of JSON; `console` is for all else
    last: Report | None = None

    def __post_init__(self) -> None:
        self.session = self.vlm.session()
        self.branches: list[Session] = [self.session]
        names = [name[3:] for name in vars(Shell) if name.startswith("do_")]
        self.commands: dict[str, Callable[..., None]] = {n: getattr(self, f"do_{n}") for n in names}

    def run(self) -> None:
        """Read lines until there are no more, or `/exit`."""
        for line in self._lines():
            try:
                if not self._is_command(line):
                    self.typed(line)
                elif line.split(" ")[0] in ("/exit", "/quit"):
                    return
                else:
                    self._command(line)
            except (KeepsightError, OSError) as error:
                if self.as_json:
                    json_line({"error": str(error)})
                else:
                    self.console.print(Text(f"error: {plain(str(error))}", "red"))
            except KeyboardInterrupt:
                self._say("\nstopped; nothing of it is in the history: ask again, or /exit")

    def _lines(self) -> Iterator[str]:
        interactive = sys.stdin.isatty() and not self.as_json  # a prompt would be among the JSON
        if not interactive:
            for line in sys.stdin:
                if line := line.strip():
                    self.console.print(Text(_PROMPT + plain(line), "bold"))
                    yield line
            return
        edited = line_editor([*self.commands, "exit"], self.history)
        more = ", Alt-Enter starts a new line" if edited else ""
        self._say(f"/help lists the commands{more}; drop pictures here")
        if edited is None:
            with suppress(ImportError):  # missing on some platforms
                import readline  # noqa: F401  # `input` edits lines with it
        while True:
            try:
                if line := (edited or input)(_PROMPT).strip():
                    yield line
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self._say("\n/exit or Ctrl-D ends the chat")

    def _say(self, text: str) -> None:
        self.console.print(Text(plain(text), "dim"))

    # -- answering -------------------------------------------------------------------------------

    def typed(self, line: str) -> None:
        """Handle a line that is no command: pictures, a question, or both."""
        names, question = split_pictures(line)
        for name in names:
            self._take(name, "goes with this question" if question else _WAITS)
        if question:
            self.ask(question)

    def ask(self, question: str) -> None:
        """Ask the next question and print the answer as it comes."""
        media = [medium for _, medium in self.waiting]
        if stopped := self._answer(self.session, question, media):
            asked, said = stopped
            if not said:
                raise KeyboardInterrupt
            self.session.remember(asked, said)
            self._say("\nstopped; the answer so far is in the history: /retry asks again")
        self.waiting = []

    def _answer(
        self, session: Session, question: str, images: list[Medium]
    ) -> tuple[list[Message], str] | None:
        """Answer a question. Ctrl-C: the conversation with it, and the words so far."""
        start, first = time.perf_counter(), ""
        asked = [*session.messages, *session.named([user_turn((question, images or None), {})])]
        pieces, words = list[Piece](), WrittenWords(self.console)
        answer = session.answer(asked, dict(self.options))
        try:
            with closing(answer):  # type: ignore[type-var]  # stopping it releases its memory
                for piece in answer:
                    if not first and piece.token is not None:
                        ms = 1e3 * (time.perf_counter() - start)
                        first = f", first token after {ms:.0f} ms"
                    pieces.append(piece)
                    words.write("" if self.as_json else piece.text)
        except KeyboardInterrupt:
            words.end()
            return asked, "".join(piece.text for piece in pieces)
        words.end()
        reply = Reply.of(pieces)
        usage, self.last = reply.usage, reply.report
        if self.as_json:
            told: Record = {"question": question, "text": reply.text}
            told |= {"finish_reason": reply.finish_reason, "usage": vars(usage)}
            json_line(told | ({"report": self.last.to_dict()} if self.reports else {}))
            return None
        seen = f", {usage.images_encoded} of {usage.images} images encoded" if usage.images else ""
        reused, computed = usage.cached_tokens, self.last.computed_tokens
        self.console.print()
        self._say(f"[{reused} tokens reused, {computed} computed{seen}{first}]")
        if self.reports:
            self.console.print(report_table(self.last))
        return None

    # -- commands --------------------------------------------------------------------------------

    def _is_command(self, line: str) -> bool:
        """Whether a line is a command; `/tmp/a.png` is a path."""
        if not line.startswith("/"):
            return False
        word = line[1:].split(" ")[0]
        known = (*self.commands, "exit", "quit")
        return word in known or not ("/" in word or Path("/", word).exists())

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        known = self.commands
        if name not in known:
            near = difflib.get_close_matches(name, [*known, "exit"], n=1)
            hint = f"did you mean /{near[0]}?" if near else "/help"
            raise InputError(f"no command /{name}; {hint}")
        if inspect.signature(known[name]).parameters:
            known[name](rest.strip())
        elif rest.strip():
            raise InputError(f"/{name} takes no argument, got {rest.strip()!r}")
        else:
            known[name]()

    def do_image(self, name: str) -> None:
        """/image PATH     a picture (file, URL, folder, PDF, .sight) for the next question"""
        if not name:
            raise InputError("/image wants a path or URL")
        self._take(name, _WAITS)

    def _take(self, name: str, then: str) -> None:
        for label, image in open_pictures(name):
            part = {"type": "image", "image": image}
            [named] = self.session.named([{"role": "user", "content": [part]}])
            medium = named["content"][0]["image"]
            self.waiting.append((label, medium))
            with suppress(OSError, ValueError):  # the library has read it; this is for display
                is_file = isinstance(image, str) and Path(image).is_file()
                drawn = Image.open(str(image)) if is_file else image
                if isinstance(drawn, Image.Image):
                    show_thumbnail(drawn, self.console)
            self._say(f"{label}: {medium.tokens} tokens, {then}")

    def do_images(self, rest: str) -> None:
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

    def do_edit(self, rest: str) -> None:
        """/edit [N] TEXT  ask TEXT in place of question N, or of the last; later ones go"""
        number, _, text = rest.partition(" ")
        if not number.isdigit():
            number, text = "", rest
        if not text.strip():
            raise InputError("/edit wants the new question, for example /edit 1 What is it?")
        self._again("/edit", number, text.strip())

    def do_retry(self) -> None:
        """/retry          answer the last question again"""
        self._again("/retry", "", None)

    def _again(self, command: str, number: str, text: str | None) -> None:
        """Answer a question again, with its pictures; nothing is lost if that stops."""
        spots = [i for i, m in enumerate(self.session.messages) if m["role"] == "user"]
        spot = spots[_number(command, number or str(len(spots)), len(spots), "question") - 1]
        other = self.session.fork()
        content = other.messages[spot]["content"]
        other.messages = other.messages[:spot]
        images = [part["image"] for part in content if part["type"] == "image"]
        before = "".join(part["text"] for part in content if part["type"] == "text")
        if self._answer(other, before if text is None else text, images):
            raise KeyboardInterrupt
        self._switch(other)

    def do_clear(self) -> None:
        """/clear          a new conversation; what was seen stays in memory"""
        self.waiting, self.last = [], None
        self._switch(self.vlm.session())
        self._say("a new conversation")

    def do_branch(self, number: str) -> None:
        """/branch [N]     branch off here; with a number, go to that branch"""
        if number:
            chosen = _number("/branch", number, len(self.branches), "branch")
            self.session = self.branches[chosen - 1]
        else:
            self.session = self.session.fork()
            self.branches.append(self.session)
        here = next(i for i, b in enumerate(self.branches, 1) if b is self.session)
        turns = sum(message["role"] == "user" for message in self.session.messages)
        self._say(f"branch {here} of {len(self.branches)}, {turns} questions so far")

    def do_save(self, name: str) -> None:
        """/save FILE      the conversation, its pictures and its memory, in one file"""
        if not name:
            raise InputError("/save needs a file name, for example: /save talk.keep")
        self._say(f"saved to {self.session.save(name)}")

    def do_load(self, name: str) -> None:
        """/load FILE      go on with a saved conversation"""
        if not name:
            raise InputError("/load needs a file name, for example: /load talk.keep")
        session = self.vlm.resume(name)
        self._switch(session)
        for note in session.notes:
            self._say(f"note: {note}")
        self._say(f"{name}: {len(session.messages)} messages")

    def do_report(self) -> None:
        """/report         what was reused for the last answer, and why"""
        if self.last is None:
            raise InputError("there is no answer to report on yet")
        self.console.print(report_table(self.last))

    def do_help(self) -> None:
        """/help           these lines"""
        for command in self.commands.values():
            self._say(str(command.__doc__))
        self._say("/exit           the end (Ctrl-D does it too)")

    def _switch(self, session: Session) -> None:
        """Replace the current conversation by another."""
        spot = next(i for i, b in enumerate(self.branches) if b is self.session)
        self.branches[spot] = self.session = session


_WAITS = "waits for your next question"


def _number(command: str, given: str, most: int, what: str) -> int:
    """The number given to a command, from 1 to `most`."""
    if not most:
        raise InputError(f"{command}: there is no {what} yet")
    if not given.isdecimal() or not 1 <= int(given) <= most:
        raise InputError(f"{command} {given}: expected a {what} from 1 to {most}")
    return int(given)
