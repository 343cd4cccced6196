"""The log of requests: short lines on a terminal, the address always below them; JSON elsewhere."""

from __future__ import annotations

import gc
import io
import json
import logging
from typing import Any

import pytest
from support.server_harness import HELLO, Scripted, live, refusal, until

import keepsight as ks
from keepsight.cli import serve
from keepsight.server import log, running
from keepsight.server.config import ServerConfig


def written(record: dict[str, Any]) -> str:
    """What a terminal gets of one line."""
    entry = logging.LogRecord("x", logging.INFO, "", 0, "%s", ("as JSON",), None)
    entry.request = record
    return log.ShortFormatter().format(entry) if log.no_page_files(entry) else ""


def test_a_terminal_shows_short_lines(
    vlm: ks.VLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with live(vlm, Scripted("hi")) as server:
        object.__setattr__(server.service.config, "log", True)
        with caplog.at_level(logging.INFO, logger="keepsight.server.requests"):
            assert server.chat({"messages": HELLO, "tempature\x1b[2J": 1})[0] == 200
            assert server.call("/v1/models/none")[0] == 404
            until(lambda: len(caplog.records) == 2)
    good, bad = (json.loads(record.getMessage()) for record in caplog.records)
    assert good["prompt_tokens"] == 10 and good["cached_tokens"] == 4
    line = written(good | {"images": 2, "images_encoded": 1})
    for word in ("POST /v1/chat/completions  200", "4/10 tokens", "1/2 images", "tempature?[2J"):
        assert word in line
    assert "  404  " in written(bad)
    file = {**bad, "path": "/page/main.js"}
    assert "  404  " in written(file) and written(file | {"status": 200}) == ""


def test_a_failure_is_told_once(vlm: ks.VLM, caplog: pytest.LogCaptureFixture) -> None:
    """In the log, with the id that the client is told and nothing else."""

    class Broken(Scripted):
        def submit(self, messages: Any, **options: Any) -> Any:
            raise RuntimeError("a secret")

    with live(vlm, Broken()) as server, caplog.at_level(logging.ERROR, logger="keepsight.server"):
        error = refusal(server.chat({"messages": HELLO}), 500)
    assert error["code"] == "internal_error" and "req_" in error["message"]
    assert "secret" not in json.dumps(error)
    [failure] = caplog.records
    assert "RuntimeError" in failure.getMessage()


def test_garbage_is_not_looked_for_among_what_loading_made(
    vlm: ks.VLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look through all of it takes 0.2 s, amid an answer."""
    frozen = []

    class Listening:
        ready: object = None

        def run(self) -> None:
            frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(running, "make_server", lambda service: Listening())
    running.serve(vlm, "demo", ServerConfig(log=False), str)
    assert frozen[0] > 100_000 and not gc.get_freeze_count()


def test_the_log_and_the_address_are_json_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", stream)
    loggers = [logging.getLogger(name) for name in ("keepsight.server", "uvicorn.error")]
    for logger in loggers:
        monkeypatch.setattr(logger, "handlers", [])
    log.start(True)
    log.note({"time": 0, "method": "GET", "path": "/", "status": 200, "ms": 1, "key": None})
    assert "GET /  200" in stream.getvalue(), "the control: on a terminal lines are short"
    stream.truncate(stream.seek(0))
    for logger in loggers:
        logger.handlers = []
    log.start(True, as_json=True)
    log.note({"path": "/health", "status": 200})
    loggers[0].warning("two\nlines, and %s", 'a "word"')
    request, problem = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert request == {"path": "/health", "status": 200}
    assert (problem["level"], problem["message"]) == ("warning", 'two\nlines, and a "word"')
    serve.announce("demo", ServerConfig(host="0.0.0.0"), 8000, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told == {"event": "listening", "model": "demo", "url": "http://127.0.0.1:8000"}
    serve.announce("demo", ServerConfig(), 8000)
    out = capsys.readouterr().out
    assert out.startswith("Keepsight serves demo at http://127.0.0.1:8000") and "  curl http" in out
