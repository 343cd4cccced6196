"""Write the tables of settings and of fields into the docs; run it after one has changed."""

from __future__ import annotations

import re
from pathlib import Path

from keepsight.server.config import ServerConfig
from keepsight.server.schema import TABLE

DOCS = Path(__file__).parents[1] / "docs"


def settings() -> str:
    """All settings, by their groups."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    group = None
    for name, one in ServerConfig.model_fields.items():
        if one.title != group:
            group = one.title
            rows.append(f"| **{group}** | | |")
        default = "" if one.default in (None, ()) else f"`{one.default}`"
        default = default.lower() if isinstance(one.default, bool) else default
        rows.append(f"| `{name}` | {default} | {(one.description or '').removesuffix('.')} |")
    return "\n".join(rows) + "\n"


def fields() -> str:
    """What becomes of each field of each body."""
    rows = ["| body | honoured | named | refused |", "|---|---|---|---|"]
    for path, kind in TABLE.items():
        names = (kind.model_fields, kind.IGNORED, kind.REFUSED)
        cells = [", ".join(f"`{name}`" for name in sorted(each)) for each in names]
        rows.append(f"| {path} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


TABLES = (
    ("settings.md", r"\| setting \| default \| meaning \|\n(?:\|.*\n)+", settings),
    ("http.md", r"\| body \| honoured \| named \| refused \|\n(?:\|.*\n)+", fields),
)

if __name__ == "__main__":
    for name, pattern, table in TABLES:
        before = (DOCS / name).read_text("utf-8")
        made = table()
        (DOCS / name).write_text(re.sub(pattern, lambda _, made=made: made, before), "utf-8")  # type: ignore[misc]
