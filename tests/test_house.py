"""The rules of the house, read off the source: who may look at whom, and what is never written.

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
from intel_avx2 import ASK_FOR_MORE

import keepsight as ks

HOUSE = Path(ks.__file__).parent
FILES = sorted(HOUSE.rglob("*.py"))
_MAY = re.compile(r"\s*May import (.*?)\.(?:\s|$)", re.S)
Function = ast.FunctionDef | ast.AsyncFunctionDef

TALKERS = {"cli", "bench"}  # the rooms that may print


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room(path: Path) -> str:
    """The first part of a module's name inside the house."""
    return path.relative_to(HOUSE).with_suffix("").parts[0]


def shown(path: Path) -> str:
    return str(path.relative_to(HOUSE))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, Function))


# -- what is named is there --------------------------------------------------------------------

NAMED = re.compile(r"(?<![\w/.{}%-])((?:[\w-]+/)*[\w-]+\.py)\b")


def told(path: Path) -> str:
    """What a file says of others: all of a page or a module of ours, the docstrings of a test."""
    if path.suffix != ".py" or HOUSE in path.parents:
        return path.read_text(encoding="utf-8")
    nodes = ast.walk(tree(path))
    documented = (n for n in nodes if isinstance(n, ast.Module | ast.ClassDef | Function))
    return "\n".join(ast.get_docstring(node) or "" for node in documented)


def test_files_that_are_named_exist() -> None:
    root = HOUSE.parent
    folders = ("keepsight", "bench", "tests", "docs", "examples", "demo", "deploy")
    found = [path for folder in folders for path in (root / folder).rglob("*.py")]
    there = [f"/{path.relative_to(root).as_posix()}" for path in found]
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    for path in [*found, *pages]:
        for name in NAMED.findall(told(path)):
            assert any(one.endswith(f"/{name}") for one in there), f"{path.name}: {name}"


# -- who may import whom -----------------------------------------------------------------------


def rooms() -> dict[str, Path]:
    """Each room by name: a folder with an `__init__`, or one file."""
    found = {p.stem: p for p in HOUSE.glob("*.py") if p.stem != "__main__"}
    return found | {p.parent.name: p for p in HOUSE.glob("*/__init__.py")}


def sentences(home: Path) -> tuple[str, str]:
    """What a room is for, and what its docstring says it may import."""
    text = ast.get_docstring(ast.parse(home.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split())
    may = _MAY.search(first)
    return _MAY.sub(" ", first).strip(), may[1] if may else ""


def imports(name: str, home: Path, known: set[str]) -> set[str]:
    """The other rooms that a room's files import, hidden and type-checking imports too."""
    files = home.parent.rglob("*.py") if home.parent != HOUSE else [home]
    found: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for dotted in names:
                first, _, rest = f"{dotted}.".partition(".")
                if first == "keepsight":
                    inner = rest.split(".")[0]
                    found.add(inner if inner in known else "__init__")
    return found - {name}


def floors(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Rooms in rows: each stands above all that it imports."""
    rows: list[list[str]] = []
    placed: set[str] = set()
    while len(placed) < len(arrows):
        row = sorted(name for name in arrows.keys() - placed if arrows[name] <= placed)
        if not row:
            circle = ", ".join(sorted(arrows.keys() - placed))
            raise AssertionError(f"these rooms import each other in a circle: {circle}")
        rows.append(row)
        placed |= set(row)
    return rows


ROOMS = rooms()


def allowed(name: str) -> set[str]:
    """What the first sentence of a room's docstring says that it may import."""
    may = sentences(ROOMS[name])[1].replace("keepsight", "__init__")
    if may == "nothing":
        return set()
    if may.startswith("every room"):
        return set(ROOMS) - set(re.findall(r"\w+", may.partition(" but ")[2])) - {"and", name}
    named = set(re.findall(r"\w+", may)) - {"and", "below"}
    assert named and named <= set(ROOMS), f"{name}: {may!r}"
    below = {lower for room in named for lower in allowed(room)} if may.endswith("below") else set()
    return named | below


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_a_room_imports_what_its_first_sentence_says(name: str) -> None:
    wrong = imports(name, ROOMS[name], set(ROOMS)) - allowed(name)
    assert not wrong, f"{name} may not import {', '.join(sorted(wrong))}"


def test_rooms_import_each_other_in_no_circle() -> None:
    rows = floors({name: allowed(name) for name in ROOMS})
    assert sum(map(len, rows)) == len(ROOMS)


def test_the_front_door_is_easy_to_read() -> None:
    entries = {p.name for p in HOUSE.iterdir()} - {"__pycache__", "py.typed"}
    assert len(entries) <= 26, "a new file belongs in a room"


def modules() -> dict[str, Path]:
    names = {p: ".".join(p.relative_to(HOUSE).with_suffix("").parts) for p in FILES}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def test_no_module_imports_itself_in_a_circle() -> None:
    """Inside a room too; imports for type checkers are left out, they run nowhere."""
    known = modules()
    arrows = {name: set(imported(path, known)) - {name} for name, path in known.items()}
    done: set[str] = set()
    while len(done) < len(arrows):
        ready = {name for name in arrows.keys() - done if arrows[name] <= done}
        assert ready, f"a circle among {sorted(arrows.keys() - done)}"
        done |= ready


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules that a file names in an import, hidden ones too."""
    typing = {
        inner
        for node in ast.walk(tree(path))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree(path)):
        if node in typing or not isinstance(node, ast.ImportFrom):
            continue
        assert not node.level, f"{shown(path)} has a relative import"
        if (node.module or "").split(".")[0] != "keepsight":
            continue
        base = (node.module or "").partition(".")[2]
        for alias in node.names:
            full = f"{base}.{alias.name}".lstrip(".")
            yield full if full in known else base or "__init__"


# -- how things are said -----------------------------------------------------------------------


def test_every_module_says_what_it_is() -> None:
    silent = []
    for path in FILES:
        text = ast.get_docstring(tree(path)) or ""
        lines = [line for line in text.split("\n") if line.strip()]
        if len(lines) < (1 if path.stem in ("__init__", "__main__") else 2):
            silent.append(shown(path))
    assert not silent, f"says too little: {', '.join(silent)}"


def test_public_functions_are_annotated() -> None:
    bare = [where for path in FILES for where in bare_functions(path)]
    assert not bare, f"arguments or results without a type: {', '.join(bare)}"


def bare_functions(path: Path) -> Iterator[str]:
    inner = {id(f) for outer in functions(path) for f in ast.walk(outer) if f is not outer}
    for function in functions(path):
        if function.name.startswith("_") or id(function) in inner:
            continue
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
        bare = [a.arg for a in every if a.annotation is None and a.arg not in ("self", "cls")]
        if bare or function.returns is None:
            yield f"{shown(path)}:{function.lineno} {function.name}"


def test_what_is_never_written() -> None:
    """`assert` vanishes under -O; pickle, eval and exec run what a file says; the umask is the
    whole process's, and asking for it changes it."""
    for path in FILES:
        expect_never_written(path)


def expect_never_written(path: Path) -> None:
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
    left = re.search(r"\b(TODO|FIXME|XXX)\b", path.read_text(encoding="utf-8"))
    assert not left, f"{shown(path)}: {left}"


def test_a_class_name_stands_for_one_thing() -> None:
    homes: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, set()).add(shown(path))
    twice = {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1}
    assert not twice, f"class names in several modules: {twice}"


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


def test_tests_that_are_left_out_on_some_processors_exist() -> None:
    """One that is renamed would be run again where it cannot pass."""
    folder = Path(__file__).parent
    there = {name for file in folder.glob("test_*.py") for name in _defined(file)}
    assert set(ASK_FOR_MORE) <= there


def _defined(file: Path) -> Iterator[str]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
