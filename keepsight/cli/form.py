"""The form of an answer, as `keepsight ask` takes it: a JSON schema, choices, a pattern.

Each becomes what `response_format=` takes; what is no form is refused before PyTorch is imported.
"""

from __future__ import annotations

from typing import Annotated

import typer

from keepsight.cli.options import read_text
from keepsight.core.structured import formats
from keepsight.errors import InputError
from keepsight.system.optional import optional

_PANEL = "Form of the answer"
JsonSchema = Annotated[
    str | None,
    typer.Option(
        help="JSON that fits this schema: a file, - for standard input, or the schema itself.",
        rich_help_panel=_PANEL,
    ),
]
JsonObject = Annotated[
    bool, typer.Option("--json-object", help="Any JSON object.", rich_help_panel=_PANEL)
]
Choices = Annotated[
    str | None,
    typer.Option(help="One of these texts: yes,no,unclear.", rich_help_panel=_PANEL),
]
Choice = Annotated[
    list[str] | None,
    typer.Option(help="One of these texts, also with commas; repeatable.", rich_help_panel=_PANEL),
]
Regex = Annotated[
    str | None,
    typer.Option(help="A text that matches this to its end.", rich_help_panel=_PANEL),
]


def form_of(
    json_schema: str | None,
    json_object: bool,
    choices: str | None,
    choice: list[str] | None,
    regex: str | None,
) -> formats.Format | None:
    """The one form that the options name, checked; None without any."""
    forms = list[formats.Format]()
    if json_schema is not None:
        inline = json_schema.lstrip().startswith("{")
        text = json_schema if inline else read_text(json_schema, "--json-schema")
        forms.append(formats.of_schema(text, "--json-schema"))
    if json_object:
        forms.append(formats.of_schema({"type": "object"}, "--json-object"))
    if choices is not None or choice:
        split = [] if choices is None else [one.strip() for one in choices.split(",")]
        forms.append(formats.of_choices([*split, *(choice or [])], "--choices"))
    if regex is not None:
        forms.append(formats.of_regex(regex, "--regex"))
    if len(forms) > 1:
        named = " and ".join(form.place for form in forms)
        raise InputError(f"{named}: an answer has one form; name one of them")
    if forms:
        optional("llguidance", "structured")
    return forms[0] if forms else None
