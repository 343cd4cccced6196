"""Questions about a video while it is still running: `session.watch`.

One thread reads frames and another prefills new ones, so that an answer starts at once. The video
occurs once in the conversation, before the first question about it, and grows there; each time step
is encoded and prefilled once. If it exceeds the budget, the oldest quarter is dropped at once,
because the rest must be prefilled again.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from keepsight.errors import ImageError, InputError, KeepsightError
from keepsight.kinds import Message, Record
from keepsight.media.clips import is_rate
from keepsight.media.live import Frames, frames_of
from keepsight.media.medium import Medium
from keepsight.prompt.messages import user_message
from keepsight.report import Piece, Reply

if TYPE_CHECKING:
    from keepsight.session.session import Session

_LEAST = 8  # least number of frames in a budget
_STEP = 2  # frames per time step, in all families with videos
_LOOK = 1.0  # seconds between two looks whether anyone still watches


class WatchedVideo:
    """The frames seen of a source so far. Close it, or use it in a `with` statement.

    Its threads do not keep it: they end soon after it was dropped.
    """

    def __init__(self, session: Session, source: Frames, fps: float, budget: int) -> None:
        if not is_rate(fps, 1_000):
            raise InputError(f"fps={fps!r}; expected a positive number of frames per second")
        if not is_rate(budget, math.inf) or budget < _LEAST or budget % 1:
            raise InputError(f"budget={budget!r} frames; expected at least {_LEAST}")
        self.session, self.fps, self.budget = session, float(fps), budget
        self.seen = 0  # frames taken from the source, including dropped ones
        self.error: KeepsightError | None = None  # why the source ended early
        self._held: list[np.ndarray] = []
        # What the conversation holds of the video, once it was asked about, and an edit keeps.
        self._source = object()
        self._state = threading.Condition()
        self._over = self._closed = False
        self._prepared = 0
        this, frames = weakref.ref(self), frames_of(source, fps)
        for name, work in (
            ("read", lambda: _read(this, frames)),
            ("prepare", lambda: _prepare(this)),
        ):
            threading.Thread(target=work, name=f"keepsight-{name}", daemon=True).start()

    # -- the video --------------------------------------------------------------------------------

    @property
    def frames(self) -> int:
        """The number of frames that a question would cover."""
        return len(self._held)

    @property
    def ended(self) -> bool:
        """Whether no more frames will come."""
        return self._over

    def wait(self, frames: int | None = None, timeout: float | None = None) -> int:
        """Wait until this many frames were seen, or the source ended; return how many were seen."""
        with self._state:
            self._state.wait_for(
                lambda: self._over or (frames is not None and self.seen >= frames), timeout
            )
            return self.seen

    def _take(self, frame: np.ndarray) -> bool:
        """Add one frame; return whether more are wanted."""
        with self._state:
            if self._closed:
                return False
            self._held.append(frame)
            self.seen += 1
            if len(self._held) > self.budget:
                gone = max(_STEP, self.budget // 4 // _STEP * _STEP)
                self._held, self._prepared = self._held[gone:], 0
            self._state.notify_all()
            return True

    def _end(self, error: KeepsightError | None) -> None:
        """Note that no more frames will come, and why."""
        with self._state:
            self.error, self._over = error, True
            self._state.notify_all()

    def _prepare_new(self) -> bool:
        """Prefill the new frames once an eighth was added, waiting a little for them; return
        whether more may come."""
        with self._state:
            self._state.wait_for(lambda: self._over or self._is_much_new(), _LOOK)
            if self._closed or not self._is_much_new():
                return not self._over
            count = self._prepared = len(self._held) // _STEP * _STEP
            frames = self._held[:count]
        try:
            asked, place, _ = self._asked(frames, "")
            self.session.prepare(asked[: place + 1])
        except KeepsightError:
            return False  # the next question will report the error
        return True

    def _is_much_new(self) -> bool:
        new = len(self._held) - self._prepared
        return new >= max(_STEP, self._prepared // 8)

    # -- asking ----------------------------------------------------------------------------------

    def ask(self, question: str, **options: object) -> Reply:
        """Answer about the frames seen so far; the source continues meanwhile."""
        return Reply.of(self.stream(question, **options))

    def stream(self, question: str, **options: object) -> Iterator[Piece]:
        """Answer piece by piece."""
        with self._state:
            held = list(self._held)
        if not held:
            raise self.error or ImageError(
                "no frame was seen yet; wait(frames=1) waits for the first"
            )
        asked, _, video = self._asked(held, question)
        for piece in self.session.answer(asked, options):
            if piece.usage is not None:
                self._source = video.opened  # the history holds it now
            if piece.report is not None and self.error is not None:
                piece.report.notes.append(f"the video ended early: {self.error}")
            yield piece

    def _asked(self, frames: list[np.ndarray], question: str) -> tuple[list[Message], int, Medium]:
        """The conversation with the current video and a question after it, the place of the
        message with the video, and the video as that message holds it."""
        rows = np.stack(frames)
        rows.setflags(write=False)  # nobody else has it, so the session need not copy it
        clip: Record = {"frames": rows, "fps": self.fps, "sampled": True}
        part = {"type": "video", "video": clip}
        [shown] = self.session.named([{"role": "user", "content": [part]}])
        video = shown["content"][0]
        messages = self.session.messages
        place = next((i for i, one in enumerate(messages) if self._shows(one)), len(messages))
        asked = [*messages, user_message(question)]
        parts = [part for part in asked[place]["content"] if not self._is_this(part)]
        asked[place] = dict(asked[place], content=[video, *parts])
        return asked, place, video["video"]

    def _shows(self, message: Message) -> bool:
        """Whether a message of the conversation holds this video, from an earlier question."""
        parts = message["content"] if isinstance(message["content"], list) else []
        return any(map(self._is_this, parts))

    def _is_this(self, part: Message) -> bool:
        return getattr(part.get("video"), "opened", None) is self._source

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop reading. Earlier questions stay in the conversation."""
        with self._state:
            self._closed = self._over = True
            self._state.notify_all()

    def __enter__(self) -> WatchedVideo:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "ended" if self.ended else "running"
        frames = f"{self.frames} of {self.seen} frames held, {self.fps:g} a second"
        return f"<WatchedVideo {state}; {frames}>"


_This = weakref.ref[WatchedVideo]


def _read(this: _This, frames: Iterator[np.ndarray]) -> None:
    error: KeepsightError | None = None
    try:
        for frame in frames:
            watched = this()
            if watched is None or not watched._take(frame):
                return
            del watched
    except KeepsightError as failed:
        error = failed
    except BaseException as failed:  # the caller's source may raise anything, or end its thread
        error = ImageError(f"the source of frames failed: {failed!r}")
    finally:
        if (watched := this()) is not None:
            watched._end(error)


def _prepare(this: _This) -> None:
    while (watched := this()) is not None:
        if not watched._prepare_new():
            return
        del watched
