"""Write the table of settings in `docs/settings.md`; run it after a setting has changed."""

from __future__ import annotations

import re
from pathlib import Path

from keepsight.server.config import table

PAGE = Path(__file__).parents[1] / "docs/settings.md"
TABLE = re.compile(r"\| setting \| default \| meaning \|\n(?:\|.*\n)+")

if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), "utf-8")
