"""Answers for programs with an event loop: the model runs in a thread, pieces arrive by `async
for`.

Each answer keeps one thread from its first step to its last. Leaving the loop, closing it or
cancelling the task ends the answer at its next token; snapshots remembered by then stay.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

from keepsight.report import Piece, Reply


async def in_thread(answer: Callable[[], Iterator[Piece]]) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of an answer that is computed in a thread."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
    left = threading.Event()

    def hand_over(piece: Piece | BaseException | None) -> None:
        try:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)
        except RuntimeError:  # the loop was closed
            left.set()

    def work() -> None:
        try:
            made = answer()
            try:
                for piece in made:
                    if left.is_set():
                        return
                    hand_over(piece)
            finally:
                made.close()  # type: ignore[attr-defined]
        except BaseException as error:
            hand_over(error)
        else:
            hand_over(None)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name="keepsight-answer").start()
    try:
        while (piece := await pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece
    finally:
        left.set()


async def gathered(pieces: AsyncGenerator[Piece, None]) -> Reply:
    """Collect the whole answer; cancelling the task cancels it."""
    async with aclosing(pieces):
        return Reply.of([piece async for piece in pieces])
