"""How a model, a session and its history look in a notebook or at a prompt.

`repr` is one line; `_repr_html_` is a table in which outside text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepsight.core.runtime import Runtime
from keepsight.kinds import Message, Record
from keepsight.media.medium import Medium
from keepsight.system import html
from keepsight.system.units import bytes_text


def described(runtime: Runtime) -> str:
    model = runtime.model
    name = getattr(model.config, "_name_or_path", "") or ""
    short = str(name).rstrip("/").rpartition("/")[2]
    kind = str(model.config.model_type)
    named = kind if short in ("", kind) else f"{short} ({kind})"
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{named}, {dtype} on {model.device}{', closed' if runtime.closed else ''}"


def model_as_html(shown: str, stats: Record) -> str:
    """A model as a table: what each tier holds."""
    features, prefix, store = stats["features"], stats["prefix"], stats.get("store")
    rows = [
        ("features in memory", bytes_text(features["bytes"]), _of(features["budget"])),
        ("prefixes in memory", bytes_text(prefix["bytes"]), _of(prefix.get("budget"))),
    ]
    if store is not None:
        rows.append(("store", bytes_text(store.get("bytes") or 0), _of(store.get("budget"))))
    return html.paragraph(shown) + html.table(rows)


def history(messages: list[Message]) -> str:
    turns = sum(message["role"] == "user" for message in messages)
    images = sum(len(_images(message)) for message in messages)
    return f"{turns} turn{'s' * (turns != 1)}, {images} image{'s' * (images != 1)}"


def history_as_html(messages: list[Message]) -> str:
    rows, number = [], 0
    for message in messages:
        shown = []
        for image in _images(message):
            number += 1
            known = f", {image.tokens} tokens" if isinstance(image, Medium) else ""
            shown.append(f"[image {number}{known}]")
        rows.append((message["role"], " ".join([*shown, _words(message)])))
    return html.paragraph(f"Session: {history(messages)}") + html.table(rows)


def _parts(message: Message) -> Iterable[Record]:
    content = message["content"]
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _images(message: Message) -> list[object]:
    return [part["image"] for part in _parts(message) if part.get("type") == "image"]


def _words(message: Message) -> str:
    return " ".join(str(part["text"]) for part in _parts(message) if part.get("type") == "text")


def _of(budget: int | None) -> str:
    return "no limit" if budget is None else f"of {bytes_text(budget)}"
