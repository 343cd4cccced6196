"""The log of requests: JSON lines for programs, or short lines on a terminal, whose last line
always tells the server's address."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import TextIO

from keepsight.kinds import Record

requests = logging.getLogger("keepsight.server.requests")

_ERASE = "\r\x1b[2K"  # to the start of the line, and nothing in it
_YELLOW, _RED, _DIM, _PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[2m", "\x1b[0m"
_PAGE = "/page/"
_SHOWN = 120  # most characters of names that a client sent


def note(record: Record) -> None:
    """Write the line of one request."""
    requests.info(json.dumps(record), extra={"request": record})


def short(record: Record) -> str:
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
        names = ", ".join(unused)
        words.append(f"no effect: {names[:_SHOWN]}{'...' if len(names) > _SHOWN else ''}")
    return "".join(c if c.isprintable() else "\ufffd" for c in "  ".join(words))


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Writes short lines above a status line."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._stays = ""
        self._colours = "NO_COLOR" not in os.environ

    def format(self, record: logging.LogRecord) -> str:
        """A request in short form; anything else unchanged."""
        request = getattr(record, "request", None)
        if request is None:
            return super().format(record)
        status = request["status"]
        return self._in(_RED if status >= 500 else _YELLOW if status >= 400 else "", short(request))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line in place of the status line, and the status line below it.

        Successful requests for the page's own files are left out, two dozen per visit. The log for
        programs has them.
        """
        request = getattr(record, "request", None)
        if request and request["path"].startswith(_PAGE) and (request["status"] or 500) < 400:
            return
        try:
            self.stream.write(f"{_ERASE}{self.format(record)}\n{self._last()}")
            self.flush()
        except Exception:  # like logging's own handlers: a logging error breaks no request
            self.handleError(record)

    def stay(self, text: str) -> None:
        """Set the status line; empty for none."""
        self.acquire()
        try:
            self._stays = text
            self.stream.write(f"{_ERASE}{self._last()}")
            self.flush()
        finally:
            self.release()

    def _last(self) -> str:
        try:
            width = os.get_terminal_size(self.stream.fileno()).columns or 80
        except (OSError, ValueError):
            width = 80
        return self._in(_DIM, self._stays[: width - 1]) if self._stays else ""

    def _in(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self._colours and colour else text


class JsonFormatter(logging.Formatter):
    """Every line as JSON: requests as they are written, problems with time, level and text."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the record holds."""
        text = super().format(record)
        if hasattr(record, "request"):
            return text
        about = {"time": record.created, "level": record.levelname.lower(), "message": text}
        return json.dumps(about)


def start(wanted: bool, as_json: bool = False) -> TerminalHandler | None:
    """Start logging to standard error, problems as text unless all is to be JSON; return the
    terminal's handler."""
    terminal = None
    if wanted and not as_json and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        terminal = TerminalHandler(sys.stderr)
    handler = terminal or logging.StreamHandler(sys.stderr)
    handler.setFormatter((JsonFormatter if as_json else logging.Formatter)("%(message)s"))
    for name, level in (("keepsight.server", logging.INFO), ("uvicorn.error", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if not logger.handlers:
            logger.addHandler(handler)
        logger.propagate = False
    requests.disabled = not wanted
    return terminal
