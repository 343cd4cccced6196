"""Small pieces of HTML for notebooks, with colours for light and dark pages.

All outside text (answers, file names) goes through `escape`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

REUSED, COMPUTED = "#2da44e", "#bf8700"
_CELL = "padding:2px 12px 2px 0;text-align:left;vertical-align:top"


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """A plain table; every cell is escaped."""
    top = "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(str(v))}</td>' for v in row) + "</tr>"
        for row in rows
    )
    first = f"<tr>{top}</tr>" if top else ""
    return f'<table style="border-collapse:collapse;font-size:90%">{first}{body}</table>'


def paragraph(text: str, soft: bool = False) -> str:
    """A paragraph that keeps line breaks."""
    style = "white-space:pre-wrap;margin:4px 0" + (";opacity:.7;font-size:90%" if soft else "")
    return f'<p style="{style}">{escape(text)}</p>'


def bar(parts: Iterable[tuple[int, str, str]]) -> str:
    """A bar of parts, each with its size, its colour, and a tooltip."""
    sized = [(size, colour, text) for size, colour, text in parts if size > 0]
    whole = sum(size for size, _, _ in sized) or 1
    boxes = "".join(
        f'<span title="{escape(text)}" style="display:inline-block;height:10px;'
        f'width:{100 * size / whole:.2f}%;background:{colour}"></span>'
        for size, colour, text in sized
    )
    return f'<div style="max-width:600px;line-height:0;margin:4px 0">{boxes}</div>'


def details(summary: str, inner: str) -> str:
    """A line that opens to show more; `inner` is already HTML."""
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>"


def shortened(text: str) -> str:
    """One line of at most 60 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
