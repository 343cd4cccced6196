"""Docs are executed: every Python block of README and docs runs, and says what it claims.

A line that ends in `# -> text` must print exactly that text. Blocks run in order, in an empty
folder, with nothing but what the page itself has defined: as a reader would type them. Only
`demo-smol` is as if it were not installed; tests/demo/test_smol.py loads it.
"""

from __future__ import annotations

import ast
import builtins
import codeop
import contextlib
import importlib
import io
import re
import shlex
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import typer

from keepsight.errors import MissingExtra
from keepsight.models import demo_smol

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
NOT_RUN = {
    "docs/exporting.md": "needs an export; tests/export/test_export_command.py runs it",
    "docs/fleets.md": "needs vLLM and SGLang; tests/export/test_fleet.py does the same",
}


def blocks(page: str) -> list[str]:
    """The Python blocks of a page, in order; those in a list without its indentation."""
    found = re.findall(r"^( *)```python\n(.*?)^ *```", _text(page), re.DOTALL | re.MULTILINE)
    return [re.sub(f"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def commands(page: str) -> list[list[str]]:
    """The words of each `keepsight` command in the fenced blocks of a page."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", _text(page), re.DOTALL | re.MULTILINE)
    lines = (
        "\n".join(text for kind, text in fenced if kind in ("", "sh"))
        .replace("\\\n", " ")
        .splitlines()
    )
    return [shlex.split(line, comments=True) for line in lines if line.startswith("keepsight ")]


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page not in NOT_RUN])
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    missing = MissingExtra.named("gguf")  # loading `demo-smol` takes half a minute
    monkeypatch.setattr(demo_smol, "folder", Mock(side_effect=missing))
    world: dict[str, Any] = {}
    for block in blocks(page):
        claims = re.findall(r"^\s*print\(.*# -> (.*)$", block, re.MULTILINE)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block, page, "exec", dont_inherit=True), world)
        printed = out.getvalue().splitlines()
        for claim in claims:
            assert claim.strip() in printed, f"{page}: expected {claim!r} among {printed}"
    for value in world.values():
        if hasattr(value, "close") and hasattr(value, "runtime"):
            value.close()


def refused_when_typed(block: str) -> str | None:
    """What Python's prompt says of a block whose lines come one by one, as they are pasted."""
    lines: list[str] = []
    for line in [*block.splitlines(), ""]:
        lines.append(line)
        try:
            whole = codeop.compile_command("\n".join(lines), symbol="single") is not None
        except SyntaxError as error:
            return f"{line!r}: {error}"
        if whole and not line.startswith(" "):
            lines = []
    return None


def test_a_block_that_the_prompt_refuses_is_found() -> None:
    assert refused_when_typed("with a:\n    b\nc") and not refused_when_typed("with a:\n    b\n\nc")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page not in NOT_RUN])
def test_blocks_can_be_typed_at_the_prompt(page: str) -> None:
    """A `with` or `def` ends in an empty line there; a class of several methods needs a file."""
    for block in blocks(page):
        if "\nclass " not in block:
            assert refused_when_typed(block) is None, f"{page}: {refused_when_typed(block)}"


def undefined(blocks: list[str]) -> list[str]:
    """Names that a block uses, within functions too, and neither it nor an earlier one defines."""
    known = set(dir(builtins))
    missing = []
    for block in blocks:
        nodes = list(ast.walk(ast.parse(block)))
        for node in nodes:
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                known.add(node.id)
            elif isinstance(node, ast.alias):
                known.add((node.asname or node.name).split(".")[0])
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                known.add(node.name)
            elif isinstance(node, ast.arg):
                known.add(node.arg)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                known.add(node.name)
        used = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        missing += [name for name in used if name not in known]
    return missing


def test_a_name_that_a_page_does_not_define_is_found() -> None:
    assert undefined(["x = 1", "def f(a):\n    return a + x + y"]) == ["y"]
    assert undefined(["print(z)", "z = 1"]) == ["z"]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_blocks_use_only_what_the_page_defines(page: str) -> None:
    assert not undefined(blocks(page)), page


@pytest.mark.parametrize("page", NOT_RUN)
def test_blocks_that_are_not_run_name_what_exists(page: str) -> None:
    """What a block takes from keepsight, and from a module of it, is there."""
    modules: dict[str, ModuleType] = {}
    for node in [node for block in blocks(page) for node in ast.walk(ast.parse(block))]:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("keepsight"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                found = getattr(module, alias.name, None) or importlib.import_module(
                    f"{node.module}.{alias.name}"
                )
                if isinstance(found, ModuleType):
                    modules[alias.asname or alias.name] = found
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "keepsight":
                    modules[alias.asname or alias.name] = importlib.import_module("keepsight")
    for node in [node for block in blocks(page) for node in ast.walk(ast.parse(block))]:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            assert module is None or hasattr(module, node.attr), f"{page}: {ast.unparse(node)}"


def test_commands_have_the_options_that_pages_name() -> None:
    from keepsight.cli.app import app

    root = typer.main.get_command(app)
    for page in PAGES:
        for words in commands(page):
            command, rest = root, words[1:]
            while hasattr(command, "commands"):
                assert rest[:1] and rest[0] in command.commands, f"{page}: {shlex.join(words)}"
                command, rest = command.commands[rest[0]], rest[1:]
            options = command.get_params(typer.Context(command))
            known = {name for option in options for name in option.opts}
            for word in rest:
                name = word.split("=")[0]
                assert not re.match("--?[a-z]", name) or name in known, f"{page}: {words}"


def test_files_that_the_readme_names_are_shipped() -> None:
    for words in commands("README.md"):
        for word in words:
            if word.startswith(("examples/", "docs/")):
                assert (ROOT / word).exists(), f"README.md: {word} is missing"


def test_install_lines_work_before_the_name_is_on_an_index() -> None:
    for page in [*PAGES, "examples/README.md"]:
        for line in re.findall("pip install.*", _text(page)):
            assert not re.match(r'pip install "?keepsight', line), f"{page}: {line}"
            assert "[" not in re.sub(r'"[^"]*"', "", line.split("`")[0]), f"{page}: unquoted {line}"


def test_every_page_is_linked() -> None:
    readme, index = ((ROOT / page).read_text() for page in ("README.md", "docs/index.md"))
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in readme or f"({page.name})" in index, f"no link to {page.name}"


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text()
        written = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(
            r'src(?:set)?="(.*?)"', text
        )
        for target in written:
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target} is missing"


def test_every_family_has_its_line() -> None:
    from keepsight.models.families import SUPPORTED

    page = (ROOT / "docs" / "families.md").read_text()
    missing = [name for name in SUPPORTED if f"`{name}`" not in page]
    assert not missing


@pytest.mark.parametrize("page", ["docs/how-it-works.md", "docs/contributing.md"])
def test_files_that_a_page_names_are_there(page: str) -> None:
    named = set(re.findall(r"`([\w.]+(?:/[\w.*]+)*(?:\.py|/))`", _text(page)))
    folder = ROOT / "keepsight"
    gone = [name for name in named if not [*ROOT.glob(name), *folder.rglob(name)]]
    assert len(named) > 5 and not gone


def test_the_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that end by themselves and take seconds, in a copy of the folder they name."""
    from typer.testing import CliRunner

    from keepsight.cli.app import app

    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    said = {}
    for words in commands("README.md"):
        if words[1] in ("ask", "encode", "cache"):
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, (words, done.output)
            said[words[1]] = done.output
    assert list(said) == ["ask", "encode", "cache"] and "picture.png" in said["cache"]
