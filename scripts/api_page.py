"""Writes `docs/api.md`, `docs/errors.md` and `docs/command-line.md` from the code.

Run `python scripts/api_page.py` after one of them has changed; a test compares.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import typer

import keepsight as ks
from keepsight import training
from keepsight.cli.app import app
from keepsight.kinds import Answering, Generating, Wrapping

DOCS = Path(__file__).parents[1] / "docs"
GROUPS = {
    "Loading": ["load", "wrap", "VLM"],
    "Answers": ["Reply", "Usage", "Report"],
    "Conversations": ["Session", "Prefix"],
    "Features": ["Package", "Encoder", "tower_tensors"],
    "Several at once": ["Together", "Ticket"],
    "Inside other people's code": ["installed", "install", "uninstall"],
}
# What calls share, and where the page that lists it is.
SHARED = {
    *(name for kind in (Wrapping, Generating) for name in kind.__annotations__),
}
MADE_BY_CALLERS = (ks.Encoder, ks.Together, training.PackageDataset)
INSIDE = (
    *("of", "from_record", "record", "stored"),
    *("errand", "beside", "named", "before_exit", "put", "end"),
)


def api() -> str:
    """The page of everything that `import keepsight as ks` gives."""
    lines = [
        "# Python",
        "",
        "All that `import keepsight as ks` gives, from signatures and docstrings; "
        "[errors](errors.md) have a page of their own. Two groups of options are written "
        "`**options` below:",
        "",
        f"- of `load`, `wrap` and `install`: {_listed(Wrapping)};",
        f"- of calls that answer: {_listed(Answering)}, and those of Transformers' "
        "`GenerationConfig`.",
    ]
    for group, names in GROUPS.items():
        lines += ["", f"## {group}"]
        for name in names:
            lines += described(f"ks.{name}", getattr(ks, name), "###")
    lines += ["", "## keepsight.training"]
    for name in ("PackageDataset", "Example", "Collator"):
        lines += described(f"training.{name}", getattr(training, name), "###")
    return "\n".join(lines) + "\n"


def errors() -> str:
    """The page of errors: each class under its base, with what it means."""
    lines = [
        "# Errors",
        "",
        "Every error is a `KeepsightError` from `keepsight.errors`. It says what was wrong, what "
        "was expected, and what to do; nothing is lost, and the next call works.",
        "",
        "| error | also a | meaning |",
        "|---|---|---|",
    ]
    for name, kind in vars(ks.errors).items():
        if inspect.isclass(kind) and kind.__module__ == ks.errors.__name__:
            bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
            lines.append(f"| `{name}` | {bases} | {_text(kind, ' ')} |")
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """The page of commands, with their options, from what `--help` prints."""
    lines = [
        "# Command line",
        "",
        "Every command has `--help`. Examples of each stand in the guides.",
    ]

    def page_of(command: Any, path: str) -> None:
        if hasattr(command, "commands"):
            for name, child in command.commands.items():
                page_of(child, f"{path} {name}")
            return
        context = typer.Context(command, info_name=path)
        usage = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
        told = " ".join((command.help or "").split()).replace("<", "&lt;")
        lines.extend(["", f"## {path}", "", f"`{' '.join([path, *usage])}`", "", told])
        rows = [row for param in command.params if (row := _option(param, context))]
        if rows:
            lines.extend(["", "| option | meaning |", "|---|---|", *rows])

    page_of(typer.main.get_command(app), "keepsight")
    return "\n".join(lines) + "\n"


def _option(param: Any, context: Any) -> str:
    """A row of a command's table; nothing for arguments and for `--help`."""
    if param.param_type_name != "option" or param.name == "help" or getattr(param, "hidden", False):
        return ""
    names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    meaning = " ".join((param.help or "").split()).replace("|", "\\|")
    default = param.get_default(context, call=False)
    if default not in (None, "", (), [], False) and "efault" not in meaning:
        meaning += f" Default: `{default}`."
    return f"| {names} | {meaning} |"


def described(name: str, value: Any, level: str) -> list[str]:
    """A function, or a class with its public methods."""
    lines = ["", f"{level} {name}", ""]
    if not inspect.isclass(value) or value in MADE_BY_CALLERS:
        lines += ["```text", _signature(name, value), "```", ""]
    lines.append(_text(value))
    if inspect.isclass(value):
        short = name.rpartition(".")[2].lower()
        for attribute, own in vars(value).items():
            own = _own(own)
            if own is None or attribute.startswith("_") or attribute in INSIDE or not own.__doc__:
                continue
            if isinstance(own, property):
                lines += ["", f"**`{short}.{attribute}`**: {_text(own, ' ')}"]
            else:
                called = _signature(f"{short}.{attribute}", own)
                lines += ["", "```text", called, "```", "", _text(own)]
    return lines


def _listed(kind: Any) -> str:
    return ", ".join(f"`{name}`" for name in kind.__annotations__)


def _own(value: Any) -> Any:
    """What a class holds under a name, if it is a property or a function."""
    if isinstance(value, classmethod | staticmethod):
        return value.__func__
    return value if isinstance(value, property) or inspect.isfunction(value) else None


def _signature(name: str, value: Any) -> str:
    """A call as people write it; options that many calls share are `**options` here."""
    shown = []
    for key, one in inspect.signature(value).parameters.items():
        if key in ("self", "cls") or key in SHARED:
            continue
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        default = ""
        if one.default is not one.empty:
            default = " = ..." if callable(one.default) else f" = {one.default!r}"
        wanted = "" if stars == "**" else f": {one.annotation}"
        shown.append(f"{stars}{key}{wanted}{default}".replace("<factory>", "..."))
    one_line = f"{name}({', '.join(shown)})"
    if len(one_line) < 100:
        return one_line
    return f"{name}(\n    " + ",\n    ".join(shown) + ",\n)"


def _text(value: Any, between: str = "\n") -> str:
    return between.join((inspect.getdoc(value) or "").splitlines())


if __name__ == "__main__":
    (DOCS / "api.md").write_text(api(), "utf-8")
    (DOCS / "errors.md").write_text(errors(), "utf-8")
    (DOCS / "command-line.md").write_text(command_line(), "utf-8")
