"""Commands run in this process, and what they say."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from keepsight.cli.app import app


def run(*words: str, given: str | bytes | None = None, code: int = 0, columns: int = 200) -> Any:
    # A terminal of its own width: the runner of several test processes sets 80 columns.
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(words), input=given)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def refused(*words: str) -> str:
    """The one line on stderr of a command that is refused."""
    result = run(*words, code=2)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def last_json(text: str) -> Any:
    return json.loads(text.strip().splitlines()[-1])
