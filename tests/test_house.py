"""The rules of the house, read off the source: who may look at whom, and how large things get.

A rule that needs an exception gets it here, in writing, or it is changed here.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import draw_rooms
import pytest
from hostile import finished, start
from intel_avx2 import ASK_FOR_MORE

import keepsight as ks

HOUSE = Path(ks.__file__).parent
FILES = sorted(HOUSE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef

TALKERS = {"cli", "bench"}  # the rooms that may print
MAX_FILE, MAX_FUNCTION, MAX_P90 = 400, 60, 30
MAX_ANY = 80


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room(path: Path) -> str:
    """The first part of a module's name inside the house."""
    return path.relative_to(HOUSE).with_suffix("").parts[0]


def shown(path: Path) -> str:
    return str(path.relative_to(HOUSE))


def called(node: ast.Call) -> str:
    function = node.func
    return getattr(function, "id", None) or getattr(function, "attr", "")


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, Function))


def length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


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

ROOMS = draw_rooms.rooms()


def allowed(name: str) -> set[str]:
    """What the first sentence of a room's docstring says that it may import."""
    may = draw_rooms.sentences(ROOMS[name])[1].replace("keepsight", "__init__")
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
    wrong = draw_rooms.imports(name, ROOMS[name], set(ROOMS)) - allowed(name)
    assert not wrong, f"{name} may not import {', '.join(sorted(wrong))}"


def test_rooms_import_each_other_in_no_circle() -> None:
    floors = draw_rooms.floors({name: allowed(name) for name in ROOMS})
    assert sum(map(len, floors)) == len(ROOMS)


def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    assert draw_rooms.PICTURE.read_text(encoding="utf-8") == draw_rooms.draw()


def test_the_front_door_is_easy_to_read() -> None:
    entries = {p.name for p in HOUSE.iterdir()} - {"__pycache__", "py.typed"}
    assert len(entries) <= 25, "a new file belongs in a room"


def test_a_folder_can_be_read_at_a_glance() -> None:
    """A large room has rooms inside, each named by the room around it."""
    for folder in (path for path in HOUSE.rglob("*") if path.is_dir()):
        files = list(folder.glob("*.py"))
        assert len(files) <= 30, f"{folder.relative_to(HOUSE)} has {len(files)} modules"
        if files and folder.parent.parent == HOUSE:
            about = ast.get_docstring(tree(folder.parent / "__init__.py")) or ""
            assert f"`{folder.name}`" in about, f"{folder.parent.name} does not name {folder.name}"


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


# -- how large things get ----------------------------------------------------------------------


def test_files_and_functions_stay_small() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    long = [f"{shown(path)} ({count})" for path, count in lines.items() if count > MAX_FILE]
    for path in FILES:
        found = [f for f in functions(path) if length(f) > MAX_FUNCTION]
        long += [f"{shown(path)}: {f.name} ({length(f)})" for f in found]
    assert not long, f"too long: {', '.join(long)}"


def test_most_functions_are_short() -> None:
    lengths = sorted(length(f) for path in FILES for f in functions(path))
    assert lengths[len(lengths) * 9 // 10] < MAX_P90


def test_values_have_types() -> None:
    """How often the code says `Any`. The number may only fall: what has a type of its own gets it
    (kinds.py), what is looked at first is an `object`, and `Any` is left to keyword arguments that
    are passed on, to plain JSON, and to what others' libraries hold inside."""
    found = [node for path in FILES for node in ast.walk(tree(path)) if isinstance(node, ast.Name)]
    assert sum(node.id == "Any" for node in found) <= MAX_ANY


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
