"""Count what the table in contributing.md shows: `python docs/count_house.py [FOLDER]`.

The folder is that of a checkout, this one if none is named.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SHIPPED = (".py", ".js", ".css", ".html")


def count(package: Path) -> dict[str, int]:
    """The numbers of one package."""
    shipped = [path for path in package.rglob("*") if path.suffix in SHIPPED]
    trees = [ast.parse(path.read_text("utf-8")) for path in shipped if path.suffix == ".py"]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [(function.end_lineno or 0) - function.lineno + 1 for function in functions]
    classes = Counter(
        name
        for tree in trees
        for name in {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    )
    return {
        "entries in the root": sum(
            path.name not in ("__pycache__", "py.typed") for path in package.iterdir()
        ),
        "lines shipped": sum(len(path.read_text("utf-8").splitlines()) for path in shipped),
        "largest file": max(len(path.read_text("utf-8").splitlines()) for path in shipped),
        "functions over 40 lines": sum(length > 40 for length in lengths),
        "`Any`": sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
        "private members of another object": len(list(_private(nodes))),
        "class names in two modules": sum(number > 1 for number in classes.values()),
    }


def _private(nodes: list[ast.AST]) -> Iterator[ast.Attribute]:
    """Uses of a private attribute of anything but `self`, `cls` and `super()`."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            of = node.value
            own = isinstance(of, ast.Name) and of.id in ("self", "cls")
            own = own or (isinstance(of, ast.Call) and ast.unparse(of.func) == "super")
            if not own and not node.attr.startswith("__"):
                yield node


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    for name, number in count(root / "keepsight").items():
        print(f"{number:7,}  {name}")
