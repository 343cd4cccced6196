"""The line editor of `keepsight chat`: several lines, pastes, history, completion.

It is prompt_toolkit's, from the extra `chat`; without it Python's own `input` reads the lines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from keepsight.system import private_files
from keepsight.system.suffixes import is_picture

if TYPE_CHECKING:
    from prompt_toolkit.history import History

_MOST = 100  # completions


def line_editor(commands: list[str], history: Path | None) -> Callable[[str], str] | None:
    """A function that reads a line, like `input`; None without prompt_toolkit.

    Enter sends, Alt-Enter starts a new line; a paste keeps its lines. Ctrl-J sends too: an Enter
    typed during an answer arrives as Ctrl-J.
    """
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion
        from prompt_toolkit.document import Document
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError:
        return None

    class TypedWords(Completer):
        def get_completions(self, document: Document, event: object) -> Iterator[Completion]:
            start, words = completions(document.text_before_cursor, commands)
            yield from (Completion(word, start_position=start) for word in words)

    keys = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    session: PromptSession[str] = PromptSession(
        history=history_at(history),
        completer=TypedWords(),
        complete_while_typing=False,
        key_bindings=keys,
        multiline=True,
        prompt_continuation=lambda width, *_: ". ".rjust(width),
    )
    ask: Callable[[str], str] = session.prompt
    return ask


def history_at(path: Path | None) -> History:
    """In memory for this chat, or in a file if a store was named."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if path is not None:
        with suppress(OSError):  # the store itself reports that it cannot be written
            private_files.make_folders(path.parent)
            private_files.reserve(path)
            return FileHistory(str(path))
    return InMemoryHistory()


def completions(text: str, commands: list[str]) -> tuple[int, list[str]]:
    """Where the current word starts, relative to the cursor, and its possible completions."""
    found = [f"/{name}" for name in commands if f"/{name}".startswith(text)]
    if text.startswith("/") and found:
        return -len(text), found
    word = text.replace("\n", " ").rpartition(" ")[2].lstrip("'\"")
    folder, name = os.path.split(word)
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda e: e.name)
    except OSError:
        return 0, []
    fitting = [e for e in entries if e.name.startswith(name) and (name or e.name[0] != ".")]
    wanted = [e for e in fitting if e.is_dir() or is_picture(e.name)]
    return -len(name), [e.name + os.sep * e.is_dir() for e in wanted[:_MOST]]
