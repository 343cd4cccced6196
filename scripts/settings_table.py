"""Write the tables of settings and of fields into the docs; run it after one has changed."""

from __future__ import annotations

import re
from pathlib import Path

from keepsight.server import config, schema

DOCS = Path(__file__).parents[1] / "docs"
TABLES = (
    ("settings.md", r"\| setting \| default \| meaning \|\n(?:\|.*\n)+", config.table),
    ("http.md", r"\| body \| honoured \| named \| refused \|\n(?:\|.*\n)+", schema.table),
)

if __name__ == "__main__":
    for name, pattern, table in TABLES:
        before = (DOCS / name).read_text("utf-8")
        made = table()
        (DOCS / name).write_text(re.sub(pattern, lambda _, made=made: made, before), "utf-8")  # type: ignore[misc]
