"""The line editor of `keepsight chat`: several lines, pastes, history, completion.

It is prompt_toolkit's, from the extra `chat`; without it Python's own `input` reads the lines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from keepsight.cli.typed_pictures import SUFFIXES
from keepsight.system import private_files

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

_MOST = 100  # completions


def line_editor(commands: list[str], history: Path | None) -> Callable[[str], str] | None:
    """A function that reads a line, like `input`; None without prompt_toolkit."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion
        from prompt_toolkit.document import Document
    except ImportError:
        return None

    class TypedWords(Completer):
        def get_completions(self, document: Document, event: object) -> Iterator[Completion]:
            start, words = completions(document.text_before_cursor, commands)
            for word in words:
                yield Completion(word, start_position=start)

    session: PromptSession[str] = PromptSession(
        history=_history(history),
        completer=TypedWords(),
        complete_while_typing=False,
        key_bindings=_keys(),
        multiline=True,
        prompt_continuation=lambda width, *_: ". ".rjust(width),
    )
    ask: Callable[[str], str] = session.prompt
    return ask


def _history(path: Path | None) -> History:
    """In memory for this chat, or in a file if a store was named."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if path is None:
        return InMemoryHistory()
    with suppress(OSError):  # the store itself reports that it cannot be written
        private_files.make_folders(path.parent)
        private_files.reserve(path)
        return FileHistory(str(path))
    return InMemoryHistory()


def _keys() -> KeyBindings:
    """Enter sends, Alt-Enter starts a new line; a paste keeps its lines.

    Ctrl-J sends too: an Enter typed during an answer arrives as Ctrl-J.
    """
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    return keys


def completions(text: str, commands: list[str]) -> tuple[int, list[str]]:
    """Where the current word starts, relative to the cursor, and its possible completions."""
    if text.startswith("/") and " " not in text:
        found = [f"/{name}" for name in commands if f"/{name}".startswith(text)]
        if found:
            return -len(text), found
    word = text.replace("\n", " ").rpartition(" ")[2].lstrip("'\"")
    folder, name = os.path.split(word)
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda e: e.name)
    except OSError:
        return 0, []
    fitting = [e for e in entries if e.name.startswith(name) and (name or e.name[0] != ".")]
    wanted = [e for e in fitting if e.is_dir() or Path(e.name).suffix.lower() in SUFFIXES]
    return -len(name), [e.name + os.sep * e.is_dir() for e in wanted[:_MOST]]
