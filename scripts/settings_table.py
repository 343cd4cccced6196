"""Draw the table of settings in `docs/server.md` from the models in `keepsight/server/config.py`.

Run `python scripts/settings_table.py` after a setting has changed; a test compares the two.
"""

from __future__ import annotations

import re
from pathlib import Path

from keepsight.server.config import ModelSettings, ServerConfig

PAGE = Path(__file__).parents[1] / "docs/server.md"
TABLE = re.compile(r"\| setting \| default \| meaning \|\n(?:\|.*\n)+")


def table() -> str:
    """Return the settings of the server, then those of the model, one row each."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for kind in (ServerConfig, ModelSettings):
        for name, field in kind.model_fields.items():
            default = "" if field.default in (None, ()) else f"`{str(field.default).lower()}`"
            default = f"`{field.default}`" if isinstance(field.default, str) else default
            rows.append(f"| `{name}` | {default} | {(field.description or '').removesuffix('.')} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), "utf-8")
