"""What every client's script needs: where the server is, a picture, a tool."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

URL = os.environ["KEEPSIGHT_URL"]
_FILE = Path(os.environ["KEEPSIGHT_PICTURE"])
PICTURE = "data:image/png;base64," + base64.b64encode(_FILE.read_bytes()).decode()
QUESTION = "What is in the picture?"
ASKED: dict[str, Any] = {
    "role": "user",
    "content": [
        {"type": "image_url", "image_url": {"url": PICTURE, "detail": "auto"}},
        {"type": "text", "text": QUESTION},
    ],
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look closer.",
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string"}},
            "required": ["where"],
            "additionalProperties": False,
        },
    },
}
# What an answer has to be: of a few words, so that a small model comes to its end.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "green", "blue"]},
        "sides": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["colour", "sides"],
    "additionalProperties": False,
}


def look(where: str) -> str:
    """Look closer."""
    return "A ring."


def check(truth: object, what: str) -> None:
    """End the script where something is not so; `python -O` changes nothing."""
    if not truth:
        raise SystemExit(f"not so: {what}")
    print("ok:", what)
