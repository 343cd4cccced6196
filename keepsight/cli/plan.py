"""`keepsight plan`: the memory that a model and its data will take, before its weights are
downloaded.

`keepsight.core.plan` counts; here the result is shown.
"""

from __future__ import annotations

import re

from keepsight.cli.options import JSON, MODEL, REVISION, Named, one_model, option
from keepsight.cli.terminal import hush, loading_line, say, table
from keepsight.errors import InputError
from keepsight.system.units import bytes_text, parse_bytes


def plan(
    named: Named = None,
    model: str | None = MODEL,
    size: str = option("Width and height of a picture.", default="1280x800"),
    pictures: int = option("Number of pictures in a store.", min=1, default=1000),
    budget: str = option("Memory for features, and as much for prompts.", default="2GiB"),
    revision: str | None = REVISION,
    as_json: bool = JSON,
) -> None:
    """Tell from a configuration alone how much memory weights, features and keys will take."""
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", size)
    if found is None or not int(found[1]) or not int(found[2]):
        raise InputError(f"--size {size}; expected width and height, such as 1280x800")
    room = parse_bytes(budget)
    name = one_model(named, model)
    with loading_line("PyTorch"):
        from keepsight.core import plan as core

        hush()
    planned = core.plan(name, (int(found[1]), int(found[2])), revision)
    columns = {}
    for dtype in core.DTYPES:
        features, prefix = planned.features(dtype), planned.prefix(dtype)
        columns[dtype] = {
            "weights": planned.weights(dtype),
            "token": planned.token(dtype),
            "features": features,
            "prefix": prefix,
            "store": pictures * (features + prefix),
            "features_in_budget": room // 2 // features,  # the other half is for waiting pixels
            "prefixes_in_budget": room // prefix,
        }
    told = {"model": name, "size": size, "pictures": pictures, **vars(planned)}
    rows = [
        (words, *(bytes_text(column[key]) for column in columns.values()))
        for key, words in (
            ("weights", "weights"),
            ("token", "a token of a remembered prompt"),
            ("features", "features of a picture"),
            ("prefix", "keys and values of a picture"),
            ("store", f"{pictures} pictures in a store, both"),
        )
    ]
    for key, words in (("features_in_budget", "features"), ("prefixes_in_budget", "prompts")):
        text = f"pictures in a budget of {budget}, {words}"
        rows.append((text, *(f"{column[key]:,}" for column in columns.values())))
    if planned.state_numbers:
        sizes = (bytes_text(planned.snapshot(dtype)) for dtype in columns)
        rows.append(("states of each snapshot, beside these, at least", *sizes))
    count, tower = planned.parameters / 1e6, planned.tower_parameters / 1e6
    about = (
        f"{name}: {planned.model_type}, {count:,.1f} million weights, of which {tower:,.1f} in "
        f"the vision encoder\na picture of {size}: {planned.picture_tokens} tokens"
    )
    say(as_json, told | columns, about, table("", *columns, right=tuple(columns), rows=rows))
