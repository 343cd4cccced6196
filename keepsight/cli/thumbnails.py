"""Draws a small picture in a terminal: by kitty's or iTerm's protocol, sixel, or colour blocks.

Without colours, in a pipe or with NO_COLOR, nothing is drawn.
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
_PIXELS = 256  # longer side of a picture sent to a terminal
_SIXELS = 128  # the same for sixel, which is drawn dot by dot
_COLOURS = 64
_WITH_SIXEL = ("foot", "mlterm", "contour", "yaft", "xterm-sixel")  # values of TERM
_CHUNK = 4096  # characters per message to kitty


def show_thumbnail(picture: Image, console: Console) -> None:
    """Show a picture if colours are visible; a pipe and NO_COLOR get none."""
    if not console.is_terminal or console.no_color:
        return
    protocol = _protocol()
    if protocol is None:
        console.print(thumbnail(picture, _COLUMNS))
        return
    sent = {"kitty": _kitty, "iterm": _iterm, "sixel": _sixel}[protocol](picture)
    console.file.write(sent + "\n")
    console.file.flush()


def _protocol() -> str | None:
    """The protocol that the terminal announces; tmux and screen pass no pictures."""
    if os.environ.get("TMUX") or os.environ.get("TERM", "").startswith(("screen", "tmux")):
        return None
    if os.environ.get("KITTY_WINDOW_ID") or os.environ.get("TERM") in (
        "xterm-kitty",
        "xterm-ghostty",
    ):
        return "kitty"
    program = os.environ.get("TERM_PROGRAM")
    if program in ("iTerm.app", "WezTerm"):
        return "iterm"
    sixel = program == "mintty" or os.environ.get("TERM", "").startswith(_WITH_SIXEL)
    return "sixel" if sixel else None


def _png(picture: Image) -> str:
    small = picture.convert("RGB")
    small.thumbnail((_PIXELS, _PIXELS))
    file = io.BytesIO()
    small.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _kitty(picture: Image) -> str:
    data = _png(picture)
    chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
    first = f"a=T,f=100,c={_COLUMNS},q=2,"
    return "".join(
        f"\x1b_G{first if not n else ''}m={int(n < len(chunks) - 1)};{chunk}\x1b\\"
        for n, chunk in enumerate(chunks)
    )


def _iterm(picture: Image) -> str:
    data = _png(picture)
    return f"\x1b]1337;File=inline=1;width={_COLUMNS};preserveAspectRatio=1:{data}\x07"


def _sixel(picture: Image) -> str:
    """Sixel data: bands of six rows; for every colour in a band, which of the six dots have it."""
    small = picture.convert("RGB")
    small.thumbnail((_SIXELS, _SIXELS))
    width, height = small.size
    reduced = small.quantize(_COLOURS)
    palette = reduced.getpalette() or []
    dots = reduced.tobytes()
    out = [f'\x1bPq"1;1;{width};{height}']
    for colour in sorted(set(dots)):
        shares = (round(part * 100 / 255) for part in palette[3 * colour : 3 * colour + 3])
        out.append(f"#{colour};2;{';'.join(map(str, shares))}")
    for top in range(0, height, 6):
        band: dict[int, bytearray] = {}
        for at in range(top * width, min(top + 6, height) * width):
            row, x = divmod(at, width)
            band.setdefault(dots[at], bytearray(b"?" * width))[x] += 1 << (row - top)
        out.append("$".join(f"#{colour}{bits.decode()}" for colour, bits in band.items()) + "-")
    return "".join(out) + "\x1b\\"
