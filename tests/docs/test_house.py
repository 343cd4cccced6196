"""The rules of the house, read off the source: who may import whom, and what is never written."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from support.hostile import finished, start

import keepsight as ks

HOUSE = Path(ks.__file__).parent
FILES = sorted(HOUSE.rglob("*.py"))
_MAY = re.compile(r"\s*May import (.*?)\.(?:\s|$)", re.S)
TALKERS = {"cli", "bench"}  # the rooms that may print


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(path: Path) -> str:
    """The name of a module inside the house."""
    return ".".join(path.relative_to(HOUSE).with_suffix("").parts).removesuffix(".__init__")


def room(path: Path) -> str:
    return dotted(path).split(".")[0]


# -- who may import whom -----------------------------------------------------------------------

# Each room by name: a folder with an `__init__`, or one file.
ROOMS = {p.stem: p for p in HOUSE.glob("*.py") if p.stem != "__main__"}
ROOMS |= {p.parent.name: p for p in HOUSE.glob("*/__init__.py")}
MODULES = {dotted(path): path for path in FILES}


def imported(path: Path, running: bool) -> Iterator[str]:
    """The modules of ours that a file names in an import, hidden ones too; those that only type
    checkers see unless it is about `running`."""
    typing = {
        inner
        for node in ast.walk(tree(path))
        if running and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{dotted(path)} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names if node not in typing else ():
            first, _, full = name.partition(".")
            if first == "keepsight":
                yield full if full in MODULES else full.rpartition(".")[0] or "__init__"


@functools.cache
def allowed(name: str) -> frozenset[str]:
    """What the first sentence of a room's docstring says that it may import."""
    text = (ast.get_docstring(tree(ROOMS[name])) or "").split("\n\n")[0]
    found = _MAY.search(" ".join(text.split()))
    may = (found[1] if found else "").replace("keepsight", "__init__")
    if may == "nothing":
        return frozenset()
    if may.startswith("every room"):
        return frozenset(ROOMS) - set(re.findall(r"\w+", may.partition(" but ")[2])) - {name}
    named = set(re.findall(r"\w+", may)) - {"and", "below"}
    assert named and named <= set(ROOMS), f"{name}: {may!r}"
    below = [allowed(lower) for lower in named] if may.endswith("below") else []
    return frozenset(named).union(*below)


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_a_room_imports_what_its_first_sentence_says(name: str) -> None:
    files = [path for path in FILES if room(path) == name]
    found = {module.split(".")[0] for path in files for module in imported(path, False)}
    wrong = found - {name} - allowed(name)
    assert not wrong, f"{name} may not import {', '.join(sorted(wrong))}"


def test_neither_rooms_nor_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter({name: allowed(name) for name in ROOMS}).prepare()
    TopologicalSorter(
        {name: set(imported(path, True)) - {name} for name, path in MODULES.items()}
    ).prepare()


# -- what is never written ---------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_what_is_never_written(path: Path) -> None:
    """`assert` vanishes under -O; pickle, eval and exec run what a file says; the umask is the
    whole process's, and asking for it changes it."""
    for node in ast.walk(tree(path)):
        where = f"{dotted(path)}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Assert), where
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "compile"), where
            assert node.func.id != "print" or room(path) in TALKERS, where
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in (("torch", "load"), ("os", "umask")), where
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = {getattr(node, "module", None), *(alias.name for alias in node.names)}
            assert not modules & {"pickle", "cPickle", "dill", "marshal", "shelve"}, where


# -- the public face ---------------------------------------------------------------------------


def test_the_public_names_are_sorted_and_real() -> None:
    assert ks.__all__ == sorted(ks.__all__), "capitals first, as ASCII has them"
    assert set(ks.__all__) == set(ks._HOMES) and set(ks.__all__) <= set(dir(ks))
    for name in ks.__all__:
        thing = getattr(ks, name)
        home = "keepsight" if name == "errors" else f"keepsight.{ks._HOMES[name]}"
        assert getattr(thing, "__module__", "keepsight") == home, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ks.nothing


IMPORTS = """
import sys
import keepsight
from keepsight import errors
heavy = {"torch", "transformers", "numpy", "PIL", "safetensors", "rich", "typer"} & set(sys.modules)
print(sorted(heavy))
"""


def test_importing_is_light() -> None:
    """That it opens no network is asked by `laws/test_windows.py`."""
    assert finished(start(IMPORTS)) == "[]\n"
