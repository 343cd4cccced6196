"""Servers with an OpenAI-compatible API: how each is started, asked, and stopped.

A server runs in a process of its own, which ends with the `with` that holds it, and whatever it
started with it. The client is the standard library's, so that nobody's own client helps or hinders.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keepsight
from keepsight.bench.frame import now
from keepsight.errors import KeepsightError

KEEPSIGHT = "keepsight serve"
_START = 240.0  # seconds until a server must answer
_STOP = 30.0  # seconds to end in order
_ANSWER = 300.0  # seconds for one answer


class ServerFailed(KeepsightError, RuntimeError):
    """A server did not start, or answered with an error."""


@dataclass
class Heard:
    """One answer as a client hears it: milliseconds since the request was sent, and counts."""

    text: str = ""
    first: float = 0.0
    total: float = 0.0
    tokens: int = 0
    prompt: int = 0
    cached: int | None = None  # None where the server does not say

    @property
    def rate(self) -> float:
        """Tokens per second, after the first."""
        return 1e3 * max(0, self.tokens - 1) / max(self.total - self.first, 1e-3)

    def hears(self, text: str, after: float) -> None:
        """A piece of the answer; pieces without text are not heard."""
        if text:
            self.first = self.first or after
            self.text += text


@dataclass(frozen=True)
class Contestant:
    """A server that can be started: its command for a folder of a model and a port."""

    name: str
    command: Callable[[Path, int], list[str]]
    version: str
    environment: dict[str, str] = field(default_factory=dict)
    usage: bool = True  # is asked for with `stream_options`
    many: bool = True  # takes several clients at once
    prepare: Callable[[Path], object] = lambda model: None  # done once, before anything is timed


class Running:
    """A server for as long as a `with` lasts."""

    def __init__(self, contestant: Contestant, model: Path) -> None:
        self.contestant, self.model = contestant, model

    def __enter__(self) -> Running:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port: int = taken.getsockname()[1]
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self.contestant.command(self.model, self.port),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **self.contestant.environment},
            start_new_session=True,  # so that what it starts itself ends with it
        )
        try:
            end = time.monotonic() + _START
            while not self._healthy():
                if self._process.poll() is not None or time.monotonic() > end:
                    raise self.failed("did not start")
                time.sleep(0.1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End it and everything that it started."""
        for signal_ in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, signal_)
                self._process.wait(_STOP)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._process.wait(_STOP)
        self._log.close()

    def failed(self, why: object) -> ServerFailed:
        """An error with the end of what the server printed."""
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")[-2000:]
        return ServerFailed(f"{self.contestant.name}: {why}; {said}")

    def _healthy(self) -> bool:
        try:
            return self._request("GET", "/health", None, 5).status == 200
        except (OSError, http.client.HTTPException):
            return False

    def _request(
        self, method: str, path: str, body: bytes | None, timeout: float = _ANSWER
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request(method, path, body, headers)
        return connection.getresponse()

    def ask(self, messages: list[dict[str, Any]], tokens: int) -> Heard:
        """Hear a greedy streamed answer; the clock starts when the request is sent."""
        asked: dict[str, Any] = {"model": str(self.model), "messages": messages, "stream": True}
        asked |= {"max_tokens": tokens, "temperature": 0}
        if self.contestant.usage:
            asked["stream_options"] = {"include_usage": True}
        body, heard = json.dumps(asked).encode(), Heard()
        start = now()
        try:
            with self._request("POST", "/v1/chat/completions", body) as response:
                if response.status != 200:
                    raise self.failed(response.read(600).decode())
                for line in response:
                    self._hear(heard, line, now() - start)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise self.failed(error) from error
        heard.total = now() - start
        if not heard.text:
            raise self.failed("it answered nothing")
        return heard

    def _hear(self, heard: Heard, line: bytes, after: float) -> None:
        """One line of an event stream."""
        if not line.startswith(b"data:") or line.strip().endswith(b"[DONE]"):
            return
        event = json.loads(line[5:])
        if event.get("error"):
            raise self.failed(event["error"])
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            heard.hears(delta.get("content") or delta.get("reasoning_content") or "", after)
        if usage := event.get("usage"):
            heard.tokens, heard.prompt = usage["completion_tokens"], usage["prompt_tokens"]
            heard.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def post(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        with self._request("POST", path, json.dumps(asked).encode()) as response:
            told = response.read()
            if response.status != 200:
                raise self.failed(told[:600].decode())
        found: dict[str, Any] = json.loads(told)
        return found

    def forget(self) -> None:
        """Empty the memory of Keepsight's server."""
        self.post("/v1/cache/reset", {})


def threads_of(count: int) -> dict[str, str]:
    """How PyTorch is told how many threads to use."""
    return {"OMP_NUM_THREADS": str(count)}


def keepsight_server(dtype: str, threads: int) -> Contestant:
    """The server of this working tree."""

    def command(model: Path, port: int) -> list[str]:
        words = [sys.executable, "-m", "keepsight", "serve", str(model), "--port", str(port)]
        return [*words, "--dtype", dtype, "--no-log"]

    return Contestant(KEEPSIGHT, command, keepsight.__version__, threads_of(threads))


def exported_server(way: str, threads: int) -> Contestant:
    """The same server with an export of the checkpoint; `way` is such as "onnx" or "onnx int8"."""
    from bench.exporting import exported

    runtime, _, kind = way.partition(" ")
    made = f"{runtime} {kind or 'float32'}"

    def command(model: Path, port: int) -> list[str]:
        words = [sys.executable, "-m", "keepsight", "serve", exported(str(model), made), "--no-log"]
        return [*words, "--port", str(port), "--model-name", str(model)]

    return Contestant(
        f"exported, {way}",
        command,
        keepsight.__version__,
        threads_of(threads),
        prepare=lambda model: exported(str(model), made),
    )


def made_by(who: str, command: list[str]) -> None:
    """A file made by a tool, or what the tool said."""
    done = subprocess.run(command, capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        said = done.stderr.decode(errors="replace")[-2000:]
        raise ServerFailed(f"{who} failed: {said}")


def version_in(environment: Path, package: str) -> str:
    """The name and version of what is installed in a virtual environment."""
    stem = re.sub(r"[-_.]+", "_", package)
    found = environment.glob(f"lib/python3*/site-packages/{stem}-*.dist-info")
    names = sorted(path.name for path in found)
    return names[0].removesuffix(".dist-info") if names else package
