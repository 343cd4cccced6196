"""Answers of a given form on the command line: what they are, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import last_json, refused, run

SCHEMA = json.dumps(
    {"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}
)


@pytest.mark.parametrize(
    ("words", "given", "allowed"),
    [
        (("--choices", "left, right"), None, ["left", "right"]),
        (("--choice", "a, b", "--choice", "c"), None, ["a, b", "c"]),
        (("--choices", "no", "--choice", "yes, both"), None, ["no", "yes, both"]),
        (("--regex", "A-[12]"), None, ["A-1", "A-2"]),
        (("--json-schema", SCHEMA), None, [{"size": 1}, {"size": 2}]),
        (("--json-schema", "s.json"), None, [{"size": 1}, {"size": 2}]),
        (("--json-schema", "-"), SCHEMA, [{"size": 1}, {"size": 2}]),
    ],
)
def test_an_answer_has_the_form_that_was_asked_for(
    words: tuple[str, ...], given: str | None, allowed: list[Any], folder: Path
) -> None:
    Path("s.json").write_text(SCHEMA)
    told = last_json(run("ask", "a.png", "Which?", *words, "--json", given=given).stdout)
    assert told["parsed"] in allowed


def test_an_answer_is_printed_and_is_an_error_where_it_is_cut(folder: Path) -> None:
    assert run("ask", "a.png", "Which?", "--regex", "b{4}").stdout == "bbbb\n"
    words = ("ask", "a.png", "Which?", "--regex", "b{200}", "--max-tokens", "1")
    done = run(*words, code=2)
    assert done.stdout.strip().strip("b") == "" and "--max-tokens" in done.stderr
    assert "parsed" not in last_json(run(*words, "--json", code=2).stdout)


def test_a_batch_has_a_form_for_all_and_its_lines_their_own(folder: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": json.loads(SCHEMA)}}
    asked = [{"question": "A?", "images": "a.png", "response_format": form}, {"question": "B?"}]
    Path("in.jsonl").write_text("\n".join(map(json.dumps, asked)))
    words = ("ask", "--batch", "in.jsonl", "--out", "out.jsonl")
    run(*words, "--choices", "yes,no")
    rows = map(json.loads, Path("out.jsonl").read_text().splitlines())
    found = {row["id"]: row["parsed"] for row in rows}
    assert found[1] in ({"size": 1}, {"size": 2}) and found[2] in ("yes", "no")

    Path("out.jsonl").unlink()
    cut = run(*words, "--regex", "b{200}", "--max-tokens", "1", code=1)
    assert "0 answered, 2 failed" in cut.stdout
    asked[0]["response_format"] = {"not": {}}
    Path("in.jsonl").write_text("\n".join(map(json.dumps, asked)))
    for option in ((), ("--choices", "a,b")):
        said = refused("ask", "--batch", "in.jsonl", "--out", "new.jsonl", *option)
        assert "line 1: response_format: it cannot be enforced" in said
