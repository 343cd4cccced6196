"""Draws what memory saves, from a committed result: the two pictures of the README, light and dark.

`python -m bench.page` (`make docs`) writes them with the page of benchmarks, so that no bar was
drawn by a person.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

SHOWN = ("W1", "W5")
_WIDTH, _BAR, _GAP, _LEFT, _ROOM = 760, 15, 12, 104, 480
_COLOURS = {
    "light": {"back": "#ffffff", "text": "#1f2328", "soft": "#59636e", "stock": "#afb8c1"},
    "dark": {"back": "#0d1117", "text": "#f0f6fc", "soft": "#9198a1", "stock": "#57606a"},
}
_OURS = {"light": "#0969da", "dark": "#4493f8"}


def drawings(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """File name and text of each picture; none where no float32 result has the workloads."""
    for result in newest_first(results):
        for run in result["runs"]:
            found = {load["name"]: load for load in run["workloads"]}
            if run["dtype"] == "float32" and all(found.get(one) for one in SHOWN):
                loads = [found[one] for one in SHOWN]
                under = _measured_on(result, run)
                return {f"memory-{kind}.svg": _draw(loads, under, kind) for kind in _COLOURS}
    return {}


def newest_first(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Results by their date: what the README shows is of the newest, whatever it says."""
    return sorted(results.values(), key=lambda one: str(one["machine"].get("date")), reverse=True)


def write(results: dict[str, dict[str, Any]], folder: Path) -> None:
    """Write the pictures into a folder."""
    for name, text in drawings(results).items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def same(results: dict[str, dict[str, Any]], folder: Path) -> bool:
    """Whether the pictures in a folder are those of the results."""
    there = {file.name: file.read_text(encoding="utf-8") for file in folder.glob("memory-*.svg")}
    return there == drawings(results)


def _measured_on(result: dict[str, Any], run: dict[str, Any]) -> str:
    machine = result["machine"]
    model = f"{run['shape']} shape with {run['parameters'] / 1e6:.0f} M random weights"
    return f"{model}, {run['dtype']}, {cores_of(machine)}; medians, from bench/results"


def cores_of(machine: dict[str, Any]) -> str:
    """How many cores, and what they can do."""
    units = f"{machine['instructions']} and AMX" if machine.get("amx") else machine["instructions"]
    return f"{machine['cores']} CPU cores with {units}"


def _draw(loads: list[dict[str, Any]], under: str, kind: str) -> str:
    colours = _COLOURS[kind]
    most = max(step["stock_ms"] for load in loads for step in load["steps"])
    parts: list[str] = []
    y = _legend(parts, kind)
    for load in loads:
        y += 30
        parts.append(_text(16, y, load["about"], colours["text"], "bold 14px"))
        y += 12
        for step in load["steps"]:
            y = _step(parts, step, y, most, kind)
    y += 24
    parts.append(_text(16, y, under, colours["soft"], "11px"))
    height = y + 16
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
    back = f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="{colours["back"]}"/>'
    title = "<title>Seconds until an answer starts: stock generate and Keepsight</title>"
    return "\n".join([f'{head} width="{_WIDTH}" role="img">', title, back, *parts, "</svg>\n"])


def _legend(parts: list[str], kind: str) -> int:
    colours = _COLOURS[kind]
    parts.append(_text(16, 28, "Seconds until an answer starts", colours["text"], "bold 16px"))
    for x, name, fill in ((380, "stock generate", colours["stock"]), (530, "Keepsight", "")):
        fill = fill or _OURS[kind]
        parts.append(f'<rect x="{x}" y="17" width="12" height="12" rx="2" fill="{fill}"/>')
        parts.append(_text(x + 18, 28, name, colours["text"], "13px"))
    return 34


def _step(parts: list[str], step: dict[str, Any], y: int, most: float, kind: str) -> int:
    """The two bars of one turn; returns where they end."""
    colours = _COLOURS[kind]
    parts.append(_text(16, y + _BAR + 5, step["name"], colours["soft"], "13px"))
    for name, fill in (("stock_ms", colours["stock"]), ("keepsight_ms", _OURS[kind])):
        wide = max(2, round(_ROOM * step[name] / most))
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{wide}" height="{_BAR - 2}" rx="2" fill="{fill}"/>'
        )
        said = f"{step[name] / 1000:.2f} s"
        parts.append(_text(_LEFT + wide + 6, y + 11, said, colours["text"], "12px"))
        y += _BAR
    return y + _GAP


def _text(x: int, y: int, text: str, fill: str, font: str) -> str:
    style = f"font:{font} system-ui,sans-serif"
    return f'<text x="{x}" y="{y}" fill="{fill}" style="{style}">{escape(text)}</text>'
