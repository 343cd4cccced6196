"""`keepsight families`: the model types that are served exactly, in a table or one in detail.

What is said comes from the family's class and its module; here it is only shown.
"""

from __future__ import annotations

import difflib
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from keepsight.cli.options import JSON
from keepsight.cli.terminal import facts, loading_line, say, table
from keepsight.errors import InputError

if TYPE_CHECKING:
    from keepsight.models.families import Family

_NEAR = 3  # most names that an unknown type is answered with
_REUSES = {
    "prefix": "whatever two prompts begin with in common",
    "same media": "the beginning of a prompt, as long as no image is added behind it",
    "whole prompt": "only an identical prompt, since all its tokens attend to each other",
}


def families(
    named: Annotated[
        str | None,
        typer.Argument(
            metavar="TYPE", help="One model type, such as qwen3_vl.", show_default=False
        ),
    ] = None,
    as_json: bool = JSON,
) -> None:
    """List the model types that Keepsight serves exactly, or tell about one of them."""
    with loading_line("PyTorch"):
        from keepsight.models.families import SUPPORTED

    if named is None:
        rows = [_row(name, family) for name, family in sorted(SUPPORTED.items())]
        cells = [(row["model_type"], row["reuses"], _short(row["family"])) for row in rows]
        hint = Text("keepsight families TYPE says what one is about", "dim")
        say(as_json, rows, table("model type", "reuses", "served by", rows=cells), hint)
        return
    name = _known(named, list(SUPPORTED))
    row = _row(name, SUPPORTED[name])
    said = {key.replace("_", " "): value for key, value in row.items()}
    said |= {"served by": _short(said.pop("family"))}
    said |= {"reuses": f"{row['reuses']}: {_REUSES[row['reuses']]}"}
    say(as_json, row, facts(said))


def _known(given: str, types: list[str]) -> str:
    """The listed type that is meant; dashes, dots and capitals do not matter, as in a hub id."""
    name = given.lower().replace("-", "_").replace(".", "_")
    if name in types:
        return name
    near = difflib.get_close_matches(name, types, n=_NEAR, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else "keepsight families lists them"
    raise InputError(
        f"model type {given!r} is not listed; {hint} (the type stands in a model's config.json; "
        "one that is not listed is tried when it is loaded)"
    )


def _row(name: str, family: type[Family]) -> dict[str, str]:
    """What is known of a type; its module's first paragraph says what it is about."""
    first = (sys.modules[family.__module__].__doc__ or "").split("\n\n")[0]
    row = {
        "model_type": name,
        "reuses": family.reuse,
        "family": f"{family.__module__}.{family.__name__}",
        "about": " ".join(first.split()),
    }
    if family.packages_only:
        return row | {"makes": " ".join(f"packages only: {family.packages_only}".split())}
    takes = "the features (vlm.inputs)" if family.feeds_stock else "pixels only"
    return row | {"stock_generate": f"takes {takes}"}


def _short(family: str) -> str:
    return family.removeprefix("keepsight.models.families.")
