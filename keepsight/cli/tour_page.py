"""The tour as one HTML page: embedded pictures, light and dark, no script and no network.

`Stage` passes on each thing that it prints, so the page shows what the terminal showed.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from keepsight.cli.terminal import plain, report_table
from keepsight.errors import InputError, StoreError
from keepsight.report import Reply
from keepsight.system.places import expanded

_MARK = "<!doctype html>\n<!-- a tour of keepsight demo -->\n"
_STYLE = """
:root { --paper: #fbfaf7; --ink: #1d1c1a; --muted: #67635b; --line: #e2ded5; --good: #23673f;
  --bad: #a4291c; --new: #8a5d09; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --paper: #161615; --ink: #e9e6df; --muted: #a19c92;
  --line: #35332f; --good: #70c592; --bad: #f0907f; --new: #dfb057; } }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 0; border-top: 1px solid var(--line); padding-top: 1.5rem; }
p { margin: .4rem 0; }
.dim, figcaption, caption, summary { color: var(--muted); font-size: .875rem; }
.good { color: var(--good); } .bad { color: var(--bad); }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0 0; }
figure { margin: 0; } figure img { display: block; max-width: 14rem; height: 8rem; }
.turn, .verdict { margin: .8rem 0; padding-left: .8rem; border-left: 3px solid var(--line); }
.bar { display: block; height: .5rem; margin: .3rem 0; background: var(--new); }
.bar i { display: block; height: 100%; background: var(--good); }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .875rem; }
caption { text-align: left; }
th, td { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
td { border-top: 1px solid var(--line); }
.right { text-align: right; font-variant-numeric: tabular-nums; }
.times { display: grid; grid-template-columns: auto 1fr auto; gap: .1rem .8rem; margin: 1rem 0;
  align-items: center; font-size: .875rem; }
.times i { display: block; height: .7rem; background: var(--good); }
.times .stock { background: var(--new); }
pre { overflow-x: auto; font-size: .8125rem; }
"""


def check_page(path: Path) -> None:
    """Before the tour, refuse a page that cannot be written, or an existing foreign file."""
    path = expanded(path)
    if path.is_dir() or not path.parent.is_dir():
        what = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise InputError(f"--save {path}: {what}; name a file such as tour.html")
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(_MARK)) != _MARK.encode():
                raise InputError(f"--save {path}: a file of that name is there; name a new one")


class TourPage:
    """What the tour showed, as parts of a page."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def act(self, title: str, about: str) -> None:
        """The heading of an act."""
        self._parts.append(f"<h2>{_text(title)}</h2>\n<p class=dim>{_text(about)}</p>")

    def say(self, text: str) -> None:
        """One paragraph."""
        if text.strip():
            self._parts.append(f"<p class=dim>{_text(text.strip())}</p>")

    def exchange(self, asked: str, reply: Reply, truth: str | None) -> None:
        """A question, its answer, and the report."""
        right = reply.text.strip() == truth
        mark = "" if truth is None else _mark(right)
        wrong = "" if truth is None or right else f" <span class=bad>(it is: {_text(truth)})</span>"
        report = reply.report
        share = 100 * report.cached_tokens / max(1, report.prompt_tokens)
        self._parts.append(
            f"<div class=turn><p><b>{_text(asked)}</b></p>\n<p>{mark}{_text(reply.text)}{wrong}</p>"
            f'\n<span class=bar><i style="width:{share:.1f}%"></i></span>\n<details>'
            f"<summary>{reuse_of(reply)}</summary>{_shown(report_table(report))}</details></div>"
        )

    def pictures(self, shown: Iterable[tuple[Path, str]]) -> None:
        """Pictures with captions, embedded in the page."""
        figures = [
            f'<figure><img alt="{_text(words)}" src="data:image/png;base64,'
            f'{base64.b64encode(path.read_bytes()).decode()}"><figcaption>{_text(words)}'
            "</figcaption></figure>"
            for path, words in shown
        ]
        self._parts.append(f"<div class=pictures>{''.join(figures)}</div>")

    def verdict(self, who: str, text: str, verdict: str, right: bool) -> None:
        """Who answered, how that compares with a fresh computation, and the answer."""
        style = "good" if right else "bad"
        self._parts.append(
            f"<div class=verdict><p>{_mark(right)}<b>{_text(who)}</b>: "
            f"<span class={style}>{_text(verdict)}</span></p><p>{_text(text)}</p></div>"
        )

    def times(self, rows: Sequence[tuple[float, float]]) -> None:
        """Milliseconds of each turn and those of stock, as bars on one scale."""
        longest = max(ms for row in rows for ms in row)
        cells = []
        for number, row in enumerate(rows, 1):
            for name, style, ms in zip(
                ("Keepsight", "stock"), ("", " class=stock"), row, strict=True
            ):
                bar = f'<i{style} style="width:{100 * ms / longest:.1f}%"></i>'
                cells.append(f"<span>turn {number}, {name}</span>{bar}<span>{ms:.0f} ms</span>")
        self._parts.append(f"<div class=times>{''.join(cells)}</div>")

    def show(self, shown: RenderableType) -> None:
        """A table, several, or the output of another process."""
        self._parts.append(_shown(shown))

    def save(self, path: Path) -> None:
        """Write the page."""
        page = (
            f"{_MARK}<html lang=en>\n<head>\n<meta charset=utf-8>\n"
            '<meta name=viewport content="width=device-width">\n'
            '<meta http-equiv=Content-Security-Policy content="'
            "default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
            f"<title>Keepsight: look once, remember</title>\n<style>{_STYLE}</style>\n</head>\n"
            "<body>\n<h1>Keepsight: look once, remember</h1>\n"
        )
        try:
            expanded(path).write_text(
                page + "\n".join(self._parts) + "\n</body>\n</html>\n", encoding="utf-8"
            )
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def reuse_of(reply: Reply) -> str:
    """What was reused for an answer, in words."""
    report, usage = reply.report, reply.usage
    reused = f"{report.cached_tokens} of {report.prompt_tokens} tokens reused"
    if not usage.images:
        return reused
    return f"{reused}, {usage.images_encoded} of {usage.images} pictures looked at"


def _text(text: str) -> str:
    return escape(plain(text))


def _mark(right: bool) -> str:
    return "<span class=good>✓</span> " if right else "<span class=bad>✗</span> "


def _shown(shown: RenderableType) -> str:
    if isinstance(shown, Group):
        return "\n".join(map(_shown, shown.renderables))
    if isinstance(shown, Table):
        return _table(shown)
    return f"<pre>{_text(str(shown).strip())}</pre>"


def _table(shown: Table) -> str:
    columns = shown.columns
    sides = [" class=right" if column.justify == "right" else "" for column in columns]
    heads = [str(column.header) for column in columns]
    rows = zip(*([_cell(cell) for cell in column.cells] for column in columns), strict=True)
    title = f"<caption>{_text(str(shown.title).strip())}</caption>" if shown.title else ""
    head = _row("th", heads, sides) if any(heads) else ""
    body = "".join(_row("td", row, sides) for row in rows)
    return f"<div class=scroll><table>{title}{head}{body}</table></div>"


def _cell(cell: RenderableType) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _row(tag: str, cells: Iterable[str], sides: Sequence[str]) -> str:
    made = [f"<{tag}{side}>{_text(cell)}</{tag}>" for cell, side in zip(cells, sides, strict=True)]
    return f"<tr>{''.join(made)}</tr>"
