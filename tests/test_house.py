"""The rules of the house, read off the source: who may look at whom, and how large things get.

A rule that needs an exception gets it here, in writing, or it is changed here.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile import finished, start

import keepsight as ks

HOUSE = Path(ks.__file__).parent
FILES = sorted(HOUSE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef

# A room may import rooms of the rows above its own, and no others; a folder is one room. Hidden
# imports and those for type checkers count. `__init__` stands where the public face is complete.
LAYERS = """
demo digests errors report
system
formats
store
models
media
prefix
core
runtimes session
vlm
encode export scheduler training
__init__
bench server testing
cli
__main__
"""
RANK = {room: rank for rank, row in enumerate(LAYERS.split("\n")) for room in row.split()}
TALKERS = {"cli", "bench", "demo", "terminal"}  # the rooms that may print
MAX_FILE, MAX_FUNCTION, MAX_P90 = 400, 60, 30


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room(path: Path) -> str:
    """The first part of a module's name inside the house."""
    return path.relative_to(HOUSE).with_suffix("").parts[0]


def shown(path: Path) -> str:
    return str(path.relative_to(HOUSE))


def imported(path: Path) -> Iterator[str]:
    """Every room that a file names in an import of any kind."""
    for node in ast.walk(tree(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{shown(path)} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            names = [a.value for a in node.args if isinstance(a, ast.Constant)]
        for name in names:
            first, _, rest = f"{name}.".partition(".")
            if first == "keepsight":
                inner = rest.split(".")[0]
                yield inner if inner in RANK else "__init__"


def called(node: ast.Call) -> str:
    function = node.func
    return getattr(function, "id", None) or getattr(function, "attr", "")


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, Function))


def length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


# -- who may look at whom ----------------------------------------------------------------------


def test_every_room_has_its_place() -> None:
    assert {room(path) for path in FILES} == set(RANK)


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_imports_go_one_way(path: Path) -> None:
    mine = room(path)
    wrong = {other for other in imported(path) if other != mine and RANK[other] >= RANK[mine]}
    assert not wrong, f"{shown(path)} may not look at {', '.join(sorted(wrong))}"


# -- how large things get ----------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_files_and_functions_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE
    long = [f"{f.name} ({length(f)})" for f in functions(path) if length(f) > MAX_FUNCTION]
    assert not long, f"too long: {', '.join(long)}"


def test_most_functions_are_short() -> None:
    lengths = sorted(length(f) for path in FILES for f in functions(path))
    assert lengths[len(lengths) * 9 // 10] < MAX_P90


# -- how things are said -----------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_every_module_says_what_it_is(path: Path) -> None:
    text = ast.get_docstring(tree(path)) or ""
    lines = [line for line in text.split("\n") if line.strip()]
    assert len(lines) >= (1 if path.stem in ("__init__", "__main__") else 2)


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_public_functions_are_annotated(path: Path) -> None:
    inner = {id(f) for outer in functions(path) for f in ast.walk(outer) if f is not outer}
    for function in functions(path):
        if function.name.startswith("_") or id(function) in inner:
            continue
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
        bare = [a.arg for a in every if a.annotation is None and a.arg not in ("self", "cls")]
        where = f"{shown(path)}:{function.lineno} {function.name}"
        assert not bare and function.returns is not None, where


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_what_is_never_written(path: Path) -> None:
    """`assert` vanishes under -O; pickle, eval and exec run what a file says; the umask is the
    whole process's, and asking for it changes it."""
    for node in ast.walk(tree(path)):
        where = f"{shown(path)}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Assert), where
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "compile"), where
            assert node.func.id != "print" or room(path) in TALKERS, where
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in (("torch", "load"), ("os", "umask")), where
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = {getattr(node, "module", None), *(alias.name for alias in node.names)}
            assert not modules & {"pickle", "cPickle", "dill", "marshal", "shelve"}, where
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", path.read_text(encoding="utf-8"))


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
import pkgutil, socket, sys
def refuse(*arguments, **options):
    raise RuntimeError("importing must not open the network")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
import keepsight
from keepsight import errors
heavy = {"torch", "transformers", "numpy", "PIL", "safetensors", "rich", "typer"} & set(sys.modules)
print(sorted(heavy))
for module in pkgutil.walk_packages(keepsight.__path__, "keepsight."):
    if not module.name.endswith("__main__"):
        __import__(module.name)
print("all")
"""


def test_importing_is_light_and_stays_at_home() -> None:
    assert finished(start(IMPORTS)).split("\n")[:2] == ["[]", "all"]
