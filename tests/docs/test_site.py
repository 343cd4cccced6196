"""The site: every page is in its contents, and pages made from code are those of this code."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts import api_page

DOCS = Path(__file__).parents[2] / "docs"


def test_every_page_is_in_the_contents() -> None:
    nav = (DOCS.parent / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = re.findall(r"([\w-]+\.md)$", nav, re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.parametrize("name", ["api", "errors", "command-line"])
def test_pages_made_from_docstrings_are_of_this_code(name: str) -> None:
    made = getattr(api_page, name.replace("-", "_"))()
    assert (DOCS / f"{name}.md").read_text("utf-8") == made, "run python scripts/api_page.py"


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    book = json.loads((DOCS.parent / "examples/start.ipynb").read_text("utf-8"))
    world: dict[str, Any] = {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for cell in book["cells"]:
            if cell["cell_type"] == "code":
                assert not cell["outputs"], "clear its outputs"
                exec("".join(cell["source"]), world)
    assert "Red. 0 pictures encoded" in said.getvalue() and "star" in said.getvalue()
