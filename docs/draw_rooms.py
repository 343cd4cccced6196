"""Draws the rooms of `keepsight/` and what each imports, read from the code: docs/rooms.svg.

python docs/draw_rooms.py            write the picture
python docs/draw_rooms.py --check    exit 1 where the committed picture is out of date
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "keepsight"
PICTURE = ROOT / "docs" / "rooms.svg"
_MAY = re.compile(r"\s*May import (.*?)\.(?:\s|$)", re.S)
_BOX, _HIGH, _GAP, _ROW, _LEFT = 152, 58, 14, 92, 20


def rooms() -> dict[str, Path]:
    """Each room by name: a folder with an `__init__`, or one file."""
    found = {p.stem: p for p in HOUSE.glob("*.py") if p.stem != "__main__"}
    return found | {p.parent.name: p for p in HOUSE.glob("*/__init__.py")}


def sentences(home: Path) -> tuple[str, str]:
    """What a room is for, and what its docstring says it may import."""
    text = ast.get_docstring(ast.parse(home.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split())
    may = _MAY.search(first)
    return _MAY.sub(" ", first).strip(), may[1] if may else ""


def imports(name: str, home: Path, known: set[str]) -> set[str]:
    """The other rooms that a room's files import, hidden and type-checking imports too."""
    files = home.parent.rglob("*.py") if home.parent != HOUSE else [home]
    found: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for dotted in names:
                first, _, rest = f"{dotted}.".partition(".")
                if first == "keepsight":
                    inner = rest.split(".")[0]
                    found.add(inner if inner in known else "__init__")
    return found - {name}


def floors(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Rooms in rows: each stands above all that it imports."""
    rows: list[list[str]] = []
    placed: set[str] = set()
    while len(placed) < len(arrows):
        row = sorted(name for name in arrows.keys() - placed if arrows[name] <= placed)
        if not row:
            circle = ", ".join(sorted(arrows.keys() - placed))
            raise SystemExit(f"these rooms import each other in a circle: {circle}")
        rows.append(row)
        placed |= set(row)
    return rows


def draw() -> str:
    """The picture as SVG, the highest floor at the top."""
    homes = rooms()
    arrows = {name: imports(name, home, set(homes)) for name, home in homes.items()}
    rows = floors(arrows)[::-1]
    width = 2 * _LEFT + max(map(len, rows)) * (_BOX + _GAP)
    at = _places(rows)
    pairs = [(name, other) for name in sorted(arrows) for other in sorted(direct(name, arrows))]
    parts = [_line(at[name], at[other]) for name, other in pairs]
    parts += [_box(name, *at[name], sentences(homes[name])[0]) for name in at]
    high = 20 + len(rows) * _ROW
    size = f'viewBox="0 0 {width:.0f} {high}" width="{width:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, _STYLE, *parts, "</svg>", ""])


def _places(rows: list[list[str]]) -> dict[str, tuple[float, float]]:
    """The upper left corner of each box, every row in the middle."""
    step, most = _BOX + _GAP, max(map(len, rows))
    return {
        name: (_LEFT + (spot + (most - len(row)) / 2) * step, 20 + floor * _ROW)
        for floor, row in enumerate(rows)
        for spot, name in enumerate(row)
    }


def direct(name: str, arrows: dict[str, set[str]]) -> set[str]:
    """The rooms that a room imports and reaches in no other way: fewer arrows to read."""
    through: set[str] = set()
    for other in arrows[name]:
        todo = list(arrows[other])
        while todo:
            room = todo.pop()
            if room not in through:
                through.add(room)
                todo += arrows[room]
    return arrows[name] - through


def _line(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<path d="M{x1 + _BOX / 2:.0f} {y1 + _HIGH} L{x2 + _BOX / 2:.0f} {y2:.0f}"/>'


def _box(name: str, x: float, y: float, purpose: str) -> str:
    shown = {"__init__": "keepsight"}.get(name, name)
    lines = _wrapped(purpose, 26)[:3]
    texts = [f'<text x="{x + 8:.0f}" y="{y + 14}" class="name">{escape(shown)}</text>']
    for number, line in enumerate(lines):
        texts.append(f'<text x="{x + 8:.0f}" y="{y + 28 + 11 * number}">{escape(line)}</text>')
    box = f'<rect x="{x:.0f}" y="{y}" width="{_BOX}" height="{_HIGH}" rx="5"/>'
    return f"<g><title>{escape(purpose)}</title>{box}{''.join(texts)}</g>"


def _wrapped(text: str, most: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


_STYLE = """<style>
rect{fill:#f6f8fa;stroke:#57606a} path{stroke:#8c959f;fill:none}
text{font:9px sans-serif;fill:#24292f}
.name{font:bold 12px sans-serif} @media(prefers-color-scheme:dark){rect{fill:#161b22;stroke:#8b949e}
path{stroke:#6e7681} text{fill:#e6edf3}}</style>"""

if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(PICTURE.read_text(encoding="utf-8") != draw())
    PICTURE.write_text(draw(), encoding="utf-8")
