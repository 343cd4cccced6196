"""`keepsight families`: the model types that are served exactly, in a table or one in detail.

What is said comes from the family's class and its module; here it is only shown.
"""

from __future__ import annotations

import difflib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from keepsight.cli.loading_line import loading_line
from keepsight.cli.options import Json
from keepsight.cli.terminal import console, json_line, plain, table
from keepsight.errors import InputError

if TYPE_CHECKING:
    from keepsight.models.families import Family

_NEAR = 3  # most names that an unknown type is answered with
_ROOM = "keepsight.models.families."
_REUSES = {
    "prefix": "whatever two prompts begin with in common",
    "same media": "the beginning of a prompt, as long as no medium is added behind it",
    "whole prompt": "only an identical prompt, since all its tokens attend to each other",
}


def families(
    named: Annotated[
        str | None,
        typer.Argument(
            metavar="TYPE", help="One model type, such as qwen3_vl.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the model types that Keepsight serves exactly, or tell about one of them."""
    with loading_line("PyTorch"):
        from keepsight.models.families import SUPPORTED

    if named is not None:
        name = _known(named, list(SUPPORTED))
        row = _row(name, SUPPORTED[name])
        if as_json:
            json_line(row)
        else:
            _show(row, SUPPORTED[name])
        return
    rows = [_row(name, family) for name, family in sorted(SUPPORTED.items())]
    if as_json:
        json_line(rows)
        return
    shown = table("model type", "reuses", "served by")
    for row in rows:
        shown.add_row(row["model_type"], row["reuses"], row["family"].removeprefix(_ROOM))
    console().print(shown)
    console().print("keepsight families TYPE says what one is about", style="dim")


def _known(given: str, types: list[str]) -> str:
    """The listed type that is meant; dashes, dots and capitals do not matter, as in a hub id."""
    plain_name = given.lower().replace("-", "_").replace(".", "_")
    if plain_name in types:
        return plain_name
    near = difflib.get_close_matches(plain_name, types, n=_NEAR, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else "keepsight families lists them"
    raise InputError(
        f"model type {given!r} is not listed; {hint} (the type stands in a model's config.json; "
        "one that is not listed is tried when it is loaded)"
    )


def _row(name: str, family: type[Family]) -> dict[str, str]:
    return {
        "model_type": name,
        "reuses": family.reuse,
        "family": f"{family.__module__}.{family.__name__}",
        "about": _about(family),
    }


def _about(family: type[Family]) -> str:
    """What a family reuses, and the first line of its module docstring."""
    first = (sys.modules[family.__module__].__doc__ or "").split("\n\n")[0]
    said = " ".join(first.split())
    return said if family.reuse == "prefix" else f"{said} Reuses: {family.reuse}."


def _show(row: dict[str, str], family: type[Family]) -> None:
    """One type: a line for each thing that is known of it."""
    out, shown = console(), table("", "")
    stock = "takes the features (vlm.inputs)" if family.feeds_stock else "takes pixels only"
    for what, said in (
        ("model type", row["model_type"]),
        ("reuses", f"{row['reuses']}: {_REUSES[row['reuses']]}"),
        ("served by", row["family"].removeprefix(_ROOM)),
        ("about", plain((sys.modules[family.__module__].__doc__ or "").split("\n\n")[0])),
        ("makes", family.packages_only and f"packages only: {family.packages_only}"),
        ("stock generate", "" if family.packages_only else stock),
    ):
        if said:
            shown.add_row(what, " ".join(said.split()))
    out.print(shown)
