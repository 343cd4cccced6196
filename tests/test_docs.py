"""Docs are executed: every Python block of README and docs runs, and says what it claims.

A line that ends in `# -> text` must print exactly that text.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "docs/quickstart.md",
    "docs/how-it-works.md",
    "docs/exactness.md",
    "docs/families.md",
    "docs/stores.md",
    "docs/datasets.md",
    "docs/training.md",
    "docs/server.md",
    "docs/limits.md",
]


def blocks(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def inputs_from_processor(vlm: Any, messages: list[Any]) -> dict[str, Any]:
    """What a user's own processor call would give; the pages leave that step out."""
    from models import stock_inputs

    return stock_inputs(vlm.processor, messages)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    world: dict[str, Any] = {
        "inputs_from_processor": inputs_from_processor,
        "my_tiny_model": None,
        "my_processor": None,
    }
    for block in blocks(page):
        claims = re.findall(r"^\s*print\(.*# -> (.*)$", block, re.MULTILINE)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block, page, "exec"), world)
        printed = out.getvalue().splitlines()
        for claim in claims:
            assert claim.strip() in printed, f"{page}: expected {claim!r} among {printed}"
    for value in world.values():
        if hasattr(value, "close") and hasattr(value, "memory"):
            value.close()


def test_every_page_is_linked() -> None:
    readme = (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in readme, f"README does not link docs/{page.name}"


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target} is missing"


def test_every_family_has_its_line() -> None:
    from keepsight.models.families import REFUSED, SUPPORTED

    page = (ROOT / "docs" / "families.md").read_text()
    missing = [name for name in [*SUPPORTED, *REFUSED] if f"`{name}`" not in page]
    assert not missing


def test_files_that_how_it_works_names_are_there() -> None:
    named = set(re.findall(r"`(\w+(?:/\w+)*\.py)`", (ROOT / "docs/how-it-works.md").read_text()))
    folder = ROOT / "keepsight"
    gone = [name for name in named if not list(folder.rglob(name.removeprefix("keepsight/")))]
    assert named and not gone
