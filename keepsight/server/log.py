"""The log of requests: JSON lines for programs, short lines on a terminal.

No word or picture of anybody is in it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time

from keepsight.kinds import Record

requests = logging.getLogger("keepsight.server.requests")

_YELLOW, _RED, _PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[0m"
_SHOWN = 120  # most characters of names that a client sent


def note(record: Record) -> None:
    requests.info(json.dumps(record), extra={"request": record})


def _short(record: Record) -> str:
    """The short form of a request: what it was, how it ended, what was reused."""
    words = [
        time.strftime("%H:%M:%S", time.localtime(record["time"])),
        f"{record['method']} {record['path']}",
        str(record["status"] or "-"),
        f"{record['ms'] / 1e3:.2f} s",
    ]
    if "prompt_tokens" in record:
        words.append(f"{record['cached_tokens']}/{record['prompt_tokens']} tokens reused")
    if record.get("images"):
        words.append(f"{record['images_encoded']}/{record['images']} images encoded")
    if "error" in record:
        words.append(str(record["error"]))
    if record.get("hung_up"):
        words.append("client hung up")
    if record["key"] is not None:
        words.append(f"key {record['key']}")
    if unused := record.get("unused"):
        words.append(f"no effect: {', '.join(unused)[:_SHOWN]}")
    return "".join(c if c.isprintable() else "\ufffd" for c in "  ".join(words))


class ShortFormatter(logging.Formatter):
    """Requests in short form and in colour, for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        request = getattr(record, "request", None)
        if request is None:
            return super().format(record)
        colour = _RED if request["status"] >= 500 else _YELLOW if request["status"] >= 400 else ""
        text = _short(request)
        return f"{colour}{text}{_PLAIN}" if colour and "NO_COLOR" not in os.environ else text


def no_page_files(record: logging.LogRecord) -> bool:
    """Whether a line is for a terminal: the page's own files, two dozen per visit, are not."""
    request = getattr(record, "request", None)
    return not (request and request["path"].startswith("/page/") and 0 < request["status"] < 400)


class JsonFormatter(logging.Formatter):
    """Every line as JSON: requests as they are written, problems with time, level and text."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if hasattr(record, "request"):
            return text
        about = {"time": record.created, "level": record.levelname.lower(), "message": text}
        return json.dumps(about)


def start(wanted: bool, as_json: bool = False) -> None:
    """Start logging to standard error: short lines on a terminal; elsewhere requests as JSON, and
    problems as text unless all is to be JSON."""
    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        handler.setFormatter(JsonFormatter("%(message)s"))
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        handler.setFormatter(ShortFormatter("%(message)s"))
        handler.addFilter(no_page_files)
    for name, level in (("keepsight.server", logging.INFO), ("uvicorn.error", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        if not logger.handlers:
            logger.addHandler(handler)
    requests.disabled = not wanted
