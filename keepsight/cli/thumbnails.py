"""Draws a small picture in a terminal: kitty's and iTerm's protocols, colour blocks elsewhere.

Where colours cannot be seen, in a pipe or with NO_COLOR, nothing is drawn.
"""

from __future__ import annotations

import base64
import io
import os
from typing import TYPE_CHECKING

from rich.console import Console

from keepsight.cli.terminal import thumbnail

if TYPE_CHECKING:
    from PIL.Image import Image

_COLUMNS = 16
_PIXELS = 256  # the longer side of what is sent to a terminal
_CHUNK = 4096  # characters that kitty takes at once


def show_thumbnail(picture: Image, console: Console) -> None:
    """Show a picture where colours can be seen; a pipe and NO_COLOR get none."""
    if not console.is_terminal or console.no_color:
        return
    protocol = _protocol()
    if protocol is None:
        console.print(thumbnail(picture, _COLUMNS))
        return
    sent = _kitty(_png(picture)) if protocol == "kitty" else _iterm(_png(picture))
    console.file.write(sent + "\n")
    console.file.flush()


def _protocol() -> str | None:
    """What the terminal says of itself; inside tmux or screen no picture gets through."""
    if os.environ.get("TMUX") or os.environ.get("TERM", "").startswith(("screen", "tmux")):
        return None
    if os.environ.get("KITTY_WINDOW_ID") or os.environ.get("TERM") in (
        "xterm-kitty",
        "xterm-ghostty",
    ):
        return "kitty"
    return "iterm" if os.environ.get("TERM_PROGRAM") in ("iTerm.app", "WezTerm") else None


def _png(picture: Image) -> str:
    small = picture.convert("RGB")
    small.thumbnail((_PIXELS, _PIXELS))
    file = io.BytesIO()
    small.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _kitty(data: str) -> str:
    chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
    first = f"a=T,f=100,c={_COLUMNS},q=2,"
    return "".join(
        f"\x1b_G{first if not n else ''}m={int(n < len(chunks) - 1)};{chunk}\x1b\\"
        for n, chunk in enumerate(chunks)
    )


def _iterm(data: str) -> str:
    return f"\x1b]1337;File=inline=1;width={_COLUMNS};preserveAspectRatio=1:{data}\x07"
