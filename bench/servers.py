"""Servers with an OpenAI-compatible API: how each is started, asked, and stopped.

A server runs in a process of its own, which ends with the `with` that holds it, and whatever it
started with it. The client is the standard library's, so that nobody's own client helps or hinders.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.serving_sums import Heard
from keepsight.errors import KeepsightError

KEEPSIGHT = "keepsight serve"
_START = 240.0  # seconds until a server must answer
_STOP = 30.0  # seconds to end in order
_ANSWER = 300.0  # seconds for one answer
_USAGE = {"stream_options": {"include_usage": True}}


class ServerFailed(KeepsightError, RuntimeError):
    """A server did not start, or answered with an error."""


@dataclass(frozen=True)
class Contestant:
    """A server that can be started: its command for a folder of a model and a port."""

    name: str
    command: Callable[[Path, int], list[str]]
    version: str
    environment: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=lambda: dict(_USAGE))  # of every request
    many: bool = True  # takes several clients at once
    prepare: Callable[[Path], None] = lambda model: None  # done once, before anything is timed


class Running:
    """A server for as long as a `with` lasts."""

    def __init__(self, contestant: Contestant, model: Path) -> None:
        self.contestant, self.model = contestant, model
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`)
        self.port = _free_port()

    def __enter__(self) -> Running:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **self.contestant.environment}
        self._process = subprocess.Popen(
            self.contestant.command(self.model, self.port),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # so that what it starts itself ends with it
        )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait(self) -> None:
        end = time.monotonic() + _START
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ServerFailed(f"{self.contestant.name} ended at once: {self.log()}")
            if _healthy(self.port):
                return
            time.sleep(0.1)
        raise ServerFailed(f"{self.contestant.name} did not answer in time: {self.log()}")

    def stop(self) -> None:
        """End it and everything that it started."""
        for signal_, seconds in ((signal.SIGTERM, _STOP), (signal.SIGKILL, _STOP)):
            try:
                os.killpg(self._process.pid, signal_)
                self._process.wait(seconds)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._process.wait(_STOP)
        self._log.close()

    def log(self) -> str:
        """The end of what it printed."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]

    def body(self, messages: list[dict[str, Any]], tokens: int) -> bytes:
        """A request for a greedy streamed answer of so many tokens."""
        asked = {
            "model": str(self.model),
            "messages": messages,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            **self.contestant.fields,
        }
        return json.dumps(asked).encode()

    def ask(self, body: bytes) -> Heard:
        """Send a request and hear the answer; the clock starts when it is sent."""
        heard = Heard()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER)
        start = time.perf_counter()
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ServerFailed(f"{self.contestant.name}: {response.read(600).decode()}")
            while line := response.readline():
                self._hear(heard, line, 1e3 * (time.perf_counter() - start))
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise ServerFailed(f"{self.contestant.name}: {error}; {self.log()}") from error
        finally:
            connection.close()
        heard.total = 1e3 * (time.perf_counter() - start)
        if not heard.text:
            raise ServerFailed(f"{self.contestant.name} answered nothing: {self.log()}")
        return heard

    def _hear(self, heard: Heard, line: bytes, now: float) -> None:
        """One line of an event stream."""
        if not line.startswith(b"data:") or line.strip().endswith(b"[DONE]"):
            return
        event = json.loads(line[5:])
        if event.get("error"):
            raise ServerFailed(f"{self.contestant.name}: {event['error']}; {self.log()}")
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            heard.hears(delta.get("content") or delta.get("reasoning_content") or "", now)
        if event.get("usage"):
            heard.counts(event["usage"])

    def forget(self) -> None:
        """Empty the memory of Keepsight's server."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER)
        connection.request("POST", "/v1/cache/reset", b"{}", {"Content-Type": "application/json"})
        response = connection.getresponse()
        told = response.read(600).decode()
        connection.close()
        if response.status != 200:
            raise ServerFailed(f"the memory was not emptied: {told}")


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def threads_of(count: int) -> dict[str, str]:
    """How PyTorch is told how many threads to use."""
    return {"OMP_NUM_THREADS": str(count)}


def keepsight_server(dtype: str, threads: int) -> Contestant:
    """The server of this working tree. Unless it is told to, it does nothing between requests:
    a client that never pauses gains nothing by it, and others may be measured meanwhile."""
    import keepsight

    def command(model: Path, port: int) -> list[str]:
        words = [sys.executable, "-m", "keepsight", "serve", str(model), "--port", str(port)]
        return [*words, "--dtype", dtype, "--no-log"]

    return Contestant(KEEPSIGHT, command, keepsight.__version__, threads_of(threads))


def exported_server(way: str, threads: int) -> Contestant:
    """The same server with an export of the checkpoint; `way` is such as "onnx" or "onnx int8"."""
    import keepsight
    from keepsight.export.graphs.exporter import export

    runtime, _, quantised = way.partition(" ")

    def folder(model: Path) -> Path:
        return model.parent / f"{model.name}-{runtime}-{quantised or 'float32'}"

    def prepare(model: Path) -> None:
        if not folder(model).exists():
            export(str(model), folder(model), runtime=runtime, quantised=quantised or None)

    def command(model: Path, port: int) -> list[str]:
        words = [sys.executable, "-m", "keepsight", "serve", str(folder(model)), "--no-log"]
        return [*words, "--port", str(port), "--model-name", str(model)]

    name = f"exported, {way}"
    version = keepsight.__version__
    return Contestant(name, command, version, threads_of(threads), prepare=prepare)
