"""The mistakes of a first hour: each row of docs/troubleshooting.md is tried and says what it says.

The first column is run as it stands: a command, or Python. In the second `...` stands for anything.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants
from support.commands import run
from support.models import picture

import keepsight as ks
from keepsight.errors import KeepsightError
from keepsight.models import reachable

PAGE = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(.+?)`(?: \(.+?\))? \| `(.+?)` \|", PAGE, re.MULTILINE)
COMMANDS = [row for row in ROWS if row[0].startswith("keepsight ")]
PYTHON = [row for row in ROWS if row not in COMMANDS]


@pytest.fixture(scope="module")
def world(demo_parts: dict[str, tuple[Any, Any]]) -> Iterator[dict[str, Any]]:
    """The names that the page says it uses."""
    closed = ks.wrap(*demo_parts["demo"])
    closed.close()
    with ks.wrap(*demo_parts["demo"]) as vlm, ks.wrap(*demo_parts["demo-hybrid"]) as hybrid:
        image = picture(1)
        yield {
            "ks": ks,
            "vlm": vlm,
            "hybrid": hybrid,
            "chat": vlm.session(),
            "picture": image,
            "package": vlm.encode(image),
            "closed": closed,
        }


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture, a text, a model of text; and neither an accelerator nor a network."""
    monkeypatch.chdir(tmp_path)
    picture(1).save("picture.png")
    Path("notes.txt").write_text("a note")
    transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8).save_pretrained("gpt2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(reachable, "_asked", lambda *asked: OSError("no network"))


def agree(said: str, page: str) -> bool:
    """Whether the parts of the page's message stand in what was said, in their order."""
    return re.search(".*".join(map(re.escape, page.split("..."))), said) is not None


def test_there_are_at_least_fifteen() -> None:
    assert len(ROWS) >= 15 and COMMANDS and PYTHON
    assert len(ROWS) == PAGE.count("\n| `")


@pytest.mark.parametrize(("command", "page"), COMMANDS)
def test_a_command_says_what_the_page_says(command: str, page: str) -> None:
    result = run(*shlex.split(command)[1:], code=2)
    said = " ".join(re.sub("[╭╮╰╯│─]", " ", result.stderr).split())
    assert agree(said, page), said
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("code", "page"), PYTHON)
def test_python_raises_what_the_page_says(code: str, page: str, world: dict[str, Any]) -> None:
    with pytest.raises(KeepsightError) as caught:
        eval(code, dict(world))
    said = " ".join(str(caught.value).split())
    assert agree(said, page), said
