"""Write the tables of settings and of fields in `docs/server.md`; run it after one has changed."""

from __future__ import annotations

import re
from pathlib import Path

from keepsight.server import config, schema

PAGE = Path(__file__).parents[1] / "docs/server.md"
TABLES = {
    re.compile(r"\| setting \| default \| meaning \|\n(?:\|.*\n)+"): config.table,
    re.compile(r"\| body \| honoured \| named \| refused \|\n(?:\|.*\n)+"): schema.table,
}

if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    for pattern, table in TABLES.items():
        page = pattern.sub(lambda _, table=table: table(), page)  # type: ignore[misc]
    PAGE.write_text(page, "utf-8")
