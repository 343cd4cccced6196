"""Draws what memory saves, from a committed result: the two pictures of the README, light and dark.

`python -m bench.page` (`make docs`) writes them with the page of benchmarks, so that no bar was
drawn by a person.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from bench.frame import Record

SHOWN = ("W1", "W5")
_WIDTH, _BAR, _GAP, _LEFT, _ROOM = 760, 15, 12, 104, 480
_COLOURS = {  # background, text, soft text, stock, Keepsight
    "light": ("#ffffff", "#1f2328", "#59636e", "#afb8c1", "#0969da"),
    "dark": ("#0d1117", "#f0f6fc", "#9198a1", "#57606a", "#4493f8"),
}


def newest(results: dict[str, Record]) -> tuple[Record, Record, list[Record]] | None:
    """The newest result with a float32 run of the shown workloads, that run, and those."""
    by_date = sorted(results.values(), key=lambda one: str(one["machine"]["date"]), reverse=True)
    for result in by_date:
        for run in result["runs"]:
            loads = {load["name"]: load for load in run["workloads"]}
            if run["dtype"] == "float32" and all(name in loads for name in SHOWN):
                return result, run, [loads[name] for name in SHOWN]
    return None


def drawings(results: dict[str, Record]) -> dict[str, str]:
    """File name and text of each picture; none where no float32 result has the workloads."""
    found = newest(results)
    if found is None:
        return {}
    result, run, loads = found
    model = f"{run['shape']} shape with {run['parameters'] / 1e6:.0f} M random weights"
    on = cores_of(result["machine"])
    under = f"{model}, {run['dtype']}, {on}; medians, from bench/results"
    return {f"memory-{kind}.svg": _draw(loads, under, *_COLOURS[kind]) for kind in _COLOURS}


def cores_of(machine: Record) -> str:
    """How many cores, and what they can do."""
    units = f"{machine['instructions']} and AMX" if machine.get("amx") else machine["instructions"]
    return f"{machine['cores']} CPU cores with {units}"


def _draw(loads: list[Record], under: str, back: str, text: str, soft: str, *bars: str) -> str:
    most = max(step["stock_ms"] for load in loads for step in load["steps"])
    parts = [_text(16, 28, "Seconds until an answer starts", text, "bold 16px")]
    for x, name, fill in zip((380, 530), ("stock generate", "Keepsight"), bars, strict=True):
        parts.append(f'<rect x="{x}" y="17" width="12" height="12" rx="2" fill="{fill}"/>')
        parts.append(_text(x + 18, 28, name, text, "13px"))
    y = 34
    for load in loads:
        y += 30
        parts.append(_text(16, y, load["about"], text, "bold 14px"))
        y += 12
        for step in load["steps"]:
            parts.append(_text(16, y + _BAR + 5, step["name"], soft, "13px"))
            for name, fill in zip(("stock_ms", "keepsight_ms"), bars, strict=True):
                wide = max(2, round(_ROOM * step[name] / most))
                size = f'width="{wide}" height="{_BAR - 2}" rx="2"'
                parts.append(f'<rect x="{_LEFT}" y="{y}" {size} fill="{fill}"/>')
                said = f"{step[name] / 1000:.2f} s"
                parts.append(_text(_LEFT + wide + 6, y + 11, said, text, "12px"))
                y += _BAR
            y += _GAP
    y += 24
    parts.append(_text(16, y, under, soft, "11px"))
    height = y + 16
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
    rect = f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="{back}"/>'
    title = "<title>Seconds until an answer starts: stock generate and Keepsight</title>"
    return "\n".join([f'{head} width="{_WIDTH}" role="img">', title, rect, *parts, "</svg>\n"])


def _text(x: int, y: int, text: str, fill: str, font: str) -> str:
    style = f"font:{font} system-ui,sans-serif"
    return f'<text x="{x}" y="{y}" fill="{fill}" style="{style}">{escape(text)}</text>'
