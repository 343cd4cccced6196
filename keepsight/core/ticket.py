"""A caller's handle on a request: its pieces, its end, and a way to cancel it.

It knows nothing about how requests are served. All methods may be called from any thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np

from keepsight.errors import KeepsightError
from keepsight.report import Piece, Reply, Report, Usage

Listener = Callable[[Piece], None]


class Ticket:
    """One request. Iterate over it for its pieces; the last one carries usage and report.

    `on_piece` and `on_done` are called on the scheduler's thread, so they must be quick; they serve
    programs that pass pieces to an event loop. With `on_piece` no pieces are kept for iteration.
    """

    def __init__(
        self,
        on_piece: Listener | None = None,
        on_done: Callable[[Ticket], None] | None = None,
    ) -> None:
        self._on_piece, self._on_done = on_piece, on_done
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._heard: list[Piece] = []  # all pieces, for result()
        self._wake: Callable[[], None] = lambda: None
        self.cancelled = False
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.prompt_ids: np.ndarray | None = None  # once it has begun
        self.usage: Usage | None = None
        self.report: Report | None = None
        self.finish_reason: str | None = None

    # -- for the caller --------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Piece]:
        """Wait for each piece; raise the error of the request."""
        self._require_kept()
        while (piece := self._pieces.get()) is not None:
            yield piece
        self._pieces.put(None)  # a later reader finds the end too
        if self.error is not None:
            raise self.error

    def result(self) -> Reply:
        """The whole answer, once it is complete; may be called repeatedly."""
        self._require_kept()
        self.done.wait()
        if self.error is not None:
            raise self.error
        text = "".join(piece.text for piece in self._heard)
        tokens = [piece.token for piece in self._heard if piece.token is not None]
        if self.usage is None or self.report is None:
            raise KeepsightError("the request was cancelled before it had begun")
        return Reply(text, self.usage, self.report, tokens, self.finish_reason or "stop")

    def _require_kept(self) -> None:
        if self._on_piece is not None:
            raise KeepsightError("this ticket's pieces go to its on_piece; they are not kept")

    def cancel(self) -> None:
        """Stop after the current step. What was prefilled stays remembered."""
        self.cancelled = True
        self._wake()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.done.is_set():
            self.cancel()

    # -- for the scheduler -----------------------------------------------------------------------

    def awake_with(self, wake: Callable[[], None]) -> None:
        """Set the callback for a cancellation by the caller."""
        self._wake = wake

    def put(self, piece: Piece) -> None:
        """Hand over one piece."""
        if piece.usage is not None:
            self.usage, self.report = piece.usage, piece.report
            self.finish_reason = piece.finish_reason
        if self._on_piece is not None:
            self._on_piece(piece)
        else:
            self._heard.append(piece)
            self._pieces.put(piece)

    def end(self, error: BaseException | None = None) -> None:
        """End the ticket; no more pieces come."""
        self.error = error
        self.done.set()
        self._pieces.put(None)
        if self._on_done is not None:
            self._on_done(self)
