"""Count what the table in contributing.md shows, before and now.

    python docs/count_house.py [FOLDER]          print the counts of a checkout (or this one)
    python docs/count_house.py --record NAME [FOLDER]     time and weigh it too: docs/house.json
    python docs/count_house.py --table           write the table of docs/house.json into the page

`--record` needs hatchling and the library's own requirements in the Python that runs it, and a
machine that does nothing else. What each row counts is said in the function that counts it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

DOCS = Path(__file__).resolve().parent
RESULTS, PAGE = DOCS / "house.json", DOCS / "contributing.md"
BEGIN, END = "<!-- table: python docs/count_house.py --table -->\n", "<!-- end of the table -->\n"
THEIRS = {"_buffers", "_parameters", "_version", "_replace"}  # also names of PyTorch, of tuples
SHIPPED = (".py", ".js", ".css", ".html")
ROUNDS = 10  # of what is timed; the best counts
Arrows = dict[str, set[str]]


def count(package: Path) -> dict[str, float]:
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
        "rooms (folders in the root)": sum(
            (path / "__init__.py").exists() for path in package.iterdir()
        ),
        "modules in the fullest folder": max(
            len(list(path.glob("*.py"))) for path in (package, *package.rglob("*"))
        ),
        "modules that import each other in a circle": circles(arrows(package, types=False)),
        "entries of the root that import each other": len(list(mutual(entries(package)))),
        "lines shipped": sum(len(path.read_text("utf-8").splitlines()) for path in shipped),
        "largest file": max(len(path.read_text("utf-8").splitlines()) for path in shipped),
        "functions over 40 lines": sum(length > 40 for length in lengths),
        "`Any`": sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
        "private members of another class": len(list(_private(trees))),
        "class names in two modules": sum(number > 1 for number in classes.values()),
    }


def _private(trees: list[ast.Module]) -> Iterator[ast.Attribute]:
    """Uses of a private attribute that a class of the package has, outside of that class: an object
    may touch another of its own class, as in a copy or a comparison."""
    classes = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    anywhere = set().union(*map(_members, classes)) - THEIRS
    for tree in trees:
        inside = {n: c for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for n in ast.walk(c)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in anywhere:
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                home = inside.get(node)
                if not own and (home is None or node.attr not in _members(home)):
                    yield node


def _members(of: ast.ClassDef) -> set[str]:
    """The private names that a class defines or sets on itself."""
    found: set[str] = set()
    for node in ast.walk(of):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def arrows(package: Path, *, types: bool) -> Arrows:
    """What each module imports, hidden imports too; those for type checkers alone with `types`."""
    files = {_name(path, package): path for path in package.rglob("*.py")}
    return {name: set(_imported(path, files, types)) - {name} for name, path in files.items()}


def _name(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _imported(path: Path, known: dict[str, Path], types: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text("utf-8"))
    checks = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)
    ]
    skipped = {inner for check in checks for inner in ast.walk(check)} if not types else set()
    for node in ast.walk(tree):
        if node in skipped or not isinstance(node, ast.ImportFrom):
            continue
        first, _, base = (node.module or "").partition(".")
        for alias in node.names if first == "keepsight" else ():
            full = f"{base}.{alias.name}".lstrip(".")
            yield full if full in known else base or "__init__"


def circles(graph: Arrows) -> int:
    """The modules that stay when those are removed, again and again, that import none or that none
    imports."""
    left = dict(graph)
    while True:
        above = set().union(*left.values()) if left else set()
        gone = {
            name for name, others in left.items() if not others & left.keys() or name not in above
        }
        if not gone:
            return len(left)
        left = {name: others - gone for name, others in left.items() if name not in gone}


def entries(package: Path) -> Arrows:
    """What each entry of the root imports of the others, imports for type checkers too."""
    found: Arrows = {}
    for name, others in arrows(package, types=True).items():
        first = name.split(".")[0]
        found.setdefault(first, set()).update(other.split(".")[0] for other in others)
    return {
        name: others - {name, "__init__"} for name, others in found.items() if name != "__init__"
    }


def mutual(graph: Arrows) -> Iterator[tuple[str, str]]:
    """Each pair once: one of its two arrows goes upward, in whatever order they are drawn."""
    for name, others in graph.items():
        yield from (
            (name, other) for other in others if name < other and name in graph.get(other, ())
        )


def measure(root: Path) -> dict[str, float]:
    """What takes time or a build."""
    with TemporaryDirectory() as out:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out]
        subprocess.run(build, cwd=root, check=True, capture_output=True)
        (wheel,) = Path(out).glob("*.whl")
        size = wheel.stat().st_size
    return {
        "bytes of the wheel": size,
        "`import keepsight`, seconds": _best(root, "-c", "import keepsight"),
        "`keepsight --help`, seconds": _best(root, "-m", "keepsight", "--help"),
    }


def _best(root: Path, *words: str) -> float:
    """Seconds of a core, less what Python itself takes to start."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    took: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS):
        for bare in (True, False):
            command = [sys.executable, *(("-c", "pass") if bare else words)]
            begun = _spent()
            subprocess.run(command, env=environment, check=True, capture_output=True, cwd=root)
            took[bare].append(_spent() - begun)
    return round(min(took[False]) - min(took[True]), 3)


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(results: dict[str, dict[str, float]]) -> str:
    """One column for each that was recorded."""
    names = list(results)
    rows = [f"| | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for row in results[names[-1]]:
        cells = (f"{results[name][row]:,}" if row in results[name] else "" for name in names)
        rows.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def page(text: str) -> str:
    """The page with the table of the committed results in it."""
    head, _, rest = text.partition(BEGIN)
    results = json.loads(RESULTS.read_text("utf-8"))
    return head + BEGIN + "\n" + table(results) + "\n" + END + rest.partition(END)[2]


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=DOCS.parent)
    parser.add_argument("--record", metavar="NAME")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
        return
    counts = count(options.folder / "keepsight")
    if options.record:
        counts |= measure(options.folder.resolve())
        known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
        counts = {**known.get(options.record, {}), **counts}  # what is measured by hand stays
        RESULTS.write_text(json.dumps(known | {options.record: counts}, indent=1) + "\n", "utf-8")
    for name, number in counts.items():
        print(f"{number:12,}  {name}")


if __name__ == "__main__":
    main()
