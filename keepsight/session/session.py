"""One conversation: it keeps its own history, branches, and is saved to a file.

Pictures in the history are named media, so a turn does not hash or open the pictures of earlier
turns.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from keepsight.core.answer import answer, prepare
from keepsight.core.call import Call
from keepsight.core.display import described, history, history_as_html
from keepsight.core.in_thread import gathered, in_thread
from keepsight.core.order import Order
from keepsight.core.runtime import Runtime
from keepsight.core.signatures import shows
from keepsight.errors import InputError
from keepsight.formats.package import Package
from keepsight.kinds import Answering, Asking, AskOptions, Generating, Message, Options
from keepsight.media.features import Vision
from keepsight.media.live import Frames
from keepsight.media.medium import Medium, Pictures
from keepsight.prefix.prompt import Prompt
from keepsight.prompt.messages import kept_notes
from keepsight.prompt.question import user_turn
from keepsight.report import Piece, Reply
from keepsight.session import keep_file
from keepsight.session.watching import WatchedVideo
from keepsight.system.places import expanded


class Session:
    """One conversation. `messages` is its history, with named images in place of pixels."""

    def __init__(self, runtime: Runtime, system: str | None = None, tenant: str = "") -> None:
        self.runtime, self.tenant = runtime, tenant
        self.messages: list[Message] = []
        self.notes: list[str] = []
        self._awaited = False  # whether an asynchronous turn runs
        if system is not None:
            if not isinstance(system, str):
                raise InputError(f"system is a {type(system).__name__}, expected a text")
            self.messages.append({"role": "system", "content": system})

    def __repr__(self) -> str:
        return f"<Session {described(self.runtime)}; {history(self.messages)}>"

    def _repr_html_(self) -> str:
        return history_as_html(self.messages)

    # -- talking ---------------------------------------------------------------------------------

    @shows(Asking)
    def ask(
        self,
        *given: Pictures | None,
        **options: Unpack[AskOptions],
    ) -> Reply:
        """Ask the next question: `ask("What is it?", images=[...])`, or both in either order."""
        return Reply.of(self.stream(*given, **options))

    @shows(Asking)
    def stream(self, *given: Pictures | None, **options: Unpack[AskOptions]) -> Iterator[Piece]:
        """Ask the next question and yield the answer piece by piece. The history grows when it is
        complete."""
        left: Options = dict(options)
        message = user_turn(given, left)
        return self.answer([*self.messages, *self.named([message])], left)

    @shows(Asking)
    async def aask(self, *given: Pictures | None, **options: Unpack[AskOptions]) -> Reply:
        """`ask` for programs with an event loop; cancelling the task cancels the turn."""
        return await gathered(self.astream(*given, **options))

    @shows(Asking)
    async def astream(
        self, *given: Pictures | None, **options: Unpack[AskOptions]
    ) -> AsyncGenerator[Piece, None]:
        """`stream` for `async for`; each turn runs in a thread, one at a time."""
        left: Options = dict(options)
        message = user_turn(given, left)
        if self._awaited:
            raise InputError("this session is already answering; await that, or ask a fork()")
        asked: list[Message] = []

        def answer() -> Iterator[Piece]:
            asked.extend([*self.messages, *self.named([message])])
            return self._pieces(asked, left)

        self._awaited, text = True, ""
        try:
            async with aclosing(in_thread(answer)) as pieces:
                async for piece in pieces:
                    text += piece.text
                    if piece.usage is not None:
                        self.remember(asked, text)
                    yield piece
        finally:
            self._awaited = False

    @shows(Asking)
    def edit(self, turn: int, text: str, images: Pictures | None = None, **options: Any) -> Reply:
        """Replace user turn `turn` (0 is the first) by another question; later turns are dropped.

        Without `images`, `videos` or `audio` the turn keeps those that it has.
        """
        spot = self._user_turn(turn)
        given = {**options, "images": images}
        for name, kind in (("images", "image"), ("videos", "video"), ("audio", "audio")):
            if given.get(name) is None:
                content = self.messages[spot]["content"]
                given[name] = [part[kind] for part in content if part.get("type") == kind]
        asked = [*self.messages[:spot], *self.named([user_turn((text,), given)])]
        return Reply.of(self.answer(asked, given, "edit"))

    @shows(Answering)
    def regenerate(self, **options: Unpack[Generating]) -> Reply:
        """Answer the last user turn again."""
        asked = self.messages[: self._user_turn(-1) + 1]
        return Reply.of(self.answer(asked, dict(options), "regenerate"))

    def fork(self) -> Session:
        """A new conversation with the same history."""
        other = Session(self.runtime, tenant=self.tenant)
        other.messages = copy.copy(self.messages)
        other.notes = list(self.notes)
        return other

    def answer(self, asked: list[Message], options: Options, where: str = "ask") -> Iterator[Piece]:
        """Answer a history that ends with a question; both become this session's history."""
        text = ""
        for piece in self._pieces(asked, options, where):
            text += piece.text
            if piece.usage is not None:
                self.remember(asked, text)
            yield piece

    def remember(self, asked: list[Message], text: str) -> None:
        """Make a question and its answer the history, as the template will render them; the next
        turn prefills them."""
        self.messages = [*asked, {"role": "assistant", "content": [_text(text)]}]

    def _pieces(
        self, asked: list[Message], options: Options, where: str = "ask"
    ) -> Iterator[Piece]:
        whose = options.pop("tenant", None)
        if whose is not None and whose != self.tenant:
            raise InputError(f"this session belongs to tenant {self.tenant!r}, not to {whose!r}")
        for piece in answer(self.runtime, asked, Call.of(options, self.tenant, where)):
            if piece.report is not None:
                piece.report.notes += [*self.notes, *kept_notes(self.messages)]
            yield piece

    def named(self, messages: list[Message]) -> list[Message]:
        """Messages with their pictures named once, for this and all later turns. They are read and
        decoded without the model's lock."""
        self.runtime.require_open()
        with self.runtime.lock.beside():
            order = Order(self.runtime, messages, Call(self.tenant, {}, {}))
            order.media = [self.kept(medium) for medium in order.media]
        with self.runtime.lock:
            order.learn()
        return order.with_media()

    def kept(self, medium: Medium) -> Medium:
        """An image with what was given for it, whatever becomes of its file or its owner's
        pixels or features."""
        if isinstance(medium.recall, Package):
            medium = replace(medium, recall=medium.recall.copied())
        if medium.opened is None:
            return medium
        kept = self.runtime.caches.kept.keep(self.tenant, medium.opened)
        return replace(medium, opened=kept)

    def prepare(self, asked: list[Message]) -> None:
        """Encode and prefill a history now, to answer later."""
        prepare(self.runtime, asked, Call.before_decoding({}, self.tenant, "prepare"))

    def watch(self, source: Frames, *, fps: float = 1.0, budget: int = 256) -> WatchedVideo:
        """Watch a video file, a camera (by number) or an iterable of frames, and ask meanwhile.

        `fps` is the number of frames used per second; the latest `budget` frames are kept.
        """
        return WatchedVideo(self, source, fps, budget)

    @property
    def vision(self) -> Vision:
        return self.runtime.vision_of(self.tenant)

    def prompt(self) -> Prompt:
        """The history as it will be rendered next time."""
        call = Call(self.tenant, {}, {})
        return self.runtime.render(self.messages, call, generate=False)

    def _user_turn(self, turn: int) -> int:
        spots = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        try:
            return spots[turn]
        except (IndexError, TypeError):
            raise InputError(f"there is no user turn {turn!r}; there are {len(spots)}") from None

    # -- files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write the conversation, its packages and its snapshots to one `.keep` file."""
        return keep_file.save(self, expanded(path))

    @classmethod
    def load(
        cls, runtime: Runtime, path: Path, tenant: str = "", accept_features: str | None = None
    ) -> Session:
        """Read a `.keep` file. Other vision weights are refused. In another environment the
        packages are used and the prefixes computed again; `notes` and reports say so."""
        session = cls(runtime, tenant=tenant)
        keep_file.load(session, path, accept_features)
        return session


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
