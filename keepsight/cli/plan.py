"""`keepsight plan`: the memory that a model and its data will take, before its weights are
downloaded.

`keepsight.core.plan` counts; here the result is shown.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from keepsight.cli.loading_line import loading_line
from keepsight.cli.options import Json, Named, SomeModel, one_model
from keepsight.cli.terminal import console, json_line, plain, table
from keepsight.errors import InputError
from keepsight.kinds import Record
from keepsight.system.units import bytes_text, parse_bytes

if TYPE_CHECKING:
    from keepsight.core.plan import Plan

_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


def plan(
    named: Named = None,
    model: SomeModel = None,
    size: Annotated[str, typer.Option(help="Width and height of a picture.")] = "1280x800",
    pictures: Annotated[int, typer.Option(min=1, help="Number of pictures in a store.")] = 1000,
    budget: Annotated[
        str, typer.Option(help="Memory for features, and as much for prompts.")
    ] = "2GiB",
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub id.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell from a configuration alone how much memory weights, features and keys will take."""
    found = _SIZE.fullmatch(size)
    if found is None or not int(found[1]) or not int(found[2]):
        raise InputError(f"--size {size}; expected width and height, such as 1280x800")
    room = parse_bytes(budget)
    name = one_model(named, model)
    with loading_line("PyTorch"):
        from transformers import logging

        from keepsight.core import plan as core

    logging.set_verbosity_error()
    planned = core.plan(name, (int(found[1]), int(found[2])), revision)
    columns = {dtype: _column(planned, dtype, pictures, room) for dtype in core.DTYPES}
    if as_json:
        json_line({"model": name, "size": size, "pictures": pictures, **vars(planned)} | columns)
        return
    _show(planned, name, size, pictures, budget, columns)


def _column(planned: Plan, dtype: str, pictures: int, room: int) -> Record:
    features, prefix = planned.features(dtype), planned.prefix(dtype)
    return {
        "weights": planned.weights(dtype),
        "token": planned.token(dtype),
        "features": features,
        "prefix": prefix,
        "store": pictures * (features + prefix),
        "features_in_budget": room // 2 // features,  # the other half is for waiting pixels
        "prefixes_in_budget": room // prefix,
    }


def _show(
    planned: Plan, name: str, size: str, pictures: int, budget: str, columns: dict[str, Record]
) -> None:
    out = console()
    count, tower = planned.parameters / 1e6, planned.tower_parameters / 1e6
    out.print(
        plain(
            f"{name}: {planned.model_type}, {count:,.1f} million weights, of which {tower:,.1f} in "
            f"the tower\na picture of {size}: {planned.picture_tokens} tokens"
        )
    )
    rows = {
        "weights": "weights",
        "token": "a token of a remembered prompt",
        "features": "features of a picture",
        "prefix": "keys and values of a picture",
        "store": f"{pictures} pictures in a store, both",
    }
    shown = table("", *columns, right=tuple(columns))
    for key, words in rows.items():
        shown.add_row(words, *(bytes_text(column[key]) for column in columns.values()))
    for key, words in (("features_in_budget", "features"), ("prefixes_in_budget", "prompts")):
        text = f"pictures in a budget of {budget}, {words}"
        shown.add_row(text, *(f"{column[key]:,}" for column in columns.values()))
    if planned.state_numbers:
        sizes = (bytes_text(planned.snapshot(dtype)) for dtype in columns)
        shown.add_row("states of each snapshot, beside these, at least", *sizes)
    out.print(shown)
